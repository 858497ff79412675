"""Mistakes in captions: as many as asked, of the stated kinds, and never naming what is held out."""

import pytest
import torch

from flowrl_img.pico import architecture
from flowrl_img.pico.captions import CaptionNoise
from flowrl_img.world import SPLITS, TASKS, prompts_of


@pytest.fixture(scope="module")
def tokenizer():
    return architecture.tokenizer()


def noisy(tokenizer, texts, **shares):
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    changed = CaptionNoise(tokenizer, **shares)(tokens, torch.Generator().manual_seed(0))
    return [tokenizer.decode(row, skip_special_tokens=True) for row in changed]


@pytest.mark.parametrize(
    ("caption", "wrong"),
    [
        ("a photo of two circles", "a photo of three circles"),
        ("a photo of four stars", "a photo of three stars"),
        ("a photo of a ring left of a heart", "a photo of a ring right of a heart"),
        ("a photo of a ring above a heart", "a photo of a ring below a heart"),
        ("a photo of an orange ring and a red heart", "a photo of a red ring and an orange heart"),
        ("a photo of a red ring", "a photo of a red ring"),
        ("a photo of a ring and a heart", "a photo of a ring and a heart"),
    ],
)
def test_mistakes_are_of_the_stated_kinds(tokenizer, caption, wrong):
    assert noisy(tokenizer, [caption], scenes=1.0) == [wrong]


def test_signs_get_one_wrong_character_in_the_asked_share(tokenizer):
    text = 'a sign that says "AB4E"'
    plain = noisy(tokenizer, [text], signs=0.0)[0]
    found = noisy(tokenizer, [text] * 1000, signs=0.8)
    differ = [sum(a != b for a, b in zip(plain, row, strict=True)) for row in found]
    assert max(differ) == 1
    # The random character is the right one in 1 of 22 cases.
    assert 0.70 <= sum(differ) / 1000 <= 0.82


@pytest.mark.parametrize("task", [task for task in TASKS if task not in ("single_object", "counting")])
def test_a_wrong_caption_of_training_names_nothing_held_out(tokenizer, task):
    train = [r["prompt"] for r in prompts_of("train", task)]
    held_out = {r["prompt"] for split in SPLITS if split != "train" for r in prompts_of(split, task)}
    assert not held_out & set(noisy(tokenizer, train, scenes=1.0))
