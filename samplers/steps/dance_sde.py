r"""Dance-SDE: the flow's SDE with a constant diffusion coefficient, one Euler-Maruyama step at a time.

    mean = x_t + [v + a^2 / (2 t) * (x_t + (1 - t) v)] dt,   std = a sqrt(-dt),   a = noise_level

The SDE of Flow-SDE with sigma_t = a, so there is no pole at the noise end and no special first step. Noise is spread
evenly over time: the last step still adds a sqrt(t), which no later step removes.
Source: DanceGRPO, arXiv 2505.07818; written there through x0 = x_t - t v.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable, check_sigmas, sde_table

__all__ = ["DanceSDE"]


@dataclass(frozen=True)
class DanceSDE:
    """noise_level: a >= 0, the diffusion coefficient. 0 is the Euler ODE; 0.3 is the published default for FLUX."""

    name: ClassVar[str] = "dance_sde"
    process: ClassVar[str] = "flow"
    noise_level: float = 0.3

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < float("inf"):
            raise ValueError(f"noise_level must be finite and at least 0, got {self.noise_level}")

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        return sde_table(sigmas, torch.full_like(sigmas[:-1], self.noise_level))
