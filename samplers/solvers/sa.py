r"""SA-Solver: a stochastic predictor-corrector of order 2, one network call a step.

With lambda = log((1 - t) / t), h = lambda_s - lambda_t, tau the stochasticity of the step and k = 1 + tau^2:

    x_s = e^(-tau^2 h) (s / t) x_t + sum_j c_j x0_j + s sqrt(1 - e^(-2 tau^2 h)) z
    c_j = (1 - s) k int_0^h e^(-k u) l_j(lambda_s - u) du,      l_j: Lagrange polynomials of the nodes

The predictor's nodes are this evaluation and the one before; the corrector's, the one at the predicted state and this
one. tau = 0 everywhere is a deterministic solver. The predictor is first order where there is no history and in the
last `first_order_end` steps, for the reason given in `dpm2`; the published solver has 1. The last step is not
corrected: no evaluation follows it. A step from pure noise is taken in the limit of infinite h.

`few_step_term` adds the terms of the authors' code: e^(-k u) in the slope's integral becomes its leading order in h,
equal up to O(h^3). It needs finite h, so the grid must start below 1. With it and `first_order_end` 1, steps equal
those of diffusers' SASolverScheduler on the same levels.
Source: SA-Solver, arXiv 2309.05019; AWM, arXiv 2509.25050, rolls out with tau = noise_level for 0.3 <= t <= 0.9.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.solvers.table import SolverTable, log_snr
from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["SASolver"]


@dataclass(frozen=True)
class SASolver:
    """noise_level: tau >= 0 of the steps that start within `stochastic` = (lowest, highest sigma); 0 elsewhere."""

    name: ClassVar[str] = "sa"
    noise_level: float = 0.4
    stochastic: tuple[float, float] = (0.3, 0.9)
    first_order_end: int = 2
    few_step_term: bool = False

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < float("inf"):
            raise ValueError(f"noise_level must be finite and at least 0, got {self.noise_level}")
        if self.stochastic[0] > self.stochastic[1]:
            raise ValueError(f"stochastic is (lowest, highest sigma), got {self.stochastic}")
        if self.first_order_end < 1:
            raise ValueError(f"first_order_end must be at least 1, for the step to sigma 0; got {self.first_order_end}")

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps.

        Raises ValueError when `few_step_term` meets a grid that starts at 1.
        """
        sigmas = check_sigmas(sigmas)
        if self.few_step_term and sigmas[0] == 1:
            raise ValueError("few_step_term diverges on a step from sigma 1: start the grid below 1, or switch it off")
        t, s, h = sigmas[:-1], sigmas[1:], log_snr(sigmas).diff()
        low, high = self.stochastic
        tau2 = self.noise_level**2 * ((t >= low) & (t <= high)).to(torch.float64)
        decay = torch.exp(-torch.where(tau2 > 0, tau2 * h, tau2))  # 1, and not 0 * inf, without noise
        total = (1 - s) * -torch.expm1(-(1 + tau2) * h)
        return SolverTable(
            keep=decay * s / t,
            predictor=self._predictor(s, h, 1 + tau2, total),
            std=s * (1 - decay**2).sqrt(),
            corrector=self._corrector(s, h, 1 + tau2, total),
            reuse=True,
        )

    def _predictor(self, s: Tensor, h: Tensor, k: Tensor, total: Tensor) -> Tensor:
        """[N, 2]. The slope between the two newest predictions, times its integral."""
        slope = torch.zeros_like(h)
        integral = k * h**2 / 2 if self.few_step_term else h + torch.expm1(-k * h) / k
        slope[1:] = ((1 - s) * integral)[1:] / h[:-1]  # 0 after an infinite h
        slope[max(len(h) - self.first_order_end, 0) :] = 0
        return torch.stack([total + slope, -slope], dim=1)

    def _corrector(self, s: Tensor, h: Tensor, k: Tensor, total: Tensor) -> Tensor:
        """[N, 3]; the last column, for the evaluation before this one, is 0."""
        share = k * h / 2 if self.few_step_term else 1 + torch.expm1(-k * h) / (k * h)
        newest = (1 - s) * share
        corrector = torch.stack([newest, total - newest, torch.zeros_like(h)], dim=1)
        corrector[-1] = 0
        return corrector
