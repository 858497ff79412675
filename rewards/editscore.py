"""EditScore: marks for an edit by a vision-language model: was the instruction followed, was too much changed, is the
result natural and clean.

Two questions. Semantic consistency (SC) sees source and result and gives two marks, perceptual quality (PQ) sees the
result alone and gives two; each counts its lower mark, and the score is the root of their product, 0 to 10.
Source: EditScore, arXiv 2509.23909, in the form of VIEScore. The models were trained on the published instructions:
give those as files to reproduce published numbers; the ones here ask for the same marks in other words.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any, ClassVar

from flowrl_img.rewards.judge import (
    SOURCE,
    Judge,
    Question,
    Reply,
    output_of_replies,
    require_sources,
    source_of,
    text_of,
    why_unread,
)
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import edited_scenes
from flowrl_img.rewards.transport import ServiceError

__all__ = ["EditScore", "marks_of"]

FORM = 'Answer with one JSON object and nothing else: {{"reasoning": "a short reason", "score": [{first}, {second}]}}.'
CONSISTENCY = (
    "The first picture was to be edited as told below; the second picture is the result, which may be unchanged if the "
    "edit failed. Give two marks from 0 to {highest}. success: 0 when nothing of the instruction was done, {highest} "
    "when all of it was. restraint: 0 when the result has nothing in common with the first picture, {highest} when "
    "only what was asked for changed.\n" + FORM.format(first="success", second="restraint") + "\nInstruction: {prompt}"
)
QUALITY = (
    "Judge this picture as a picture. Give two marks from 0 to {highest}. naturalness: 0 for wrong distances, shadows "
    "or light, {highest} for a scene that looks natural. cleanness: 0 for distortions, watermarks, scratches, blurred "
    "faces or malformed bodies all over, {highest} for none.\n" + FORM.format(first="naturalness", second="cleanness")
)
SCALE = 10.0
_LIST = re.compile(r"[\"']?score[\"']?\s*[:=]\s*\[([^\]]*)\]", re.IGNORECASE)


@dataclass(frozen=True)
class EditScore:
    """sqrt(SC * PQ) in [0, 10]. judge: the server and the model's name on it.

    highest: the mark that the model is asked for at most. passes: replies for each question, averaged; pass i has
    seed + i. consistency, quality: files of instructions, with {prompt} and {highest}, in place of the ones here.
    The prompt is the editing instruction, the metadata key `source` the picture before the edit: a path or a data URI.
    Details: `prompt_following`, `consistency`, `quality`, each in [0, 10].
    """

    judge: Judge
    highest: int = 25
    passes: int = 1
    temperature: float = 0.7
    seed: int = 42
    max_tokens: int = 512
    consistency: str = ""
    quality: str = ""

    name: ClassVar[str] = "editscore"
    needs: ClassVar[frozenset[str]] = frozenset({SOURCE})
    requirements: ClassVar[tuple[str, ...]] = ("httpx>=0.27",)

    def __post_init__(self) -> None:
        if self.highest < 1 or self.passes < 1:
            raise ValueError(f"editscore highest and passes must be at least 1, got {self.highest} and {self.passes}")

    @cached_property
    def _texts(self) -> tuple[str, str]:
        given = text_of(self.name, CONSISTENCY, self.consistency), text_of(self.name, QUALITY, self.quality)
        consistency, quality = (text.replace("{highest}", str(self.highest)) for text in given)
        return consistency, quality

    @property
    def fingerprint(self) -> dict[str, str]:
        """The judge, its instructions and how it is sampled."""
        sampling = f"temperature {self.temperature}, seed {self.seed}, {self.passes} passes, marks to {self.highest}"
        return {**self.judge.fingerprint, "instructions": " | ".join(self._texts), "sampling": sampling}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """ValueError names a line whose source picture is missing; RemoteError when the judge does not answer."""
        require_sources(self.name, metadata)
        _ = self._texts
        self.judge.check()

    def known_answers(self) -> Sequence[KnownAnswer]:
        """An edit that was made scores above the picture left as it was."""
        return [edited_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; a row is invalid where no pass gave marks for both questions."""
        asked = [question for row in range(len(batch)) for question in self._questions(batch, row)]
        replies = self.judge.ask(asked)
        each = 2 * self.passes
        rows = [self._judged(replies[row * each : (row + 1) * each]) for row in range(len(batch))]
        names = ("prompt_following", "consistency", "quality")
        details = {name: [None if marks is None else marks[k] for _, marks, _ in rows] for k, name in enumerate(names)}
        return output_of_replies([value for value, _, _ in rows], [error for _, _, error in rows], details)

    def _questions(self, batch: RewardBatch, row: int) -> list[Question]:
        """SC and PQ of each pass."""
        result = batch.images[row].numpy()
        source = source_of(self.name, batch.metadata[row])
        consistency, quality = self._texts
        asked: list[Question] = []
        for k in range(self.passes):
            sampling = {"temperature": self.temperature, "seed": self.seed + k, "max_tokens": self.max_tokens}
            told = consistency.replace("{prompt}", batch.prompts[row])
            asked += [Question((source, result), told, sampling), Question((result,), quality, sampling)]
        return asked

    def _judged(
        self, replies: Sequence[Reply | ServiceError]
    ) -> tuple[float | None, tuple[float, float, float] | None, str | None]:
        """Score, the three marks on a scale of 10, and the reason where there is no score."""
        found: list[tuple[float, float, float, float]] = []
        reason: str | None = None
        for sc, pq in zip(replies[::2], replies[1::2], strict=True):
            pair = [None if isinstance(r, ServiceError) else marks_of(r.text, self.highest) for r in (sc, pq)]
            if pair[0] is None or pair[1] is None:
                reason = reason or why_unread(sc if pair[0] is None else pq, f"two marks from 0 to {self.highest}")
                continue
            (success, restraint), (natural, clean) = pair[0], pair[1]
            lower = min(success, restraint), min(natural, clean)
            found.append((math.sqrt(lower[0] * lower[1]), success, restraint, lower[1]))
        if not found:
            return None, None, reason
        value, *marks = (SCALE / self.highest * sum(column) / len(found) for column in zip(*found, strict=True))
        return value, (marks[0], marks[1], marks[2]), None


def marks_of(text: str, high: float) -> tuple[float, float] | None:
    """The two numbers of "score" in a JSON object, or in what is left of one; None when they are not in [0, high]."""
    listed = _listed(text)
    try:
        first, second = (float(mark) for mark in listed)
    except (TypeError, ValueError):
        return None
    return (first, second) if 0 <= first <= high and 0 <= second <= high else None


def _listed(text: str) -> Sequence[Any]:
    start, end = text.find("{"), text.rfind("}")
    try:
        score = json.loads(text[start : end + 1])["score"]
        return score if isinstance(score, list) else []
    except (ValueError, KeyError, TypeError):
        found = _LIST.findall(text)
        return found[-1].split(",") if found else []
