"""Pictures on request: prompts x seeds x strengths of the tuning, as PNG files that say how they were made."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from PIL import Image
from PIL.PngImagePlugin import PngInfo
from torch import Tensor

from flowrl_img import __version__
from flowrl_img.blend import nominal_kl
from flowrl_img.folders import writable
from flowrl_img.prompts import load_prompts
from flowrl_img.rollout import generate
from flowrl_img.sampling import evaluation_solver_of
from flowrl_img.scales import Variant, parse_variants
from flowrl_img.sheets import Group, contact_sheet, to_picture
from flowrl_img.sources import Subject, open_subject

__all__ = ["LAYOUTS", "Ask", "Request", "draw_pictures", "parse_seeds", "sample_sources", "settings_of"]

KEY = "flowrl-img"  # of the PNG's text that holds the settings
LAYOUTS = ("single", "grid", "both")
GRID = "grid.png"
MOST_SEEDS = 100_000


@dataclass(frozen=True)
class Request:
    """What to draw: every prompt with every seed at every strength."""

    prompts: tuple[str, ...]
    seeds: tuple[int, ...]
    variants: tuple[Variant, ...]
    layout: str = "single"
    """single: a file for each picture; grid: one sheet, a row of strengths for each prompt and seed; both"""
    overwrite: bool = False

    def __post_init__(self) -> None:
        if self.layout not in LAYOUTS:
            raise ValueError(f"layout {self.layout!r} is none of {', '.join(LAYOUTS)}")
        if not self.prompts or not all(prompt.strip() for prompt in self.prompts):
            raise ValueError("no prompt: give --prompt TEXT or --prompts FILE, and no empty text")

    def file(self, prompt: int, seed: int, variant: Variant) -> str:
        """Name of one picture's file."""
        words = re.sub(r"[^a-z0-9]+", "-", self.prompts[prompt].lower()).strip("-")[:40].strip("-")
        return f"{prompt:03d}-{words}-seed{seed}-{variant.label.replace('/', '+').replace(':', '_')}.png"

    def files(self) -> list[str]:
        """Every file that will be written."""
        single = [self.file(p, s, v) for p in range(len(self.prompts)) for s in self.seeds for v in self.variants]
        return (single if self.layout != "grid" else []) + ([GRID] if self.layout != "single" else [])


def parse_seeds(text: str) -> tuple[int, ...]:
    """`0,3,8-11` -> (0, 3, 8, 9, 10, 11). ValueError for anything else."""
    seeds: list[int] = []
    for part in text.split(","):
        found = re.fullmatch(r"\s*(\d{1,18})(?:-(\d{1,18}))?\s*", part)
        first, last = (int(found[1]), int(found[2] or found[1])) if found else (0, -1)
        if last < first or last - first >= MOST_SEEDS:
            raise ValueError(f"{part.strip()!r} is no seed: write numbers from 0 and ranges, for example 0,3,8-11")
        seeds += range(first, last + 1)
    return tuple(dict.fromkeys(seeds))


@dataclass(frozen=True)
class Ask:
    """Options of `flowrl-img sample`, as they are written there."""

    recipe: str
    prompts: tuple[str, ...] = ()
    file: str | None = None
    """a prompt file, after the prompts"""
    seeds: str = "0"
    scales: str | None = None
    layout: str = "single"
    out: Path = Path("samples")
    overwrite: bool = False
    threads: int | None = None


