"""The clipped surrogate that policy-gradient objectives share, and the contract that every objective keeps.

Left out: where a log-ratio comes from. It is an objective's own: a transition's density, or a matching error.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Protocol

import torch
from torch import Tensor

from flowrl_img.needs import Needs

__all__ = ["ClipRange", "Objective", "clip_bounds", "clipped_surrogate", "exponential"]

LOG_RATIO_LIMIT = 20.0  # e^20 is finite in float32; beyond it the clipped branch decides anyway
ClipRange = float | tuple[float, float]


class Objective(Protocol):
    """A pure function of per-row moments and advantages. It sees no model, configuration, file or rank.

    `needs.unit` other than "row" asks for a method `unit_score(moments, advantage) -> [R]`, whose mean over the unit
    comes back as `moments.unit_mean`. A group without spread has advantage 0: what it does then is in the docstring of
    each.
    """

    name: ClassVar[str]

    @property
    def needs(self) -> Needs:
        """What the loop has to provide."""
        ...

    @property
    def penalties(self) -> Mapping[str, float]:
        """Metric -> weight: loss = policy_loss + sum of weight times metric, to the last bit."""
        ...

    def __call__(self, moments: Any, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]. Returns the loss [R], whose mean is differentiated, and metrics [R] without gradient.

        `policy_loss` and the penalties are always among the metrics; `log_ratio` where the objective has a ratio.
        """
        ...


def clip_bounds(clip_range: ClipRange) -> tuple[float, float]:
    """(low, high): a ratio is clipped to [1 - low, 1 + high]. ValueError unless 0 < low and 0 < high."""
    low, high = (clip_range, clip_range) if isinstance(clip_range, (int, float)) else clip_range
    if not (0 < low <= 1 and high > 0):
        raise ValueError(f"clip_range must be positive (and at most 1 downwards), got {clip_range}")
    return low, high


def exponential(log_ratio: Tensor) -> Tensor:
    """exp of a log-ratio, finite whatever its size."""
    return log_ratio.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()


def clipped_surrogate(ratio: Tensor, advantage: Tensor, bounds: tuple[float, float]) -> tuple[Tensor, Tensor]:
    """(max(-A r, -A clip(r, 1 - low, 1 + high)), clipped): losses [R], and 1.0 where the clip stops the gradient."""
    low, high = bounds
    advantage = advantage.to(ratio)
    unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
    return torch.maximum(unclipped, clipped), ((clipped > unclipped) & (advantage != 0)).float()
