"""UnifiedReward: a vision-language model that marks a picture from 1 to 5 for its caption and its quality.

Served by vLLM or SGLang under its name; the Qwen version is the one its authors advise for training. Source: arXiv
2503.05236. The task statement is the one that the model was trained with, so it stands here word for word.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import ClassVar

from flowrl_img.rewards.judge import Judge, Question, output_of_replies, picture_of, why_unread
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes
from flowrl_img.rewards.transport import ServiceError

__all__ = ["TASK", "UnifiedReward", "final_score"]

TASK = (
    "<image>\nYou are given a text caption and a generated image based on that caption. Your task is to evaluate this "
    "image based on two key criteria:\n1. Alignment with the Caption: Assess how well this image aligns with the "
    "provided caption. Consider the accuracy of depicted objects, their relationships, and attributes as described in "
    "the caption.\n2. Overall Image Quality: Examine the visual quality of this image, including clarity, detail "
    "preservation, color accuracy, and overall aesthetic appeal.\nBased on the above criteria, assign a score from 1 "
    "to 5 after 'Final Score:'.\nYour task is provided as follows:\nText Caption: [{prompt}]"
)
LOW, HIGH = 1.0, 5.0
_SCORE = re.compile(r"final\s*score\W{0,8}?(-?\d(?:[\d.,–-]*\d)?)(?:\s*/\s*(\d+))?", re.IGNORECASE)


@dataclass(frozen=True)
class UnifiedReward:
    """mark / 5, in [0.2, 1]. judge: the server and the model's name on it. size: pictures are shown at size x size.

    max_tokens: of a reply; the mark comes last. Details: `reply`.
    """

    judge: Judge
    size: int = 512
    max_tokens: int = 1024

    name: ClassVar[str] = "unifiedreward"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("httpx>=0.27",)

    @property
    def fingerprint(self) -> dict[str, str]:
        """The judge and how pictures are shown to it."""
        return {**self.judge.fingerprint, "preprocessing": f"{self.size} x {self.size}, bicubic, PNG", "task": TASK}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; RemoteError when the judge does not answer."""
        self.judge.check()

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; a reply without a mark from 1 to 5 is an invalid row."""
        sampling = {"temperature": 0, "max_tokens": self.max_tokens}
        asked = [
            Question((picture_of(image, self.size),), TASK.replace("{prompt}", prompt), sampling)
            for image, prompt in zip(batch.images, batch.prompts, strict=True)
        ]
        replies = self.judge.ask(asked)
        marks = [None if isinstance(reply, ServiceError) else final_score(reply.text) for reply in replies]
        texts = [None if isinstance(reply, ServiceError) else reply.text for reply in replies]
        values = [None if mark is None else mark / HIGH for mark in marks]
        return output_of_replies(values, [why_unread(reply, "mark from 1 to 5") for reply in replies], {"reply": texts})


def final_score(text: str) -> float | None:
    """The last number after "final score" in any case and dress (**Final Score:** [4]); None outside 1 to 5.

    The whole number counts, so 10 is no 1; "4/5" is 4, another denominator is no mark, nor is "4-5" or "4,5".
    """
    found = _SCORE.findall(text)
    if not found:
        return None
    number, denominator = found[-1]
    try:
        mark = float(number)
    except ValueError:  # two numbers
        return None
    return mark if LOW <= mark <= HIGH and denominator in ("", "5") else None
