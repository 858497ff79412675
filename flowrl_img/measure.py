"""`flowrl-img evaluate`: from the words of the command line to a folder with the table, the sheet and every score."""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

import torch

from flowrl_img.blend import nominal_kl
from flowrl_img.compare import compare
from flowrl_img.config import RewardConfig
from flowrl_img.loading import accelerator
from flowrl_img.parallel import Processes
from flowrl_img.rewards import registry
from flowrl_img.scales import parse_variants
from flowrl_img.sources import Subject, open_subject
from flowrl_img.tables import facts_of, lines_of, markdown, plot_scales, sheet_of

__all__ = ["Ask", "evaluate_sources"]


@dataclass(frozen=True)
class Ask:
    """Options of the command; None: as the configuration says."""

    recipe: str
    pictures: int
    scales: str | None = None
    prompts: str | None = None
    rewards: tuple[str, ...] = ()
    """further rewards to report, by name"""
    out: Path | None = None
    threads: int | None = None
    restart: bool = False


def evaluate_sources(
    words: Sequence[str], ask: Ask, progress: Callable[[int, int], None] = lambda done, total: None
) -> Iterator[str]:
    """Evaluate `[TUNED]... [KEY=VALUE]...`; yields lines to print. Wrong input is found before a model is loaded."""
    if ask.threads:
        torch.set_num_threads(ask.threads)
    subject = open_subject([*words, *_changes(ask)], ask.recipe)
    subject = _with_rewards(subject, ask.rewards)
    variants = parse_variants(ask.scales or ("0,1" if subject.sources else "0"), len(subject.sources))
    out = ask.out or _default_folder(subject)
    processes = Processes(accelerator())
    comparison = compare(
        subject, variants, out, pictures=ask.pictures, processes=processes, restart=ask.restart, progress=progress
    )
    if comparison is None:
        return
    title = ", ".join(source.title for source in subject.sources) or subject.config.model.path
    facts = facts_of(comparison, title)
    (out / "table.json").write_text(json.dumps(facts, indent=1))
    (out / "table.md").write_text(markdown(facts))
    sheet_of(comparison, out / "sheet.png")
    plot_scales(out / "scales.png", comparison)
    yield from lines_of(comparison, title)
    for variant in variants:
        if len(variant.scales) == 1 and (line := nominal_kl(subject.kl_weight, variant.scales[0])):
            yield line
    yield f"table: {out / 'table.md'}"


def _changes(ask: Ask) -> list[str]:
    return [f"prompts.evaluation={json.dumps(ask.prompts)}"] if ask.prompts is not None else []


def _with_rewards(subject: Subject, names: Sequence[str]) -> Subject:
    """The subject with further rewards to report. ValueError for an unknown name."""
    for name in names:
        registry.build({"name": name}, where="--reward")
    held = subject.config.report_rewards
    known = {r.name for r in held}
    more = tuple(RewardConfig(name=name) for name in dict.fromkeys(names) if name not in known)
    return replace(subject, config=subject.config.model_copy(update={"report_rewards": (*held, *more)}))


def _default_folder(subject: Subject) -> Path:
    """Beside what was evaluated: in the run folder, else in `evaluations/`."""
    name = subject.config.prompts.evaluation.replace(os.sep, "/").strip("./").replace("/", "-")
    return (subject.run or Path("evaluations")) / f"evaluation-{name}"
