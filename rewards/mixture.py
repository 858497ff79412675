"""Several rewards of one run: scored side by side, then combined over a whole rollout.

Scoring is per process and per row; combining needs every picture of the rollout where a transform or an aggregate looks
at groups, so it is a pure function of the gathered columns. `sum` and `geometric` combine values. `advantage_sum` and
`gdpo` combine the advantages of each column: their maths is in `flowrl_img.advantages`, and the value here, their
weighted sum, is what is logged.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from flowrl_img.rewards.failures import FailureBudget, InvalidScoreError
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput
from flowrl_img.rewards.score import Scorer
from flowrl_img.rewards.transforms import Transform

__all__ = ["AGGREGATES", "Combined", "Mixture", "Part", "reporting"]

AGGREGATES = ("sum", "advantage_sum", "gdpo", "geometric")


@dataclass(frozen=True)
class Part:
    """One reward of a mixture. weight 0: scored and logged, but neither its value nor its failure counts.

    transforms: applied to its column in this order, pointwise ones first.
    """

    scorer: Scorer
    weight: float = 1.0
    transforms: tuple[Transform, ...] = ()

    def __post_init__(self) -> None:
        label = self.scorer.label
        if not math.isfinite(self.weight):
            raise ValueError(f"reward '{label}': its weight must be a finite number, got {self.weight}")
        order = [transform.pointwise for transform in self.transforms]
        if order != sorted(order, reverse=True):
            raise ValueError(f"reward '{label}': transforms of single values (affine, clip) come before rank, log_tame")

    @property
    def pointwise(self) -> tuple[Transform, ...]:
        """The transforms that a held-out value keeps."""
        return tuple(transform for transform in self.transforms if transform.pointwise)


@dataclass(frozen=True)
class Combined:
    """A rollout's rewards, B rows. values, valid: the aggregate. columns: each reward after its transforms.

    columns are float64 [B], NaN where invalid; a row of `values` is valid where every part of non-zero weight is.
    terms, weights, aggregate: what `flowrl_img.advantages.combined_advantages` takes: the values themselves, or each
    column of weight for an aggregate of advantages.
    """

    values: Tensor
    valid: Tensor
    columns: Mapping[str, Tensor]
    terms: Mapping[str, Tensor]
    weights: Mapping[str, float]
    aggregate: str


@dataclass(frozen=True)
class Mixture:
    """Parts in order, with different labels. Callable on a RewardBatch; `combine` gives what a run trains on.

    Example: Mixture((Part(Scorer(GenEval())), Part(Scorer(Jpeg()), weight=0.1)))
    """

    parts: tuple[Part, ...]
    aggregate: str = "sum"

    def __post_init__(self) -> None:
        if self.aggregate not in AGGREGATES:
            raise ValueError(f"aggregate must be one of {', '.join(AGGREGATES)}, got {self.aggregate!r}")
        labels = [part.scorer.label for part in self.parts]
        twice = sorted({label for label in labels if labels.count(label) > 1})
        if twice:
            raise ValueError(f"two rewards are called {twice[0]!r}: give one of them another label")
        if not any(part.weight for part in self.parts):
            raise ValueError("at least one weight must differ from 0, else every picture is as good as any")
        negative = [part.scorer.label for part in self.parts if part.weight < 0]
        if self.aggregate == "geometric" and negative:
            raise ValueError(f"aggregate geometric takes weights of 0 or more, see {negative}")

    @property
    def labels(self) -> tuple[str, ...]:
        """The names of the columns."""
        return tuple(part.scorer.label for part in self.parts)

    @property
    def weights(self) -> dict[str, float]:
        """Of each column."""
        return {part.scorer.label: part.weight for part in self.parts}

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: the aggregate of each row by pointwise transforms alone, float32 [B], NaN where it has none.

        Details: under each label the raw values, `label/detail` its details (so `geneval/strict`), `error` the reasons.
        InvalidScoreError when a part fails more than it may.
        """
        details: dict[str, list[Any]] = {}
        errors: list[str | None] = [None] * len(batch)
        for part in self.parts:
            label, output = part.scorer.label, part.scorer(batch)
            details[label] = output.values.tolist()
            details |= {f"{label}/{column}": entries for column, entries in output.details.items()}
            if part.weight != 0:
                errors = _first_error(errors, label, output)
        combined = self._combined(_tensors({label: details[label] for label in self.labels}), (), pointwise=True)
        errors = [
            error or (None if ok else "aggregate geometric has no value for a reward below 0")
            for error, ok in zip(errors, combined.valid.tolist(), strict=True)
        ]
        return RewardOutput(combined.values.float(), combined.valid, details | {"error": errors}, batch.ids)

    def columns(self, output: RewardOutput) -> dict[str, list[float]]:
        """The raw values of each part, [B] each, NaN where invalid."""
        return {label: list(output.details[label]) for label in self.labels}

    def combine(self, columns: Mapping[str, Sequence[float]], groups: Sequence[str]) -> Combined:
        """columns: raw values of all pictures of a rollout, from every process; groups: their B group ids.

        InvalidScoreError when an aggregate or a transform does not apply to the values, such as a root of a negative.
        """
        return self._combined(_tensors(columns), groups, pointwise=False)

    def held_out(self) -> Mixture:
        """The mixture for evaluations: a failure leaves its picture out and never stops the run.

        Parts that compare the pictures of a group are left out: over a group they always add up to the same. Where no
        other part has weight, the first of the rest is what is reported. ValueError when nothing is left.
        """
        left = [part for part in self.parts if part.scorer.scope == "point"]
        if not left:
            raise ValueError(
                f"the rewards {', '.join(self.labels)} compare pictures of a group, which measures no progress: add a "
                "reward of single pictures, with weight 0 if it should not be trained on"
            )
        if not any(part.weight for part in left):
            left[0] = replace(left[0], weight=1.0)
        return replace(self, parts=tuple(replace(part, scorer=reporting(part.scorer)) for part in left))

    def _combined(self, raw: Mapping[str, Tensor], groups: Sequence[str], *, pointwise: bool) -> Combined:
        columns = dict(raw)
        for part in self.parts:
            for transform in part.pointwise:
                columns |= {part.scorer.label: transform(part.scorer.label, columns, groups)}
        weighted = {label: weight for label, weight in self.weights.items() if weight != 0}
        if not pointwise:
            counted = {label: columns[label] for label in weighted}
            columns = {part.scorer.label: _over_rollout(part, columns, counted, groups) for part in self.parts}
        combine = _sum if self.aggregate != "geometric" else _roots if pointwise else _geometric
        values = combine(columns, weighted)
        if self.aggregate in ("sum", "geometric"):
            return Combined(values, ~values.isnan(), columns, {"reward": values}, {"reward": 1.0}, "sum")
        terms = {label: columns[label] for label in weighted}
        return Combined(values, ~values.isnan(), columns, terms, weighted, self.aggregate)


