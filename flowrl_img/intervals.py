"""Means over tasks with bootstrap intervals, resampling whole prompts: pictures of one prompt are not independent."""

from __future__ import annotations

from collections.abc import Hashable, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

__all__ = ["Interval", "bootstrap", "by_task"]

RESAMPLES = 2000


@dataclass(frozen=True)
class Interval:
    """An estimate and its bootstrap 95 % interval; all NaN where there was nothing to average."""

    value: float
    low: float
    high: float

    def __str__(self) -> str:
        return f"{self.value:+.4f} [{self.low:+.4f}, {self.high:+.4f}]"


def bootstrap(
    values: NDArray[np.float64], tasks: Sequence[str], prompts: Sequence[Hashable], seed: int = 0
) -> Interval:
    """The mean over tasks of task means, with its interval. values: [N], NaN is left out; tasks, prompts: of each.

    Prompts are resampled within each task (percentile bootstrap), pictures going with their prompt.
    """
    rng = np.random.default_rng(seed)
    means, draws = [], []
    for task in dict.fromkeys(tasks):
        clusters: dict[Hashable, list[float]] = {}
        for prompt, of, value in zip(prompts, tasks, values, strict=True):
            if of == task and np.isfinite(value):
                clusters.setdefault(prompt, []).append(float(value))
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


def by_task(
    values: NDArray[np.float64], tasks: Sequence[str], prompts: Sequence[Hashable], seed: int = 0
) -> dict[str, Interval]:
    """The interval of each task, in the order in which tasks appear."""
    found = {}
    for task in dict.fromkeys(tasks):
        rows = [k for k, of in enumerate(tasks) if of == task]
        found[task] = bootstrap(values[rows], [task] * len(rows), [prompts[k] for k in rows], seed)
    return found
