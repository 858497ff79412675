"""GenEval as a reward: detect, filter, judge.

The detector and the colour classifier are plug-ins by name; the default pair knows the embedded world.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, ClassVar, cast

import numpy as np

from flowrl_img import plugins
from flowrl_img.rewards.geneval.detection import ColorClassifier, Detection, Detector, KnowsPictures, Picture
from flowrl_img.rewards.geneval.logic import (
    CORRECTED,
    FLOW_GRPO,
    PartialRules,
    Thresholds,
    Verdict,
    evaluate,
    filter_detections,
)
from flowrl_img.rewards.known_answers import Example, KnownAnswer, Scores
from flowrl_img.rewards.pretrained import fingerprint
from flowrl_img.rewards.protocol import Fingerprinted, Metadata, RewardBatch, RewardOutput, require_keys

__all__ = ["COMPAT", "MODES", "GenEval", "benchmark", "partial", "strict"]

RELATIONS = ("left of", "right of", "above", "below")


def partial(verdict: Verdict) -> float:
    """Mean over the things asked: the signal to train on."""
    return verdict.partial


def strict(verdict: Verdict) -> float:
    """1 when every asked count, colour and relation is exact, else 0."""
    return float(verdict.strict)


def benchmark(verdict: Verdict) -> float:
    """1 when the original GenEval calls the picture correct, else 0."""
    return float(verdict.benchmark)


MODES: Mapping[str, Callable[[Verdict], float]] = {"partial": partial, "strict": strict, "benchmark": benchmark}
COMPAT: Mapping[str | None, PartialRules] = {None: CORRECTED, "flow_grpo": FLOW_GRPO}


@dataclass(frozen=True)
class GenEval:
    """mode: "partial" | "strict" | "benchmark"; compat: None, or "flow_grpo" for the published partial score.

    detector, colors: name in `rewards/detectors`, entry point of `flowrl_img.detectors`, or `package.module:Object`
    (a class, or an instance); `{name: ..., key: value}` gives it options.
    Details, one entry a row: `partial`, `strict`, `benchmark`, `tag`.
    """

    mode: str = "partial"
    compat: str | None = None
    detector: str | Mapping[str, Any] = "scenes"
    colors: str | Mapping[str, Any] = "scenes"
    thresholds: Thresholds = field(default_factory=Thresholds)

    name: ClassVar[str] = "geneval"
    needs: ClassVar[frozenset[str]] = frozenset({"include", "tag"})
    requirements: ClassVar[tuple[str, ...]] = ("scipy>=1.12",)

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"geneval mode must be one of {sorted(MODES)}, got {self.mode!r}")
        if self.compat not in COMPAT:
            raise ValueError(f"geneval compat must be None or 'flow_grpo', got {self.compat!r}")
        if isinstance(self.thresholds, Mapping):  # as a config file gives them
            object.__setattr__(self, "thresholds", Thresholds(**self.thresholds))

    @cached_property
    def _detector(self) -> Detector:
        return cast("Detector", plugins.build("detectors", _section(self.detector), "detector"))

    @cached_property
    def _color_classifier(self) -> ColorClassifier:
        return cast("ColorClassifier", plugins.build("detectors", _section(self.colors), "colors"))

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """ValueError for the first line (counted from 1) that does not fit the schema, the detector or the colours."""
        require_keys(self.name, self.needs, metadata)
        classes, colors = self._detector.classes, self._color_classifier.colors
        for line, row in enumerate(metadata, start=1):
            try:
                _check(row, classes, colors)
            except ValueError as error:
                raise ValueError(f"line {line}: {error}") from error

    @property
    def fingerprint(self) -> dict[str, str]:
        """Detector and colour classifier, with what they state of their own weights, and versions."""
        facts = fingerprint({}, detector=_named(self.detector), colors=_named(self.colors))
        for role, part in (("detector", self._detector), ("colors", self._color_classifier)):
            stated = part.fingerprint if isinstance(part, Fingerprinted) else {}
            facts |= {f"{role}.{key}": value for key, value in stated.items() if key != "libraries"}
        return facts

    def known_answers(self) -> Sequence[KnownAnswer]:
        """The detector's own pictures score 1, black ones of their size 0; none where the detector states none."""
        if not isinstance(self._detector, KnowsPictures):
            return []
        answers: list[KnownAnswer] = []
        for picture, row in self._detector.known_pictures():
            asked = row if _named(self.detector) == _named(self.colors) else _without_colors(row)
            words = "; ".join(str(dict(clause)) for clause in asked["include"])
            right = Example(f"a picture of {words}", picture, metadata=asked)
            black = Example(f"a black picture, asked for {words},", np.zeros_like(picture), metadata=asked)
            answers += [Scores(right, 1.0, 1.0), Scores(black, high=0.0)]
        return answers

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        pictures = [image.numpy() for image in batch.images]
        found = self._detector.detect(pictures)
        verdicts = [self._judge(*row) for row in zip(pictures, found, batch.metadata, strict=True)]
        details: dict[str, list[Any]] = {
            "partial": [verdict.partial for verdict in verdicts],
            "strict": [verdict.strict for verdict in verdicts],
            "benchmark": [verdict.benchmark for verdict in verdicts],
            "tag": [verdict.tag for verdict in verdicts],
        }
        return RewardOutput.of(map(MODES[self.mode], verdicts), details)

    def _judge(self, picture: Picture, found: Sequence[Detection], metadata: Metadata) -> Verdict:
        def colors_of(objects: Sequence[Detection], label: str) -> list[str]:
            return self._color_classifier.classify(picture, objects, label)

        objects = filter_detections(found, metadata["tag"], self.thresholds)
        return evaluate(objects, metadata, colors_of, self.thresholds, COMPAT[self.compat])


