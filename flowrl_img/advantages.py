"""Advantages: how much better a picture is than its baseline, in float64, from one or several rewards.

A = (r - baseline) / (spread + eps). Invalid rewards are left out of every statistic and get 0. A group with fewer than
two valid rewards, or without spread, is exactly 0: an equality test, not a threshold on the spread, because rounding of
a mean must not become an advantage.
Source: Flow-GRPO, arXiv 2505.05470, Eq. 4, and the global spread of its published code; running statistics per prompt:
DDPO, arXiv 2305.13301; normalising each reward by itself: GDPO, arXiv 2601.05242.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

__all__ = [
    "AGGREGATES", "BASELINES", "SCALES", "History", "combined_advantages", "group_advantages", "members_of", "usable",
]  # fmt: skip

BASELINES = ("group", "leave_one_out", "history", "none")
SCALES = ("group", "global", "none", "sign")
AGGREGATES = ("sum", "advantage_sum", "gdpo")


@dataclass
class History:
    """The last `size` rewards of every prompt; state that a checkpoint holds and every process agrees on.

    Until a prompt has `min_count` of them, the statistics of the whole rollout stand in. Example: `History(32, 16)`.
    """

    size: int
    min_count: int
    rewards: dict[str, list[float]] = field(default_factory=dict)

    def observe(self, prompts: Sequence[str], rewards: Tensor, valid: Tensor) -> None:
        """Add the valid rewards of a rollout, in order. prompts: B ids."""
        for prompt, reward, ok in zip(prompts, rewards.tolist(), valid.tolist(), strict=True):
            if ok:
                kept = [*self.rewards.get(prompt, []), reward]
                self.rewards[prompt] = kept[-self.size :]

    def of(self, prompt: str, rollout: Tensor) -> Tensor:
        """The rewards that the baseline of `prompt` is taken from, float64; `rollout`: all valid rewards of now."""
        past = self.rewards.get(prompt, [])
        return torch.tensor(past, dtype=torch.float64) if len(past) >= self.min_count else rollout


def usable(valid: Tensor, groups: Sequence[str]) -> Tensor:
    """bool [B]: the rows with a valid reward in a group that has at least two of them."""
    counts: dict[str, int] = {}
    for group, ok in zip(groups, valid.tolist(), strict=True):
        counts[group] = counts.get(group, 0) + ok
    return torch.tensor([ok and counts[g] >= 2 for g, ok in zip(groups, valid.tolist())], dtype=torch.bool)


def group_advantages(
    rewards: Tensor, valid: Tensor, groups: Sequence[str], *, baseline: str = "group", scale: str = "group",
    eps: float = 1e-4, history: History | None = None, prompts: Sequence[str] = (),
) -> Tensor:  # fmt: skip
    """rewards, valid: [B]; groups: B ids, in any order. Returns float64 [B].

    baseline: "group" is the mean of the group, "leave_one_out" that of its other members, "history" that of the
    prompt's last rewards (needs `history` and the B `prompts`, and takes the spread "group" from them too), "none" is
    0. scale: "group" divides by the population std of the group, "global" by that of all valid rewards, "none" by 1;
    "sign" takes +1 from the baseline up and -1 below it, and centres these in the group. Raises ValueError on another
    name or on unequal lengths.
    """
    _check(baseline, scale, [len(rewards), len(valid), len(groups)], history, prompts)
    rewards = rewards.double()
    advantages, everything = torch.zeros_like(rewards), rewards[valid]
    if history is not None and baseline == "history":
        history.observe(prompts, rewards, valid)
    for rows in members_of(usable(valid, groups), groups):
        r = rewards[rows]
        past = history.of(prompts[rows[0]], everything) if history is not None and baseline == "history" else r
        if (baseline != "none" or scale in ("group", "sign")) and bool((torch.cat([past, r]) == r[0]).all()):
            continue
        centred = r - _center(baseline, r, past)
        if scale == "sign":
            signs = torch.where(centred >= 0, 1.0, -1.0).double()
            advantages[rows] = signs - signs.mean()
            continue
        spread = {"group": past.std(correction=0), "global": everything.std(correction=0), "none": r.new_ones(())}[
            scale
        ]
        advantages[rows] = centred / (spread + (eps if scale != "none" else 0.0))
    return advantages


def _center(baseline: str, r: Tensor, past: Tensor) -> Tensor:
    if baseline == "leave_one_out":
        return (r.sum() - r) / (len(r) - 1)
    return r.new_zeros(()) if baseline == "none" else past.mean()


def members_of(keep: Tensor, groups: Sequence[str]) -> list[list[int]]:
    """The kept rows of each group."""
    members: dict[str, list[int]] = {}
    for row in keep.nonzero().flatten().tolist():
        members.setdefault(groups[row], []).append(row)
    return list(members.values())


def combined_advantages(
    columns: Mapping[str, Tensor], weights: Mapping[str, float], valid: Tensor, groups: Sequence[str], *,
    aggregate: str = "sum", baseline: str = "group", scale: str = "group", eps: float = 1e-4,
    histories: Mapping[str, History] | None = None, prompts: Sequence[str] = (),
) -> Tensor:  # fmt: skip
    """One advantage from several rewards. columns: name -> [B], weights by the same names. Returns float64 [B].

    aggregate: "sum" normalises the weighted sum of the rewards; "advantage_sum" sums the weighted advantages of each,
    so that no reward counts by its own scale; "gdpo" standardises that sum over the rollout besides. valid: [B], rows
    where every reward is. histories: by column, or by "" for the sum. A reward of weight 0 is left out.
    """
    if aggregate not in AGGREGATES:
        raise ValueError(f"advantage aggregate must be one of {', '.join(AGGREGATES)}, not {aggregate!r}")
    counted = {name: columns[name].double() for name, weight in weights.items() if weight != 0}

    def normalised(name: str, rewards: Tensor) -> Tensor:
        history = (histories or {}).get(name)
        return group_advantages(
            rewards, valid, groups, baseline=baseline, scale=scale, eps=eps, history=history, prompts=prompts
        )

    if aggregate == "sum":
        return normalised("", torch.stack([weights[name] * r for name, r in counted.items()]).sum(0))
    total = torch.stack([weights[name] * normalised(name, r) for name, r in counted.items()]).sum(0)
    return total if aggregate == "advantage_sum" else _standardised(total, usable(valid, groups), eps)


def _standardised(advantages: Tensor, rows: Tensor, eps: float) -> Tensor:
    """Over the usable rows; what is exactly 0 (no reward tells the pictures apart) stays 0."""
    used = advantages[rows]
    if not used.any():
        return advantages
    centred = (advantages - used.mean()) / (used.std(correction=0) + eps)
    return torch.where(rows & (advantages != 0), centred, 0.0)


def _check(baseline: str, scale: str, lengths: list[int], history: History | None, prompts: Sequence[str]) -> None:
    if baseline not in BASELINES:
        raise ValueError(f"advantage baseline must be one of {', '.join(BASELINES)}, not {baseline!r}")
    if scale not in SCALES:
        raise ValueError(f"advantage scale must be one of {', '.join(SCALES)}, not {scale!r}")
    if len(set(lengths)) != 1:
        raise ValueError(f"one reward, validity and group per sample: got {', '.join(str(n) for n in lengths)}")
    if baseline == "history" and (history is None or len(prompts) != lengths[0]):
        raise ValueError("the baseline history needs a History and the prompt of each sample")
