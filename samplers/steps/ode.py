"""The probability-flow ODE by Euler's rule: x_s = x_t + dt * v. Deterministic, so it has no log-prob."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable, check_sigmas

__all__ = ["ODE"]


@dataclass(frozen=True)
class ODE:
    """A = 1, B = dt, std = 0. Equals the step of diffusers' FlowMatchEulerDiscreteScheduler."""

    name: ClassVar[str] = "ode"
    process: ClassVar[str] = "flow"

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        dt = check_sigmas(sigmas).diff()
        zero = torch.zeros_like(dt)
        return StepTable(A=torch.ones_like(dt), B=dt, std=zero, sigma_t=zero, dt=dt)
