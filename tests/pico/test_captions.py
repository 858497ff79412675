"""Mistakes in captions: as many as asked, of the stated kinds, and never naming what is held out."""

import numpy as np
import pytest
import torch

from flowrl_img.pico import architecture
from flowrl_img.pico.captions import SHARES, CaptionNoise, is_trained
from flowrl_img.pico.wrong_captions import KINDS
from flowrl_img.world import SPLITS, TASKS, prompts_of


@pytest.fixture(scope="module")
def tokenizer():
    return architecture.tokenizer()


def noisy(tokenizer, texts, **shares):
    tokens = tokenizer(texts, padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
    noise = CaptionNoise(tokenizer, shares)
    return noise.texts(noise(tokens, torch.Generator().manual_seed(0)))


@pytest.mark.parametrize(
    ("caption", "kind"),
    [
        ("a photo of an orange circle", "color"),
        ("a photo of a red circle and a blue diamond", "color"),
        ("a photo of three circles", "count"),
        ("a photo of a circle above a diamond", "relation"),
        ('a sign that says "AB4E"', "letter"),
    ],
)
def test_captions_get_one_mistake_in_the_asked_share(tokenizer, caption, kind):
    found = noisy(tokenizer, [caption] * 1000, **{kind: 0.7})
    assert 0.63 <= sum(c != caption for c in found) / 1000 <= 0.77
    assert all(is_trained(c) for c in found)
    for wrong in {c for c in found if c != caption and kind != "letter"}:
        assert sum(a != b for a, b in zip(wrong.split()[3:], caption.split()[3:], strict=True)) <= 2


def test_what_has_no_share_stays_as_it_is(tokenizer):
    captions = ["a photo of a ring and a heart", "a photo of a star", "a photo of four stars", 'a sign that says "AB"']
    assert noisy(tokenizer, captions) == captions
    assert noisy(tokenizer, captions[:2], **SHARES) == captions[:2]


@pytest.mark.parametrize("task", [*TASKS, "ocr"])
def test_a_wrong_caption_of_training_names_nothing_held_out(tokenizer, task):
    train = [r["prompt"] for r in prompts_of("train", task)][:500]
    shared = {"single_object", "counting"}  # all splits name these
    held_out = {r["prompt"] for s in SPLITS if s != "train" for t in {*TASKS, "ocr"} - shared for r in prompts_of(s, t)}
    found = noisy(tokenizer, train, **dict.fromkeys(KINDS, 1.0))
    assert not held_out & set(found)
    assert all(map(is_trained, found))


@pytest.mark.parametrize("split", [s for s in SPLITS if s != "train"])
@pytest.mark.parametrize("task", ["two_object", "position", "color_attr", "colors", "ocr"])
def test_held_out_captions_are_known_as_such(split, task):
    assert not any(is_trained(r["prompt"]) for r in prompts_of(split, task))


def test_a_caption_without_a_trained_alternative_stays(tokenizer, monkeypatch):
    monkeypatch.setattr("flowrl_img.pico.captions.is_trained", lambda caption: False)
    noise = CaptionNoise(tokenizer, {"color": 1.0})
    assert noise.wrong("a photo of a red circle", np.random.default_rng(0)) == "a photo of a red circle"
