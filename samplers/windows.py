"""Which steps of a rollout are stochastic, and therefore trained: pure functions of (seed, iteration).

Every rank asks with the same arguments and gets the same answer, so members of one group always perturb the same
steps, whichever process draws them. No object here holds state or touches a random stream.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Protocol

__all__ = [
    "AllSteps",
    "DecayWindow",
    "ExponentialWindow",
    "ListedSteps",
    "ProgressiveWindow",
    "RandomWindow",
    "StepChoice",
]


class StepChoice(Protocol):
    """A rule that names the stochastic steps of one training iteration."""

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N of the grid. Returns rising step indices in [0, N), at least one."""
        ...


@dataclass(frozen=True)
class AllSteps:
    """Every step but the last `skip_last`.

    The last Flow-SDE step has a std near 0.006 on the SD3 grid: its log-prob dwarfs all others and its noise is
    invisible, so published recipes leave it out.
    """

    skip_last: int = 1

    def __post_init__(self) -> None:
        if self.skip_last < 0:
            raise ValueError(f"skip_last counts steps and cannot be negative, got {self.skip_last}")

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N. Returns (0, ..., N - 1 - skip_last)."""
        if self.skip_last >= num_steps:
            raise ValueError(f"skip_last={self.skip_last} leaves none of {num_steps} steps: lower it or add steps")
        return tuple(range(num_steps - self.skip_last))


@dataclass(frozen=True)
class ListedSteps:
    """The same steps in every iteration: a fixed window, or any set."""

    indices: tuple[int, ...]

    def __post_init__(self) -> None:
        object.__setattr__(self, "indices", tuple(sorted(self.indices)))
        if not self.indices or len(set(self.indices)) != len(self.indices) or self.indices[0] < 0:
            raise ValueError(f"list at least one step, each once and none negative; got {self.indices}")

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N. Returns the listed indices, all of which must be below N."""
        if self.indices[-1] >= num_steps:
            raise ValueError(f"step {self.indices[-1]} does not exist in a rollout of {num_steps} steps (0-based)")
        return self.indices


@dataclass(frozen=True)
class RandomWindow:
    """`size` neighbouring steps inside [lo, hi), their start drawn anew every `every` iterations, uniformly.

    Source: the SDE window of Flow-GRPO-Fast, drawn there per sampling batch and rank; here per iteration, for all.
    """

    size: int
    range: tuple[int, int]
    every: int = 1

    def __post_init__(self) -> None:
        _check_window(self.size, self.range, self.every)

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N >= hi. Returns `size` neighbouring indices in [lo, hi)."""
        starts = _starts(self.size, self.range, num_steps)
        digest = hashlib.sha256(f"window/{seed}/{iteration // self.every}".encode()).digest()
        start = starts[int.from_bytes(digest[:8], "big") % len(starts)]
        return tuple(range(start, start + self.size))


@dataclass(frozen=True)
class ProgressiveWindow:
    """`size` neighbouring steps that move down the trajectory by `stride` every `every` iterations, then wrap to lo.

    Source: the sliding window of MixGRPO, arXiv 2507.21802.
    """

    size: int
    range: tuple[int, int]
    every: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        _check_window(self.size, self.range, self.every)
        if self.stride < 1:
            raise ValueError(f"stride must be at least 1 step, got {self.stride}")

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N >= hi. Returns `size` neighbouring indices in [lo, hi)."""
        starts = _starts(self.size, self.range, num_steps)[:: self.stride]
        start = starts[iteration // self.every % len(starts)]
        return tuple(range(start, start + self.size))


@dataclass(frozen=True)
class DecayWindow:
    """A progressive window that stays longer among the noisy steps: `longest` iterations at lo, fewer further down.

    At start l it stays max(shortest, floor(longest (1 - p) + shortest p)) iterations, p = (l - lo) / (hi - lo); then it
    moves by `stride`, and after the last start wraps to lo.
    Source: the "decay" strategy of MixGRPO's code. Its window runs past the end of the range, short or empty.
    """

    size: int
    range: tuple[int, int]
    longest: int
    shortest: int = 1
    stride: int = 1

    def __post_init__(self) -> None:
        _check_window(self.size, self.range, self.shortest)
        if self.longest < self.shortest or self.stride < 1:
            raise ValueError(
                f"longest must be at least shortest and stride at least 1, got longest={self.longest}, "
                f"shortest={self.shortest}, stride={self.stride}"
            )

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N >= hi. Returns `size` neighbouring indices in [lo, hi)."""
        lo, hi = self.range
        starts = _starts(self.size, self.range, num_steps)[:: self.stride]
        shares = [(start - lo) / (hi - lo) for start in starts]
        stays = [max(self.shortest, int(self.longest * (1 - p) + self.shortest * p)) for p in shares]
        start = starts[_visit(stays, iteration)]
        return tuple(range(start, start + self.size))


@dataclass(frozen=True)
class ExponentialWindow:
    """A progressive window that stays ceil(longest e^(-rate max(0, l - knee))) iterations at start l, then wraps.

    Source: the "exp_decay" strategy of MixGRPO's code, whose defaults are rate 0.1 and knee 13 of 25 steps.
    """

    size: int
    range: tuple[int, int]
    longest: int
    rate: float = 0.1
    knee: int = 13
    stride: int = 1

    def __post_init__(self) -> None:
        _check_window(self.size, self.range, self.longest)
        if self.rate < 0 or self.stride < 1:
            raise ValueError(
                f"rate must be at least 0 and stride at least 1, got rate={self.rate}, stride={self.stride}"
            )

    def steps(self, num_steps: int, *, seed: int, iteration: int) -> tuple[int, ...]:
        """num_steps: N >= hi. Returns `size` neighbouring indices in [lo, hi)."""
        starts = _starts(self.size, self.range, num_steps)[:: self.stride]
        shares = [math.exp(-self.rate * max(0, start - self.knee)) for start in starts]
        stays = [max(1, math.ceil(self.longest * share)) for share in shares]  # exp(-800) is 0 in floating point
        start = starts[_visit(stays, iteration)]
        return tuple(range(start, start + self.size))


def _visit(stays: Sequence[int], iteration: int) -> int:
    """Which of the places, visited in turn for `stays` iterations each and then again, `iteration` falls on."""
    left = iteration % sum(stays)
    for place, stay in enumerate(stays):
        if left < stay:
            return place
        left -= stay
    raise AssertionError("unreachable: iteration % total is below the total")


def _check_window(size: int, bounds: tuple[int, int], every: int) -> None:
    lo, hi = bounds
    if size < 1 or every < 1:
        raise ValueError(f"size and every must be at least 1, got size={size}, every={every}")
    if lo < 0 or hi - lo < size:
        raise ValueError(f"a window of {size} steps does not fit in range [{lo}, {hi}): shrink it or widen the range")


def _starts(size: int, bounds: tuple[int, int], num_steps: int) -> range:
    """All places where the window may begin."""
    lo, hi = bounds
    if hi > num_steps:
        raise ValueError(f"range ends at {hi} but the rollout has {num_steps} steps: end it at {num_steps} or before")
    return range(lo, hi - size + 1)
