"""Score a finished run on more pictures: base and tuned weights, equal prompts and seeds, with intervals."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
import yaml

from flowrl_img.checkpoint import latest, load_adapter_tensors
from flowrl_img.config import Config
from flowrl_img.evaluate import Evaluation, evaluate, gain, level
from flowrl_img.needs import Needs
from flowrl_img.parallel import Processes
from flowrl_img.parts import assemble
from flowrl_img.prompts import choose_evenly
from flowrl_img.report import before_after_sheet, summary
from flowrl_img.run import load_model, load_weights

__all__ = ["evaluate_run"]


def evaluate_run(run: Path, *, pictures: int, prompts: str | None = None, threads: int | None = None) -> list[str]:
    """Compare the base with the latest checkpoint of `run`; returns the printed lines.

    Writes `evaluation-<prompts>.json` and a before/after sheet into the run folder. FileNotFoundError if `run` is no
    run folder or holds no complete checkpoint.
    """
    config = _config(run, prompts, threads)
    checkpoint = latest(run)
    parts = assemble(config)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    model = load_model(config, device)
    weights = load_weights(config, model, Needs())
    samples = choose_evenly(parts.held_out, pictures, config.prompts.balance)
    label = "ema" if "ema" in weights.sets else "current"

    def scored() -> Evaluation:
        return evaluate(
            model, parts.held_out, samples, parts.reward, num_steps=config.evaluation.steps,
            guidance=config.evaluation.guidance, batch=config.evaluation.batch, solver=parts.evaluation_solver,
            processes=Processes(), keep=len(samples), report=parts.report,
        )  # fmt: skip

    with weights.use("reference"):
        before = scored()
    load_adapter_tensors(checkpoint, weights, label)
    after = scored()
    name = config.prompts.evaluation.replace("/", "-")
    (run / f"evaluation-{name}.json").write_text(json.dumps(_facts(before, after, checkpoint), indent=1))
    _sheet(run / f"before_after-{name}.png", config, parts.held_out, before, after)
    return [f"{run}: {checkpoint.name}, {len(samples)} paired pictures", *summary(before, after)]


def _config(run: Path, prompts: str | None, threads: int | None) -> Config:
    file = run / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is no run folder: it holds no config.yaml")
    config = Config.model_validate(yaml.safe_load(file.read_text()))
    if threads:
        torch.set_num_threads(threads)
    if prompts is None:
        return config
    return config.model_copy(update={"prompts": config.prompts.model_copy(update={"evaluation": prompts})})


def _facts(before: Evaluation, after: Evaluation, checkpoint: Path) -> dict[str, Any]:
    shared = [c for c in before.columns if c in after.columns]

    def triple(interval: Any) -> list[float]:
        return [round(x, 6) for x in (interval.value, interval.low, interval.high)]

    columns = {
        c: {
            "before": triple(level(before, c)),
            "after": triple(level(after, c)),
            "gain": triple(gain(before, after, c)),
            "by_task": {"before": before.by_tag(c), "after": after.by_tag(c)},
        }
        for c in shared
    }
    return {"checkpoint": checkpoint.name, "pictures": len(before.samples), "columns": columns}


def _sheet(path: Path, config: Config, prompts: Any, before: Evaluation, after: Evaluation) -> None:
    """A sheet of evenly spaced pictures out of all."""
    count = min(config.evaluation.sheet, len(before.samples))
    rows = [k * len(before.samples) // count for k in range(count)] if count else []

    def part(e: Evaluation) -> Evaluation:
        columns = {name: values[rows] for name, values in e.columns.items()}
        return Evaluation(tuple(e.samples[k] for k in rows), tuple(e.tags[k] for k in rows), columns, e.images[rows])

    before_after_sheet(path, prompts, part(before), part(after))