def _section(part: str | Mapping[str, Any]) -> Mapping[str, Any]:
    return {"name": part} if isinstance(part, str) else part


def _named(part: str | Mapping[str, Any]) -> str:
    return str(_section(part)["name"])


def _without_colors(row: Metadata) -> Metadata:
    """A detector does not vouch for the colour names of another classifier."""
    return {**row, "include": [{k: v for k, v in clause.items() if k != "color"} for clause in row["include"]]}


def _check(row: Metadata, classes: Sequence[str], colors: Sequence[str]) -> None:
    """ValueError when a record asks for what cannot be judged."""
    for key in ("include", "exclude"):
        clauses = row.get(key, ())
        if not isinstance(clauses, (list, tuple)) or not all(isinstance(clause, Mapping) for clause in clauses):
            raise ValueError(f"'{key}' must be a list of objects with 'class' and 'count', got {clauses!r}")
    if not row["include"]:
        raise ValueError("'include' is empty: name at least one class")
    for index, clause in enumerate([*row["include"], *row.get("exclude", ())]):
        if not {"class", "count"} <= clause.keys():
            raise ValueError(f"clause {dict(clause)} needs 'class' and 'count'")
        if not isinstance(clause["count"], int) or clause["count"] < 1:
            raise ValueError(f"count must be a whole number of at least 1, got {clause['count']!r}")
        _known("class", clause["class"], classes)
        if "color" in clause:
            _known("colour", clause["color"], colors)
        if "position" in clause:
            placed = clause["position"]
            if not isinstance(placed, (list, tuple)) or len(placed) != 2 or not isinstance(placed[1], int):
                raise ValueError(f"position must be [relation, number of an earlier clause], got {placed!r}")
            relation, reference = placed
            _known("relation", relation, RELATIONS)
            if not 0 <= reference < index:
                raise ValueError(f"position of {clause['class']!r} must refer to an earlier clause, got {reference}")


def _known(kind: str, word: str, valid: Sequence[str]) -> None:
    if word not in valid:
        raise ValueError(f"unknown {kind} {word!r}; {plugins.nearest(str(word), valid)}")
