"""An evaluation as a table: numbers for JSON, Markdown for people, lines for the terminal, a plot over the scale."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from flowrl_img.compare import Comparison
from flowrl_img.evaluate import Evaluation, gain, level
from flowrl_img.intervals import Interval, by_task
from flowrl_img.plot import Point, plot
from flowrl_img.report import summary
from flowrl_img.sheets import Group, contact_sheet

__all__ = ["facts_of", "lines_of", "markdown", "plot_scales", "sheet_of", "shown", "table"]

Intervals = Mapping[str, Any]
"""label -> {"mean": [value, low, high], "minus": {other label: [...]}, "by_task": {task: [...]}, "invalid": n}"""

AGAINST = ("base", "tuned")
DIVERSITY = "diversity inside prompts"
HOW = (
    "Means over tasks of task means; in brackets bootstrap 95 % intervals, resampling prompts with all their pictures. "
    "Differences are paired: same prompts, same seeds. Diversity: mean distance of the thumbnails of two pictures of "
    "one prompt, in [0, 1]."
)


def facts_of(comparison: Comparison, title: str) -> dict[str, Any]:
    """Every number of the table, for JSON; intervals are [value, low, high]."""
    columns = {c: {v.label: _facts(comparison, c, v.label) for v in comparison.variants} for c in _columns(comparison)}
    diversity = {
        v.label: {
            "mean": _triple(comparison.diversity(v.label)),
            "minus": {other: _triple(comparison.diversity(v.label, other)) for other in _others(comparison, v.label)},
        }
        for v in comparison.variants
    }
    return {
        "title": title,
        "settings": dict(comparison.settings),
        "pictures": len(comparison.samples),
        "prompts": len({s.prompt for s in comparison.samples}),
        "variants": {v.label: [str(scale) for scale in v.scales] for v in comparison.variants},
        "columns": columns,
        "diversity": diversity,
    }


def _facts(comparison: Comparison, column: str, label: str) -> dict[str, Any]:
    evaluation = comparison.evaluations[label]
    tasks = by_task(evaluation.columns[column], evaluation.tags, [s.prompt for s in evaluation.samples])
    others = _others(comparison, label)
    return {
        "mean": _triple(level(evaluation, column)),
        "minus": {o: _triple(gain(comparison.evaluations[o], evaluation, column)) for o in others},
        "by_task": {task: _triple(interval) for task, interval in tasks.items()},
        "invalid": int(np.isnan(evaluation.columns[column]).sum()),
    }


def _columns(comparison: Comparison) -> list[str]:
    """Columns that every variant has, the reward and the further rewards first."""
    found = [set(e.columns) for e in comparison.evaluations.values()]
    return sorted(set.intersection(*found), key=lambda c: (c != "reward", not c.startswith("report/"), c))


def _others(comparison: Comparison, label: str) -> list[str]:
    return [other for other in AGAINST if other != label and other in comparison.evaluations]


def _triple(interval: Interval) -> list[float | None]:
    return [None if np.isnan(x) else round(x, 6) for x in (interval.value, interval.low, interval.high)]


def markdown(facts: Mapping[str, Any], *, details: bool = True) -> str:
    """The table for people. details: the columns a reward adds to its score, too."""
    evaluation = facts["settings"]["evaluation"]
    parts = [
        f"# Evaluation: {facts['title']}",
        f"{facts['pictures']} pictures of {facts['prompts']} prompts ({facts['settings']['prompts']}) for each "
        f"variant, {evaluation['steps']} steps, guidance {evaluation['guidance']:g}, base {facts['settings']['base']}. "
        f"{HOW}",
    ]
    for column, rows in facts["columns"].items():
        if column != "reward" and _same(rows, facts["columns"]["reward"]):
            continue  # a single reward is its own sum
        if details or column == "reward" or column.startswith("report/"):
            parts += [f"## {column}", _overall(rows), _tasks(rows)]
    diverse = any(row["mean"][0] is not None for row in facts["diversity"].values())
    parts += [f"## {DIVERSITY}", _overall(facts["diversity"]) if diverse else "No prompt has two pictures."]
    return "\n\n".join(part for part in parts if part) + "\n"


def _same(rows: Intervals, others: Intervals) -> bool:
    return all(rows[label]["mean"] == others[label]["mean"] for label in rows)


def _overall(rows: Intervals) -> str:
    against = [other for other in AGAINST if any(other in row["minus"] for row in rows.values())]
    digits = _digits(row["mean"] for row in rows.values())
    body = [
        [label, shown(row["mean"], digits), *(shown(row["minus"].get(o), digits, sign="+") for o in against)]
        for label, row in rows.items()
    ]
    missing = [row.get("invalid", 0) for row in rows.values()]
    if any(missing):
        body = [[*line, str(count)] for line, count in zip(body, missing, strict=True)]
    return table(["", "mean", *(f"minus {o}" for o in against), *(["invalid"] if any(missing) else [])], body)


def _tasks(rows: Intervals) -> str:
    tasks = list(next(iter(rows.values()))["by_task"])
    if len(tasks) < 2:
        return ""
    digits = _digits(row["mean"] for row in rows.values()) - 1
    body = [[label, *(shown(row["by_task"][task], digits) for task in tasks)] for label, row in rows.items()]
    return table(["", *(task or "none" for task in tasks)], body)


def table(head: Sequence[str], body: Sequence[Sequence[str]]) -> str:
    """Markdown."""
    lines = [head, ["---"] * len(head), *body]
    return "\n".join("| " + " | ".join(cell.replace("|", "\\|") for cell in line) + " |" for line in lines)


def _digits(triples: Iterable[Sequence[float | None]]) -> int:
    """Decimals that show a ten thousandth of the largest value, at least four."""
    largest = max((abs(t[0]) for t in triples if t[0]), default=1.0)
    return max(4, min(9, 3 - math.floor(math.log10(largest))))


def shown(triple: Sequence[float | None] | None, digits: int = 4, sign: str = "") -> str:
    """`0.8123 [0.8000, 0.8240]`, or a dash where there is nothing."""
    if triple is None or triple[0] is None:
        return "-"
    value, low, high = (f"{x:{sign}.{digits}f}" for x in triple)
    return f"{value} [{low}, {high}]"


def lines_of(comparison: Comparison, title: str) -> list[str]:
    """For the terminal: base against tuned on every column, then the reward of every other variant."""
    found = comparison.evaluations
    lines = [f"{title}, {len(comparison.samples)} paired pictures"]
    if set(AGAINST) <= set(found):
        lines += summary(found["base"], found["tuned"])
    for variant in comparison.variants:
        if set(AGAINST) <= set(found) and variant.label in AGAINST:
            continue
        line = f"{variant.label}: held-out reward {_level(found[variant.label])}"
        for other in _others(comparison, variant.label):
            line += f", minus {other} {gain(found[other], found[variant.label])}"
        lines.append(line)
    return lines


def _level(evaluation: Evaluation) -> str:
    return shown(_triple(level(evaluation)))


def plot_scales(path: Path, comparison: Comparison) -> bool:
    """A plot over the scale of the reward, the further rewards and the diversity. False: too few constant scales."""
    points = sorted((v.weight, v.label) for v in comparison.variants if v.weight is not None)
    if len(points) < 3:
        return False
    shown = [c for c in _columns(comparison) if c == "reward" or c.startswith("report/")]
    panels = {c: [Point(w, *_interval(level(comparison.evaluations[v], c))) for w, v in points] for c in shown}
    panels[DIVERSITY] = [Point(w, *_interval(comparison.diversity(v))) for w, v in points]
    plot("scale w (0 base, 1 tuned)", {name: p for name, p in panels.items() if all(np.isfinite(q.y) for q in p)}).save(
        path
    )
    return True


def _interval(interval: Interval) -> tuple[float, float, float]:
    return interval.value, interval.low, interval.high


def sheet_of(comparison: Comparison, path: Path) -> None:
    """The pictures of the sheet, a row of variants for each prompt, with their rewards."""
    labels = [v.label for v in comparison.variants]
    places = {s.id: k for k, s in enumerate(comparison.samples)}
    groups = [
        Group(
            [comparison.evaluations[label].images[k] for label in labels],
            (
                comparison.prompts.texts[sample.prompt],
                "reward "
                + " | ".join(f"{comparison.evaluations[v].columns['reward'][places[sample.id]]:.2f}" for v in labels),
            ),
        )
        for k, sample in enumerate(comparison.sheet)
    ]
    if groups:
        contact_sheet("same prompt and same seed in each group", groups, labels, cell=128).save(path)
