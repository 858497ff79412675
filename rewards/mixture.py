"""A weighted sum of rewards, itself a reward.

The sum is of raw values, so parts with a large scale dominate: choose weights accordingly, or normalise each part
in the advantage. Each part's raw value is kept in the details under its name.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, ClassVar

import torch

from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch, RewardOutput
from flowrl_img.rewards.score import checked

__all__ = ["Mixture"]


@dataclass(frozen=True)
class Mixture:
    """sum_k weights[k] * rewards[k]; a row is invalid where any part of non-zero weight is.

    A part of weight 0 is scored and logged but does not count, nor does its failure.
    Details: `k` the part's raw values, `k/detail` its details (so `geneval/strict`), `error` the reasons.
    """

    weights: Mapping[str, float]
    rewards: Mapping[str, Reward]

    name: ClassVar[str] = "weighted_sum"

    def __post_init__(self) -> None:
        if not self.weights or self.weights.keys() != self.rewards.keys():
            raise ValueError(f"each reward needs one weight: {list(self.weights)} against {list(self.rewards)}")
        wrong = [key for key, weight in self.weights.items() if not math.isfinite(weight)]
        if wrong:
            raise ValueError(f"weights must be finite numbers, see {wrong}")
        if not any(self.weights.values()):
            raise ValueError("at least one weight must differ from 0, else every picture is as good as any")

    @property
    def needs(self) -> frozenset[str]:
        """The metadata keys that any part needs."""
        return frozenset().union(*(part.needs for part in self.rewards.values()))

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """ValueError for the first line that a part cannot score."""
        for part in self.rewards.values():
            part.validate(prompts, metadata)

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        values, valid = torch.zeros(len(batch)), torch.ones(len(batch), dtype=torch.bool)
        details: dict[str, list[Any]] = {}
        errors: list[str | None] = [None] * len(batch)
        for key, weight in self.weights.items():
            part = checked(self.rewards[key], batch)
            details[key] = part.values.tolist()
            details |= {f"{key}/{column}": entries for column, entries in part.details.items()}
            if weight != 0:  # 0 * NaN is NaN: a part out of the sum must not touch it
                values, valid = values + weight * part.values, valid & part.valid
                errors = _first_error(errors, key, part)
        values = torch.where(valid, values, torch.nan)
        return RewardOutput(values, valid, details | {"error": errors})


def _first_error(errors: list[str | None], key: str, part: RewardOutput) -> list[str | None]:
    reasons = part.details.get("error", [None] * len(errors))
    return [
        known or (None if ok else f"{key}: {reason or 'no reason given'}")
        for known, ok, reason in zip(errors, part.valid.tolist(), reasons, strict=True)
    ]
