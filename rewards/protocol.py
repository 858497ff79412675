"""What a reward is: a map from (picture, prompt, metadata) triples to numbers, one triple at a time in meaning.

A reward sees a batch only for speed: the value of a row depends on that row alone, so a batch equals its singles and
values follow any permutation of the rows. The exception says so by its `scope`: "group" compares the pictures of a
group, "set" judges a group as a whole. A score that could not be computed is *invalid* (NaN and `valid = False`), never
0: a zero would be a verdict.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol, runtime_checkable

import torch
from torch import Tensor

__all__ = [
    "Differentiable", "Fingerprinted", "Metadata", "Reward", "RewardBatch", "RewardOutput", "Scoped", "groups_of",
    "require_keys", "scope_of",
]  # fmt: skip

Metadata = Mapping[str, Any]


@dataclass(frozen=True)
class RewardBatch:
    """B pictures with what was asked of them; row i of every field belongs to sample `ids[i]`.

    images: uint8 [B, H, W, 3], RGB, on the CPU. group_ids: the group of each sample, where the caller has groups.
    finite: bool [B], False where a picture held NaN or infinity and is black here; None: all are finite. The wrapper
    drops such rows, so a reward never sees one.

    Example: RewardBatch(pictures, ["a red ring"], [{"tag": "colors", "include": [...]}], ["p0/s0"])
    """

    images: Tensor
    prompts: Sequence[str]
    metadata: Sequence[Metadata]
    ids: Sequence[str]
    group_ids: Sequence[str] | None = None
    finite: Tensor | None = None

    def __post_init__(self) -> None:
        if self.images.dtype != torch.uint8 or self.images.ndim != 4 or self.images.shape[-1] != 3:
            raise ValueError(f"images must be uint8 [B, H, W, 3], got {self.images.dtype} {list(self.images.shape)}")
        lengths = {"images": len(self.images), "prompts": len(self.prompts), "metadata": len(self.metadata)}
        lengths["ids"] = len(self.ids)
        if self.group_ids is not None:
            lengths["group_ids"] = len(self.group_ids)
        if self.finite is not None:
            lengths["finite"] = len(self.finite)
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

        rows = list(index)
        groups = None if self.group_ids is None else pick(self.group_ids)
        finite = None if self.finite is None else self.finite[rows]
        images = self.images[rows]
        return RewardBatch(images, pick(self.prompts), pick(self.metadata), pick(self.ids), groups, finite)


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


@runtime_checkable
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
class Scoped(Protocol):
    """A reward whose rows are not independent. It is given whole groups, and `group_ids` with them."""

    @property
    def scope(self) -> str:
        """ "group": the value of a row depends on the pictures of its group. "set": one value for the whole group,
        repeated in its rows. "point" is the same as not having a scope.
        """
        ...


@runtime_checkable
class Fingerprinted(Protocol):
    """A reward that states what its scores depend on besides picture and prompt; recorded in the run folder."""

    @property
    def fingerprint(self) -> Mapping[str, str]:
        """Revision and SHA-256 of weights, preprocessing, versions of libraries."""
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


def scope_of(reward: Reward) -> str:
    """ "point", "group" or "set"; ValueError for another scope."""
    scope = reward.scope if isinstance(reward, Scoped) else "point"
    if scope not in ("point", "group", "set"):
        raise ValueError(f"reward '{reward.name}': scope must be point, group or set, got {scope!r}")
    return scope


def groups_of(batch: RewardBatch, name: str) -> dict[str, list[int]]:
    """The rows of each group, in order of first appearance. ValueError when the batch has no groups."""
    if batch.group_ids is None:
        raise ValueError(f"reward '{name}' compares the pictures of a group: give group_ids, one a row")
    rows: dict[str, list[int]] = {}
    for row, group in enumerate(batch.group_ids):
        rows.setdefault(group, []).append(row)
    return rows
