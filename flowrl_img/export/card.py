"""The model card of an export: what it is, what it was trained on, how far it got, and how to load it."""

from __future__ import annotations

import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from flowrl_img import __version__
from flowrl_img.config import Config
from flowrl_img.loading import model_source
from flowrl_img.plot import Point, plot
from flowrl_img.prompts import load_prompts
from flowrl_img.run_folder import rows_of
from flowrl_img.tables import markdown

__all__ = ["MADE_BY", "licence_of", "write_card"]

MADE_BY = "Made by flowrl-img"
CURVE, BEFORE_AFTER = "curve.png", "before_after.png"
UNKNOWN = "unknown"


def write_card(
    folder: Path, run: Path, config: Config, call: dict[str, Any], formats: dict[str, str], notes: Sequence[str]
) -> None:
    """Write README.md, the curve and the before/after pictures into `folder`.

    call: arguments of the stock pipeline for one picture; formats: file or folder by name of the format; notes: lines
    on how the files were checked.
    """
    curve = _curve(run, folder / CURVE)
    pictures = (run / BEFORE_AFTER).is_file()
    if pictures:
        shutil.copyfile(run / BEFORE_AFTER, folder / BEFORE_AFTER)
    licence = licence_of(config.model.path)
    parts = [
        _head(config, licence),
        f"# {config.name}",
        f"{config.description or 'Tuned by reinforcement learning'}. {MADE_BY} {__version__}.",
        _facts(config, run, licence),
        _results(config, run),
        *([f"![reward over updates]({CURVE})"] if curve else []),
        *([f"![the same prompts and seeds, before and after]({BEFORE_AFTER})"] if pictures else []),
        "## Loading",
        *_loading(config, call, formats),
        "## Checks",
        "\n".join(f"- {note}" for note in notes),
    ]
    (folder / "README.md").write_text("\n\n".join(part for part in parts if part) + "\n")


def licence_of(base: str) -> str:
    """The `license` that the base's own card states, from its folder or the hub's cache; nothing is downloaded."""
    if base == "pico":
        return "apache-2.0"
    card = Path(base) / "README.md"
    if not Path(base).is_dir():
        from huggingface_hub import try_to_load_from_cache

        cached = try_to_load_from_cache(base, "README.md")
        card = Path(cached) if isinstance(cached, str) else card
    if not card.is_file():
        return UNKNOWN
    before, fence, _ = card.read_text(encoding="utf-8").removeprefix("---\n").partition("\n---")
    try:
        head = yaml.safe_load(before) if fence else {}
    except yaml.YAMLError:
        return UNKNOWN
    found = head if isinstance(head, dict) else {}
    return str(found.get("license_name") or found.get("license") or UNKNOWN)


def _head(config: Config, licence: str) -> str:
    """What the hub reads."""
    facts = {
        **(
            {"base_model": config.model.path}
            if "/" in config.model.path and not Path(config.model.path).exists()
            else {}
        ),
        "library_name": "diffusers",
        "pipeline_tag": "text-to-image",
        "license": "other" if licence == UNKNOWN else licence,
        "tags": ["text-to-image", "reinforcement-learning", *(["lora"] if config.weights.kind == "lora" else [])],
    }
    return f"---\n{yaml.safe_dump(facts, sort_keys=False)}---"


def _facts(config: Config, run: Path, licence: str) -> str:
    rewards = ", ".join(f"{r.weight:g} x {r.name}" if r.weight != 1 else r.name for r in config.rewards)
    last = rows_of(run, "metrics.jsonl")[-1:]
    weights = config.weights
    stated = "not stated by it where this card was made: look it up" if licence == UNKNOWN else licence
    rows = [
        ("base", config.model.path),
        ("licence of the base", stated),
        (
            "weights",
            f"LoRA, rank {weights.lora.rank}, alpha {weights.lora.alpha:g}" if weights.kind == "lora" else "full",
        ),
        ("method", config.objective.name),
        ("reward", rewards),
        ("prompts", f"{config.prompts.train} ({_count(config.prompts.train)})"),
        ("held-out prompts", config.prompts.evaluation),
        ("optimizer updates", str(last[0]["update"]) if last else "-"),
        ("resolution", str(config.model.resolution)),
    ]
    return "\n".join(["| | |", "|---|---|", *(f"| {name} | {value} |" for name, value in rows)])


