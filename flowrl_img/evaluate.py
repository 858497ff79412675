"""Held-out evaluation: equal prompts and seeds for every weight set, means over tasks, intervals by prompt."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from flowrl_img.blend import Blend, Side
from flowrl_img.intervals import Interval, bootstrap
from flowrl_img.parallel import Processes
from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.score import Scorer, score
from flowrl_img.rollout import EULER, generate, root_keys
from flowrl_img.samplers.solvers.table import Solver
from flowrl_img.types import PromptSet, Sample

__all__ = [
    "EVAL_SEED",
    "Evaluation",
    "Scoring",
    "evaluate",
    "evaluation_of",
    "gain",
    "held_out_pictures",
    "level",
]

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
    solver: Solver = EULER,
    keep: int = 0,
    report: Mapping[str, Scorer] | None = None,
    progress: Callable[[int], None] = lambda n: None,
) -> Evaluation:
    """Score the pictures that `solver` draws of `samples` with the weights that are active.

    report: further rewards, by label. `reward` is asked as `Scoring` says: a failed score is NaN and stops nothing.
    Samples are shared between processes and joined by id, so each counts once whatever their number.
    """
    mine, scoring = processes.share(samples), Scoring(prompts, reward, report or {})
    rows: dict[str, dict[str, float]] = {}
    kept: list[Tensor] = []
    wanted = {s.id for s in samples[:keep]}
    for start in range(0, len(mine), batch):
        chunk = mine[start : start + batch]
        images = held_out_pictures(
            Blend(Side(model)), prompts, chunk, num_steps=num_steps, guidance=guidance, solver=solver
        )
        rows |= scoring(images, chunk)
        kept += [image for image, s in zip(images, chunk, strict=True) if s.id in wanted]
        progress(len(chunk))
    everything = {name: row for part in processes.gather(rows) for name, row in part.items()}
    return evaluation_of(prompts, samples, everything, torch.stack(kept) if kept else torch.zeros(0, 3, 1, 1))


def evaluation_of(
    prompts: PromptSet, samples: Sequence[Sample], rows: Mapping[str, Mapping[str, float]], images: Tensor
) -> Evaluation:
    """rows: the columns of each sample, by its id; a column that a sample lacks is NaN there."""
    names = sorted({name for s in samples for name in rows[s.id]})
    nan = float("nan")
    columns = {n: np.array([rows[s.id].get(n, nan) for s in samples], dtype=np.float64) for n in names}
    tags = tuple(str(prompts.metadata[s.prompt].get("tag", "")) for s in samples)
    return Evaluation(tuple(samples), tags, columns, images)


def held_out_pictures(
    blend: Blend, prompts: PromptSet, samples: Sequence[Sample], *, num_steps: int, guidance: float, solver: Solver
) -> Tensor:
    """The held-out pictures of `samples` in one batch, float32 [B, 3, H, W] in [0, 1]."""
    return generate(
        blend, [prompts.texts[s.prompt] for s in samples], root_keys(samples, EVAL_SEED), num_steps=num_steps,
        guidance=guidance, batch=max(len(samples), 1), solver=solver,
    )  # fmt: skip


@dataclass
class Scoring:
    """Every number the rewards give for held-out pictures: `reward` with its numeric details, and further rewards.

    `reward` is asked as `Mixture.held_out` says, which refuses a mixture without a reward of single pictures with a
    ValueError. A score that failed is NaN and stops nothing.
    """

    prompts: PromptSet
    reward: Mixture
    report: Mapping[str, Scorer]

    def __post_init__(self) -> None:
        self.reward = self.reward.held_out()

    def __call__(self, images: Tensor, samples: Sequence[Sample]) -> dict[str, dict[str, float]]:
        """images: float [B, 3, H, W] in [0, 1]. Returns sample id -> column -> value, NaN where invalid.

        `reward` is the score of the mixture, its numeric details follow under their own names, and `report/<label>`
        holds that of each further reward.
        """
        texts = [self.prompts.texts[s.prompt] for s in samples]
        asked = (images, texts, [self.prompts.metadata[s.prompt] for s in samples], [s.id for s in samples])
        output = score(self.reward, *asked)
        columns: dict[str, list[Any]] = {"reward": output.values.tolist()}
        for key, column in output.details.items():
            numbers = [entry for entry in column if entry is not None]
            if numbers and all(isinstance(entry, (int, float, bool)) for entry in numbers):
                columns[key] = column
        for name, scorer in self.report.items():
            columns[f"report/{name}"] = score(scorer, *asked).values.tolist()
        nan = float("nan")
        return {
            sample.id: {name: nan if column[k] is None else float(column[k]) for name, column in columns.items()}
            for k, sample in enumerate(samples)
        }


def _mean_of_valid(values: NDArray[np.float64]) -> float:
    valid = values[~np.isnan(values)]
    return float(valid.mean()) if len(valid) else float("nan")


def level(evaluation: Evaluation, column: str = "reward", seed: int = 0) -> Interval:
    """The mean over tasks with its interval."""
    return _interval(evaluation, evaluation.columns[column], seed)


def gain(before: Evaluation, after: Evaluation, column: str = "reward", seed: int = 0) -> Interval:
    """Mean paired difference after - before, over tasks. ValueError if the two hold different pictures."""
    if [s.id for s in before.samples] != [s.id for s in after.samples]:
        raise ValueError("a paired difference needs the same prompts and seeds on both sides")
    return _interval(after, after.columns[column] - before.columns[column], seed)


def _interval(evaluation: Evaluation, values: NDArray[np.float64], seed: int) -> Interval:
    return bootstrap(values, evaluation.tags, [s.prompt for s in evaluation.samples], seed)
