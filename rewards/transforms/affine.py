"""scale * value + shift."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

from torch import Tensor

__all__ = ["Affine"]


@dataclass(frozen=True)
class Affine:
    """scale * value + shift. Example: `{name: affine, scale: 0.25, shift: -0.25}` maps marks of 1 to 5 to [0, 1]."""

    scale: float = 1.0
    shift: float = 0.0

    name: ClassVar[str] = "affine"
    pointwise: ClassVar[bool] = True

    def __post_init__(self) -> None:
        if not (math.isfinite(self.scale) and math.isfinite(self.shift)) or self.scale == 0:
            raise ValueError(f"affine needs finite numbers and a scale other than 0, got {self.scale}, {self.shift}")

    def __call__(self, label: str, columns: Mapping[str, Tensor], groups: Sequence[str]) -> Tensor:
        """[B]."""
        return self.scale * columns[label] + self.shift
