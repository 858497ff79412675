"""What may be done to a reward's column before the rewards are combined: one file each, named in `transforms`.

Pointwise ones change a value by itself and hold in held-out values too. The others look at a whole rollout, of all
processes, and belong to training alone: held-out values would not compare from one evaluation to the next.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Protocol

from torch import Tensor

__all__ = ["Transform"]


class Transform(Protocol):
    """A map of columns. A frozen dataclass fits: its fields are its keys in `transforms`."""

    @property
    def pointwise(self) -> bool:
        """A value is mapped whatever the others are."""
        ...

    def __call__(self, label: str, columns: Mapping[str, Tensor], groups: Sequence[str]) -> Tensor:
        """columns: float64 [B] of every reward by label, NaN where invalid. groups: B ids; empty where pointwise.

        The new column of `label`, [B], NaN where it was NaN.
        """
        ...
