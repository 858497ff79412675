"""The one place that calls a reward: batches, checks what comes back, joins rows by id, counts failures, takes times.

A row is invalid when its picture is not finite or when the reward says so. An exception inside a reward is not caught
here: a reward marks the failures it expects, anything else is a bug and must stop the run.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor

from flowrl_img.rewards.cache import ScoreCache, content_keys
from flowrl_img.rewards.failures import FailureBudget, InvalidScoreError
from flowrl_img.rewards.images import to_uint8
from flowrl_img.rewards.protocol import (
    Metadata,
    Reward,
    RewardBatch,
    RewardOutput,
    groups_of,
    require_keys,
    scope_of,
)

__all__ = ["InvalidScoreError", "Scorer", "checked", "gather_rows", "score"]

Part = tuple[Sequence[int], RewardOutput]


@dataclass
class Scorer:
    """A reward as a run asks it. Itself callable on a RewardBatch.

    label: name of its column, the reward's own where empty. batch_size: the most pictures given to the reward at once,
    None gives all; groups of a groupwise reward stay whole. cache: scores remembered by content, 0 for none; pointwise
    rewards only. seconds: time spent in the reward so far.
    """

    reward: Reward
    label: str = ""
    failures: FailureBudget = field(default_factory=FailureBudget)
    batch_size: int | None = None
    cache: int = 0
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.label = self.label or self.reward.name
        if self.batch_size is not None and self.batch_size < 1:
            raise ValueError(f"batch_size must be at least 1 or None, got {self.batch_size}")
        if self.cache < 0:
            raise ValueError(f"cache must be 0 or the number of scores to remember, got {self.cache}")
        if self.scope != "point" and self.cache:
            raise ValueError(f"reward '{self.label}' depends on the whole group, so no row of it can be remembered")

    @property
    def scope(self) -> str:
        """ "point", "group" or "set"; see `protocol.Scoped`."""
        return scope_of(self.reward)

    @cached_property
    def memory(self) -> ScoreCache | None:
        """The cache, where there is one."""
        return ScoreCache(self.cache) if self.cache else None

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values float32 [B] and valid bool [B] on the CPU, in the batch's order; details are lists of B entries.

        ValueError when the reward breaks the protocol, InvalidScoreError when more fails than `failures` bears.
        """
        require_keys(self.label, self.reward.needs, batch.metadata)
        good = list(range(len(batch))) if batch.finite is None else batch.finite.nonzero().flatten().tolist()
        keys = {} if self.memory is None else dict(zip(good, content_keys(batch.rows(good)), strict=True))
        known, asked = self._remembered(keys, good)
        parts: list[Part] = known
        for rows in self._chunks(batch, asked):
            part = self._timed(batch.rows(rows))
            if self.memory is not None:
                self.memory.remember([keys[row] for row in rows], part)
            parts.append((rows, part))
        output = gather_rows(parts, batch.ids)
        self.failures.count(self.label, output)
        return output

    def _timed(self, batch: RewardBatch) -> RewardOutput:
        began = time.perf_counter()
        with torch.no_grad():
            output = checked(self.reward, batch)
        self.seconds += time.perf_counter() - began
        return output

    def _remembered(self, keys: Mapping[int, str], rows: Sequence[int]) -> tuple[list[Part], list[int]]:
        """The answers found in the cache, and the rows to ask for. keys: of each row."""
        if self.memory is None:
            return [], list(rows)
        known: list[Part] = []
        asked = []
        for row in rows:
            found = self.memory.find(keys[row])
            if found is None:
                asked.append(row)
            else:
                value, details = found
                known.append(([row], RewardOutput.of([value], {name: [entry] for name, entry in details.items()})))
        return known, asked

    def _chunks(self, batch: RewardBatch, rows: Sequence[int]) -> Iterable[list[int]]:
        """Row numbers of each call: at most batch_size of them, but never less than a group where groups count."""
        if not rows:
            return
        if self.scope == "point":
            units = [[row] for row in rows]
        else:
            units = [[rows[k] for k in group] for group in groups_of(batch.rows(rows), self.label).values()]
        chunk: list[int] = []
        for unit in units:
            if chunk and self.batch_size is not None and len(chunk) + len(unit) > self.batch_size:
                yield chunk
                chunk = []
            chunk = [*chunk, *unit]
        yield chunk


