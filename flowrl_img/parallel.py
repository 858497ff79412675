"""Processes of one run, over accelerate: who draws which sample, and sums that every rank agrees on.

Every rank makes the same collective calls in the same order, also with nothing to contribute. Gradients are summed
explicitly once per update instead of by a DDP hook per backward, so ranks may hold unequal numbers of points.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any, TypeVar

import torch
from torch import Tensor

__all__ = ["Processes"]

T = TypeVar("T")
BUCKET = 32 * 1024 * 1024  # elements in one gradient all-reduce


class Processes:
    """Rank, world size and the collectives of a run. Without a launcher it is one process."""

    def __init__(self, accelerator: Any = None) -> None:
        self.accelerator = accelerator
        self.rank: int = accelerator.process_index if accelerator else 0
        self.count: int = accelerator.num_processes if accelerator else 1
        self.device: torch.device = accelerator.device if accelerator else torch.device("cpu")

    @property
    def is_main(self) -> bool:
        return self.rank == 0

    def share(self, items: Sequence[T]) -> list[T]:
        """This rank's contiguous share."""
        bounds = [k * len(items) // self.count for k in range(self.count + 1)]
        return list(items[bounds[self.rank] : bounds[self.rank + 1]])

    def deal(self, items: Sequence[T]) -> list[T]:
        """This rank's share, dealt in turn, so that neighbours (the pictures of a group) are spread over all ranks."""
        return list(items[self.rank :: self.count])

    def gather_by_id(self, ids: Sequence[str], *columns: Tensor) -> dict[str, list[Any]]:
        """One row of numbers per id, of all ranks."""
        rows = {
            name: list(row) for name, row in zip(ids, zip(*(c.tolist() for c in columns), strict=True), strict=True)
        }
        everything: dict[str, list[Any]] = {}
        for part in self.gather(rows):
            everything |= part
        return everything

    def gather(self, item: T) -> list[T]:
        """Each rank's item, in rank order, on every rank. Items travel as JSON bytes: nothing is unpickled."""
        if self.count == 1:
            return [item]
        data = torch.tensor(list(json.dumps(item).encode()), dtype=torch.uint8, device=self.device)
        lengths = [torch.zeros(1, dtype=torch.int64, device=self.device) for _ in range(self.count)]
        torch.distributed.all_gather(lengths, torch.tensor([len(data)], device=self.device))
        longest = max(int(n) for n in lengths)
        parts = [data.new_empty(longest) for _ in range(self.count)]
        torch.distributed.all_gather(parts, torch.nn.functional.pad(data, (0, longest - len(data))))
        return [json.loads(bytes(p[: int(n)].tolist())) for p, n in zip(parts, lengths, strict=True)]

    def agree(self, names: list[str]) -> set[str]:
        """The union of the names of all ranks."""
        return {name for part in self.gather(names) for name in part}

    def _reduce(self, value: float, operation: str) -> float:
        if self.count == 1:
            return value
        tensor = torch.tensor(value, dtype=torch.float64, device=self.device)
        torch.distributed.all_reduce(tensor, getattr(torch.distributed.ReduceOp, operation))
        return tensor.item()

    def sum(self, value: float) -> float:
        return self._reduce(value, "SUM")

    def sum_tensor(self, value: Tensor) -> Tensor:
        """Sum over ranks of a float64 tensor that every rank has in the same shape."""
        if self.count == 1:
            return value
        total = value.to(self.device, torch.float64)
        torch.distributed.all_reduce(total)
        return total.to(value.device)

    def max(self, value: float) -> float:
        return self._reduce(value, "MAX")

    def any(self, flag: bool) -> bool:
        return self.max(float(flag)) > 0

    def sum_gradients(self, parameters: Sequence[Tensor]) -> None:
        """Replace every gradient by its sum over ranks, in flat buckets."""
        if self.count == 1:
            return
        bucket: list[Tensor] = []
        for index, parameter in enumerate(parameters):
            assert parameter.grad is not None
            bucket.append(parameter.grad)
            if sum(g.numel() for g in bucket) >= BUCKET or index == len(parameters) - 1:
                flat = torch.cat([g.flatten() for g in bucket])
                torch.distributed.all_reduce(flat)
                for grad, piece in zip(bucket, flat.split([g.numel() for g in bucket]), strict=True):
                    grad.copy_(piece.view_as(grad))
                bucket = []

    def wait(self) -> None:
        if self.count > 1:
            torch.distributed.barrier()
