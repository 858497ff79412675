import json
from itertools import combinations
from pathlib import Path

import numpy as np
import pytest

from flowrl_img.resources import asset
from flowrl_img.world import CHARACTERS, COLORS, NUMBERS, RELATIONS, SHAPES, SPLITS, TASKS, load_split, prompts_of
from flowrl_img.world.splits import color_split, pair_split, random_text, text_split, write_splits

HELD_OUT_BY_COMBINATION = ("two_object", "position", "colors", "color_attr", "ocr")
SHARED = ("single_object", "counting")


def prompts(split: str, task: str) -> set[str]:
    return {record["prompt"] for record in prompts_of(split, task)}


def pairs(split: str) -> set[frozenset[str]]:
    """Unordered pairs of shapes that stand together in any prompt of a split."""
    records = [r for task in ("two_object", "position", "color_attr") for r in prompts_of(split, task)]
    return {frozenset(clause["class"] for clause in record["include"]) for record in records}


@pytest.mark.parametrize("task", HELD_OUT_BY_COMBINATION)
def test_no_prompt_is_in_two_splits(task):
    for a, b in combinations(SPLITS, 2):
        assert not prompts(a, task) & prompts(b, task)


@pytest.mark.parametrize("task", SHARED)
def test_single_objects_and_counts_share_their_prompts(task):
    assert prompts("train", task) == prompts("tune", task) == prompts("test", task)


def test_an_unordered_pair_of_shapes_belongs_to_one_split():
    for a, b in combinations(SPLITS, 2):
        assert not pairs(a) & pairs(b)
    assert set.union(*map(pairs, SPLITS)) == {frozenset(pair) for pair in combinations(SHAPES, 2)}


def test_pairs_fall_17_to_training_4_to_tuning_7_to_test():
    assert [len(pairs(split)) for split in SPLITS] == [17, 4, 7]


def test_the_split_of_a_pair_does_not_depend_on_its_order():
    assert all(pair_split(a, b) == pair_split(b, a) for a, b in combinations(SHAPES, 2))


def test_a_pair_of_equal_shapes_is_refused():
    with pytest.raises(ValueError, match="two different shapes"):
        pair_split("star", "star")


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", TASKS)
def test_every_shape_is_in_every_split_of_every_task(split, task):
    assert {clause["class"] for record in prompts_of(split, task) for clause in record["include"]} == set(SHAPES)


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", ["colors", "color_attr"])
def test_every_colour_is_in_every_split(split, task):
    assert {clause["color"] for record in prompts_of(split, task) for clause in record["include"]} == set(COLORS)


def test_colours_fall_48_8_8():
    counts = [sum(color_split(s, c) == split for s in SHAPES for c in COLORS) for split in SPLITS]
    assert counts == [48, 8, 8]


@pytest.mark.parametrize("split", SPLITS)
def test_positions_ask_every_relation_and_counts_every_number(split):
    asked = {record["include"][1]["position"][0] for record in prompts_of(split, "position")}
    assert asked == set(RELATIONS)
    assert {record["include"][0]["count"] for record in prompts_of(split, "counting")} == set(NUMBERS)


def test_sign_texts_have_2_to_4_characters_and_belong_to_their_split():
    for split in SPLITS:
        texts = [record["ocr_target"] for record in prompts_of(split, "ocr")]
        assert len(texts) == len(set(texts))
        assert {len(text) for text in texts} == {2, 3, 4}
        assert all(set(text) <= set(CHARACTERS) and text_split(text) == split for text in texts)


@pytest.mark.parametrize("split", SPLITS)
def test_random_texts_belong_to_the_split_they_are_drawn_for(split):
    rng = np.random.default_rng(0)
    assert {text_split(random_text(split, rng)) for _ in range(50)} == {split}


@pytest.mark.parametrize("split", SPLITS)
def test_records_follow_the_schema_of_geneval(split):
    for record in load_split(split):
        assert record["tag"] in TASKS and record["prompt"].startswith("a photo of ")
        for clause in record["include"]:
            assert clause["class"] in SHAPES and clause["count"] >= 1
            assert clause.get("color") in {None, *COLORS}
        if record["tag"] == "counting":
            [clause] = record["include"]
            assert record["exclude"] == [{"class": clause["class"], "count": clause["count"] + 1}]


@pytest.mark.parametrize("split", SPLITS)
@pytest.mark.parametrize("task", ["geneval", "ocr"])
def test_packaged_prompt_files_are_what_the_generator_writes(split, task):
    lines = asset(f"prompts/pico/{split}_{task}.jsonl").read_text().splitlines()
    assert [json.loads(line) for line in lines] == load_split(split, task)


def test_writing_the_splits_gives_the_packaged_bytes(tmp_path: Path):
    write_splits(tmp_path)
    for path in tmp_path.iterdir():
        assert path.read_bytes() == asset(f"prompts/pico/{path.name}").read_bytes()
    assert len(list(tmp_path.iterdir())) == 6


@pytest.mark.parametrize(("split", "task"), [("dev", "geneval"), ("test", "clip")])
def test_unknown_splits_and_tasks_are_refused(split, task):
    with pytest.raises(ValueError, match=r"splits are|tasks geneval and ocr"):
        load_split(split, task)
