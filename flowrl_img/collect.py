"""One rollout of this process's share: drawn, scored, and ranked against everything that all processes drew."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl_img.advantages import combined_advantages, members_of, usable
from flowrl_img.forked import forks_of, roll_forked
from flowrl_img.prompts import draw_samples
from flowrl_img.rollout import draw, roll
from flowrl_img.scoring import Answer, ask, judge
from flowrl_img.types import Rollout, Sample, Scored

__all__ = ["Started", "collect"]


@dataclass(frozen=True)
class Started:
    """A drawn rollout with all samples of all processes, and what gives (or waits for) this process's scores."""

    drawn: Rollout
    everything: tuple[Sample, ...]
    answer: Callable[[], Answer]


def collect(trainer: Any, rollout: int) -> Scored:
    """Draw, score and rank. Every process makes the same collective calls.

    With a thread for scores (`trainer.scorers`) the next rollout is drawn, by the weights of now, while this one's are
    computed, and waits in `trainer.ahead`.
    """
    started = trainer.ahead.pop(rollout) if rollout in trainer.ahead else _started(trainer, rollout)
    last = trainer.config.run.rollouts
    if trainer.scorers is not None and (last is None or rollout + 1 < last):
        trainer.ahead[rollout + 1] = _started(trainer, rollout + 1)
    with trainer.timed("scoring"):
        return _ranked(trainer, started.drawn, started.everything, started.answer())


def _started(trainer: Any, rollout: int) -> Started:
    config, parts = trainer.config.rollout, trainer.parts
    forked = config.kind == "anchor_fork"
    paths = draw_samples(
        trainer.prompts, config.groups, config.group_size // (config.branches if forked else 1),
        trainer.config.prompts.balance, trainer.config.prompts.shares, seed=trainer.config.run.seed, rollout=rollout,
    )  # fmt: skip
    steps: Sequence[int] = ()
    if parts.window is not None:
        steps = parts.window.steps(config.steps, seed=trainer.config.run.seed, iteration=rollout)
    everything = tuple(s for p in paths for s in forks_of(p, steps, config.branches)) if forked else paths
    mine = trainer.processes.deal(paths) if trainer.objective.needs.unit == "group" else trainer.processes.share(paths)
    with trainer.timed("sampling"), trainer.weights.use(trainer.policy):
        trainer.weights.network.eval()
        drawn = _drawn(trainer, mine, steps)
    asked = partial(ask, parts.reward, drawn.leaves, trainer.prompts)
    return Started(drawn, everything, asked if trainer.scorers is None else trainer.scorers.submit(asked).result)


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


def _ranked(trainer: Any, drawn: Rollout, everything: tuple[Sample, ...], answer: Answer) -> Scored:
    prompts, config, reward = trainer.prompts, trainer.config.advantage, trainer.parts.reward
    judged = judge(answer, reward, everything, trainer.processes, trainer.alarm, trainer.warn)
    for part in reward.parts:
        trainer.clock[f"scoring/{part.scorer.label}"] = part.scorer.seconds
    combined, groups = judged.combined, judged.groups
    advantage = combined_advantages(
        combined.terms, combined.weights, combined.valid, groups, aggregate=combined.aggregate,
        baseline=config.baseline, scale=config.scale, eps=config.eps, histories=trainer.histories,
        prompts=[prompts.ids[s.prompt] for s in everything],
    ).clamp(-config.clip, config.clip)  # fmt: skip
    valid = usable(combined.valid, groups)
    kept = valid & _chosen(trainer.objective.needs.best_and_worst, advantage, valid, groups)
    place = {s.id: row for row, s in enumerate(everything)}
    rows = torch.tensor([place[s.id] for s in drawn.leaves.samples], dtype=torch.int64)
    told_apart = {group for group, a in zip(groups, advantage.tolist(), strict=True) if a != 0}
    metrics = judged.metrics | {"flat_groups": float(len(set(groups)) - len(told_apart))}
    trained = dict.fromkeys(group for group, keep in zip(groups, kept.tolist(), strict=True) if keep)
    return Scored(drawn, advantage.float()[rows], kept[rows], everything, tuple(trained), metrics)


def _chosen(best_and_worst: tuple[int, int] | None, advantage: Tensor, valid: Tensor, groups: Sequence[str]) -> Tensor:
    """bool [B]: all, or the best and the worst of each group that has spread; equals go by their order.

    The best are above the baseline and the worst below it, so fewer are chosen where there are fewer such.
    """
    if best_and_worst is None:
        return torch.ones_like(valid)
    chosen = torch.zeros_like(valid)
    best, worst = best_and_worst
    for rows in members_of(valid, groups):
        ranked = sorted(rows, key=lambda row: -advantage[row].item())
        chosen[[row for row in ranked[:best] if advantage[row] > 0]] = True
        chosen[[row for row in ranked[len(ranked) - worst :] if advantage[row] < 0]] = True
    return chosen
