"""The journal as numbers, a table and curves. A run that is not there leaves an empty place."""

from __future__ import annotations

import json
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl_img.comparison.curves import Curve, cost_to, curve_of, fewer, mean_curve
from flowrl_img.comparison.journal import Journal
from flowrl_img.comparison.settings import Cell, cost_of_rollout

__all__ = ["interval", "results", "table", "tuning_table", "write_report"]


def interval(values: Sequence[float]) -> list[float] | None:
    """[mean, low, high] of a few independent values, 95 %, by Student's t; None of none, and no width of one."""
    if not values:
        return None
    from scipy import stats

    mean = float(np.mean(values))
    if len(values) == 1:
        return [mean, float("nan"), float("nan")]
    half = float(stats.t.ppf(0.975, len(values) - 1) * np.std(values, ddof=1) / math.sqrt(len(values)))
    return [mean, mean - half, mean + half]


def results(journal: Journal) -> dict[str, Any]:
    """Everything that the report says, by reward and algorithm."""
    settings = journal.settings
    found: dict[str, Any] = {}
    for reward, what in settings.rewards.items():
        names = what.algorithms or tuple(settings.algorithms)
        curves = {name: _curves(journal, reward, name, what.seeds) for name in names}
        against = list(curves.get(settings.reference, {}).values())
        rows = {}
        for name in names:
            cells = [Cell(reward, name, seed) for seed in what.seeds if journal.done(Cell(reward, name, seed))]
            measured = [json.loads((journal.place(cell) / "measured.json").read_text()) for cell in cells]
            rows[name] = {
                "seeds": [cell.seed for cell in cells],
                "cells": {str(cell.seed): m for cell, m in zip(cells, measured, strict=True)},
                "curves": {str(seed): vars(curve) for seed, curve in curves[name].items()},
                "summary": _summary(measured),
                "cost_to": {str(t): cost_to(list(curves[name].values()), t) for t in what.targets},
                "fewer": None if name == settings.reference else fewer(against, list(curves[name].values())),
                "seconds": interval([curve.seconds[-1] for curve in curves[name].values()]),
            }
        found[reward] = rows
    return found


def _curves(journal: Journal, reward: str, name: str, numbers: Sequence[int]) -> dict[int, Curve]:
    found = {}
    for cell in (Cell(reward, name, seed) for seed in numbers):
        if journal.done(cell):
            config = journal.config(cell)
            found[cell.seed] = curve_of(journal.place(cell), cost_of_rollout(config), config.run.updates_per_rollout)
    return found


def _summary(measured: Sequence[dict[str, Any]]) -> dict[str, Any]:
    """[mean, low, high] over seeds of what was measured; of one seed, its own interval over prompts."""
    if not measured:
        return {}
    columns = measured[0]["gain"]

    def over(part: str, column: str) -> Any:
        if len(measured) == 1:
            return measured[0][part][column]
        return interval([m[part][column][0] for m in measured])

    found = {f"{part} {c}": over(part, c) for part in ("before", "after", "gain") for c in columns}
    for label in ("before", "after"):
        found[f"{label} diversity"] = interval([m["diversity"][label] for m in measured])
    return found | {"kl": interval([m["kl"] for m in measured])}


WHOLLY = ("gain geneval/strict", "gain ocr/exact")
COLUMNS = (
    ("gain of reward", lambda row: row["summary"].get("gain reward")),
    ("gain of wholly right", lambda row: next((row["summary"][c] for c in WHOLLY if c in row["summary"]), None)),
    ("CLIP score", lambda row: row["summary"].get("after report/clipscore")),
    ("diversity", lambda row: row["summary"].get("after diversity")),
    ("KL to base", lambda row: row["summary"].get("kl")),
    ("seconds", lambda row: row["seconds"]),
    ("times fewer evaluations", lambda row: row["fewer"]),
)


def table(found: dict[str, Any], reward: str) -> str:
    """The rows of one reward in Markdown; mean and 95 % interval, an empty cell where there is no number."""
    rows = found[reward]
    targets = list(next(iter(rows.values()))["cost_to"]) if rows else []
    titles = ["algorithm", "runs", *(title for title, _ in COLUMNS), *(f"evaluations to {t}" for t in targets)]
    lines = [f"| {' | '.join(titles)} |", f"|{'---|' * len(titles)}"]
    for name, row in rows.items():
        cells = [_cell(read(row)) for _, read in COLUMNS]
        cells += [_cell(row["cost_to"][t]) for t in targets]
        lines.append(f"| {' | '.join([name, str(len(row['seeds'])), *cells])} |")
    return "\n".join(lines)


