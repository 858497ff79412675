"""Proof before the first update that training sees what the rollout drew, and the errors that stop a run.

Two quantities at transitions, because each is blind to what the other sees: the ratio from recomputed against stored
velocity, and the standardised residual of x_s, mean ((x_s - mu) / std)^2, against its value at the rollout. At clean
samples noised again, the sets that follow the weights must still give their velocity. All are noted in the first
update's own passes and judged before its step, so the proof costs no evaluation.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from torch import Tensor

from flowrl_img.parallel import Processes

__all__ = ["FirstUpdate", "NonFiniteError", "RolloutMismatchError"]

RATIO_LIMIT = 1e-6
# Rounding of fp32 states over the smallest std in use (0.006) moves the residual by under 1e-4 of itself;
# a state scaled by 1.01 moves it by more than 1e-3. In low precision the rollout's own velocity drew x_s, so mu differs
# by the layout's rounding.
RESIDUAL_LIMIT, LOW_PRECISION_RESIDUAL_LIMIT = 5e-4, 0.05
# Mean square distance of two equal sets' velocities over the matching error: they run in batches of other shapes.
DISTANCE_LIMIT, LOW_PRECISION_DISTANCE_LIMIT = 1e-8, 1e-2


class NonFiniteError(RuntimeError):
    """A velocity or gradient overflowed; raised before any weight changes."""


class RolloutMismatchError(RuntimeError):
    """Training does not reproduce the rollout: states, velocities or scalars differ."""


@dataclass
class FirstUpdate:
    """The largest deviations seen. smallest_clip: of the objective; every ratio is 1 within a tenth of it.

    In low precision the stored velocity was retaken in the training layout, so the ratio must be 1 there as well; what
    the layouts differ by is measured against the rollout's own velocity and reported as `layout_ratio_error`.
    """

    smallest_clip: float
    low_precision: bool
    largest: dict[str, float] = field(default_factory=dict)

    def note_ratio(self, log_ratio: Tensor) -> None:
        """log_ratio: [R]."""
        self._note("check_ratio_error", log_ratio.double().expm1())

    def note_residual(self, error: Tensor) -> None:
        """error: [R] relative deviation of the standardised residual."""
        self._note("check_residual_error", error)

    def note_layout(self, log_ratio: Tensor) -> None:
        """log_ratio: [R] against the velocity of the rollout's own layout."""
        self._note("layout_ratio_error", log_ratio.double().expm1())

    def note_distance(self, relative: Tensor) -> None:
        """relative: [R] mean square distance from another set over the matching error."""
        self._note("check_distance", relative)

    def _note(self, name: str, error: Tensor) -> None:
        if len(error):
            # max() of Python passes over NaN, which is no proof of anything.
            worst = float(error.detach().abs().nan_to_num(nan=math.inf).max())
            self.largest[name] = max(self.largest.get(name, 0.0), worst)

    def verdict(self, processes: Processes) -> dict[str, float]:
        """What was measured, over all processes. Raises RolloutMismatchError beyond the limits."""
        names = sorted(processes.agree(list(self.largest)))
        found = {name: processes.max(self.largest.get(name, 0.0)) for name in names}
        checks = ("check_ratio_error", "check_residual_error", "check_distance")
        ratio, residual, distance = (found.get(name, 0.0) for name in checks)
        limit = min(RATIO_LIMIT, self.smallest_clip / 10)
        if ratio > limit:
            raise RolloutMismatchError(
                f"rollout/train mismatch: |ratio - 1| is {ratio:.2e} before the first update, the limit is "
                f"{limit:.0e}. The recomputed velocity differs from the one stored by the rollout: check dropout, "
                "precision and conditioning"
            )
        limit = LOW_PRECISION_RESIDUAL_LIMIT if self.low_precision else RESIDUAL_LIMIT
        if residual > limit:
            raise RolloutMismatchError(
                f"rollout/train mismatch: the standardised residual of x_s is off by {residual:.2e} of its rollout "
                f"value, the limit is {limit:.0e}. The stored x_s is not the one the noise was added to"
            )
        limit = LOW_PRECISION_DISTANCE_LIMIT if self.low_precision else DISTANCE_LIMIT
        if distance > limit:
            raise RolloutMismatchError(
                f"the old or trust weights are not those of the start: their velocity is off by {distance:.2e} of the "
                f"matching error (mean squares), the limit is {limit:.0e}: check dropout and precision"
            )
        return found
