"""One rollout of this process's share: drawn, scored, and ranked against everything that all processes drew."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img.advantages import combined_advantages, usable
from flowrl_img.forked import forks_of, roll_forked
from flowrl_img.prompts import draw_samples
from flowrl_img.rewards.alarm import columns
from flowrl_img.rewards.score import score
from flowrl_img.rollout import draw, roll
from flowrl_img.types import Rollout, Sample, Scored

__all__ = ["collect"]


def collect(trainer: Any, rollout: int) -> Scored:
    """Draw, score and rank. Every process makes the same collective calls."""
    config, parts = trainer.config.rollout, trainer.parts
    forked = config.kind == "anchor_fork"
    paths = draw_samples(
        trainer.prompts, config.groups, config.group_size // (config.branches if forked else 1),
        trainer.config.prompts.balance, trainer.config.prompts.shares, seed=trainer.config.run.seed, rollout=rollout,
    )  # fmt: skip
    steps = parts.window.steps(config.steps, seed=trainer.config.run.seed, iteration=rollout)
    everything = tuple(s for p in paths for s in forks_of(p, steps, config.branches)) if forked else paths
    mine = trainer.processes.deal(paths) if trainer.objective.needs.unit == "group" else trainer.processes.share(paths)
    with trainer.timed("sampling"), trainer.weights.use(trainer.policy):
        trainer.weights.network.eval()
        drawn = _drawn(trainer, mine, steps)
    with trainer.timed("scoring"):
        return _ranked(trainer, drawn, everything)


def _drawn(trainer: Any, mine: Sequence[Sample], steps: Sequence[int]) -> Rollout:
    config, parts = trainer.config.rollout, trainer.parts
    how = {
        "num_steps": config.steps, "guidance": config.guidance, "seed": trainer.config.run.seed, "batch": config.batch,
        "shared_noise": config.shared_noise, "progress": lambda n: trainer.progress("sampling", n, len(mine)),
    }  # fmt: skip
    if trainer.objective.needs.matching:
        leaves = draw(trainer.model, trainer.prompts, mine, solver=parts.solver, **how)
        return Rollout(leaves, trainer.model.sigmas(config.steps))
    how |= {"step_rule": parts.step_rule, "stochastic": steps}
    if config.kind == "anchor_fork":
        return roll_forked(trainer.model, trainer.prompts, mine, branches=config.branches, **how)
    return roll(trainer.model, trainer.prompts, mine, tail=parts.tail, **how)


def _ranked(trainer: Any, drawn: Rollout, everything: tuple[Sample, ...]) -> Scored:
    prompts, samples, config = trainer.prompts, drawn.leaves.samples, trainer.config.advantage
    output = score(
        trainer.parts.reward, drawn.leaves.images,
        [prompts.texts[s.prompt] for s in samples], [prompts.metadata[s.prompt] for s in samples],
        [s.id for s in samples], policy=trainer.config.run.reward_policy, group_ids=[s.group for s in samples],
    )  # fmt: skip
    if warning := trainer.alarm.observe(trainer.processes.gather(columns(trainer.parts.reward, output))):
        trainer.warn(warning)
    weights = {reward.name: reward.weight for reward in trainer.config.rewards}
    each = [_column(output.details[name]) for name in weights]
    found = trainer.processes.gather_by_id([s.id for s in samples], output.values, output.valid, *each)
    values, valid, *each = (torch.tensor(column) for column in zip(*(found[s.id] for s in everything), strict=True))
    if not valid.any():
        raise RuntimeError("no image of the rollout could be scored; see the reward's errors above")
    groups = [s.group for s in everything]
    rewards = {"": values} if config.aggregate == "sum" else dict(zip(weights, each, strict=True))
    advantage = combined_advantages(
        rewards, {"": 1.0} if config.aggregate == "sum" else weights, valid, groups, aggregate=config.aggregate,
        baseline=config.baseline, scale=config.scale, eps=config.eps, histories=trainer.histories,
        prompts=[prompts.ids[s.prompt] for s in everything],
    ).clamp(-config.clip, config.clip)  # fmt: skip
    kept = usable(valid, groups) & _chosen(
        trainer.objective.needs.best_and_worst, advantage, usable(valid, groups), groups
    )
    place = {s.id: row for row, s in enumerate(everything)}
    rows = torch.tensor([place[s.id] for s in samples], dtype=torch.int64)
    told_apart = {group for group, a in zip(groups, advantage.tolist(), strict=True) if a != 0}
    metrics = {
        "reward": values[valid].double().mean().item(),
        "reward_std": values[valid].double().std(correction=0).item(),
        "invalid": float((~valid).sum()),
        "flat_groups": float(len(set(groups)) - len(told_apart)),
    }
    if len(weights) > 1:
        metrics |= {f"reward/{name}": column[valid].double().mean().item() for name, column in zip(weights, each)}
    trained = dict.fromkeys(group for group, keep in zip(groups, kept.tolist(), strict=True) if keep)
    return Scored(drawn, advantage.float()[rows], kept[rows], everything, tuple(trained), metrics)


def _column(entries: Sequence[float | None]) -> Tensor:
    """float32 [B], NaN where there is no number."""
    return torch.tensor([float("nan") if entry is None else entry for entry in entries], dtype=torch.float32)


def _chosen(best_and_worst: tuple[int, int] | None, advantage: Tensor, valid: Tensor, groups: Sequence[str]) -> Tensor:
    """bool [B]: all, or the best and the worst of each group that has spread; equals go by their order."""
    if best_and_worst is None:
        return torch.ones_like(valid)
    chosen = torch.zeros_like(valid)
    members: dict[str, list[int]] = {}
    for row in valid.nonzero().flatten().tolist():
        members.setdefault(groups[row], []).append(row)
    best, worst = best_and_worst
    for rows in members.values():
        ranked = sorted(rows, key=lambda row: -advantage[row].item())
        if advantage[ranked[0]] > advantage[ranked[-1]]:
            chosen[ranked[:best]] = True
            chosen[ranked[len(ranked) - worst :]] = True
    return chosen
