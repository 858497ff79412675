"""The one place that calls a reward: converts pictures, checks what comes back, joins rows by id.

A row is invalid when its picture is not finite or when the reward says so. An exception inside a reward is not caught
here: a reward marks the failures it expects, anything else is a bug and must stop the run.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img.rewards.images import to_uint8
from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch, RewardOutput, require_keys

__all__ = ["InvalidScoreError", "checked", "score"]


class InvalidScoreError(RuntimeError):
    """A sample could not be scored and the policy is to stop."""


def score(
    reward: Reward,
    images: Tensor,
    prompts: Sequence[str],
    metadata: Sequence[Metadata],
    ids: Sequence[str],
    *,
    policy: str = "raise",
    batch_size: int | None = None,
    group_ids: Sequence[str] | None = None,
) -> RewardOutput:
    """images: float [B, 3, H, W] in [0, 1]; row i of everything belongs to `ids[i]`.

    Returns values float32 [B] and valid bool [B] on the CPU in the order of `ids`; details are lists of B entries.
    policy: "raise" stops with InvalidScoreError at an invalid row, "mask" returns it as NaN and valid = False.
    batch_size: the most pictures given to the reward at once; None gives all.
    """
    if policy not in _POLICIES:
        raise ValueError(f"policy must be one of {sorted(_POLICIES)}, got {policy!r}")
    if batch_size is not None and batch_size < 1:
        raise ValueError(f"batch_size must be at least 1 or None, got {batch_size}")
    pixels, finite = to_uint8(images)
    batch = RewardBatch(pixels, prompts, metadata, ids, group_ids)
    require_keys(reward.name, reward.needs, metadata)
    good = finite.nonzero().flatten().tolist()
    size = batch_size or max(len(good), 1)
    chunks = [good[start : start + size] for start in range(0, len(good), size)]
    with torch.no_grad():
        parts = [(chunk, checked(reward, batch.rows(chunk))) for chunk in chunks]
    output = _gather(parts, ids)
    _POLICIES[policy](reward.name, output)
    return output


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


def _gather(parts: Sequence[tuple[Sequence[int], RewardOutput]], ids: Sequence[str]) -> RewardOutput:
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


def _raise_on_invalid(name: str, output: RewardOutput) -> None:
    invalid = (~output.valid).nonzero().flatten().tolist()
    if invalid:
        reasons = {output.ids[row]: output.details["error"][row] or "no reason given" for row in invalid[:4]}
        raise InvalidScoreError(
            f"reward '{name}' could not score {len(invalid)} of {len(output.ids)} samples: {reasons}; "
            "set the policy to 'mask' to leave such samples out"
        )


def _keep_invalid(name: str, output: RewardOutput) -> None:
    """The caller leaves invalid rows out by `valid`."""


_POLICIES: Mapping[str, Callable[[str, RewardOutput], None]] = {"raise": _raise_on_invalid, "mask": _keep_invalid}
