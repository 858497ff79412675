"""Held-out reward over the strength of the tuning, for one or more runs, as a table and a picture.

    python scripts/rlg_table.py flow-grpo=runs/A nft=runs/B --to docs/results

Writes `rlg.md` and `rlg.png` into the folder. Each run is evaluated by `flowrl-img evaluate` in its own folder
(`RUN/evaluation-rlg`), which keeps every scored picture: a stopped table goes on where it was.
"""

from __future__ import annotations

import argparse
import json
import math
import sys
from pathlib import Path
from typing import Any

from flowrl_img.measure import Ask, evaluate_sources
from flowrl_img.plot import Point, plot
from flowrl_img.tables import shown, table

SCALES = "0,0.5,1,1.5,2,3"


def main(arguments: list[str]) -> None:
    """Evaluate every run and write the two files."""
    asked = _parse(arguments)
    tables = {}
    for name, run in (word.split("=", 1) for word in asked.runs):
        out = Path(run) / "evaluation-rlg"
        ask = Ask("pico", asked.pictures, asked.scales, asked.prompts, tuple(asked.reward), out, asked.threads)
        print(f"{name}: {run}", flush=True)
        for line in evaluate_sources([run, *asked.change], ask, _said):
            print(line, flush=True)
        tables[name] = json.loads((out / "table.json").read_text())
    asked.to.mkdir(parents=True, exist_ok=True)
    (asked.to / "rlg.md").write_text(report(tables))
    plot("scale w (0 base, 1 tuned)", panels(tables)).save(asked.to / "rlg.png")
    print(f"{asked.to / 'rlg.md'} and {asked.to / 'rlg.png'}")


def _parse(arguments: list[str]) -> Any:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("runs", nargs="+", metavar="NAME=RUN", help="a name for the table and a run folder")
    parser.add_argument("--to", type=Path, required=True, help="folder of rlg.md and rlg.png")
    parser.add_argument("--pictures", type=int, default=1200, help="for each run and scale")
    parser.add_argument("--scales", default=SCALES)
    parser.add_argument("--prompts", help="prompt file; default: the evaluation prompts of each run")
    parser.add_argument("--reward", action="append", default=[], help="a further reward to report; repeatable")
    parser.add_argument(
        "--change", action="append", default=[], metavar="KEY=VALUE", help="of every run's configuration"
    )
    parser.add_argument("--threads", type=int)
    found = parser.parse_args(arguments)
    if wrong := [word for word in found.runs if "=" not in word]:
        parser.error(f"{wrong[0]!r}: write NAME=RUN")
    return found


def _said(done: int, total: int) -> None:
    print(f"\r{done} of {total}", end="\n" if done == total else "", file=sys.stderr, flush=True)


def report(tables: dict[str, Any]) -> str:
    """One table for each run: reward, paired differences to base and tuned, further rewards, diversity."""
    parts = ["# Held-out reward over the strength of the tuning", HOW]
    for name, facts in tables.items():
        evaluation = facts["settings"]["evaluation"]
        reported = [c for c in facts["columns"] if c.startswith("report/")]
        parts.append(f"## {name}")
        parts.append(
            f"{facts['pictures']} pictures of {facts['prompts']} prompts ({facts['settings']['prompts']}) for each "
            f"scale, {evaluation['steps']} steps, guidance {evaluation['guidance']:g}."
        )
        head = ["w", "reward", "minus base", "minus tuned", *reported, "diversity"]
        parts.append(table(head, [_line(facts, label, reported) for label in facts["variants"]]))
    return "\n\n".join([*parts, "![reward over the scale](rlg.png)"]) + "\n"


HOW = (
    "w = 0 is the base, w = 1 the tuned model. Means over tasks; in brackets bootstrap 95 % intervals over prompts; "
    "differences are paired by prompt and seed. An interval that does not hold 0 is a difference beyond chance."
)


def _line(facts: dict[str, Any], label: str, reported: list[str]) -> list[str]:
    reward = facts["columns"]["reward"][label]
    others = [facts["columns"][column][label]["mean"] for column in reported]
    return [
        "/".join(facts["variants"][label]), shown(reward["mean"]),
        *(shown(reward["minus"].get(other), sign="+") for other in ("base", "tuned")),
        *map(shown, others), shown(facts["diversity"][label]["mean"]),
    ]  # fmt: skip


def panels(tables: dict[str, Any]) -> dict[str, list[Point]]:
    """The reward of each run over its constant scales."""
    found = {}
    for name, facts in tables.items():
        rows = facts["columns"]["reward"]
        points = [(_number(scales), rows[label]["mean"]) for label, scales in facts["variants"].items()]
        found[name] = [Point(w, *mean) for w, mean in sorted(p for p in points if not math.isnan(p[0]))]
    return found


def _number(scales: list[str]) -> float:
    """The constant scale of one tuned model, NaN for everything else."""
    try:
        return float(scales[0]) if len(scales) == 1 else math.nan
    except ValueError:
        return math.nan


if __name__ == "__main__":
    main(sys.argv[1:])
