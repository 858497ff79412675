"""From velocities to the moments that an objective reads, and the means over its unit.

The trainer and the tests of every objective go through here. Left out: networks, weight sets and ranks.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping

import torch
from torch import Tensor

from flowrl_img.kernels.matching_moments import matching_moments
from flowrl_img.kernels.transition import transition_moments
from flowrl_img.needs import Needs
from flowrl_img.samplers.steps.table import StepTable
from flowrl_img.types import MatchingMoments, Moments

__all__ = ["matching_of", "transition_of", "unit_means"]


def transition_of(
    needs: Needs, v: tuple[Tensor, Tensor | None], guidance: float, x_t: Tensor, x_s: Tensor, table: StepTable,
    others: Mapping[str, Tensor], mean_std: float = 1.0,
) -> Moments:  # fmt: skip
    """v: (conditional, unconditional or None) [R, ...]; x_t, x_s: [R, ...]; table: of R rows.

    others: guided velocities without gradient, "old" always and "reference" where it is asked for.
    """
    columns = transition_moments(
        *v, guidance, x_t, x_s, table.A, table.B, v_old=others.get("old"), v_ref=others.get("reference"),
        detach_uncond=needs.detach_uncond,
    )  # fmt: skip
    return Moments.of(columns, table, mean_std)


def matching_of(
    needs: Needs, v: Tensor, x0: Tensor, eps: Tensor, t: Tensor, others: Mapping[str, Tensor]
) -> MatchingMoments:
    """v, x0, eps: [R, ...]; t: [R]; others: the velocities of `needs.velocities`, by weight set, without gradient."""
    columns = matching_moments(
        v, x0, eps, v_old=others.get("old"), v_ref=others.get("reference"), v_ema=others.get("trust"),
        beta=needs.branch_width,
    )  # fmt: skip
    return MatchingMoments.of(columns, t)


def unit_means(score: Tensor, unit: Tensor, count: int, summed: Callable[[Tensor], Tensor] = lambda x: x) -> Tensor:
    """The mean of `score` over the rows of each row's unit, float64 [R].

    score: [R]. unit: [R] index in [0, count). summed: adds up a tensor over the processes that share the units.
    """
    values = torch.stack([score.detach().double(), torch.ones_like(score, dtype=torch.float64)], 1)
    totals = summed(values.new_zeros(count, 2).index_add(0, unit.to(values.device), values))
    return (totals[:, 0] / totals[:, 1].clamp(min=1))[unit.to(values.device)]
