"""Base, tuned and blends of them on the same prompts and seeds: drawn, scored, and kept picture by picture.

Pictures are drawn in chunks that depend on the samples and the batch alone, and processes share whole chunks. A picture
has therefore the same noise and the same batch mates whatever the number of processes and however often the evaluation
was stopped; what remains is the last bit of a matrix product, which may move a pixel by one level.
"""

from __future__ import annotations

import hashlib
import json
import re
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image
from torch import Tensor

from flowrl_img.config import Config, EvaluationConfig
from flowrl_img.diversity import diversity, pack, thumbnails, unpack
from flowrl_img.evaluate import EVAL_SEED, Evaluation, Scoring, evaluation_of, held_out_pictures
from flowrl_img.folders import writable
from flowrl_img.intervals import Interval, bootstrap
from flowrl_img.ledger import Ledger, Row
from flowrl_img.parallel import Processes
from flowrl_img.parts import assemble
from flowrl_img.prompts import choose_evenly, spread
from flowrl_img.samplers.solvers.table import Solver
from flowrl_img.scales import Variant
from flowrl_img.sheets import to_picture
from flowrl_img.sources import Sides, Subject
from flowrl_img.types import PromptSet, Sample

__all__ = ["Comparison", "compare"]

PICTURES = "pictures"


@dataclass(frozen=True)
class Comparison:
    """Everything measured: one evaluation for each variant, of the same samples in the same order."""

    settings: Mapping[str, Any]
    prompts: PromptSet
    variants: tuple[Variant, ...]
    evaluations: Mapping[str, Evaluation]
    """by label; `images` holds the pictures of the sheet"""
    thumbs: Mapping[str, NDArray[np.uint8]]
    """by label, [B, 192]"""
    sheet: tuple[Sample, ...]

    @property
    def samples(self) -> tuple[Sample, ...]:
        return next(iter(self.evaluations.values())).samples

    @property
    def tags(self) -> tuple[str, ...]:
        return next(iter(self.evaluations.values())).tags

    @cached_property
    def _diversities(self) -> dict[str, dict[Any, float]]:
        of = [s.prompt for s in self.samples]
        return {label: diversity(thumbs, of) for label, thumbs in self.thumbs.items()}

    def diversity(self, label: str, against: str | None = None) -> Interval:
        """Mean over tasks of the diversity inside prompts, or of its paired difference to another variant."""
        found = self._diversities[label]
        other = self._diversities[against] if against else dict.fromkeys(found, 0.0)
        tasks = {s.prompt: tag for s, tag in zip(self.samples, self.tags, strict=True)}
        values = np.array([found[p] - other[p] for p in found], dtype=np.float64)
        return bootstrap(values, [tasks[p] for p in found], list(found))


def compare(
    subject: Subject,
    variants: Sequence[Variant],
    out: Path,
    *,
    pictures: int,
    processes: Processes,
    restart: bool = False,
    progress: Callable[[int, int], None] = lambda done, total: None,
) -> Comparison | None:
    """Draw and score `pictures` of the evaluation prompts for every variant; rows go to `out` as they are made.

    Rows that `out` already holds are taken over. Returns the comparison on the first process, None on the others.
    Raises ValueError or OSError before a model is loaded: unknown rewards, prompts they cannot score, a folder that
    cannot be written to or holds an evaluation with other settings.
    """
    prompts, scoring, solver = _parts(subject.config)
    samples = choose_evenly(prompts, pictures, subject.config.prompts.balance)
    settings = _settings(subject, prompts)
    sheet = spread(samples, subject.config.evaluation.sheet)
    ledger = Ledger(writable(out, "--out"), processes.rank)
    chunks = _chunks(samples, subject.config.evaluation.batch)
    shown = {s.id for s in sheet}
    todo = _agreed(lambda: _lacking(ledger, settings, restart, chunks, variants, shown), processes)
    mine = [(chunks[chunk], variants[variant], set(ids)) for chunk, variant, ids in processes.share(todo)]
    if mine:
        sides = subject.load(processes.device)
        _Work(subject.config.evaluation, solver, sides, prompts, scoring, ledger, shown).do(mine, progress)
    processes.wait()
    if not processes.is_main:
        return None
    rows = ledger.rows()
    evaluations = {}
    for v in variants:
        scores = {s.id: rows[v.label, s.id].scores for s in samples}
        evaluations[v.label] = evaluation_of(prompts, samples, scores, _load(out, v, sheet))
    thumbs = {v.label: np.stack([unpack(rows[v.label, s.id].thumb) for s in samples]) for v in variants}
    return Comparison(settings, prompts, tuple(variants), evaluations, thumbs, sheet)


Task = tuple[int, int, list[str]]
"""(chunk, variant, ids of the samples that lack a row or a picture)"""


def _agreed(find: Callable[[], list[Task]], processes: Processes) -> list[Task]:
    """What the first process finds, on all of them; what stops it there is a ValueError on all of them.

    One process reads the ledger: the others would see rows that a faster one has begun to add.
    """
    found: dict[str, Any] = {}
    if processes.is_main:
        try:
            found["todo"] = find()
        except (ValueError, OSError) as error:
            found["problem"] = str(error)
    found = processes.gather(found)[0]
    if "problem" in found:
        raise ValueError(found["problem"])
    return [(chunk, variant, ids) for chunk, variant, ids in found["todo"]]


