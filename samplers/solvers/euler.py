"""Euler's rule for the probability-flow ODE: first order, one network call a step."""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.solvers.table import SolverTable
from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["Euler"]


@dataclass(frozen=True)
class Euler:
    """x_s = x_t + (s - t) v, written as (s / t) x_t + (1 - s / t) x0. Also the first-order DPM-Solver++ and DDIM."""

    name: ClassVar[str] = "euler"

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        keep = sigmas[1:] / sigmas[:-1]
        zero = torch.zeros_like(keep)
        corrector = torch.zeros(len(keep), 2, dtype=torch.float64)
        return SolverTable(keep, predictor=(1 - keep)[:, None], std=zero, corrector=corrector, reuse=False)
