"""The journal of a comparison: one folder for each run, so that a stopped comparison goes on.

FOLDER/<reward>/<algorithm>/<seed|trial>/
    config.yaml  metrics.jsonl  evaluations.jsonl  ...   the run's own files; of its checkpoints the last
    measured.json    base against tuned; its presence says that the run is complete
FOLDER/tuned.json    which trial of each algorithm was chosen, and what all of them reached
"""

from __future__ import annotations

import fcntl
import json
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from flowrl_img import recipes
from flowrl_img.checkpoint import latest
from flowrl_img.comparison.settings import Cell, Settings
from flowrl_img.config import Config

__all__ = ["Journal"]

TUNED_ON, TUNING_SEED = "geneval", 100

Run = Callable[[Path], None]
"""Trains the configuration of a recipe file."""
Measure = Callable[[Path], Mapping[str, Any]]
"""What is measured of a finished run folder."""


class Journal:
    """Runs cells that are not there yet. Example: `Journal(folder, settings).run(cell, measure)`."""

    def __init__(self, folder: Path, settings: Settings) -> None:
        self.folder, self.settings = folder, settings

    def place(self, cell: Cell) -> Path:
        return self.folder / cell.id

    def done(self, cell: Cell) -> bool:
        return (self.place(cell) / "measured.json").is_file()

    def config(self, cell: Cell) -> Config:
        """Of a trial, its own changes; of a run, those of the chosen trial."""
        trials = self.settings.algorithms[cell.algorithm].trials
        number = self.chosen().get(cell.algorithm, 0) if cell.trial is None else cell.trial
        return cell.config(self.settings, trials[number], self.place(cell))

    def run(self, cell: Cell, measure: Measure, train: Run | None = None) -> Mapping[str, Any] | None:
        """Train and measure unless it is done; None while another process is at it, so several share the work.

        An interrupted attempt goes on from its last checkpoint, or is thrown away if it has none or was another run.
        """
        place = self.place(cell)
        with _claimed(place) as ours:
            if not ours:
                return None
            if not self.done(cell):
                self._run(cell, measure, train or _train)
        return json.loads((place / "measured.json").read_text())

    def _run(self, cell: Cell, measure: Measure, train: Run) -> None:
        place, config = self.place(cell), self.config(cell)
        if _left_off(place, config):
            config = config.model_copy(update={"run": config.run.model_copy(update={"resume": str(place)})})
        else:
            shutil.rmtree(place, ignore_errors=True)
        recipe = place.with_suffix(".yaml")
        recipe.write_text(recipes.to_yaml(config))
        train(recipe)
        found = dict(measure(place))
        for checkpoint in sorted(place.glob("checkpoint-*"))[:-1]:
            shutil.rmtree(checkpoint)
        recipe.unlink()
        if (output := recipe.with_suffix(".log")).is_file():
            output.rename(place / "output.log")
        partial = place / "measured.json.part"
        partial.write_text(json.dumps(found, indent=1))
        partial.rename(place / "measured.json")

    def trials(self) -> list[Cell]:
        """The tuning runs of every algorithm."""
        return [
            Cell(TUNED_ON, name, TUNING_SEED, trial)
            for name, algorithm in self.settings.algorithms.items()
            for trial in range(len(algorithm.trials))
        ]

    def reached(self) -> dict[str, dict[int, float]]:
        """Reward on the tuning split of every trial that is done, by algorithm and trial."""
        found: dict[str, dict[int, float]] = {}
        for cell in self.trials():
            if cell.trial is not None and self.done(cell):
                measured = json.loads((self.place(cell) / "measured.json").read_text())
                found.setdefault(cell.algorithm, {})[cell.trial] = measured["after"]["reward"][0]
        return found

    def choose(self) -> dict[str, int]:
        """The trial of each algorithm with the best reward on the tuning split, among those that are done."""
        rows = {
            name: {"chosen": max(rewards, key=lambda k: rewards[k]), "reward": rewards,
                   "changes": [list(t) for t in self.settings.algorithms[name].trials]}
            for name, rewards in self.reached().items()
        }  # fmt: skip
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "tuned.json").write_text(json.dumps(rows, indent=1))
        return self.chosen()

    def chosen(self) -> dict[str, int]:
        """Chosen trials by algorithm; empty before tuning."""
        file = self.folder / "tuned.json"
        return {name: row["chosen"] for name, row in json.loads(file.read_text()).items()} if file.is_file() else {}


def _left_off(place: Path, config: Config) -> bool:
    """Whether `place` has a checkpoint of the run of `config` to go on from."""
    try:
        latest(place)
        began = recipes.load(str(place / "config.yaml"), ["run.resume=null"])
    except (OSError, ValueError):
        return False
    return began == config


@contextmanager
def _claimed(place: Path) -> Iterator[bool]:
    """Whether this process may write to `place`; the claim ends with the block, and with the process."""
    place.parent.mkdir(parents=True, exist_ok=True)
    lock = place.with_suffix(".lock")
    with lock.open("w") as handle:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            yield False
            return
        yield True
        lock.unlink(missing_ok=True)


def _train(recipe: Path) -> None:
    """In a process of its own, so that runs cannot disturb each other. RuntimeError with the end of its output."""
    command = [sys.executable, "-m", "flowrl_img", "train", str(recipe)]
    done = subprocess.run(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)
    recipe.with_suffix(".log").write_text(done.stdout)
    if done.returncode:
        raise RuntimeError(f"{recipe.stem} ended with code {done.returncode}:\n{done.stdout[-2000:]}")
