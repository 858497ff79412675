"""The rank inside the group in place of the value: only the order of a group's pictures counts, not by how much.

Source: PaCo-RL (arXiv 2512.04784) lists it as rank GRPO: ranks 0 .. G-1 over G-1.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

__all__ = ["Rank"]


@dataclass(frozen=True)
class Rank:
    """Rank in [0, 1] among the valid values of the group, the worst 0; equal values share their mean rank.

    A value alone in its group has rank 0.5.
    """

    name: ClassVar[str] = "rank"
    pointwise: ClassVar[bool] = False

    def __call__(self, label: str, columns: Mapping[str, Tensor], groups: Sequence[str]) -> Tensor:
        """[B]."""
        values = columns[label]
        ranks = torch.full_like(values, torch.nan)
        members: dict[str, list[int]] = {}
        for row, group in enumerate(groups):
            if not values[row].isnan():
                members.setdefault(group, []).append(row)
        for rows in members.values():
            own = values[rows]
            below = (own[:, None] > own).double().sum(1)
            ties = (own[:, None] == own).double().sum(1) - 1
            ranks[rows] = (below + ties / 2) / (len(rows) - 1) if len(rows) > 1 else 0.5
        return ranks
