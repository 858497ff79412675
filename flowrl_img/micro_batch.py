"""How the points of a rollout, of either kind, are dealt to updates and to forward and backward passes."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.mismatch import FirstUpdate
from flowrl_img.types import Sample

__all__ = ["MicroBatch", "Parts", "Points", "Predicted"]


@dataclass(frozen=True)
class MicroBatch:
    """rows: [R] evaluations of one process, possibly none. units: how many there are over all processes, 0 for none.

    groups: the units' rising numbers where they are groups.
    """

    rows: Tensor
    units: int = 0
    groups: Tensor | None = None


@dataclass(frozen=True)
class Parts:
    """Which update of a rollout trains which lot: a sample, all forks of a path, or a whole group.

    of_lot: number of the update by the lot's id. unit: "group" makes groups the lots.
    """

    of_lot: Mapping[str, int]
    unit: str

    @staticmethod
    def lot(sample: Sample, unit: str) -> str:
        """The lot that a sample belongs to."""
        return sample.group if unit == "group" else sample.trunk or sample.id

    @classmethod
    def deal(cls, everything: Sequence[Sample], unit: str, updates: int, *keys: int | str) -> Parts:
        """Equal shares of the lots of all processes, by a permutation that `keys` fix."""
        lots = list(dict.fromkeys(cls.lot(s, unit) for s in everything))
        size = len(lots) // updates
        order = seeds.permutation(len(lots), *keys)
        return cls({lots[index]: position // size for position, index in enumerate(order)}, unit)

    def of(self, samples: Sequence[Sample]) -> Tensor:
        """[B] number of the update that trains each sample."""
        return torch.tensor([self.of_lot[self.lot(s, self.unit)] for s in samples], dtype=torch.int64)


@dataclass(frozen=True)
class Predicted:
    """Moments and advantages [R] of a micro-batch's points, and the unit of each, [R] in [0, units)."""

    moments: Any
    advantage: Tensor
    unit: Tensor | None = None
    again: Callable[[], Any] | None = None
    """the moments against the velocity as the rollout stored it, without gradient"""


class Points(Protocol):
    """The points of one scored rollout. Rows are network evaluations with gradient; several points may share one."""

    def rows(self, part: int) -> Tensor:
        """[n] rows of this process in update number `part` of the rollout."""
        ...

    def count(self, rows: Tensor) -> int:
        """Points that are scored at these rows."""
        ...

    def micro_batches(self, part: int) -> list[MicroBatch]:
        """The rows of an update, units whole; equally many on every process where units are shared."""
        ...

    def predict(self, batch: MicroBatch) -> Predicted:
        """Evaluate the trained network, with gradient, and whatever it is compared with."""
        ...

    def check(self, batch: MicroBatch, predicted: Predicted, metrics: dict[str, Tensor], seen: FirstUpdate) -> None:
        """Note in `seen` how far the first update is from what the rollout drew."""
        ...

    def place(self, batch: MicroBatch) -> str:
        """Where these rows are, for an error message."""
        ...
