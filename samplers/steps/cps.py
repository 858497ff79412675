r"""CPS, the coefficient-preserving step: take x_t apart, then recombine it with some of its noise replaced.

With t = sigma_i, s = sigma_{i+1}, a = noise_level, x0 = x_t - t v and eps = x_t + (1 - t) v:

    mean = (1 - s) x0 + s |cos(a pi / 2)| eps,   std = s sin(a pi / 2)

Fresh and kept noise add up to the level s that the network expects, at every step: x_s looks as clean as an ODE state.
Coefficients are preserved, not the marginal law. The last step of a grid that ends at 0 is deterministic.
Source: Flow-CPS, arXiv 2509.05952. For a > 1 the cosine is negative and published code takes the positive root.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable, check_sigmas, recombine

__all__ = ["CPS"]


@dataclass(frozen=True)
class CPS:
    """noise_level: a in [0, 2). 0 is the Euler ODE, 1 replaces all noise; 0.8 is the published default."""

    name: ClassVar[str] = "cps"
    process: ClassVar[str] = "flow"
    noise_level: float = 0.8

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < 2:
            raise ValueError(
                f"noise_level must be in [0, 2): sin(a pi / 2) is a share of the noise, got {self.noise_level}"
            )

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        t, s = sigmas[:-1], sigmas[1:]
        one, angle = torch.ones_like(t), self.noise_level * math.pi / 2
        kept, fresh = s * abs(math.cos(angle)), s * math.sin(angle)
        return recombine(x0=(one, -t), eps=(one, 1 - t), alpha_s=1 - s, direction=kept, std=fresh, dt=s - t)
