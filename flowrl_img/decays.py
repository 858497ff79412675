"""Decay schedules of averaged weight sets: set <- d(s) set + (1 - d(s)) current, with s counting from 0.

Small frozen objects, chosen by name. s is the number of updates made when a set follows after every rollout, and the
index of the update when it follows after every update; `flowrl_img.weights` counts. Left out: the averaging.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Protocol

__all__ = ["Constant", "Copy", "Decay", "Delayed", "Linear", "Warmup"]


class Decay(Protocol):
    """A schedule: how much of the old average stays at step s >= 0, in [0, 1]."""

    def __call__(self, s: int) -> float: ...


@dataclass(frozen=True)
class Copy:
    """d = 0: the set is the weights as they are now. DiffusionNFT's type 0; the exact old policy of a rollout."""

    name: ClassVar[str] = "copy"

    def __call__(self, s: int) -> float:
        return 0.0


@dataclass(frozen=True)
class Constant:
    """d = decay, in [0, 1)."""

    decay: float = 0.9

    name: ClassVar[str] = "constant"

    def __post_init__(self) -> None:
        _check(self.decay, "decay")

    def __call__(self, s: int) -> float:
        return self.decay


@dataclass(frozen=True)
class Warmup:
    """d = min((1 + s) / (10 + s), decay): young averages forget fast. The evaluation average of published trainers."""

    decay: float = 0.9

    name: ClassVar[str] = "warmup"

    def __post_init__(self) -> None:
        _check(self.decay, "decay")

    def __call__(self, s: int) -> float:
        return min((1 + s) / (10 + s), self.decay)


@dataclass(frozen=True)
class Linear:
    """d = min(rate s, limit). DiffusionNFT's type 1 at (0.001, 0.5); the sets of AWM and DGPO at (0.001, 0.3)."""

    rate: float = 0.001
    limit: float = 0.5

    name: ClassVar[str] = "linear"

    def __post_init__(self) -> None:
        _check(self.limit, "limit")
        if self.rate < 0:
            raise ValueError(f"rate must be 0 or more, got {self.rate}")

    def __call__(self, s: int) -> float:
        return min(self.rate * s, self.limit)


@dataclass(frozen=True)
class Delayed:
    """d = 0 before step `start`, then min(rate (s - start), limit). DiffusionNFT's type 2."""

    start: int = 75
    rate: float = 0.0075
    limit: float = 0.999

    name: ClassVar[str] = "delayed"

    def __post_init__(self) -> None:
        _check(self.limit, "limit")
        if self.rate < 0 or self.start < 0:
            raise ValueError(f"rate and start must be 0 or more, got rate={self.rate}, start={self.start}")

    def __call__(self, s: int) -> float:
        return min(self.rate * max(s - self.start, 0), self.limit)


def _check(value: float, name: str) -> None:
    if not 0 <= value < 1:
        raise ValueError(f"{name} must be in [0, 1), else the set never follows; got {value}")
