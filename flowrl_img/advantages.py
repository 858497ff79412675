"""Group advantages: how much better an image is than its group, in float64.

A = (r - mean of the group) / (spread + eps). Invalid rewards are left out of every statistic and get 0. A group with
fewer than two valid rewards, or whose rewards are all equal, is exactly 0.
Source: Flow-GRPO, arXiv 2505.05470, Eq. 4; the global spread is that of its published code.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["group_advantages"]


def group_advantages(
    rewards: Tensor, valid: Tensor, groups: Sequence[str], *, scale: str = "group", eps: float = 1e-4
) -> Tensor:
    """rewards, valid: [B]; groups: B ids, in any order. Returns float64 [B].

    scale: "group" divides by the population std of the group, "global" by that of all valid rewards, "none" by 1.
    Raises ValueError on another scale or on unequal lengths.
    """
    if scale not in ("group", "global", "none"):
        raise ValueError(f"advantage scale must be group, global or none, not {scale!r}")
    if not len(rewards) == len(valid) == len(groups):
        raise ValueError(f"one reward, validity and group per sample: got {len(rewards)}, {len(valid)}, {len(groups)}")
    rewards = rewards.double()
    advantages = torch.zeros_like(rewards)
    everything = rewards[valid].std(correction=0) if valid.any() else rewards.new_zeros(())
    members: dict[str, list[int]] = {}
    for row, group in enumerate(groups):
        if valid[row]:
            members.setdefault(group, []).append(row)
    for rows in members.values():
        r = rewards[rows]
        # An equality test, not a threshold on the std: rounding of the mean must not become an advantage.
        if len(rows) < 2 or bool((r == r[0]).all()):
            continue
        spread = {"group": r.std(correction=0), "global": everything, "none": r.new_ones(())}[scale]
        advantages[rows] = (r - r.mean()) / (spread + (eps if scale != "none" else 0.0))
    return advantages
