"""The win rate of a picture inside its group: every pair is shown to a vision-language model, in both orders.

Small gaps between point scores turn into large advantages when a group is normalised; a win rate has no such gaps.
Source: Pref-GRPO, arXiv 2508.20751, which asks each pair once; models prefer a place, so both orders are asked here.
The rates of a group always add up to half its size and measure no progress: report a reward of single pictures too.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import combinations
from typing import ClassVar

from flowrl_img.rewards.judge import Judge, Question, Reply, output_of_replies, picture_of, text_of, why_unread
from flowrl_img.rewards.known_answers import Better, KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput, groups_of
from flowrl_img.rewards.scene_answers import circle, square
from flowrl_img.rewards.transport import ServiceError

__all__ = ["TASK", "Preference", "verdict"]

TASK = (
    "Two pictures were made for one caption. Compare them on three points: how well they show what the caption says, "
    "how beautiful they are, how real and well made their details are. You may add up to two points where the caption "
    "asks for them. Mark both pictures from 1 to 10 on each point with a short reason, add the marks up, and write all "
    "of this between <think> and </think>. Then give the verdict, which is one of these lines:\n"
    "<answer>Image 1 is better</answer>\n<answer>Image 2 is better</answer>\nCaption: {prompt}"
)
TIE = 0.5
_ANSWER = re.compile(r"<answer>(.*?)</answer>", re.IGNORECASE | re.DOTALL)
_BETTER = re.compile(
    r"\b(?:image|picture)\s*([12])\b\s*(?:is|wins|:)?\s*(?:the\s*)?(?:better|best|winner|wins)", re.IGNORECASE
)
_EQUAL = re.compile(r"\b(?:tie|equal(?:ly)?|both|neither)\b", re.IGNORECASE)


@dataclass(frozen=True)
class Preference:
    """Mean over the other pictures of the group: won 1, tied 0.5, lost 0, each pair in both orders; in [0, 1].

    judge: the server and the model's name on it, for example UnifiedReward-Think. instructions: a file with {prompt} in
    place of the task here; models are best asked in the words of their training. size: pictures are shown size x size.
    A group of G costs G (G - 1) requests. Details: `comparisons` that were read; `consistent`, the share of its pairs
    whose two orders agree.
    """

    judge: Judge
    instructions: str = ""
    size: int = 512
    max_tokens: int = 2048
    temperature: float = 0.0

    name: ClassVar[str] = "preference"
    needs: ClassVar[frozenset[str]] = frozenset()
    scope: ClassVar[str] = "group"
    requirements: ClassVar[tuple[str, ...]] = ("httpx>=0.27",)

    @property
    def fingerprint(self) -> dict[str, str]:
        """The judge, its task and how pictures are shown to it."""
        shown = f"{self.size} x {self.size}, bicubic, PNG, both orders"
        return {**self.judge.fingerprint, "task": text_of(self.name, TASK, self.instructions), "preprocessing": shown}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; RemoteError when the judge does not answer."""
        text_of(self.name, TASK, self.instructions)
        self.judge.check()

    def known_answers(self) -> Sequence[KnownAnswer]:
        """For "a red circle" a red circle wins against a blue square."""
        other = replace(square(), what="a drawn blue square, asked for a red circle,", prompt=circle().prompt)
        return [Better((circle(),), (other,))]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; a row is invalid where less than half of its comparisons could be read."""
        pictures = [picture_of(image, self.size) for image in batch.images]
        groups = groups_of(batch, self.name)
        pairs = [pair for rows in groups.values() for pair in combinations(rows, 2)]
        shown = [order for pair in pairs for order in (pair, pair[::-1])]
        task = text_of(self.name, TASK, self.instructions)
        sampling = {"temperature": self.temperature, "max_tokens": self.max_tokens}
        asked = [
            Question((pictures[a], pictures[b]), task.replace("{prompt}", batch.prompts[a]), sampling) for a, b in shown
        ]
        replies = self.judge.ask(asked)
        shares = [None if isinstance(reply, ServiceError) else verdict(reply.text) for reply in replies]
        won, errors = _tally(len(batch), shown, shares, replies)
        mates = {row: len(rows) - 1 for rows in groups.values() for row in rows}
        values = [_rate(won[row], 2 * mates[row]) for row in range(len(batch))]
        agreed = _agreed(len(batch), pairs, shares)
        return output_of_replies(values, errors, {"comparisons": [len(row) for row in won], "consistent": agreed})


def _tally(
    count: int,
    shown: Sequence[tuple[int, int]],
    shares: Sequence[float | None],
    replies: Sequence[Reply | ServiceError],
) -> tuple[list[list[float]], list[str]]:
    """Of each row what it won in the comparisons that were read, and the first reason of one that was not."""
    won: list[list[float]] = [[] for _ in range(count)]
    errors = ["a group of one picture has nothing to compare"] * count
    unread = {row for pair, share in zip(shown, shares, strict=True) if share is None for row in pair}
    for (a, b), share, reply in zip(shown, shares, replies, strict=True):
        if share is None:
            errors = [
                why_unread(reply, "verdict") if row in (a, b) and row in unread else text
                for row, text in enumerate(errors)
            ]
            unread -= {a, b}
        else:
            won[a].append(share)
            won[b].append(1 - share)
    return won, errors


def _agreed(count: int, pairs: Sequence[tuple[int, int]], shares: Sequence[float | None]) -> list[float | None]:
    """Of each row the share of its pairs whose two orders name the same winner; None where none was read twice."""
    found: list[list[bool]] = [[] for _ in range(count)]
    for (a, b), one, other in zip(pairs, shares[::2], shares[1::2], strict=True):
        if one is not None and other is not None:
            found[a].append(one == 1 - other)
            found[b].append(one == 1 - other)
    return [sum(row) / len(row) if row else None for row in found]


def _rate(won: Sequence[float], asked: int) -> float | None:
    return sum(won) / len(won) if won and 2 * len(won) >= asked else None


def verdict(text: str) -> float | None:
    """1 when the first picture is better, 0 when the second is, 0.5 for a tie, None when the reply does not say.

    Read from the last <answer>; where there is none, from the whole text, whose last statement counts.
    """
    answers = _ANSWER.findall(text)
    said = answers[-1] if answers else text
    better = _BETTER.findall(said)
    if better:
        return 1.0 if better[-1] == "1" else 0.0
    return TIE if answers and _EQUAL.search(said) else None
