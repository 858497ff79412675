"""`flowrl-img export`: a run's tuned weights as files for other programs, proven to load there, with a model card."""

from __future__ import annotations

import re
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from flowrl_img import recipes
from flowrl_img.checkpoint import latest, load_adapter_tensors, save_adapter
from flowrl_img.config import Config
from flowrl_img.export.card import MADE_BY, write_card
from flowrl_img.export.comfyui import to_comfyui
from flowrl_img.export.merge import merge
from flowrl_img.export.verify import Expected, Job, VerificationError, expect, verify
from flowrl_img.folders import writable
from flowrl_img.loading import DTYPES, load_model, load_weights, model_source
from flowrl_img.lora import read_lora
from flowrl_img.needs import Needs
from flowrl_img.plugins import nearest
from flowrl_img.prompts import load_prompts
from flowrl_img.sources import LORA_NAME
from flowrl_img.weights import WeightSets

__all__ = ["FORMATS", "Ask", "export_run"]

FORMATS = ("lora", "comfyui", "merged")
SETS = ("ema", "current")
COMFYUI_FAMILIES = {"sd3": "comfyui_sd3"}


@dataclass(frozen=True)
class Ask:
    """formats: of FORMATS, empty for what the run has; weights: "ema", "current" or None for the run's best."""

    out: Path | None = None
    formats: tuple[str, ...] = ()
    weights: str | None = None
    dtype: str = "fp32"
    """of merged weights"""
    verify: bool = True
    overwrite: bool = False

    def __post_init__(self) -> None:
        for name, value, valid in (("--weights", self.weights, SETS), ("--dtype", self.dtype, DTYPES)):
            if value is not None and value not in valid:
                raise ValueError(f"{name} {value!r}: {nearest(value, valid)}")
        for value in self.formats:
            if value not in FORMATS:
                raise ValueError(f"--format {value!r}: {nearest(value, FORMATS)}")


def export_run(run: Path, ask: Ask) -> Iterator[str]:
    """Export the latest checkpoint of `run`; yields the lines to print.

    Everything is written to a folder beside the final one, which takes its name when every check has passed.
    VerificationError leaves it there. Wrong input is a ValueError or OSError before a model is loaded.
    """
    config, checkpoint = _config(run), latest(run)
    formats = _formats(config, ask)
    label = _weight_set(config, ask)
    out = ask.out or run / "export"
    _check_free(out, ask.overwrite)
    if "comfyui" in formats:
        to_comfyui(read_lora(checkpoint / "adapter" / LORA_NAME).pairs)  # refuses a module without a name there
    source = model_source(config.model.path)
    prompt = load_prompts(config.prompts.evaluation).texts[0]
    part = writable(out.with_name(f".{out.name}.part"), "--out")
    shutil.rmtree(part)
    part.mkdir()

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    exact = config.model_copy(update={"model": config.model.model_copy(update={"dtype": "fp32"})})
    model = load_model(exact, device)
    weights = load_weights(exact, model, Needs())
    load_adapter_tensors(checkpoint, weights, label)
    expected = expect(model, weights, prompt, config.evaluation.steps, config.evaluation.guidance)
    notes = [f"{label} weights of {checkpoint.name}; the largest change of the fixed output is {expected.effect:.1e}"]
    files, jobs = _write(part, config, model, weights, expected, formats, ask, notes)
    yield from notes
    if ask.verify:
        checks = verify(source, jobs, expected, device)
        if failed := [str(check) for check in checks if check.problem]:
            raise VerificationError("\n".join([*failed, f"what was written is in {part}"]))
        notes += map(str, checks)
        yield from map(str, checks)
    else:
        notes.append("not verified")
    evaluation = config.evaluation
    call = {"prompt": prompt, **model.stock_call(evaluation.steps, evaluation.guidance)}
    write_card(part, run, config, call, files, notes)
    if out.exists():
        shutil.rmtree(out)
    part.rename(out)
    yield f"exported to {out}: {', '.join(sorted(files.values()))}"


def _check_free(out: Path, overwrite: bool) -> None:
    """FileExistsError where `out` is there and may not be replaced: --overwrite replaces exports and empty folders."""
    if not out.exists():
        return
    if not overwrite:
        raise FileExistsError(f"{out} is there already: give another folder with --out, or --overwrite")
    card = out / "README.md"
    made = card.is_file() and MADE_BY in card.read_text(encoding="utf-8", errors="replace")
    if not out.is_dir() or (any(out.iterdir()) and not made):
        raise FileExistsError(f"{out} holds no earlier export, so it is not replaced: give another folder with --out")


def _config(run: Path) -> Config:
    file = run / "config.yaml"
    if not file.is_file():
        raise FileNotFoundError(f"{run} is no run folder: it holds no config.yaml")
    return recipes.load(str(file))


def _formats(config: Config, ask: Ask) -> tuple[str, ...]:
    kind, family = config.weights.kind, config.model.family
    formats = tuple(dict.fromkeys(ask.formats)) or (("lora",) if kind == "lora" else ("merged",))
    if kind != "lora" and (wrong := [f for f in formats if f != "merged"]):
        raise ValueError(f"--format {wrong[0]}: this run trained all weights, so it has no LoRA; use --format merged")
    if "comfyui" in formats and family not in COMFYUI_FAMILIES:
        raise ValueError(f"--format comfyui: not for family {family!r}, only for {', '.join(COMFYUI_FAMILIES)}")
    return formats


def _weight_set(config: Config, ask: Ask) -> str:
    best = "ema" if config.weights.ema is not None else "current"
    if ask.weights == "ema" and best != "ema":
        raise ValueError("--weights ema: this run kept no average (weights.ema is null); use --weights current")
    return ask.weights or best


def _write(
    part: Path, config: Config, model: Any, weights: WeightSets, expected: Expected, formats: Sequence[str], ask: Ask,
    notes: list[str],
) -> tuple[dict[str, str], list[Job]]:  # fmt: skip
    """Write every format; returns the files by format, and what to verify. Merging is last: it changes the network."""
    files, jobs = {}, []
    if "lora" in formats or "comfyui" in formats:
        save_adapter(part, model, weights.network)
        files["lora"] = LORA_NAME
        jobs.append(Job("lora", "lora", part / LORA_NAME))
    if "comfyui" in formats:
        from safetensors.torch import save_file

        (part / "comfyui").mkdir()
        name = re.sub(r"[^\w.-]+", "-", config.name)
        files["comfyui"] = f"comfyui/{name}.safetensors"
        tensors = to_comfyui(read_lora(part / LORA_NAME).pairs)
        save_file(tensors, part / files["comfyui"], metadata={"format": "pt", "base": config.model.path})
        jobs.append(Job("comfyui", COMFYUI_FAMILIES[config.model.family], part / files["comfyui"]))
    if "merged" in formats:
        merged = merge(weights.network, part, expected, DTYPES[ask.dtype])
        notes.append(str(merged))
        files["merged"] = "transformer"
        jobs.append(Job("merged", "network", part, None if ask.dtype == "fp32" else merged.tuned))
    return files, jobs