def sample_sources(
    words: Sequence[str], ask: Ask, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[str]:
    """Draw what `[TUNED]... [KEY=VALUE]...` and the options ask for; yields the lines to print.

    Every wrong input is a ValueError or OSError before a model is loaded.
    """
    if ask.threads:
        torch.set_num_threads(ask.threads)
    texts = (*ask.prompts, *(load_prompts(ask.file).texts if ask.file is not None else ()))
    subject = open_subject(words, ask.recipe)
    variants = parse_variants(ask.scales or ("1" if subject.sources else "0"), len(subject.sources))
    request = Request(texts, parse_seeds(ask.seeds), tuple(variants), ask.layout, ask.overwrite)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    for file in draw_pictures(subject, request, ask.out, device=device, progress=progress):
        yield str(file)
    for variant in variants:
        if len(variant.scales) == 1 and (line := nominal_kl(subject.kl_weight, variant.scales[0])):
            yield line


def draw_pictures(
    subject: Subject, request: Request, out: Path, *, device: torch.device,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> list[Path]:  # fmt: skip
    """Draw the request into the folder `out`; returns the files, each with its settings in its metadata.

    Steps, guidance and batch are those of the configuration's `evaluation`. The initial noise of a seed is that of a
    stock pipeline with `torch.Generator().manual_seed(seed)`. OSError or FileExistsError before anything is loaded.
    """
    writable(out, "--out")
    solver = evaluation_solver_of(subject.config)
    if taken := [name for name in request.files() if (out / name).exists()] if not request.overwrite else []:
        raise FileExistsError(f"{out} already holds {taken[0]}: give another folder with --out, or --overwrite")
    sides = subject.load(device)
    asked = [(prompt, seed) for prompt in range(len(request.prompts)) for seed in request.seeds]
    evaluation, drawn = subject.config.evaluation, []
    for number, variant in enumerate(request.variants):
        images = generate(
            sides.blend(variant.scales), [request.prompts[p] for p, _ in asked], [s for _, s in asked],
            num_steps=evaluation.steps, guidance=evaluation.guidance, batch=evaluation.batch, solver=solver,
        )  # fmt: skip
        drawn.append(images)
        progress(number + 1, len(request.variants))
    facts = {
        **subject.facts(), "resolution": subject.config.model.resolution, "steps": evaluation.steps,
        "solver": evaluation.solver.section(), "guidance": evaluation.guidance,
    }  # fmt: skip
    return [*_singles(request, asked, drawn, facts, out), *_grid(request, asked, drawn, facts, out)]


def _singles(
    request: Request, asked: Sequence[tuple[int, int]], drawn: Sequence[Tensor], facts: dict[str, Any], out: Path
) -> list[Path]:
    files = []
    for k, (prompt, seed) in enumerate(asked if request.layout != "grid" else ()):
        for variant, images in zip(request.variants, drawn, strict=True):
            own = {"prompt": request.prompts[prompt], "seed": seed, "scale": [str(s) for s in variant.scales]}
            files.append(_save(to_picture(images[k]), out / request.file(prompt, seed, variant), {**own, **facts}))
    return files


def _grid(
    request: Request, asked: Sequence[tuple[int, int]], drawn: Sequence[Tensor], facts: dict[str, Any], out: Path
) -> list[Path]:
    if request.layout == "single":
        return []
    groups = [
        Group([images[k] for images in drawn], (f"{request.prompts[prompt]} (seed {seed})",))
        for k, (prompt, seed) in enumerate(asked)
    ]
    labels = [variant.label for variant in request.variants]
    sheet = contact_sheet(
        "one row of strengths for each prompt and seed", groups, labels, cell=max(drawn[0].shape[-1], 160)
    )
    own = {"prompts": list(request.prompts), "seeds": list(request.seeds), "scales": labels}
    return [_save(sheet, out / GRID, {**own, **facts})]


def _save(picture: Image.Image, path: Path, settings: dict[str, Any]) -> Path:
    text = PngInfo()
    text.add_text(KEY, json.dumps({**settings, "version": __version__}, ensure_ascii=False))
    picture.save(path, pnginfo=text)
    return path


def settings_of(path: Path) -> dict[str, Any]:
    """The settings that a picture was drawn with. ValueError for a picture that does not hold them."""
    with Image.open(path) as picture:
        held = getattr(picture, "text", {}).get(KEY)
    if held is None:
        raise ValueError(f"{path} does not say how it was made")
    found: dict[str, Any] = json.loads(held)
    return found
