"""What every step rule produces: p(x_s | x_t) = N(A x_t + B v, std^2), three scalars per step.

Sampling, log-prob, ratio and KL read the same table, so the std that drew x_s is the std that scores it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["StepRule", "StepTable", "check_sigmas"]


@dataclass(frozen=True)
class StepTable:
    """Scalars of N denoising steps (or of R rows, after `rows`); host float64, cast to fp32 where they are used.

    Example: `FlowSDE(0.7).coefficients(flow_match_sigmas(10)).rows(torch.tensor([0, 0, 3]))` has std .700, .700, .446.
    """

    A: Tensor
    """[N] factor of x_t in the mean."""
    B: Tensor
    """[N] factor of the velocity in the mean; negative, since time runs down."""
    std: Tensor
    """[N] standard deviation of x_s given x_t, sqrt(-dt) included; 0 for a deterministic step."""
    sigma_t: Tensor
    """[N] diffusion coefficient, std without sqrt(-dt); only the published form of the Flow-GRPO KL reads it."""

    def rows(self, index: Tensor) -> StepTable:
        """index: [R] int64 step of each row, in [0, N). Returns the same scalars per row, each [R]."""
        index = index.to(self.A.device)
        return StepTable(self.A[index], self.B[index], self.std[index], self.sigma_t[index])


class StepRule(Protocol):
    """A recipe for the scalars of every step of a grid."""

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        ...


def check_sigmas(sigmas: Tensor) -> Tensor:
    """sigmas as float64 [N+1] on the host. Raises ValueError unless 1 >= sigma_0 > ... > sigma_N >= 0."""
    sigmas = sigmas.detach().to("cpu", torch.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas must be [N+1] with N >= 1, got shape {tuple(sigmas.shape)}")
    if not (sigmas.diff() < 0).all() or sigmas[0] > 1 or sigmas[-1] < 0:
        raise ValueError("sigmas must fall strictly from at most 1 (noise) to at least 0 (data): flip or rescale them")
    return sigmas