def reporting(scorer: Scorer) -> Scorer:
    """The same reward and cache, with failures that stop nothing."""
    copy = replace(scorer, failures=FailureBudget("mask", share=1.0), seconds=0.0)
    if scorer.memory is not None:
        copy.__dict__["memory"] = scorer.memory
    return copy


def _over_rollout(
    part: Part, columns: Mapping[str, Tensor], counted: Mapping[str, Tensor], groups: Sequence[str]
) -> Tensor:
    """The column after the transforms that look at others, of which they see those that count."""
    label, own = part.scorer.label, columns[part.scorer.label]
    for transform in part.transforms[len(part.pointwise) :]:
        own = transform(label, {**counted, label: own}, groups)
    return own


def _sum(columns: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """NaN where any part is: a part out of the sum (weight 0) is not in `weights`, as 0 * NaN is NaN."""
    return torch.stack([weight * columns[label] for label, weight in weights.items()]).sum(0)


def _geometric(columns: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """`_roots` of the values that are trained on, which must not be negative."""
    for label in weights:
        if (columns[label] < 0).any():
            raise InvalidScoreError(
                f"aggregate geometric needs values of 0 or more, reward '{label}' gave "
                f"{columns[label].nan_to_num().min():.4g}: shift it by the transform 'affine', or cut it by 'clip'"
            )
    return _roots(columns, weights)


def _roots(columns: Mapping[str, Tensor], weights: Mapping[str, float]) -> Tensor:
    """prod r ** (w / sum of w); NaN where a value is negative, which a rank may still put right."""
    columns = {label: columns[label].where(columns[label] >= 0, torch.nan) for label in weights}
    total = sum(weights.values())
    return torch.stack([columns[label] ** (weight / total) for label, weight in weights.items()]).prod(0)


def _tensors(columns: Mapping[str, Sequence[float]]) -> dict[str, Tensor]:
    return {label: torch.tensor(list(column), dtype=torch.float64) for label, column in columns.items()}


def _first_error(errors: list[str | None], label: str, output: RewardOutput) -> list[str | None]:
    reasons = output.details.get("error", [None] * len(errors))
    return [
        known or (None if ok else f"{label}: {reason or 'no reason given'}")
        for known, ok, reason in zip(errors, output.valid.tolist(), reasons, strict=True)
    ]
