"""Alarms for a reward that says nothing, or that has left the range in which it means something.

A constant has no gradient: the scorer is broken, or nothing is left to learn from it. A mean far outside all values of
the first rollouts is how an unbounded reward looks when pictures are made for its weak spot. Left out: stopping a run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["Alarm"]

SPREAD = 1e-6  # relative: scores closer than this are one constant with rounding on it


@dataclass
class Alarm:
    """Fed with each rollout's values; each reward rings once for each reason.

    rollouts: how many of one constant in a row ring it, and how many first ones make the usual range. far: how many
    widths of that range the mean may lie beyond its ends.
    Example: three times `observe([{"geneval": [0.0, 0.0]}])` gives None, None, a warning.
    """

    rollouts: int = 3
    far: float = 3.0
    _constant: dict[str, tuple[float, int]] = field(default_factory=dict)
    _usual: dict[str, tuple[float, float, int]] = field(default_factory=dict)
    _told: set[tuple[str, str]] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.rollouts < 1 or self.far <= 0:
            raise ValueError(f"rollouts must be at least 1 and far above 0, got {self.rollouts} and {self.far}")

    def observe(self, shares: Sequence[Mapping[str, Sequence[float]]]) -> str | None:
        """shares: the columns of a mixture in each process for one rollout. A warning, or None.

        Invalid scores (NaN) are left out; a rollout without a valid one changes nothing.
        """
        names = dict.fromkeys(name for share in shares for name in share)
        warnings: list[str | None] = []
        for name in names:
            values = [value for share in shares for value in share.get(name, ()) if value == value]
            if values:
                warnings += [self._constant_for(name, values), self._run_away(name, values)]
        return "\n".join(text for text in warnings if text) or None

    def _constant_for(self, name: str, values: Sequence[float]) -> str | None:
        value, count = self._constant.get(name, (values[0], 0))
        flat = _flat([value, *values])
        value, count = (value, count + 1) if flat else (values[0], int(_flat(values)))
        self._constant[name] = value, count
        if count < self.rollouts:
            return None
        return self._once(
            name, "constant",
            f"reward '{name}' gave every picture of {count} rollouts in a row the same score, {value:.4g}: nothing is "
            "learned from it. At its best value the task is solved; otherwise check the scorer and its prompts",
        )  # fmt: skip

    def _run_away(self, name: str, values: Sequence[float]) -> str | None:
        low, high, count = self._usual.get(name, (min(values), max(values), 0))
        if count < self.rollouts:
            self._usual[name] = min(low, *values), max(high, *values), count + 1
            return None
        mean, slack = sum(values) / len(values), self.far * (high - low)
        if low - slack <= mean <= high + slack:
            return None
        return self._once(
            name, "runaway",
            f"reward '{name}' has run away: its mean is {mean:.4g}, where the first {self.rollouts} rollouts lay in "
            f"{low:.4g} to {high:.4g}. Look at the pictures: this is how a reward is deceived",
        )  # fmt: skip

    def _once(self, name: str, reason: str, text: str) -> str | None:
        if (name, reason) in self._told:
            return None
        self._told.add((name, reason))
        return text


def _flat(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= SPREAD * max(abs(value) for value in values)