def score(
    reward: Reward | Callable[[RewardBatch], RewardOutput],
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    ids: Sequence[str],
    *,
    group_ids: Sequence[str] | None = None,
    policy: str = "raise",
    batch_size: int | None = None,
) -> RewardOutput:
    """images: float [B, 3, H, W] in [0, 1]; row i of everything belongs to `ids[i]`.

    reward: a Scorer or a Mixture, or a plain reward, which gets a Scorer of the given `policy` ("raise": stop with
    InvalidScoreError at an invalid row; "mask": return it as NaN and valid = False) and `batch_size`.
    Returns values float32 [B] and valid bool [B] on the CPU in the order of `ids`.
    """
    pixels, finite = to_uint8(images)
    batch = RewardBatch(pixels, prompts, metadata, ids, group_ids, finite)
    if isinstance(reward, Reward):
        reward = Scorer(reward, failures=FailureBudget(policy, share=1.0), batch_size=batch_size)
    return reward(batch)


def checked(reward: Reward, batch: RewardBatch) -> RewardOutput:
    """The reward's answer to `batch`, in the batch's order; ValueError when it breaks the protocol."""
    output = reward(batch)
    name, count = reward.name, len(batch)
    if output.values.shape != (count,) or output.valid.shape != (count,):
        raise ValueError(
            f"reward '{name}' must return one value per pair: [{count}], got values {list(output.values.shape)} "
            f"and valid {list(output.valid.shape)}"
        )
    if output.values.dtype != torch.float32 or output.valid.dtype != torch.bool:
        raise ValueError(
            f"reward '{name}' must return float32 values and bool valid, "
            f"got {output.values.dtype} and {output.valid.dtype}"
        )
    wrong = [key for key, column in output.details.items() if len(column) != count]
    if wrong:
        raise ValueError(f"reward '{name}': details {wrong} must hold {count} entries, one per row")
    output = _in_order(name, output, batch.ids)
    if not output.values[output.valid].isfinite().all():
        raise ValueError(f"reward '{name}' returned a non-finite value marked valid; mark such a row invalid")
    values = torch.where(output.valid, output.values, torch.nan).cpu()
    if scope_of(reward) == "set":
        _refuse_unequal(name, values, groups_of(batch, name))
    return RewardOutput(values, output.valid.cpu(), output.details, batch.ids)


def _in_order(name: str, output: RewardOutput, ids: Sequence[str]) -> RewardOutput:
    """Rows brought into the order of `ids` where the reward names them."""
    if not output.ids or list(output.ids) == list(ids):
        return output
    place = {sample: row for row, sample in enumerate(output.ids)}
    if len(output.ids) != len(ids) or place.keys() != set(ids):
        raise ValueError(f"reward '{name}' answered for other ids than asked: {sorted(set(ids) ^ place.keys())[:4]}")
    order = [place[sample] for sample in ids]
    details = {key: [column[row] for row in order] for key, column in output.details.items()}
    return RewardOutput(output.values[order], output.valid[order], details, list(ids))


def _refuse_unequal(name: str, values: Tensor, groups: Mapping[str, list[int]]) -> None:
    for group, rows in groups.items():
        found = values[rows]
        if not torch.equal(found.nan_to_num(), found[:1].nan_to_num().expand_as(found)):
            raise ValueError(f"reward '{name}' judges a group as a whole, but gave group {group!r} {found.tolist()}")


def gather_rows(parts: Sequence[Part], ids: Sequence[str]) -> RewardOutput:
    """The chunks' answers in their rows; rows that no chunk holds had a picture that is not finite."""
    count = len(ids)
    values = torch.full((count,), torch.nan)
    valid = torch.zeros(count, dtype=torch.bool)
    errors: list[Any] = ["the picture holds NaN or infinity"] * count
    details: dict[str, list[Any]] = {}
    for rows, part in parts:
        values[list(rows)], valid[list(rows)] = part.values, part.valid
        for row in rows:
            errors[row] = None
        for key, column in part.details.items():
            target = errors if key == "error" else details.setdefault(key, [None] * count)
            for row, entry in zip(rows, column, strict=True):
                target[row] = entry
    if not valid.all():
        details["error"] = errors
    return RewardOutput(values, valid, details, list(ids))
