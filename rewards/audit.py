"""What a reward is like on a set of pictures: does it keep the protocol, how does it react, how fast is it.

Three laws every reward must keep (the same scores twice, a batch equals its singles, values follow a permutation) and
measurements that tell a user what to expect. Left out: whether a reward measures what it says.
"""

from __future__ import annotations

import io
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from PIL import Image
from torch import Tensor

from flowrl_img.rewards import known_answers
from flowrl_img.rewards.known_answers import KnownAnswerError
from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch, groups_of, scope_of
from flowrl_img.rewards.score import checked
from flowrl_img.world import load_split, render, scene_for

__all__ = ["Finding", "audit", "calibration_set"]

TOLERANCE = 1e-5  # of the largest absolute value: matrix products of other sizes round differently
GROUP = 4  # pictures of one group, where a reward compares them


@dataclass(frozen=True)
class Finding:
    """One line of the report. ok: None for a measurement, else whether the law is kept."""

    name: str
    text: str
    ok: bool | None = None


def calibration_set(reward: Reward, count: int = 24) -> RewardBatch:
    """`count` scenes of the embedded world: every second one shows what its prompt asks for, the others do not.

    The prompts are those of scenes, or of signs where the reward refuses the former. ValueError when it refuses both.
    """
    refusals = []
    for kind in ("geneval", "ocr"):
        rows = load_split("tune", kind)
        rows = [rows[k * len(rows) // count] for k in range(count)]
        try:
            reward.validate([row["prompt"] for row in rows], rows)
        except ValueError as error:
            refusals.append(str(error))
            continue
        return _drawn(rows)
    raise ValueError(
        f"'{reward.name}' takes no prompt of the embedded world, give --images and --prompts: {refusals[0]}"
    )


def _drawn(rows: Sequence[Metadata]) -> RewardBatch:
    rng = np.random.default_rng(0)
    shown = [row if k % 2 == 0 else rows[k - 1] for k, row in enumerate(rows)]
    images = torch.from_numpy(np.stack([np.asarray(render(scene_for(dict(row), rng))) for row in shown]))
    groups = [f"g{k // GROUP}" for k in range(len(rows))]
    return RewardBatch(images, [row["prompt"] for row in rows], rows, [f"s{k}" for k in range(len(rows))], groups)


def audit(reward: Reward, batch: RewardBatch) -> list[Finding]:
    """Findings on `batch`, which should hold two pictures or more. ValueError when the reward breaks the protocol."""
    findings = [_answers(reward)]
    first, _ = _scored(reward, batch)
    again, seconds = _scored(reward, batch)
    findings += [_law("same scores twice", first, again)]
    units = _units(reward, batch)
    alone = torch.cat([_scored(reward, batch.rows(unit))[0] for unit in units])
    order = [row for unit in units for row in unit]
    findings += [_law("a batch equals its parts", first[order], alone)]
    shuffled = [row for unit in units[::-1] for row in unit[::-1]]
    findings += [_law("scores follow a permutation", first[shuffled], _scored(reward, batch.rows(shuffled))[0])]
    findings += [_spread(first)]
    findings += [
        Finding(name, _moved(first, _scored(reward, _changed(batch, change))[0])) for name, change in CHANGES.items()
    ]
    findings += [Finding("prompts moved on by one", _moved(first, _scored(reward, _other_prompts(batch))[0]))]
    return [*findings, Finding("time per picture", f"{1000 * seconds / len(batch):.1f} ms")]


def _answers(reward: Reward) -> Finding:
    if not isinstance(reward, known_answers.StatesAnswers):
        return Finding("known answers", "it states none")
    try:
        known_answers.check(reward)
    except KnownAnswerError as error:
        return Finding("known answers", str(error), ok=False)
    return Finding("known answers", f"{len(reward.known_answers())} kept", ok=True)


def _scored(reward: Reward, batch: RewardBatch) -> tuple[Tensor, float]:
    """float64 [B], NaN where invalid, and the seconds it took."""
    began = time.perf_counter()
    with torch.no_grad():
        values = checked(reward, batch).values.double()
    return values, time.perf_counter() - began


def _units(reward: Reward, batch: RewardBatch) -> list[list[int]]:
    """The rows that may be scored apart: single ones, or whole groups."""
    if scope_of(reward) == "point" or batch.group_ids is None:
        return [[row] for row in range(len(batch))]
    return list(groups_of(batch, reward.name).values())


def _law(name: str, expected: Tensor, found: Tensor) -> Finding:
    same = torch.equal(expected.isnan(), found.isnan())
    gap = (expected - found).abs().nan_to_num().max().item()
    ok = same and gap <= TOLERANCE * expected.nan_to_num().abs().max().item()
    return Finding(name, f"largest difference {gap:.1e}" + ("" if same else ", and other rows fail"), ok=ok)


def _spread(values: Tensor) -> Finding:
    valid = values[~values.isnan()]
    if not len(valid):
        return Finding("range", f"none of {len(values)} could be scored", ok=False)
    text = (
        f"{valid.min():.4g} to {valid.max():.4g}, mean {valid.mean():.4g}, std {valid.std(correction=0):.4g}, "
        f"{len(valid)} of {len(values)} valid"
    )
    return Finding("range", text, ok=bool(valid.max() > valid.min()))


def _moved(before: Tensor, after: Tensor) -> str:
    valid = ~(before.isnan() | after.isnan())
    if not valid.any():
        return "could not be scored"
    change, spread = (after - before)[valid].abs().mean(), before[valid].std(correction=0)
    share = f", {change / spread:.0%} of the std" if spread > 0 else ""
    return f"mean change {change:.3g}{share}"


def _jpeg(quality: int) -> Callable[[Image.Image], Image.Image]:
    def change(picture: Image.Image) -> Image.Image:
        buffer = io.BytesIO()
        picture.save(buffer, format="JPEG", quality=quality)
        return Image.open(buffer).convert("RGB")

    return change


def _halved(picture: Image.Image) -> Image.Image:
    width, height = picture.size
    small = picture.resize((max(width // 2, 1), max(height // 2, 1)), Image.Resampling.BICUBIC)
    return small.resize(picture.size, Image.Resampling.BICUBIC)


CHANGES: dict[str, Callable[[Image.Image], Image.Image]] = {
    "JPEG of quality 95": _jpeg(95),
    "JPEG of quality 75": _jpeg(75),
    "half the size and back": _halved,
    "mirrored": lambda picture: picture.transpose(Image.Transpose.FLIP_LEFT_RIGHT),
}


def _changed(batch: RewardBatch, change: Callable[[Image.Image], Image.Image]) -> RewardBatch:
    drawn = [np.asarray(change(Image.fromarray(image.numpy()))) for image in batch.images]
    images = torch.from_numpy(np.stack(drawn))
    return RewardBatch(images, batch.prompts, batch.metadata, batch.ids, batch.group_ids)


def _other_prompts(batch: RewardBatch) -> RewardBatch:
    order = [(row + 1) % len(batch) for row in range(len(batch))]
    other = batch.rows(order)
    return RewardBatch(batch.images, other.prompts, other.metadata, batch.ids, batch.group_ids)
