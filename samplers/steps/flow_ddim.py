r"""DDIM with eta for flow-matching models: eta = 0 is the Euler ODE, eta = 1 the ancestral (DDPM) sampler.

With t = sigma_i, s = sigma_{i+1}, x0 = x_t - t v and eps = x_t + (1 - t) v:

    mean = (1 - s) x0 + sqrt(s^2 - std^2) eps,   std^2 = eta^2 s^2 (1 - ((1 - t) s / ((1 - s) t))^2)

`ddim` is the same rule for diffusion models. The step from t = 1 replaces a share eta of all noise.
Source: DDIM, arXiv 2010.02502, Eq. 12 and 16, on x_t = (1 - t) x0 + t eps; the form of DiffusionNFT's solvers.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable, check_sigmas, ddim_std, recombine

__all__ = ["FlowDDIM"]


@dataclass(frozen=True)
class FlowDDIM:
    """eta: share of the ancestral std, in [0, 1]. 0 is the Euler ODE."""

    name: ClassVar[str] = "flow_ddim"
    process: ClassVar[str] = "flow"
    eta: float = 1.0

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be in [0, 1]: 0 is deterministic, 1 is ancestral sampling; got {self.eta}")

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        sigmas = check_sigmas(sigmas)
        t, s, one = sigmas[:-1], sigmas[1:], torch.ones_like(sigmas[:-1])
        std, direction = ddim_std(self.eta, 1 - sigmas, sigmas)
        return recombine(x0=(one, -t), eps=(one, 1 - t), alpha_s=1 - s, direction=direction, std=std, dt=s - t)
