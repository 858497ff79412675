"""Prompt files and which prompts a rollout draws.

A file is JSONL (one object with `prompt` and any metadata a line) or plain text (one prompt a line). A name without a
suffix, such as `pico/train_geneval`, is a packaged file.
"""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path

from flowrl_img import seeds
from flowrl_img.plugins import nearest
from flowrl_img.resources import asset
from flowrl_img.types import PromptSet, Sample

__all__ = ["check_balance", "choose_evenly", "draw_samples", "load_prompts", "spread"]


def load_prompts(name: str) -> PromptSet:
    """Read a prompt file. FileNotFoundError or ValueError says which line is wrong and what it should be."""
    path = Path(name)
    if not path.suffix:
        path = asset(f"prompts/{name}.jsonl")
    if not path.is_file():
        raise FileNotFoundError(f"no prompt file {name!r} (looked for {path}): give a .jsonl or .txt path")
    try:
        text = path.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise ValueError(f"prompt file {path} is not UTF-8 text: {error.reason} at byte {error.start}") from error
    lines = [(n, line) for n, line in enumerate(text.splitlines(), 1) if line.strip()]
    if not lines:
        raise ValueError(f"{path} holds no prompts")
    rows = (
        [_record(path, n, line) for n, line in lines] if path.suffix == ".jsonl" else [{"prompt": x} for _, x in lines]
    )
    ids = tuple(f"{path.stem}/{n}" for n, _ in lines)
    return PromptSet(ids, tuple(row["prompt"] for row in rows), tuple(rows))


def _record(path: Path, number: int, line: str) -> dict:
    try:
        row = json.loads(line)
    except json.JSONDecodeError as error:
        raise ValueError(
            f"{path}, line {number}: not JSON ({error.msg}); a .jsonl file holds one object a line"
        ) from error
    if not isinstance(row, dict) or not isinstance(row.get("prompt"), str) or not row["prompt"].strip():
        raise ValueError(f"{path}, line {number}: needs an object with a non-empty string `prompt`")
    return row


def draw_samples(
    prompts: PromptSet, groups: int, group_size: int, balance: str | None, shares: Mapping[str, int] | None = None,
    *, seed: int, rollout: int,
) -> tuple[Sample, ...]:  # fmt: skip
    """`groups` x `group_size` samples of one rollout, groups whole and contiguous, no prompt twice while they last.

    With `balance` (a metadata key) its values take turns, in a shuffled order, and each value walks through its own
    shuffled prompts from rollout to rollout. `shares` gives the turns of each value in a round; values it leaves out
    are not drawn. Pure in (seed, rollout): the same on every process. ValueError for a share of an unknown value.
    """
    buckets = _buckets(prompts, balance)
    turns = _turns(buckets, balance, shares)
    chosen = []
    for k in range(rollout * groups, (rollout + 1) * groups):
        cycle, place = divmod(k, len(turns))
        turn = seeds.permutation(len(turns), seed, "tags", cycle)[place]
        name = turns[turn]
        visit = cycle * turns.count(name) + turn - turns.index(name)
        lap, place = divmod(visit, len(buckets[name]))
        chosen.append(buckets[name][seeds.permutation(len(buckets[name]), seed, "prompts", name, lap)[place]])
    return tuple(
        Sample(prompt, f"{rollout}/{slot}/{prompt}", image)
        for slot, prompt in enumerate(chosen)
        for image in range(group_size)
    )


def _turns(buckets: Mapping[str, list[int]], balance: str | None, shares: Mapping[str, int] | None) -> list[str]:
    """The values of one round, each as often as its share says, equal ones side by side."""
    if shares is None:
        return sorted(buckets)
    for name in shares:
        if name not in buckets:
            raise ValueError(f"prompts.shares: no prompt has {balance}={name!r}; {nearest(name, buckets)}")
    return [name for name in sorted(buckets) for _ in range(shares.get(name, 0))]


def check_balance(prompts: PromptSet, balance: str | None) -> None:
    """ValueError for a key that no prompt has. The default, `tag`, may be absent: prompts are then drawn uniformly."""
    known = {key for row in prompts.metadata for key in row}
    if balance is not None and balance != "tag" and balance not in known:
        raise ValueError(f"prompts.balance: no prompt has the key {balance!r}; {nearest(balance, known)}")


def _buckets(prompts: PromptSet, balance: str | None) -> dict[str, list[int]]:
    """Prompt indices by the value of the metadata key `balance`; one bucket without a key."""
    buckets: dict[str, list[int]] = defaultdict(list)
    for index, row in enumerate(prompts.metadata):
        buckets[str(row.get(balance, "")) if balance else ""].append(index)
    return buckets


def choose_evenly(prompts: PromptSet, pictures: int, balance: str | None) -> tuple[Sample, ...]:
    """`pictures` evaluation samples: equally many per value of `balance`, spread evenly over that value's prompts.

    Each prompt is a group; its images are numbered, so equal arguments give equal ids and therefore equal seeds.
    """
    buckets = _buckets(prompts, balance)
    shares = {name: pictures // len(buckets) + (k < pictures % len(buckets)) for k, name in enumerate(sorted(buckets))}
    samples: list[Sample] = []
    for name, share in shares.items():
        members = buckets[name]
        counts = [(j + 1) * share // len(members) - j * share // len(members) for j in range(len(members))]
        samples += [Sample(m, prompts.ids[m], i) for m, n in zip(members, counts, strict=True) for i in range(n)]
    return tuple(samples)


def spread(samples: Sequence[Sample], count: int) -> tuple[Sample, ...]:
    """`count` of the samples, or all, at equal distances, so that every task of an evaluation is among them."""
    count = min(count, len(samples))
    return tuple(samples[k * len(samples) // count] for k in range(count))
