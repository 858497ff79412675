"""An alarm for a reward that gives every picture one and the same score, rollout after rollout.

A constant has no gradient: the scorer is broken, or nothing is left to learn from it. Left out: stopping the run.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

__all__ = ["ConstantAlarm"]

SPREAD = 1e-6  # relative: scores closer than this are one constant with rounding on it


@dataclass
class ConstantAlarm:
    """Fed with each rollout's values. rollouts: how many of one constant in a row ring it; each reward rings once.

    Example: three times `observe([{"geneval": [0.0, 0.0]}])` gives None, None, a warning.
    """

    rollouts: int = 3
    _seen: dict[str, tuple[float, int]] = field(default_factory=dict)
    _told: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        if self.rollouts < 1:
            raise ValueError(f"rollouts must be at least 1, got {self.rollouts}")

    def observe(self, shares: Sequence[Mapping[str, Sequence[float]]]) -> str | None:
        """shares: the columns of a mixture in each process for one rollout. A warning, or None.

        Invalid scores (NaN) are left out; a rollout without a valid one changes nothing.
        """
        names = dict.fromkeys(name for share in shares for name in share)
        together = {name: [value for share in shares for value in share.get(name, ())] for name in names}
        warnings = [self._warning(name, values) for name, values in together.items()]
        return "\n".join(text for text in warnings if text) or None

    def _warning(self, name: str, values: Sequence[float]) -> str | None:
        valid = [value for value in values if value == value]
        if not valid:
            return None
        value, count = self._seen.get(name, (valid[0], 0))
        self._seen[name] = (value, count + 1) if _constant([value, *valid]) else (valid[0], int(_constant(valid)))
        value, count = self._seen[name]
        if count < self.rollouts or name in self._told:
            return None
        self._told.add(name)
        return (
            f"reward '{name}' gave every picture of {count} rollouts in a row the same score, {value:.4g}: nothing is "
            "learned from it. At its best value the task is solved; otherwise check the scorer and its prompts"
        )


def _constant(values: Sequence[float]) -> bool:
    return max(values) - min(values) <= SPREAD * max(abs(value) for value in values)
