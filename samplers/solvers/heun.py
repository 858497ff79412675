r"""Heun's rule for the probability-flow ODE: second order, two network calls a step.

    x' = x_t + dt v(x_t, t),   x_s = x_t + dt / 2 (v(x_t, t) + v(x', s))

The network is never called at sigma 0, so a step that ends there is Euler's.
Source: diffusers FlowMatchHeunDiscreteScheduler; Karras et al., arXiv 2206.00364, Algorithm 1.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.table import SolverTable
from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["Heun"]


@dataclass(frozen=True)
class Heun:
    """Euler's step, then the mean of the velocities at both ends."""

    name: ClassVar[str] = "heun"

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        euler = Euler().coefficients(sigmas)
        t, s, half = sigmas[:-1], sigmas[1:], sigmas.diff() / 2
        # v(x', s) = (x' - x0_s) / s with x' = (s / t) x_t + (1 - s / t) x0_t
        corrector = torch.stack([-half / s, half * (1 / s - 2 / t)], dim=1)
        corrector[s == 0] = 0
        return SolverTable(euler.keep, euler.predictor, euler.std, corrector, reuse=False)
