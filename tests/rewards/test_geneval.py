"""The GenEval reward: modes, details, plug-in detectors, and what it refuses when prompts are loaded."""

from __future__ import annotations

import sys
from collections.abc import Iterator, Sequence
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flowrl_img.rewards.geneval import GenEval
from flowrl_img.rewards.geneval.detection import Detection, Picture
from flowrl_img.rewards.protocol import RewardBatch
from flowrl_img.world import load_split, render, scene_for

CIRCLE = {"tag": "colors", "include": [{"class": "circle", "count": 1, "color": "red"}]}


class Scripted:
    """Sees one cat for every 10 levels of the first pixel."""

    classes = ("cat", "dog")
    colors = ("red",)

    def detect(self, images: Sequence[Picture]) -> list[list[Detection]]:
        return [[Detection("cat", 0.95, (0, 0, 9, 9))] * (int(image[0, 0, 0]) // 10) for image in images]

    def classify(self, image: Picture, detections: Sequence[Detection], label: str) -> list[str]:
        return ["red"] * len(detections)


@pytest.fixture
def scripted() -> Iterator[dict[str, str]]:
    module = ModuleType("my_detectors")
    module.Scripted, module.ready = Scripted, Scripted()  # type: ignore[attr-defined]
    sys.modules["my_detectors"] = module
    yield {"detector": "my_detectors:Scripted", "colors": "my_detectors:ready"}
    del sys.modules["my_detectors"]


def batch(rows: Sequence[dict], *pictures: Any) -> RewardBatch:
    images = torch.from_numpy(np.stack([np.array(picture) for picture in pictures]))
    return RewardBatch(images, [""] * len(rows), rows, [str(k) for k in range(len(rows))])


@pytest.mark.parametrize(
    ("options", "values"),
    [
        ({}, [0.0, 1.0, 0.0, 0.0]),
        ({"mode": "strict"}, [0.0, 1.0, 0.0, 0.0]),
        ({"mode": "benchmark"}, [0.0, 1.0, 1.0, 1.0]),
        ({"compat": "flow_grpo"}, [0.0, 1.0, 0.0, -1.0]),
    ],
)
def test_the_mode_chooses_the_value_and_details_hold_all_three(
    scripted: dict[str, str], options: dict[str, str], values: list[float]
) -> None:
    row = {"tag": "single_object", "include": [{"class": "cat", "count": 1}]}
    pictures = [np.full((4, 4, 3), 10 * cats, np.uint8) for cats in range(4)]
    out = GenEval(**scripted, **options)(batch([row] * 4, *pictures))
    assert out.values.tolist() == values and out.valid.all()
    assert out.details["strict"] == [False, True, False, False]
    assert out.details["benchmark"] == [False, True, True, True]
    assert out.details["partial"][:3] == [0.0, 1.0, 0.0]
    assert out.details["tag"] == ["single_object"] * 4


def test_thresholds_are_options() -> None:
    row = {"tag": "single_object", "include": [{"class": "circle", "count": 1}]}
    picture = render(scene_for(row, np.random.default_rng(0)))
    assert GenEval()(batch([row], picture)).values.item() == 1.0
    assert GenEval(thresholds={"score": 1.0})(batch([row], picture)).values.item() == 0.0  # type: ignore[arg-type]


def test_the_prompts_of_the_world_are_accepted() -> None:
    rows = [row for split in ("train", "tune", "test") for row in load_split(split)]
    GenEval().validate([row["prompt"] for row in rows], rows)


@pytest.mark.parametrize(
    ("row", "message"),
    [
        ({"prompt": "x"}, r"needs the metadata \['include', 'tag'\]"),
        ({"tag": "x", "include": []}, "name at least one class"),
        ({"tag": "x", "include": [{"class": "circle"}]}, "needs 'class' and 'count'"),
        ({"tag": "x", "include": [{"class": "circle", "count": 0}]}, "at least 1, got 0"),
        ({"tag": "x", "include": [{"class": "circl", "count": 1}]}, "class 'circl'; did you mean 'circle'"),
        ({"tag": "x", "include": [{"class": "ring", "count": 1, "color": "gray"}]}, "unknown colour 'gray'"),
        ({"tag": "x", "include": [{"class": "ring", "count": 1, "position": ["above", 0]}]}, "an earlier clause"),
        (
            {"tag": "x", "include": [CIRCLE["include"][0], {"class": "ring", "count": 1, "position": ["over", 0]}]},
            "unknown relation 'over'",
        ),
        ({**CIRCLE, "exclude": [{"class": "hat", "count": 1}]}, "unknown class 'hat'"),
        ({"tag": "x", "include": ["circle"]}, "'include' must be a list of objects"),
        ({"tag": "x", "include": 5}, "'include' must be a list of objects"),
        ({"tag": "x", "include": [{"class": 3, "count": 1}]}, "unknown class 3"),
        ({**CIRCLE, "exclude": None}, "'exclude' must be a list of objects"),
        ({"tag": "x", "include": [{"class": "ring", "count": 1, "position": "above"}]}, "position must be"),
        ({"tag": "x", "include": [{"class": "ring", "count": 1, "position": ["above", "0"]}]}, "position must be"),
        ({"tag": "x", "include": [{"class": "ring", "count": 1, "position": None}]}, "position must be"),
    ],
)
def test_a_record_that_cannot_be_judged_is_refused_with_its_line(row: dict, message: str) -> None:
    with pytest.raises(ValueError, match=f"line 3: .*{message}"):
        GenEval().validate(["a", "b", "c"], [CIRCLE, CIRCLE, row])


def test_an_unknown_detector_is_an_error_that_names_the_known_one() -> None:
    with pytest.raises(ValueError, match="no detector is called 'scene'; did you mean 'scenes'"):
        GenEval(detector="scene").validate(["a"], [CIRCLE])
