r"""What every solver produces: each step as a weighted sum of the state, the predicted clean images, and noise.

    x_s = keep x_t + sum_k predictor_k x0_k + std z,        x0_k = x - t v at the k-th newest evaluation
    x_s = keep x_t + corrector_0 x0_s + sum_k corrector_{k+1} x0_k + std z,      after evaluating x0_s at that x_s

Euler, Heun, multistep exponential integrators and their stochastic forms are all of this shape. A step is consistent
when it moves a constant clean image and its noise to the level s: keep (1 - t) + sum(predictor) = 1 - s and
(keep t)^2 + std^2 = s^2.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["Solver", "SolverTable", "log_snr"]


@dataclass(frozen=True)
class SolverTable:
    """Scalars of N steps; host float64. Example: `DPM2().coefficients(flow_match_sigmas(10)).predictor` is [10, 2]."""

    keep: Tensor
    """[N] factor of x_t."""
    predictor: Tensor
    """[N, K] factors of the K newest predictions of x0, newest first; 0 where the history is shorter."""
    std: Tensor
    """[N] standard deviation of the fresh noise; 0 in a deterministic step."""
    corrector: Tensor
    """[N, 1 + K] factors for the second pass: x0 at the new state, then as `predictor`. A row of 0: no second pass."""
    reuse: bool
    """The evaluation of the second pass serves the next step too (1 network call a step, not 2)."""

    def corrects(self, step: int) -> bool:
        """Whether this step has a second pass."""
        return bool(self.corrector[step].any())

    @property
    def network_calls(self) -> int:
        """Evaluations of the network in all N steps."""
        return len(self.keep) + (0 if self.reuse else sum(map(self.corrects, range(len(self.keep)))))


class Solver(Protocol):
    """A recipe for the scalars of every step of a grid of a flow-matching model."""

    def coefficients(self, sigmas: Tensor) -> SolverTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        ...


def log_snr(sigmas: Tensor) -> Tensor:
    """lambda = log((1 - t) / t): -inf at pure noise, +inf at data. Any shape."""
    return torch.log1p(-sigmas) - sigmas.log()