def _cell(triple: Sequence[float] | None) -> str:
    if triple is None or not math.isfinite(triple[0]):
        return ""
    mean, low, high = triple
    if math.isnan(low):
        return _number(mean)
    return f"{_number(mean)} [{_number(low)}, {_number(high)}]"


def _number(x: float) -> str:
    if math.isinf(x):
        return "not reached"
    return f"{x:,.0f}" if abs(x) >= 100 else f"{x:.3g}" if abs(x) < 0.01 or abs(x) >= 10 else f"{x:.3f}"


def write_report(journal: Journal, out: Path, command: str) -> None:
    """results.json (null: no number, or not reached), README.md, and a picture of each reward that has curves."""
    found = results(journal)
    out.mkdir(parents=True, exist_ok=True)
    (out / "results.json").write_text(json.dumps(_plain(found), indent=1, allow_nan=False))
    parts = [HEAD.format(budget=journal.settings.budget, command=command, reference=journal.settings.reference)]
    for reward in found:
        parts.append(f"## {reward}\n\n{table(found, reward)}\n")
        if any(row["curves"] for row in found[reward].values()):
            _plot(found[reward], out / f"{reward}.png")
            parts.append(f"![held-out reward on {reward}]({reward}.png)\n")
    if any(len(algorithm.trials) > 1 for algorithm in journal.settings.algorithms.values()):
        parts.append(f"## tuning\n\n{tuning_table(journal)}\n")
    (out / "README.md").write_text("\n".join(parts))


def _plain(found: Any) -> Any:
    """JSON has no NaN and no infinity."""
    if isinstance(found, dict):
        return {key: _plain(value) for key, value in found.items()}
    if isinstance(found, list | tuple):
        return [_plain(value) for value in found]
    return None if isinstance(found, float) and not math.isfinite(found) else found


def tuning_table(journal: Journal) -> str:
    """Reward of every trial on the tuning split, the chosen one in bold; an empty cell where it was not run."""
    lines = ["| algorithm | trial | reward | what it changes |", "|---|---|---|---|"]
    chosen, reached = journal.chosen(), journal.reached()
    for name, algorithm in journal.settings.algorithms.items():
        for number, changes in enumerate(algorithm.trials):
            reward = reached.get(name, {}).get(number)
            shown = "" if reward is None else f"{reward:.3f}"
            if shown and chosen.get(name) == number:
                shown = f"**{shown}**"
            lines.append(f"| {name} | {number} | {shown} | {', '.join(f'`{c}`' for c in changes) or 'nothing'} |")
    return "\n".join(lines)


HEAD = """\
# Algorithms at equal cost

`{command}`

Every run has {budget:,} network evaluations, a forward pass counted as 1 and a backward pass as 2; held-out evaluation
is not counted. Means and 95 % intervals over seeds (Student's t), of a single run over prompts (bootstrap). Evaluations
to a held-out reward: until the mean curve of the seeds reaches it. Times fewer evaluations: to the mean final reward of
{reference}, in place of its own. The intervals of both come from drawing seeds again, too narrow for few seeds; 0
times: not reached within the budget. KL to base: nats per latent element along the tuned model's path. Diversity: mean
distance of two pictures of a prompt in the judge's embedding. Wholly right: the share of pictures of which GenEval
finds everything (strict), or of which every letter is read (exact). Seconds: of training, on a machine with other work.
An empty cell: not run, or not reached. Raw files of every run are beside this page, those of the tuning trials too:
short runs on the tuning split, judged by the held-out reward at their end.
"""


def _plot(rows: dict[str, Any], file: Path) -> None:
    """Held-out reward against evaluations and against seconds, thin a run, bold the mean of an algorithm's runs."""
    from matplotlib import colormaps
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure

    figure = Figure(figsize=(10, 4), layout="constrained")
    FigureCanvasAgg(figure)
    colors = colormaps["tab10"]
    axes = figure.subplots(1, 2, sharey=True)
    for axis, key, label in ((axes[0], "cost", "network evaluations"), (axes[1], "seconds", "seconds of training")):
        for k, (name, row) in enumerate(rows.items()):
            curves = [Curve(**curve) for curve in row["curves"].values()]
            for curve in curves:
                axis.plot(getattr(curve, key), curve.reward, color=colors(k), lw=0.7, alpha=0.4)
            if curves:
                mean = mean_curve(curves)
                axis.plot(getattr(mean, key), mean.reward, color=colors(k), label=name, lw=2, marker=".")
        axis.set_xlabel(label)
        axis.grid(alpha=0.3)
    axes[0].set_ylabel("held-out reward")
    axes[1].legend(fontsize=8)
    figure.savefig(file, dpi=110)
