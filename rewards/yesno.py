"""How sure a vision-language model is that the answer is yes: P(yes) against P(no) in the first token of its reply.

As VQAScore (arXiv 2404.01291) asks whether a picture shows its prompt; as PaCo-Reward (arXiv 2512.04784) asks whether
the cells of a grid belong together, or whether an edit kept what it should and did what it was told.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import combinations
from typing import ClassVar

from flowrl_img.rewards.judge import (
    SOURCE,
    Judge,
    Pixels,
    Question,
    Reply,
    output_of_replies,
    picture_of,
    require_sources,
    source_of,
)
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes
from flowrl_img.rewards.transport import ServiceError

__all__ = ["COMBINE", "SHOW", "YesNo", "certainty"]

TOP = 20  # the most alternatives that servers give for a token
Shown = Callable[["YesNo", Pixels, Metadata], list[tuple[Pixels, ...]]]


def _picture(reward: YesNo, image: Pixels, row: Metadata) -> list[tuple[Pixels, ...]]:
    return [(image,)]


def _cells(reward: YesNo, image: Pixels, row: Metadata) -> list[tuple[Pixels, ...]]:
    """Every pair of the cells of a grid, row by row."""
    rows, columns = reward.grid
    height, width = image.shape[0] // rows, image.shape[1] // columns
    cells = [
        image[r * height : (r + 1) * height, c * width : (c + 1) * width] for r in range(rows) for c in range(columns)
    ]
    return list(combinations(cells, 2))


def _edit(reward: YesNo, image: Pixels, row: Metadata) -> list[tuple[Pixels, ...]]:
    return [(source_of(reward.name, row), image)]


SHOW: Mapping[str, Shown] = {"picture": _picture, "grid": _cells, "edit": _edit}
COMBINE: Mapping[str, Callable[[Sequence[float]], float]] = {
    "mean": lambda values: sum(values) / len(values),
    "geometric": lambda values: math.prod(values) ** (1 / len(values)),
}


@dataclass(frozen=True)
class YesNo:
    """P(yes) / (P(yes) + P(no)) in [0, 1], combined over the questions. judge: the server and the model's name on it.

    questions: asked one by one; `{prompt}` stands for the prompt. combine: "mean" or "geometric" over them. show:
    "picture"; "grid": every pair of the cells of `grid` (rows, columns), their mean; "edit": the picture named by the
    metadata key `source`, then this one. size: pictures are shown at size x size, 0 as they are.
    Details: `answers`, one number a question.
    """

    judge: Judge
    questions: tuple[str, ...] = ('Does this figure show "{prompt}"? Please answer yes or no.',)
    combine: str = "mean"
    show: str = "picture"
    grid: tuple[int, int] = (2, 2)
    size: int = 0

    name: ClassVar[str] = "yesno"
    requirements: ClassVar[tuple[str, ...]] = ("httpx>=0.27",)

    def __post_init__(self) -> None:
        for option, value, valid in (("show", self.show, SHOW), ("combine", self.combine, COMBINE)):
            if value not in valid:
                raise ValueError(f"yesno {option} must be one of {sorted(valid)}, got {value!r}")
        if not self.questions:
            raise ValueError("yesno needs a question")
        if min(self.grid) < 1 or self.grid == (1, 1):
            raise ValueError(f"yesno grid must hold two cells or more, got {self.grid}")

    @property
    def needs(self) -> frozenset[str]:
        """The source of an edit."""
        return frozenset({SOURCE}) if self.show == "edit" else frozenset()

    @property
    def fingerprint(self) -> dict[str, str]:
        """The judge and what it is asked."""
        return {**self.judge.fingerprint, "questions": " | ".join(self.questions), "show": self.show}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """ValueError names a line whose source picture is missing; RemoteError when the judge does not answer."""
        if self.show == "edit":
            require_sources(self.name, metadata)
        self.judge.check()

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better, where one picture is judged by its prompt."""
        by_prompt = self.show == "picture" and any("{prompt}" in question for question in self.questions)
        return [matched_scenes()] if by_prompt else []

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; a row is invalid where a reply holds neither a yes nor a no."""
        asked = [
            self._questions(image.numpy(), prompt, row)
            for image, prompt, row in zip(batch.images, batch.prompts, batch.metadata, strict=True)
        ]
        replies = iter(self.judge.ask([question for row in asked for question in row]))
        judged = [self._judged([next(replies) for _ in row]) for row in asked]
        means = {"answers": [None if answers is None else str(answers) for _, answers, _ in judged]}
        return output_of_replies([value for value, _, _ in judged], [reason for _, _, reason in judged], means)

    def _questions(self, image: Pixels, prompt: str, row: Metadata) -> list[Question]:
        """Every question about every set of pictures, question by question."""
        shown = SHOW[self.show](self, image, row)
        texts = [question.replace("{prompt}", prompt) for question in self.questions]
        sampling = {"temperature": 0, "max_tokens": 1, "logprobs": True, "top_logprobs": TOP}
        sized = [tuple(picture_of(picture, self.size) for picture in pictures) for pictures in shown]
        return [Question(pictures, text, sampling) for text in texts for pictures in sized]

    def _judged(self, replies: Sequence[Reply | ServiceError]) -> tuple[float | None, list[float] | None, str | None]:
        """The combined value, the mean of each question, and the reason where there is none."""
        sure = [None if isinstance(reply, ServiceError) else certainty(reply) for reply in replies]
        known = [answer for answer in sure if answer is not None]
        if len(known) < len(sure):
            return None, None, _reason(replies[sure.index(None)])
        each = len(known) // len(self.questions)
        means = [sum(known[k : k + each]) / each for k in range(0, len(known), each)]
        return COMBINE[self.combine](means), means, None


def certainty(reply: Reply) -> float | None:
    """P(yes) / (P(yes) + P(no)) over all spellings of the two; None when the alternatives hold neither."""
    yes, no = (
        sum(math.exp(p) for token, p in reply.first.items() if token.strip(" \n\t▁Ġ.\"'").casefold() == word)
        for word in ("yes", "no")
    )
    return yes / (yes + no) if yes + no > 0 else None


def _reason(reply: Reply | ServiceError) -> str:
    if isinstance(reply, ServiceError):
        return str(reply)
    return f"neither yes nor no among the {len(reply.first)} likeliest first tokens; it said {reply.text[:40]!r}"
