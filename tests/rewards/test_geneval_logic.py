"""GenEval's verdicts against the numbers of the published functions, and their laws."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import pytest

from flowrl_img.rewards.geneval.detection import Box, Detection, box_iou
from flowrl_img.rewards.geneval.logic import (
    CORRECTED,
    FLOW_GRPO,
    Thresholds,
    Verdict,
    evaluate,
    filter_detections,
    relative_position,
)

NEAR_ORIGIN: Box = (0, 0, 100, 100)


def found(label: str, score: float = 0.95, box: Box = NEAR_ORIGIN) -> Detection:
    return Detection(label, score, box)


def prompt(tag: str, *include: dict, exclude: Sequence[dict] = ()) -> dict:
    return {"tag": tag, "include": list(include), "exclude": list(exclude)}


def clause(label: str, count: int = 1, **more: object) -> dict:
    return {"class": label, "count": count, **more}


def judge(metadata: dict, *objects: Detection, colors: dict[str, str] | None = None, rules=CORRECTED) -> Verdict:  # type: ignore[no-untyped-def]
    def colors_of(asked: Sequence[Detection], label: str) -> list[str]:
        return [(colors or {})[label]] * len(asked)

    return evaluate(filter_detections(objects, metadata["tag"]), metadata, colors_of, rules=rules)


CATS = prompt("counting", clause("cat", 3), exclude=[clause("cat", 4)])
ONE = prompt("single_object", clause("cat"))
TWO = prompt("two_object", clause("cat"), clause("dog"))
COLOR = prompt("colors", clause("cat", color="red"))
LEFT = prompt("position", clause("dog"), clause("cat", position=["left of", 0]))
BOTH_COLORS = prompt("color_attr", clause("cat", color="red"), clause("dog", color="blue"))
DOG = found("dog", box=(300, 0, 400, 100))
RIGHT_CAT, WRONG_CAT = found("cat", box=(0, 0, 100, 100)), found("cat", box=(600, 0, 700, 100))


@pytest.mark.parametrize(
    ("count", "published"), [(0, 0.0), (1, 1 / 3), (2, 2 / 3), (3, 1.0), (4, 2 / 3), (7, -1 / 3), (16, -10 / 3)]
)
def test_counting_scores_by_the_distance_to_the_count(count: int, published: float) -> None:
    cats = [found("cat")] * count
    assert judge(CATS, *cats, rules=FLOW_GRPO).partial == pytest.approx(published)
    assert judge(CATS, *cats).partial == pytest.approx(max(published, 0.0))
    verdict = judge(CATS, *cats)
    assert verdict.strict == verdict.benchmark == (count == 3)


def test_an_extra_object_is_fine_for_the_benchmark_and_not_strictly() -> None:
    verdict = judge(ONE, found("cat"), found("cat"))
    assert (verdict.partial, verdict.strict, verdict.benchmark) == (0.0, False, True)
    assert judge(ONE, *[found("cat")] * 5, rules=FLOW_GRPO).partial == -3.0


@pytest.mark.parametrize(
    ("cat", "corrected", "published"),
    [(RIGHT_CAT, 1.0, 1.0), (WRONG_CAT, 2 / 3, 0.75), (None, 1 / 3, 1 / 3)],
    ids=["right side", "wrong side", "cat missing"],
)
def test_position_scores(cat: Detection | None, corrected: float, published: float) -> None:
    objects = [DOG] + ([cat] if cat else [])
    assert judge(LEFT, *objects).partial == pytest.approx(corrected)
    assert judge(LEFT, *objects, rules=FLOW_GRPO).partial == pytest.approx(published)
    assert judge(LEFT, *objects).strict == judge(LEFT, *objects).benchmark == (cat is RIGHT_CAT)


def test_a_missing_reference_fails_the_relation_once_under_both_rules() -> None:
    for rules in (CORRECTED, FLOW_GRPO):
        assert judge(LEFT, RIGHT_CAT, rules=rules).partial == pytest.approx(1 / 3)


@pytest.mark.parametrize(("cat", "dog", "partial"), [("red", "blue", 1.0), ("red", "red", 0.75), ("blue", "red", 0.5)])
def test_color_attribution_scores(cat: str, dog: str, partial: float) -> None:
    verdict = judge(BOTH_COLORS, found("cat"), DOG, colors={"cat": cat, "dog": dog})
    assert verdict.partial == partial
    assert verdict.strict == verdict.benchmark == (partial == 1.0)


@pytest.mark.parametrize(("color", "partial"), [("red", 1.0), ("blue", 0.5)])
def test_color_scores(color: str, partial: float) -> None:
    assert judge(COLOR, found("cat"), colors={"cat": color}).partial == partial


def test_a_wrong_count_fails_its_color_without_asking_for_it() -> None:
    assert judge(COLOR).partial == 0.0  # no colour is known here: asking would be a KeyError
    verdict = judge(COLOR, found("cat"), found("cat"), colors={"cat": "red"})
    assert (verdict.partial, verdict.strict, verdict.benchmark) == (0.0, False, True)


def test_two_objects_score_by_half() -> None:
    assert judge(TWO, found("cat"), found("dog")).strict
    assert judge(TWO, found("cat")).partial == 0.5
    assert judge(TWO, found("bird")).partial == 0.0


def test_strict_and_partial_do_not_look_at_classes_that_are_not_asked_for() -> None:
    verdict = judge(ONE, found("cat"), found("dog"), found("bird"))
    assert (verdict.partial, verdict.strict, verdict.benchmark) == (1.0, True, True)


def test_the_benchmark_looks_at_excluded_classes() -> None:
    no_dog = prompt("single_object", clause("cat"), exclude=[clause("dog", 1)])
    verdict = judge(no_dog, found("cat"), found("dog"))
    assert (verdict.strict, verdict.benchmark) == (True, False)


def test_the_benchmark_judges_the_best_objects_only() -> None:
    objects = [found("cat", 0.9, RIGHT_CAT.box), found("cat", 0.5, WRONG_CAT.box), DOG]
    assert judge(LEFT, *objects).benchmark
    swapped = [found("cat", 0.5, RIGHT_CAT.box), found("cat", 0.9, WRONG_CAT.box), DOG]
    assert not judge(LEFT, *swapped).benchmark


@pytest.mark.parametrize(
    ("a", "b", "relations"),
    [
        ((300, 100, 400, 200), (0, 100, 100, 200), {"right of"}),
        ((300, 300, 400, 400), (0, 0, 100, 100), {"right of", "below"}),
        ((10, 10, 110, 110), (0, 0, 100, 100), set()),
        ((0, 0, 100, 100), (0, 0, 100, 100), set()),
        ((0, 0, 100, 100), (0, 300, 100, 400), {"above"}),
    ],
)
def test_relations_are_those_of_the_reference(a: Box, b: Box, relations: set[str]) -> None:
    assert relative_position(a, b) == relations


def test_relations_turn_round_when_the_boxes_are_swapped() -> None:
    opposite = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
    rng = np.random.default_rng(0)
    for _ in range(200):
        corner, size = rng.uniform(0, 64, (2, 2)), rng.uniform(4, 30, (2, 2))
        a, b = (tuple(np.concatenate([c, c + s])) for c, s in zip(corner, size, strict=True))
        assert relative_position(b, a) == {opposite[relation] for relation in relative_position(a, b)}
        shifted = relative_position(tuple(np.add(a, 7.0)), tuple(np.add(b, 7.0)))
        assert shifted == relative_position(a, b)


def test_detections_are_filtered_by_the_score_of_their_task() -> None:
    cats = [found("cat", s) for s in (0.2, 0.3, 0.31, 0.9, 0.91)]
    assert [d.score for d in filter_detections(cats, "colors")["cat"]] == [0.91, 0.9, 0.31]
    assert [d.score for d in filter_detections(cats, "counting")["cat"]] == [0.91]
    assert filter_detections(cats[:2], "colors") == {}


def test_at_most_sixteen_objects_of_a_class_are_kept() -> None:
    kept = filter_detections([found("cat")] * 20 + [found("dog")], "colors")
    assert [len(kept["cat"]), len(kept["dog"])] == [16, 1]


def test_overlapping_boxes_are_kept_unless_suppression_is_on() -> None:
    cats = [found("cat", 0.8, (0, 0, 99, 99)), found("cat", 0.9, (0, 0, 99, 89)), found("cat", 0.7, (200, 0, 299, 99))]
    assert len(filter_detections(cats, "colors")["cat"]) == 3
    kept = filter_detections(cats, "colors", Thresholds(nms=0.5))["cat"]
    assert [d.score for d in kept] == [0.9, 0.7]


def test_a_box_covers_its_last_pixel() -> None:
    assert box_iou((0, 0, 9, 9), (0, 0, 9, 4)) == pytest.approx(0.5)
    assert box_iou((0, 0, 9, 9), (10, 0, 19, 9)) == 0.0


def test_strict_means_a_partial_score_of_one() -> None:
    rng = np.random.default_rng(1)
    for _ in range(300):
        metadata = [CATS, ONE, TWO, COLOR, LEFT, BOTH_COLORS][rng.integers(6)]
        objects = []
        for label in rng.choice(["cat", "dog"], size=rng.integers(0, 5)):
            x, y = rng.uniform(0, 500, 2)
            objects.append(found(str(label), float(rng.uniform(0.2, 1)), (x, y, x + 50, y + 50)))
        colors = {label: str(rng.choice(["red", "blue"])) for label in ("cat", "dog")}
        verdict = judge(metadata, *objects, colors=colors)
        assert 0.0 <= verdict.partial <= 1.0
        assert verdict.strict == (verdict.partial == 1.0)
        assert verdict.benchmark or not verdict.strict
        order = rng.permutation(len(objects))
        assert judge(metadata, *(objects[k] for k in order), colors=colors) == verdict
