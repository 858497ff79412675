"""log(1 + value) for the reward that varies most for its size, so that it does not outvote the others.

h = std / mean over the whole rollout; a reward whose h lies above the threshold is damped.
Source: PaCo-RL (arXiv 2512.04784), log-tamed aggregation.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl_img.rewards.failures import InvalidScoreError

__all__ = ["LogTame"]

EPS = 1e-6


@dataclass(frozen=True)
class LogTame:
    """threshold: h above which a reward is damped; "mean": the mean of h over all rewards of the mixture.

    h is a ratio to the mean, so it asks for values above -1 with a positive mean: shift others by `affine` first.
    """

    threshold: float | Literal["mean"] = "mean"

    name: ClassVar[str] = "log_tame"
    pointwise: ClassVar[bool] = False

    def __call__(self, label: str, columns: Mapping[str, Tensor], groups: Sequence[str]) -> Tensor:
        """[B]. InvalidScoreError for values to which h does not apply."""
        spreads = {name: _spread(name, column[~column.isnan()]) for name, column in columns.items()}
        limit = sum(spreads.values()) / len(spreads) if self.threshold == "mean" else self.threshold
        return torch.log1p(columns[label]) if spreads[label] > limit else columns[label]


def _spread(name: str, values: Tensor) -> float:
    """Population std over mean; 0 without a valid value."""
    if not len(values):
        return 0.0
    if values.min() <= -1 or values.mean() <= 0:
        raise InvalidScoreError(
            f"log_tame does not apply to reward '{name}': values down to {values.min():.4g} with mean "
            f"{values.mean():.4g}, where it needs values above -1 and a positive mean; shift it by 'affine' first"
        )
    return (values.std(correction=0) / (values.mean() + EPS)).item()
