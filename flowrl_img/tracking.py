"""Metrics in TensorBoard or Weights & Biases, besides the run folder's own files, by accelerate's trackers.

Left out: pictures, gradients and hyper-parameter tables; the run folder holds the pictures and the configuration.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from flowrl_img.config import Config

__all__ = ["Tracker", "check_tracker", "open_tracker"]

PROJECT = "flowrl-img"
NAMESPACES: Mapping[str, str] = {"metrics.jsonl": "train", "evaluations.jsonl": "held_out"}


@dataclass(frozen=True)
class Tracker:
    """Sends rows of the run's files on. target: one of `accelerate.tracking`; None sends nothing.

    Example: `log("metrics.jsonl", {"update": 3, "reward": 0.4, "seconds": {"sampling": 2.0}})` logs `train/reward` and
    `train/seconds/sampling` at step 3.
    """

    target: Any = None

    def log(self, file: str, row: Mapping[str, Any]) -> None:
        """The numbers of a row of `file`, named `namespace/key`, at step `row["update"]`."""
        if self.target is None:
            return
        values = {name: value for key, entry in row.items() if key != "update" for name, value in _numbers(key, entry)}
        self.target.log({f"{NAMESPACES[file]}/{name}": value for name, value in values.items()}, step=row["update"])

    def close(self) -> None:
        """Write out what is left and end the tracker's run."""
        if self.target is not None:
            self.target.finish()


def check_tracker(name: str) -> None:
    """ValueError when the package behind `run.tracker` is not installed."""
    if name != "none" and importlib.util.find_spec(name) is None:
        raise ValueError(f"run.tracker = {name!r}: the package is missing; pip install {name}, or set run.tracker=none")


def open_tracker(config: Config, folder: Path, *, enabled: bool = True) -> Tracker:
    """The tracker that `config.run.tracker` names, writing into the run folder. enabled: only in the main process.

    ValueError when its package is missing or it cannot start.
    """
    name = config.run.tracker
    check_tracker(name)
    start = _STARTS[name] if enabled else _none
    return Tracker(start(config, folder))


def _numbers(name: str, entry: Any) -> Iterator[tuple[str, float]]:
    """The numbers in nested mappings by their joined keys; texts and nulls have no curve."""
    if isinstance(entry, Mapping):
        for key, inner in entry.items():
            yield from _numbers(f"{name}/{key}", inner)
    elif isinstance(entry, (int, float)):
        yield name, float(entry)


def _none(config: Config, folder: Path) -> None:
    """metrics.jsonl is enough."""


def _tensorboard(config: Config, folder: Path) -> Any:
    """Event files in the run folder itself, so that TensorBoard calls the run by its folder."""
    from accelerate.tracking import TensorBoardTracker

    return _started(TensorBoardTracker("", logging_dir=folder))


def _wandb(config: Config, folder: Path) -> Any:
    import wandb
    from accelerate.tracking import WandBTracker

    try:
        return _started(WandBTracker(PROJECT, name=folder.name, dir=str(folder), config=config.model_dump(mode="json")))
    except wandb.Error as error:
        raise ValueError(
            f"run.tracker = 'wandb': {error}; run `wandb login`, set WANDB_MODE=offline, or set run.tracker=none"
        ) from error


def _started(tracker: Any) -> Any:
    import torch
    from accelerate import PartialState

    PartialState(cpu=not torch.cuda.is_available())  # trackers ask it for the rank; keeps the state that a launch made
    tracker.start()
    return tracker


_STARTS: Mapping[str, Callable[[Config, Path], Any]] = {"none": _none, "tensorboard": _tensorboard, "wandb": _wandb}
