"""Values cut at bounds, against the pull of rewards that are unbounded where a picture is broken."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

__all__ = ["Clip"]


@dataclass(frozen=True)
class Clip:
    """min(max(value, low), high)."""

    low: float = -float("inf")
    high: float = float("inf")

    name: ClassVar[str] = "clip"
    pointwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not self.low < self.high:
            raise ValueError(f"clip needs low < high, got {self.low} and {self.high}")

    def __call__(self, label: str, columns: Mapping[str, Tensor], groups: Sequence[str]) -> Tensor:
        """[B]; NaN stays NaN."""
        return columns[label].clamp(self.low, self.high)
