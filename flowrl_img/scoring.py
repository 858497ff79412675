"""The scores of one rollout: asked for on each process, gathered by id, combined, and summed up for the log.

`ask` touches nothing but the rewards, so it may run in a thread while the next rollout is drawn; `judge` makes the
collective calls, in the same order on every process whatever happened to its own scores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch

from flowrl_img.parallel import Processes
from flowrl_img.rewards.alarm import Alarm
from flowrl_img.rewards.mixture import Combined, Mixture
from flowrl_img.rewards.score import InvalidScoreError, score
from flowrl_img.types import Leaves, PromptSet, Sample

__all__ = ["Answer", "Judged", "ask", "judge"]


@dataclass(frozen=True)
class Answer:
    """Raw values [B] of this process's pictures by reward, NaN where invalid; or why the run has to stop."""

    samples: Sequence[Sample]
    columns: Mapping[str, list[float]]
    failure: str = ""


@dataclass(frozen=True)
class Judged:
    """The combined rewards of `everything`, all samples of all processes. metrics: over all processes."""

    combined: Combined
    everything: Sequence[Sample]
    groups: list[str]
    metrics: dict[str, float]


def ask(reward: Mixture, leaves: Leaves, prompts: PromptSet) -> Answer:
    """Score this process's pictures. A failure that stops the run is in the answer, not raised."""
    samples = leaves.samples
    try:
        output = score(
            reward, leaves.images, [prompts.texts[s.prompt] for s in samples],
            [prompts.metadata[s.prompt] for s in samples], [s.id for s in samples],
            group_ids=[s.group for s in samples],
        )  # fmt: skip
    except InvalidScoreError as error:
        return Answer(samples, {label: [] for label in reward.labels}, str(error))
    return Answer(samples, reward.columns(output))


def judge(
    answer: Answer, reward: Mixture, everything: Sequence[Sample], processes: Processes, alarm: Alarm,
    warn: Callable[[str], None],
) -> Judged:  # fmt: skip
    """InvalidScoreError on every process when one of them has a failure, or when no picture has all its scores."""
    failures = [text for text in processes.gather(answer.failure) if text]
    if failures:
        raise InvalidScoreError(failures[0])
    if warning := alarm.observe(processes.gather(answer.columns)):
        warn(warning)
    rows = processes.gather_by_id([s.id for s in answer.samples], *(torch.tensor(c) for c in answer.columns.values()))
    whole = {label: [rows[s.id][k] for s in everything] for k, label in enumerate(reward.labels)}
    groups = [s.group for s in everything]
    combined = reward.combine(whole, groups)
    if not combined.valid.any():
        raise InvalidScoreError("no picture of the rollout could be scored by every reward that has weight")
    values = combined.values[combined.valid]
    metrics = {
        "reward": values.mean().item(),
        "reward_std": values.std(correction=0).item(),
        "invalid": float((~combined.valid).sum()),
    } | _by_reward(whole)
    return Judged(combined, everything, groups, metrics)


def _by_reward(columns: Mapping[str, Sequence[float]]) -> dict[str, float]:
    """Mean and spread of each reward's raw valid values, and how many failed."""
    metrics: dict[str, float] = {}
    for label, column in columns.items():
        values = torch.tensor(column, dtype=torch.float64)
        valid = values[~values.isnan()]
        if len(valid):
            metrics |= {f"reward/{label}": valid.mean().item(), f"reward_std/{label}": valid.std(correction=0).item()}
        metrics[f"failed/{label}"] = float(len(values) - len(valid))
    return metrics