def _count(prompts: str) -> str:
    try:
        return f"{len(load_prompts(prompts))} prompts"
    except OSError:  # the card can be written where the data is not
        return "not at hand"


def _results(config: Config, run: Path) -> str:
    """The last lines of the run, and the tables of its evaluations without their details."""
    summary = run / "summary.txt"
    lines = summary.read_text().splitlines() if summary.is_file() else []
    parts = ["\n".join(f"- {line}" for line in lines if line.startswith("held-out"))]
    for table in sorted(run.glob("evaluation-*/table.json")):
        facts = {**json.loads(table.read_text()), "title": config.name}  # the path of the run says nothing elsewhere
        shifted = (
            f"##{line}" if line.startswith("#") else line for line in markdown(facts, details=False).splitlines()
        )
        parts.append("\n".join(shifted).strip())
    return "\n\n".join(["## Results", *parts]) if any(parts) else ""


def _curve(run: Path, file: Path) -> bool:
    """Plot the training reward and the held-out reward over updates; False where there is nothing to plot."""
    training = [(row["update"], row["reward"]) for row in rows_of(run, "metrics.jsonl") if "reward" in row]
    held_out = [(row["update"], row["means"]["reward"]) for row in rows_of(run, "evaluations.jsonl")]
    panels = {"training reward": training, "held-out reward": held_out}
    drawn = {name: [Point(x, y, y, y) for x, y in points] for name, points in panels.items() if len(points) > 1}
    if drawn:
        plot("optimizer updates", drawn).save(file)
    return bool(drawn)


def _loading(config: Config, call: dict[str, Any], formats: dict[str, str]) -> list[str]:
    """Code and instructions for each format."""
    import diffusers

    base = config.model.path
    pipeline = diffusers.DiffusionPipeline.load_config(model_source(base))
    family = pipeline["_class_name"]
    optional = getattr(getattr(diffusers, family), "_optional_components", [])
    absent = "".join(f", {n}=None" for n, entry in pipeline.items() if entry == [None, None] and n not in optional)
    given = 'str(asset("pico"))' if base == "pico" else repr(base)
    asked = "".join(f", {name}={value!r}" for name, value in call.items() if name != "prompt")
    draw = f"picture = pipeline({call['prompt']!r}{asked}).images[0]"
    where = ["from flowrl_img.resources import asset"] if base == "pico" else []
    folder = ["", 'folder = "."  # this folder, or its id on the hub']
    parts = []
    if "lora" in formats:
        load = f"pipeline = {family}.from_pretrained({given}{absent})"
        code = [f"from diffusers import {family}", *where, *folder, load, "pipeline.load_lora_weights(folder)", draw]
        parts += [_code(code), GUIDANCE]
    if "comfyui" in formats:
        parts.append(f"ComfyUI: put `{formats['comfyui']}` into `models/loras` and load it with its LoRA loader.")
    if "merged" in formats:
        load = f"pipeline = {family}.from_pretrained({given}, transformer=tuned{absent})"
        tuned = 'tuned = AutoModel.from_pretrained(folder, subfolder="transformer")'
        parts.append(_code([f"from diffusers import AutoModel, {family}", *where, *folder, tuned, load, draw]))
    return parts


GUIDANCE = (
    "The strength of the tuning can be chosen afterwards, beyond 1 too, with the package that trained it: "
    "`from flowrl_img.rlg import rlg`, then `with rlg(pipeline, scale=1.6): ...`"
)


def _code(lines: Sequence[str]) -> str:
    return "\n".join(["```python", *lines, "```"])
