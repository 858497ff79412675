"""GenEval's verdicts as pure functions of detections: no pixels, no model.

Three scores of one picture: `benchmark`, the original yes or no (extra objects are fine unless excluded); `strict`,
every asked count exact; `partial`, the mean of one term per thing asked, used to train. Strict and partial look at the
asked classes only: a picture may hold objects of classes that the prompt does not name.
Source: arXiv 2310.11513 (GenEval) and its evaluate_images.py; partial and strict from Flow-GRPO's reward server
(arXiv 2505.05470), with two defects corrected: see `PartialRules`.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

from flowrl_img.rewards.geneval.detection import Box, Detection, box_iou

__all__ = [
    "CORRECTED", "FLOW_GRPO", "PartialRules", "Thresholds", "Verdict", "evaluate", "filter_detections",
    "relative_position",
]  # fmt: skip

Clause = Mapping[str, Any]
ColorsOf = Callable[[Sequence[Detection], str], Sequence[str]]


@dataclass(frozen=True)
class Thresholds:
    """score, counting: least detector score, for counting prompts the second; max_objects: kept per class;
    nms: largest IoU of two kept boxes of a class, 1 switches it off; position: share of the sizes that an offset
    must exceed to count.
    """  # fmt: skip

    score: float = 0.3
    counting: float = 0.9
    max_objects: int = 16
    nms: float = 1.0
    position: float = 0.1


@dataclass(frozen=True)
class PartialRules:
    """How `partial` treats two cases. floor: least value of one term. wrong_position: terms that a wrong relation adds.

    The published server has no floor (7 found for 3 asked gives -0.333) and adds a pass after the fail, so that a
    wrong relation scores 0.75 and not 2/3.
    """

    floor: float = 0.0
    wrong_position: tuple[float, ...] = (0.0,)


CORRECTED = PartialRules()
FLOW_GRPO = PartialRules(floor=-math.inf, wrong_position=(0.0, 1.0))


@dataclass(frozen=True)
class Verdict:
    """partial in [0, 1] under CORRECTED rules; tag: the task of the prompt."""

    partial: float
    strict: bool
    benchmark: bool
    tag: str


@dataclass(frozen=True)
class _Found:
    """What the picture holds for one include clause; colors is of the first `count` objects, None if not asked."""

    clause: Clause
    objects: Sequence[Detection]
    colors: Sequence[str] | None

    @property
    def count(self) -> int:
        return int(self.clause["count"])

    @property
    def asked(self) -> Sequence[Detection]:
        return self.objects[: self.count]

    @property
    def right_colors(self) -> int:
        return list(self.colors or ()).count(self.clause["color"])


def filter_detections(
    detections: Sequence[Detection], tag: str, thresholds: Thresholds = Thresholds()
) -> dict[str, list[Detection]]:
    """Per class the detections above the tag's threshold, best first, at most max_objects, after NMS."""
    least = thresholds.counting if tag == "counting" else thresholds.score
    kept: dict[str, list[Detection]] = {}
    for found in sorted(detections, key=lambda d: -d.score):
        if found.score > least:
            kept.setdefault(found.label, []).append(found)
    return {label: _suppress(group[: thresholds.max_objects], thresholds.nms) for label, group in kept.items()}


def _suppress(ordered: Sequence[Detection], max_overlap: float) -> list[Detection]:
    if max_overlap >= 1:
        return list(ordered)
    kept: list[Detection] = []
    for found in ordered:
        if all(box_iou(found.box, other.box) < max_overlap for other in kept):
            kept.append(found)
    return kept


def relative_position(a: Box, b: Box, threshold: float = 0.1) -> set[str]:
    """Relations in which box `a` stands to box `b`; boxes are (x0, y0, x1, y1) in pixels, y down.

    r = sign(o) max(|o| - threshold (dim_a + dim_b), 0) / ||o||, o = centre a - centre b; beyond 0.5 a relation holds.
    """
    corners = np.array([a, b], dtype=np.float64).reshape(2, 2, 2)
    (center_a, center_b), sizes = corners.mean(axis=1), np.abs(corners[:, 1] - corners[:, 0])
    offset = center_a - center_b
    revised = np.sign(offset) * np.maximum(np.abs(offset) - threshold * sizes.sum(axis=0), 0)
    if (np.abs(revised) < 1e-3).all():
        return set()
    x, y = revised / np.linalg.norm(offset)
    holds = {"left of": x < -0.5, "right of": x > 0.5, "above": y < -0.5, "below": y > 0.5}
    return {relation for relation, true in holds.items() if true}


def evaluate(
    objects: Mapping[str, Sequence[Detection]],
    metadata: Mapping[str, Any],
    colors_of: ColorsOf,
    thresholds: Thresholds = Thresholds(),
    rules: PartialRules = CORRECTED,
) -> Verdict:
    """objects: per class, best first, as from `filter_detections`; colors_of names the colours of the given objects.

    Colours are asked for only where a clause names one and enough objects are there.
    """
    found = [_find(clause, objects, colors_of) for clause in metadata["include"]]
    terms, strict = _partial_terms(found, thresholds.position, rules)
    benchmark = _benchmark(found, thresholds.position) and not _excluded(objects, metadata.get("exclude", ()))
    return Verdict(sum(terms) / len(terms), strict, benchmark, str(metadata["tag"]))


def _find(clause: Clause, objects: Mapping[str, Sequence[Detection]], colors_of: ColorsOf) -> _Found:
    group = objects.get(clause["class"], ())
    asked = group[: clause["count"]]
    colors = colors_of(asked, clause["class"]) if "color" in clause and len(asked) == clause["count"] else None
    return _Found(clause, group, colors)


def _benchmark(found: Sequence[_Found], threshold: float) -> bool:
    """The original rule on the `count` best objects of each clause."""
    matched: list[bool] = []
    for part in found:
        good = len(part.asked) == part.count and ("color" not in part.clause or part.right_colors == part.count)
        matched.append(good and ("position" not in part.clause or _placed(part, found, matched, threshold)))
    return all(matched)


def _partial_terms(found: Sequence[_Found], threshold: float, rules: PartialRules) -> tuple[list[float], bool]:
    """The terms of the partial score, and whether every one is exact."""
    terms: list[float] = []
    matched: list[bool] = []
    for part in found:
        terms.append(_share(len(part.objects), part.count, rules))
        good = len(part.objects) == part.count
        if not good and part.clause.keys() & {"color", "position"}:
            terms.append(0.0)
        if good and "color" in part.clause:
            terms.append(_share(part.right_colors, part.count, rules))
            good = part.right_colors == part.count
        if good and "position" in part.clause:
            known = matched[part.clause["position"][1]]
            good = known and _placed(part, found, matched, threshold)
            terms += (1.0,) if good else rules.wrong_position if known else (0.0,)
        matched.append(good)
    return terms, all(matched)


def _share(found: int, count: int, rules: PartialRules) -> float:
    return max(1 - abs(count - found) / count, rules.floor)


def _placed(part: _Found, found: Sequence[_Found], matched: Sequence[bool], threshold: float) -> bool:
    """Every object of the clause stands in the asked relation to every object of the reference clause."""
    relation, reference = part.clause["position"]
    return matched[reference] and all(
        relation in relative_position(a.box, b.box, threshold) for a in part.asked for b in found[reference].asked
    )


def _excluded(objects: Mapping[str, Sequence[Detection]], exclude: Sequence[Clause]) -> bool:
    return any(len(objects.get(clause["class"], ())) >= clause["count"] for clause in exclude)
