"""Held-out evaluation: equal prompts and seeds for every weight set, means over tasks, intervals by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl_img.parallel import Processes
from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.score import Scorer, score
from flowrl_img.rollout import generate
from flowrl_img.types import PromptSet, Sample

__all__ = ["Evaluation", "Interval", "evaluate", "gain", "level"]

RESAMPLES = 2000
EVAL_SEED = 20_240_521  # the namespace of held-out noise: no training run draws from it


@dataclass(frozen=True)
class Evaluation:
    """Scores of B held-out pictures. columns: name -> float64 [B], NaN where invalid; always holds `reward`."""

    samples: tuple[Sample, ...]
    tags: tuple[str, ...]
    columns: Mapping[str, NDArray[np.float64]]
    images: Tensor
    """uint8-exact float32 [K, 3, H, W] of the first K samples asked to be kept"""

    def mean(self, column: str = "reward") -> float:
        """Mean over tasks of task means, invalid pictures left out."""
        return level(self, column).value

    @property
    def failed(self) -> dict[str, int]:
        """How many pictures each column has no number for, where any."""
        missing = {name: int(np.isnan(values).sum()) for name, values in self.columns.items()}
        return {name: count for name, count in missing.items() if count}

    def by_tag(self, column: str = "reward") -> dict[str, float]:
        values = self.columns[column]
        rows = {t: [k for k, tag in enumerate(self.tags) if tag == t] for t in dict.fromkeys(self.tags)}
        return {t: _mean_of_valid(values[r]) for t, r in rows.items()}


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap 95 % interval."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def evaluate(
    model: Any,
    prompts: PromptSet,
    samples: Sequence[Sample],
    reward: Mixture,
    *,
    num_steps: int,
    guidance: float,
    batch: int,
    processes: Processes,
    keep: int = 0,
    report: Mapping[str, Scorer] | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> Evaluation:
    """Score the ODE pictures of `samples` with whatever weights are active. `report`: further rewards, by label.

    `reward` is asked as `Mixture.held_out` says: a score that failed is NaN and stops nothing.
    Samples are shared between processes and joined by id, so each counts once whatever their number.
    """
    mine = processes.share(samples)
    reward = reward.held_out()
    parts: list[tuple[int, dict[str, list[float]]]] = []
    kept: list[Tensor] = []
    wanted = {s.id for s in samples[:keep]}
    for start in range(0, len(mine), batch):
        chunk = mine[start : start + batch]
        images = generate(model, prompts, chunk, num_steps=num_steps, guidance=guidance, seed=EVAL_SEED, batch=batch)
        parts.append((len(chunk), _score(reward, report or {}, images, prompts, chunk)))
        kept += [image for image, s in zip(images, chunk, strict=True) if s.id in wanted]
        progress(len(chunk))
    names = sorted(processes.agree([name for _, found in parts for name in found]))
    columns = [torch.tensor(_column(name, parts), dtype=torch.float64) for name in names]
    rows = processes.gather_by_id([s.id for s in mine], *columns)
    table = np.array([rows[s.id] for s in samples], dtype=np.float64)
    tags = tuple(str(prompts.metadata[s.prompt].get("tag", "")) for s in samples)
    pictures = torch.stack(kept) if kept else torch.zeros(0, 3, 1, 1)
    return Evaluation(tuple(samples), tags, {n: table[:, k] for k, n in enumerate(names)}, pictures)


def _score(
    reward: Mixture, report: Mapping[str, Scorer], images: Tensor, prompts: PromptSet, chunk: Sequence[Sample]
) -> dict[str, list[float]]:
    asked = (
        images,
        [prompts.texts[s.prompt] for s in chunk],
        [prompts.metadata[s.prompt] for s in chunk],
        [s.id for s in chunk],
    )
    output = score(reward, *asked)
    found = {"reward": output.values.tolist()}
    for key, column in output.details.items():
        numbers = [entry for entry in column if entry is not None]
        if numbers and all(isinstance(entry, (int, float, bool)) for entry in numbers):
            found[key] = [float("nan") if entry is None else float(entry) for entry in column]
    for name, scorer in report.items():
        found[f"report/{name}"] = score(scorer, *asked).values.tolist()
    return found


def _mean_of_valid(values: NDArray[np.float64]) -> float:
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if len(valid) else float("nan")


def _column(name: str, parts: Sequence[tuple[int, Mapping[str, list[float]]]]) -> list[float]:
    """The chunks' numbers in one column, NaN for a chunk that has none under this name."""
    return [value for size, found in parts for value in found.get(name, [float("nan")] * size)]


def level(evaluation: Evaluation, column: str = "reward", seed: int = 0) -> Interval:
    """The mean over tasks with its interval."""
    return _bootstrap(evaluation, evaluation.columns[column], seed)


def gain(before: Evaluation, after: Evaluation, column: str = "reward", seed: int = 0) -> Interval:
    """Mean paired difference after - before, over tasks. ValueError if the two hold different pictures."""
    if [s.id for s in before.samples] != [s.id for s in after.samples]:
        raise ValueError("a paired difference needs the same prompts and seeds on both sides")
    return _bootstrap(after, after.columns[column] - before.columns[column], seed)


def _bootstrap(evaluation: Evaluation, values: NDArray[np.float64], seed: int) -> Interval:
    """Resample prompts within each task, pictures with their prompt: pictures of one prompt are not independent."""
    rng = np.random.default_rng(seed)
    means, draws = [], []
    for tag in dict.fromkeys(evaluation.tags):
        clusters: dict[int, list[float]] = {}
        for sample, t, value in zip(evaluation.samples, evaluation.tags, values, strict=True):
            if t == tag and np.isfinite(value):
                clusters.setdefault(sample.prompt, []).append(float(value))
        if not clusters:
            continue
        sums = np.array([sum(c) for c in clusters.values()])
        counts = np.array([len(c) for c in clusters.values()])
        picked = rng.integers(len(sums), size=(RESAMPLES, len(sums)))
        draws.append(sums[picked].sum(1) / counts[picked].sum(1))
        means.append(sums.sum() / counts.sum())
    if not means:
        return Interval(float("nan"), float("nan"), float("nan"))
    low, high = np.percentile(np.mean(draws, axis=0), [2.5, 97.5])
    return Interval(float(np.mean(means)), float(low), float(high))
