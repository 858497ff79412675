"""The folder of a run: made, taken up again, and written to.

FOLDER/
    config.yaml  versions.json  rewards.json      what fixes the run
    metrics.jsonl  evaluations.jsonl              a row an update, a row a held-out evaluation
    checkpoint-<update>/  before_after.png  summary.txt
"""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

from flowrl_img import recipes
from flowrl_img.checkpoint import MANIFEST, latest
from flowrl_img.config import Config
from flowrl_img.parallel import Processes
from flowrl_img.parts import RunParts
from flowrl_img.rewards import registry

__all__ = ["append", "open_folder", "release", "rows_of", "writing"]

VERSIONS = ("flowrl-img", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow")


def open_folder(config: Config, parts: RunParts, processes: Processes) -> Path:
    """Make the run folder and write what fixes the run; OSError says why it cannot be written."""
    name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run.folder) if config.run.folder else Path("runs") / name
    folder = Path(processes.gather(str(folder))[0])
    if not processes.is_main:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "metrics.jsonl").exists():
            _take_up(folder, config)
        (folder / "config.yaml").write_text(recipes.to_yaml(config))
        (folder / "versions.json").write_text(json.dumps(_versions(), indent=1))
        (folder / "rewards.json").write_text(json.dumps(_rewards(config, parts), indent=1))
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise OSError(
            f"run.folder: cannot write to {folder}: {error.strerror}; free space or choose another folder"
        ) from error
    return folder


def _take_up(folder: Path, config: Config) -> None:
    """Go on in a folder that holds the run of `run.resume`: rows after its checkpoint are trained again, so they go."""
    source = latest(Path(config.run.resume)) if config.run.resume else None
    if source is None or folder.resolve() not in source.resolve().parents:
        raise ValueError(f"run.folder: {folder} already holds a run; choose another folder")
    update = json.loads((source / MANIFEST).read_text())["update"]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        file = folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        # A killed run may have left the beginning of a row.
        whole = [line for line in lines if line.endswith("\n") and json.loads(line)["update"] <= update]
        if whole != lines:
            file.write_text("".join(whole))


def _rewards(config: Config, parts: RunParts) -> dict[str, dict[str, Any]]:
    """By column, what each reward is made of: enough to score again as this run did."""
    record = {
        part.scorer.label: registry.describe(r.section(), part.scorer.reward)
        | {"weight": r.weight, "transforms": r.model_dump(mode="json")["transforms"]}
        for r, part in zip(config.rewards, parts.reward.parts, strict=True)
    }
    for r, (label, scorer) in zip(config.report_rewards, parts.report.items(), strict=True):
        record[f"report/{label}"] = registry.describe(r.section(), scorer.reward)
    return record


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


def release(folder: Path) -> None:
    """A folder in which nothing was trained or evaluated is free for the next try."""
    metrics = folder / "metrics.jsonl"
    if metrics.is_file() and not metrics.stat().st_size and not any(folder.glob("checkpoint-*")):
        metrics.unlink()


def append(folder: Path, name: str, row: dict[str, Any]) -> None:
    """Add a row to one of the folder's .jsonl files."""
    with (folder / name).open("a") as file:
        file.write(json.dumps(row) + "\n")


def rows_of(folder: Path, name: str) -> list[dict[str, Any]]:
    """The rows of one of the folder's .jsonl files; none where it is not there."""
    file = folder / name
    return [json.loads(line) for line in file.read_text().splitlines()] if file.is_file() else []


@contextmanager
def writing(folder: Path) -> Iterator[None]:
    """Tells a full disk, or one that is gone, in one OSError that names the run folder."""
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors tells a full disk in an error of its own
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write to {folder}: {reason}; what was written before is complete") from error
