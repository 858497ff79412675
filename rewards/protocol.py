"""What a reward is: a map from (picture, prompt, metadata) triples to numbers, one triple at a time in meaning.

A reward sees a batch only for speed: the value of a row depends on that row alone, so a batch equals its singles and
values follow any permutation of the rows. A score that could not be computed is *invalid* (NaN and `valid = False`),
never 0: a zero would be a verdict. Left out on purpose: rewards that compare the pictures of a group.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = ["Differentiable", "Metadata", "Reward", "RewardBatch", "RewardOutput", "require_keys"]

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class RewardBatch:
    """B pictures with what was asked of them; row i of every field belongs to sample `ids[i]`.

    images: uint8 [B, H, W, 3], RGB, on the CPU. group_ids: the group of each sample, where the caller has groups.

    Example: RewardBatch(pictures, ["a red ring"], [{"tag": "colors", "include": [...]}], ["p0/s0"])
    """

    images: Tensor
    prompts: Sequence[str]
    metadata: Sequence[Metadata]
    ids: Sequence[str]
    group_ids: Sequence[str] | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[-1] != 3:
            raise ValueError(f"images must be uint8 [B, H, W, 3], got {self.images.dtype} {list(self.images.shape)}")
        lengths = {"images": len(self.images), "prompts": len(self.prompts), "metadata": len(self.metadata)}
        lengths["ids"] = len(self.ids)
        if self.group_ids is not None:
            lengths["group_ids"] = len(self.group_ids)
        if len(set(lengths.values())) > 1:
            raise ValueError(f"every row needs one picture, prompt, metadata and id; got {lengths}")
        if len(set(self.ids)) != len(self.ids):
            raise ValueError("ids must be unique: samples are joined by id; number the samples of one prompt")

    def __len__(self) -> int:
        return len(self.images)

    def rows(self, index: Sequence[int]) -> RewardBatch:
        """The batch of the given rows, in the given order."""

        def pick(items: Sequence[Any]) -> list[Any]:
            return [items[i] for i in index]

        groups = None if self.group_ids is None else pick(self.group_ids)
        return RewardBatch(self.images[list(index)], pick(self.prompts), pick(self.metadata), pick(self.ids), groups)


@dataclass(frozen=True)
class RewardOutput:
    """values: float32 [B], higher is better, NaN where invalid. valid: bool [B].

    details: per-sample extras for logs, each a list of B entries (`error` holds the reason of an invalid row).
    ids: the ids the rows belong to, where the scorer may reorder (a remote one); empty means "as asked".
    """

    values: Tensor
    valid: Tensor
    details: Mapping[str, list[Any]] = field(default_factory=dict)
    ids: Sequence[str] = ()

    @classmethod
    def of(cls, values: Iterable[float | None], details: Mapping[str, list[Any]] | None = None) -> RewardOutput:
        """From plain numbers; None or a non-finite number marks a row invalid."""
        numbers = torch.tensor([float("nan") if v is None else float(v) for v in values], dtype=torch.float32)
        valid = numbers.isfinite()
        return cls(torch.where(valid, numbers, torch.nan), valid, details or {})


class Reward(Protocol):
    """A scorer. A frozen dataclass fits: its fields become the options of its config section."""

    @property
    def name(self) -> str:
        """Name in configs and logs; a built-in has its file's name."""
        ...

    @property
    def needs(self) -> frozenset[str]:
        """Metadata keys that every row must have."""
        ...

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Called once when prompts are loaded, before any model: ValueError names the first line it cannot score."""
        ...

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """Score each row on its own."""
        ...


@runtime_checkable
class Differentiable(Protocol):
    """A reward with gradients to the picture; `isinstance(reward, Differentiable)` tells."""

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. What the reward gives for them, float32 [B], up to 8-bit rounding."""
        ...


def require_keys(name: str, needs: frozenset[str], metadata: Sequence[Metadata]) -> None:
    """ValueError for the first line (counted from 1) whose metadata lacks a needed key."""
    for line, row in enumerate(metadata, start=1):
        missing = sorted(needs - row.keys())
        if missing:
            raise ValueError(
                f"line {line}: reward '{name}' needs the metadata {missing}, found only {sorted(row)}; "
                "add them to the prompt file or choose another reward"
            )