def _lacking(
    ledger: Ledger, settings: Mapping[str, Any], restart: bool, chunks: Sequence[Sequence[Sample]],
    variants: Sequence[Variant], shown: Collection[str],
) -> list[Task]:  # fmt: skip
    """Check the folder, and list what is not in it yet."""
    if restart:
        ledger.clear()
    ledger.check_settings(settings)
    known = ledger.rows()

    def lacks(variant: Variant, sample: Sample) -> bool:
        unseen = sample.id in shown and not _picture_file(ledger.folder, variant, sample).exists()
        return unseen or (variant.label, sample.id) not in known

    tasks = [
        (c, v, [s.id for s in chunk if lacks(variant, s)])
        for c, chunk in enumerate(chunks)
        for v, variant in enumerate(variants)
    ]
    return [task for task in tasks if task[2]]


def _parts(config: Config) -> tuple[PromptSet, Scoring, Solver]:
    """Prompts, rewards and solver. Training prompts play no part: the rewards need not be able to score them."""
    prompts = config.prompts.model_copy(update={"train": config.prompts.evaluation, "shares": None})
    parts = assemble(config.model_copy(update={"prompts": prompts}))
    return parts.held_out, Scoring(parts.held_out, parts.reward, parts.report), parts.evaluation_solver


def _settings(subject: Subject, prompts: PromptSet) -> dict[str, Any]:
    """What the rows depend on, besides the variant and the sample."""
    config = subject.config
    text = json.dumps([prompts.texts, prompts.metadata], sort_keys=True, ensure_ascii=False)
    return {
        "base": config.model.path,
        "fingerprints": subject.fingerprints(),
        "model": config.model.model_dump(mode="json", include={"family", "dtype", "resolution", "max_sequence_length"}),
        "prompts": config.prompts.evaluation,
        "prompts_fingerprint": hashlib.blake2b(text.encode(), digest_size=8).hexdigest(),
        "evaluation": config.evaluation.model_dump(mode="json", exclude={"pictures", "every", "sheet"}),
        "rewards": [r.model_dump(mode="json") for r in config.rewards],
        "aggregate": config.aggregate,
        "report_rewards": [r.model_dump(mode="json") for r in config.report_rewards],
        "seed": EVAL_SEED,
    }


def _chunks(samples: Sequence[Sample], batch: int) -> list[Sequence[Sample]]:
    return [samples[start : start + batch] for start in range(0, len(samples), batch)]


@dataclass(frozen=True)
class _Work:
    """What one process does."""

    config: EvaluationConfig
    solver: Solver
    sides: Sides
    prompts: PromptSet
    scoring: Scoring
    ledger: Ledger
    shown: Collection[str]

    def do(
        self, tasks: Sequence[tuple[Sequence[Sample], Variant, set[str]]], progress: Callable[[int, int], None]
    ) -> None:
        """Draw and score each task. The whole chunk is drawn, also for a few lacking rows: a picture keeps its batch
        mates."""
        done, total = 0, sum(len(chunk) for chunk, _, _ in tasks)
        config = self.config
        for chunk, variant, lacking in tasks:
            blend = self.sides.blend(variant.scales)
            images = held_out_pictures(
                blend, self.prompts, chunk, num_steps=config.steps, guidance=config.guidance, solver=self.solver
            )
            self._keep(chunk, variant, lacking, images)
            progress(done := done + len(chunk), total)

    def _keep(self, chunk: Sequence[Sample], variant: Variant, lacking: set[str], images: Tensor) -> None:
        """Pictures of the sheet first: a row says that everything of its sample is there."""
        scores, thumbs = self.scoring(images, chunk), thumbnails(images)
        rows = []
        for image, sample, thumb in zip(images, chunk, thumbs, strict=True):
            if sample.id in self.shown:
                file = _picture_file(self.ledger.folder, variant, sample)
                file.parent.mkdir(parents=True, exist_ok=True)
                to_picture(image).save(file)
            if sample.id in lacking:
                rows.append(Row(variant.label, sample.id, scores[sample.id], pack(thumb)))
        self.ledger.append(rows)


def _picture_file(folder: Path, variant: Variant, sample: Sample) -> Path:
    names = [re.sub(r"[^\w.=+-]", "-", name) for name in (variant.label, sample.id)]
    return folder / PICTURES / names[0] / f"{names[1]}.png"


def _load(folder: Path, variant: Variant, sheet: Sequence[Sample]) -> Tensor:
    """The pictures of the sheet, float32 [K, 3, H, W] in [0, 1]."""
    images = []
    for sample in sheet:
        with Image.open(_picture_file(folder, variant, sample)) as picture:
            images.append(torch.from_numpy(np.array(picture.convert("RGB"))).permute(2, 0, 1).float() / 255)
    return torch.stack(images) if images else torch.zeros(0, 3, 1, 1)
