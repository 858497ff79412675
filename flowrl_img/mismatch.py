"""Proof before the first update that training sees what the rollout drew, and the errors that stop a run.

Two quantities, because each is blind to what the other sees: the ratio from recomputed against stored velocity, and the
standardised residual of x_s, mean ((x_s - mu) / std)^2, against its value at the rollout.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

__all__ = ["NonFiniteError", "RolloutMismatchError", "check_first_update"]

RATIO_LIMIT = 1e-6
# Rounding of fp32 states over the smallest std in use (0.006) moves the residual by under 1e-4 of itself;
# a state scaled by 1.01 moves it by more than 1e-3.
RESIDUAL_LIMIT = 5e-4


class NonFiniteError(RuntimeError):
    """A velocity or gradient overflowed; raised before any weight changes."""


class RolloutMismatchError(RuntimeError):
    """Training does not reproduce the rollout: states, velocities or scalars differ."""


@torch.no_grad()
def check_first_update(trainer: Any, edges: Any, scored: Any, batches: Sequence[Tensor]) -> dict[str, float]:
    """Compare every point of the first update. Returns the measured spreads; raises RolloutMismatchError beyond limits.

    In low precision the stored velocity was retaken in the training layout, so the ratio must be 1 there as well; what
    the layouts differ by is measured against the rollout's own velocity and returned as `layout_ratio_error`.
    """
    low, high = trainer.objective.clip
    limit = min(RATIO_LIMIT, min(low, high) / 10)
    worst_ratio, worst_residual, layout = 0.0, 0.0, 0.0
    for rows in batches:
        points = trainer.points(edges, scored, rows)
        moments = trainer.predict(points)
        if not moments.finite():
            trainer._refuse(scored, rows, edges)
        worst_ratio = max(worst_ratio, _ratio_error(trainer, moments))
        residual = moments.e2 / moments.table.std.to(moments.e2) ** 2
        stored = scored.rollout.edges.residual[rows].to(residual)
        worst_residual = max(worst_residual, float((residual / stored - 1).abs().max()))
        if trainer._rescores:
            drawn = trainer.predict(trainer.points(scored.rollout.edges, scored, rows))
            layout = max(layout, _ratio_error(trainer, drawn))
    worst_ratio, worst_residual = trainer.processes.max(worst_ratio), trainer.processes.max(worst_residual)
    low_precision = trainer._rescores
    if worst_ratio > limit:
        raise RolloutMismatchError(
            f"rollout/train mismatch: |ratio - 1| is {worst_ratio:.2e} before the first update, the limit is "
            f"{limit:.0e}. The recomputed velocity differs from the one stored by the rollout: check dropout, "
            "precision and conditioning"
        )
    # In low precision the rollout's own velocity drew x_s, so mu differs by the layout's rounding.
    residual_limit = RESIDUAL_LIMIT if not low_precision else 0.05
    if worst_residual > residual_limit:
        raise RolloutMismatchError(
            f"rollout/train mismatch: the standardised residual of x_s is off by {worst_residual:.2e} of its rollout "
            f"value, the limit is {residual_limit:.0e}. The stored x_s is not the one the noise was added to"
        )
    spread = {"check_ratio_error": worst_ratio, "check_residual_error": worst_residual}
    return spread | ({"layout_ratio_error": trainer.processes.max(layout)} if low_precision else {})


def _ratio_error(trainer: Any, moments: Any) -> float:
    return float(trainer.objective.log_ratio(moments).double().expm1().abs().max())
