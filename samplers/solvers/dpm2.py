r"""DPM-Solver++ 2M: second-order multistep, one network call a step.

With lambda = log((1 - t) / t), h = lambda_s - lambda_t and h_0 the h of the step before:

    x_s = (s / t) x_t + (1 - s / t) (x0 + h / (2 h_0) (x0 - x0_before))

The bracket extrapolates x0 to the middle of the step in lambda. It is x0 alone (first order) at step 0, which has no
history; at step 1 of a grid that starts at 1, where h_0 is infinite; and at the last `first_order_end` steps.
A last step to sigma 0 has infinite h. The step before it is long in lambda too: on the SD3 grid of 10 steps the bracket
would extrapolate 2.3 times the last difference, and the result is worse than Euler's up to 25 steps. Hence the default
of 2; `dpm2_published` is 1.
Source: DPM-Solver++, arXiv 2211.01095, Algorithm 2 ("midpoint"), on the flow x_t = (1 - t) x0 + t eps.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.table import SolverTable, log_snr
from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["DPM2"]


@dataclass(frozen=True)
class DPM2:
    """first_order_end: how many steps at the end are first order, at least 1."""

    name: ClassVar[str] = "dpm2"
    first_order_end: int = 2

    def __post_init__(self) -> None:
        if self.first_order_end < 1:
            raise ValueError(f"first_order_end must be at least 1, for the step to sigma 0; got {self.first_order_end}")

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        euler = Euler().coefficients(sigmas)
        h = log_snr(sigmas).diff()
        extrapolation = torch.zeros_like(h)
        extrapolation[1:] = h[1:] / (2 * h[:-1])  # 0 after an infinite h, at step 1 of a grid from pure noise
        extrapolation[max(len(h) - self.first_order_end, 0) :] = 0
        weight = euler.predictor[:, 0]
        predictor = torch.stack([weight * (1 + extrapolation), -weight * extrapolation], dim=1)
        corrector = torch.zeros(len(h), 3, dtype=torch.float64)
        return SolverTable(euler.keep, predictor, euler.std, corrector, reuse=False)
