r"""Ingredients of the losses on clean samples, from their matching moments: a few lines on [rows].

All are means over latent elements. The moments come from `matching_moments`; t from the caller, on their device and in
any float dtype: it is cast to the moments'. Left out: advantages, groups and clipping, which are the objectives'.

A `Discrepancy` turns mean (v - v*)^2 and t into the number that a method minimises: minus it is the surrogate
log-likelihood of AWM and FPO, and the same object weighs mean (v - v_ref)^2 as a penalty.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = [
    "DISCREPANCIES",
    "Discrepancy",
    "Elbo",
    "GeneralisedHuber",
    "Huber",
    "Power",
    "branch_loss",
    "branch_weight",
    "other_error",
]

TINY = 1e-10


def other_error(E2: Tensor, GAIN: Tensor) -> Tensor:
    """mean (w - v*)^2 of the other velocity w that GAIN compares with: E2 - GAIN. All [rows]."""
    return E2 - GAIN


def branch_weight(MEAN_ABS: Tensor, t: Tensor, floor: float = 1e-5) -> Tensor:
    """mean |x0_hat - x0| of a branch, no less than `floor`, without gradient: t MEAN_ABS.

    MEAN_ABS: [rows], column PLUS1 or MINUS1. t: [rows]. Source: DiffusionNFT, arXiv 2509.16117, and its published code.
    """
    return (t.to(MEAN_ABS) * MEAN_ABS.detach()).clamp(min=floor)


def branch_loss(SQUARE: Tensor, MEAN_ABS: Tensor, t: Tensor, floor: float = 1e-5) -> Tensor:
    """mean (x0_hat - x0)^2 of a branch over its weight: t^2 SQUARE / branch_weight.

    SQUARE: [rows], column PLUS2 or MINUS2; MEAN_ABS: [rows], PLUS1 or MINUS1. Gradient through SQUARE alone.
    Source: DiffusionNFT, arXiv 2509.16117, and its published code.
    """
    return t.to(SQUARE) ** 2 * SQUARE / branch_weight(MEAN_ABS, t, floor)


class Discrepancy(Protocol):
    """A weighting of mean squared velocity errors. M, GAIN, t: [rows]. Not negative, and 0 at M = 0."""

    def __call__(self, M: Tensor, t: Tensor) -> Tensor:
        """The discrepancy of M = mean (v - w)^2 at time t."""
        ...

    def difference(self, M: Tensor, GAIN: Tensor, t: Tensor) -> Tensor:
        """self(M, t) - self(M - GAIN, t) without cancellation, its gradient through GAIN alone; 0 at GAIN = 0.

        Minus it is a surrogate log-ratio: M = E2, GAIN = GAIN_OLD.
        """
        ...


@dataclass(frozen=True)
class Power:
    """t^power M. power 0: the plain mean square; 2: that of the predicted clean sample."""

    power: float = 0.0

    def __call__(self, M: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        return t.to(M) ** self.power * M

    def difference(self, M: Tensor, GAIN: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        return self(GAIN, t)


@dataclass(frozen=True)
class Elbo:
    """M / (2 std^2) with std = noise_level sqrt(t / (1 - t)), t no more than `latest` in 1 - t. t > 0.

    Source: published code of AWM, arXiv 2509.25050.
    """

    noise_level: float = 0.7
    latest: float = 0.99

    def __call__(self, M: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        t = t.to(M)
        return M * (1 - t.clamp(max=self.latest)) / (2 * self.noise_level**2 * t)

    def difference(self, M: Tensor, GAIN: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        return self(GAIN, t)


@dataclass(frozen=True)
class Huber:
    """t (sqrt(M + 1e-10) - 1e-5): the root mean square, smooth at 0.

    Source: published code of AWM, arXiv 2509.25050.
    """

    def __call__(self, M: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        return t.to(M) * ((M + TINY).sqrt() - TINY**0.5)

    def difference(self, M: Tensor, GAIN: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        before = (M - GAIN).detach() + TINY
        return t.to(M) * GAIN / ((before + GAIN).sqrt() + before.sqrt())


@dataclass(frozen=True)
class GeneralisedHuber:
    """(t / power) ((M + 1e-10)^power - 1e-10^power): its gradient is t M^(power - 1) times that of M.

    Source: published code of AWM, arXiv 2509.25050, whose default this is.
    """

    power: float = 0.25

    def __call__(self, M: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        return t.to(M) / self.power * ((M + TINY) ** self.power - TINY**self.power)

    def difference(self, M: Tensor, GAIN: Tensor, t: Tensor) -> Tensor:
        """See `Discrepancy`."""
        before = (M - GAIN).detach() + TINY
        growth = torch.expm1(self.power * torch.log1p(GAIN / before))
        return t.to(M) / self.power * before**self.power * growth


DISCREPANCIES: dict[str, Discrepancy] = {
    "uniform": Power(0),
    "t": Power(1),
    "t2": Power(2),
    "elbo": Elbo(),
    "huber": Huber(),
    "ghuber": GeneralisedHuber(),
}
"""By name, for configuration."""
