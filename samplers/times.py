"""At which times a clean sample is noised again: laws that draw T levels of noise, each a pure function of a seed.

Objectives on clean samples are not bound to the path of the rollout. Small frozen objects, chosen by name: levels of
the rollout's own grid (`grid`, `strata`), or continuous ones (`uniform`, `logit_normal`), all but `grid` stratified:
one draw in each of T equal parts of the law, which lowers the variance of a sum over times at no cost.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import ClassVar, Protocol

import torch
from torch import Tensor

__all__ = ["Grid", "LogitNormal", "Strata", "TimeLaw", "Uniform"]


class TimeLaw(Protocol):
    """A law of T times. `num_times` needs no model."""

    def num_times(self, num_steps: int) -> int:
        """T for a rollout of `num_steps` steps. ValueError if so many do not exist."""
        ...

    def draw(self, sigmas: Tensor, seed: int) -> Tensor:
        """sigmas: float64 [N+1] of the rollout. Returns float64 [T] in (0, 1]; the same for the same seed."""
        ...


@dataclass(frozen=True)
class Grid:
    """T different levels of the rollout's grid, its steps [low, high) all equally likely.

    count: T; null is all but one, as in DiffusionNFT. high: null is the number of steps. DGPO's timestep clip keeps to
    the noisy end: `count: 4, high: 7` leaves steps 7, 8 and 9 of 10 out.
    """

    count: int | None = None
    low: int = 0
    high: int | None = None

    name: ClassVar[str] = "grid"

    def __post_init__(self) -> None:
        if (self.count is not None and self.count < 1) or self.low < 0:
            raise ValueError(f"count must be at least 1 and low 0 or more, got count={self.count}, low={self.low}")

    def num_times(self, num_steps: int) -> int:
        """See `TimeLaw`."""
        low, high = _range(self.low, self.high, num_steps)
        count = max(high - low - 1, 1) if self.count is None else self.count
        if count > high - low:
            raise ValueError(f"count = {count}: only {high - low} steps lie in [{low}, {high}); use so many or fewer")
        return count

    def draw(self, sigmas: Tensor, seed: int) -> Tensor:
        """See `TimeLaw`."""
        count = self.num_times(len(sigmas) - 1)
        low, high = _range(self.low, self.high, len(sigmas) - 1)
        return sigmas[low + torch.randperm(high - low, generator=_stream(seed))[:count]]


@dataclass(frozen=True)
class Strata:
    """One level of the rollout's grid in each of T neighbouring parts of its steps [low, high).

    Part i holds the steps [floor(b_i), floor(b_i+1)), b = T + 1 points evenly spaced from low to high. first: step 0 is
    one of the T besides. AWM: `count: 6, low: 1, high: 12` of 14 steps ("discrete_wo_init"), or `low: 0` ("discrete").
    """

    count: int = 6
    low: int = 0
    high: int | None = None
    first: bool = False

    name: ClassVar[str] = "strata"

    def __post_init__(self) -> None:
        if self.count < 1 or self.low < 0:
            raise ValueError(f"count must be at least 1 and low 0 or more, got count={self.count}, low={self.low}")
        if self.first and (self.low == 0 or self.count < 2):
            raise ValueError("first adds step 0 to the parts: use low = 1 or more and count = 2 or more")

    def num_times(self, num_steps: int) -> int:
        """See `TimeLaw`."""
        low, high = _range(self.low, self.high, num_steps)
        if high - low < self._parts:
            raise ValueError(
                f"count = {self.count}: {high - low} steps in [{low}, {high}) cannot be cut in so many parts"
            )
        return self.count

    @property
    def _parts(self) -> int:
        return self.count - self.first

    def draw(self, sigmas: Tensor, seed: int) -> Tensor:
        """See `TimeLaw`."""
        self.num_times(len(sigmas) - 1)
        low, high = _range(self.low, self.high, len(sigmas) - 1)
        bounds = torch.linspace(low, high, self._parts + 1, dtype=torch.float64).long()
        share = torch.rand(self._parts, generator=_stream(seed), dtype=torch.float64)
        index = bounds[:-1] + (share * bounds.diff()).long()
        return sigmas[torch.cat([index.new_zeros(1), index]) if self.first else index]


@dataclass(frozen=True)
class Uniform:
    """T stratified draws, uniform in [low, high], then shifted: t <- shift t / (1 + (shift - 1) t)."""

    count: int = 6
    low: float = 0.2
    high: float = 1.0
    shift: float = 3.0

    name: ClassVar[str] = "uniform"

    def __post_init__(self) -> None:
        if self.count < 1 or self.shift <= 0 or not 0 < self.low < self.high <= 1:
            raise ValueError(
                f"need count >= 1, shift > 0 and 0 < low < high <= 1, got "
                f"{self.count}, {self.shift}, {self.low}, {self.high}"
            )

    def num_times(self, num_steps: int) -> int:
        """See `TimeLaw`."""
        return self.count

    def draw(self, sigmas: Tensor, seed: int) -> Tensor:
        """See `TimeLaw`."""
        return _shifted(self.low + (self.high - self.low) * _stratified(self.count, seed), self.shift)


@dataclass(frozen=True)
class LogitNormal:
    """T stratified draws of 1 / (1 + e^-x), x normal, then shifted; never below `smallest`.

    Source: the time law of Stable Diffusion 3, arXiv 2403.03206, as AWM uses it.
    """

    count: int = 6
    mean: float = 0.0
    std: float = 1.0
    shift: float = 3.0
    smallest: float = 0.01

    name: ClassVar[str] = "logit_normal"

    def __post_init__(self) -> None:
        if self.count < 1 or self.shift <= 0 or self.std <= 0 or not 0 < self.smallest < 1:
            raise ValueError(
                f"need count >= 1, shift > 0, std > 0 and 0 < smallest < 1, got "
                f"{self.count}, {self.shift}, {self.std}, {self.smallest}"
            )

    def num_times(self, num_steps: int) -> int:
        """See `TimeLaw`."""
        return self.count

    def draw(self, sigmas: Tensor, seed: int) -> Tensor:
        """See `TimeLaw`."""
        normal = math.sqrt(2) * torch.erfinv(2 * _stratified(self.count, seed) - 1)
        return _shifted(torch.sigmoid(self.mean + self.std * normal), self.shift).clamp(min=self.smallest)


def _range(low: int, high: int | None, num_steps: int) -> tuple[int, int]:
    end = num_steps if high is None else high
    if not low < end <= num_steps:
        raise ValueError(f"steps [{low}, {end}) do not lie in a rollout of {num_steps} steps")
    return low, end


def _stream(seed: int) -> torch.Generator:
    return torch.Generator().manual_seed(seed)


def _stratified(count: int, seed: int) -> Tensor:
    """float64 [count]: one uniform draw in each of `count` equal parts of (0, 1)."""
    share = torch.rand(count, generator=_stream(seed), dtype=torch.float64)
    return ((torch.arange(count) + share) / count).clamp(1e-12, 1 - 1e-12)


def _shifted(t: Tensor, shift: float) -> Tensor:
    return shift * t / (1 + (shift - 1) * t)
