"""Known answers: pictures whose score a reward states itself, asked for at start-up.

A scorer can answer every request and still be useless: a detector without its weights finds nothing, a reader in the
wrong language reads nothing, and training goes on under a constant. So a reward may have a method `known_answers()`,
and `check` refuses one that contradicts it. It needs no such method; a plain function has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch
from flowrl_img.rewards.score import checked

__all__ = [
    "Better",
    "Different",
    "Example",
    "KnownAnswer",
    "KnownAnswerError",
    "Matching",
    "Scores",
    "StatesAnswers",
    "check",
]


class KnownAnswerError(ValueError):
    """A reward does not score its own examples as it says: its scores mean nothing here."""


@dataclass(frozen=True)
class Example:
    """what: the picture in words, for messages. image: uint8 [H, W, 3] RGB.

    Example: Example("a blank picture", np.zeros((64, 64, 3), np.uint8), "a ring", {"ocr_target": "AB4"})
    """

    what: str
    image: NDArray[np.uint8]
    prompt: str = ""
    metadata: Metadata = field(default_factory=dict)


class KnownAnswer(Protocol):
    """Something true of the scores of some examples."""

    @property
    def examples(self) -> Sequence[Example]:
        """The pictures to score."""
        ...

    def contradiction(self, values: Sequence[float]) -> str | None:
        """values: one for each example. What is wrong with them, or None."""
        ...


@runtime_checkable
class StatesAnswers(Protocol):
    """A reward that can be checked. Keep it cheap: under a second, a few small pictures."""

    def known_answers(self) -> Sequence[KnownAnswer]:
        """What must hold for this reward with its present options."""
        ...


@dataclass(frozen=True)
class Scores:
    """The example scores within [low, high]."""

    example: Example
    low: float = -float("inf")
    high: float = float("inf")

    @property
    def examples(self) -> Sequence[Example]:
        return (self.example,)

    def contradiction(self, values: Sequence[float]) -> str | None:
        [value] = values
        if self.low <= value <= self.high:
            return None
        return f"{self.example.what} scored {value:.4g} instead of {_range(self.low, self.high)}"


@dataclass(frozen=True)
class Better:
    """The good example scores above the bad one."""

    good: Example
    bad: Example

    @property
    def examples(self) -> Sequence[Example]:
        return (self.good, self.bad)

    def contradiction(self, values: Sequence[float]) -> str | None:
        good, bad = values
        if good > bad:
            return None
        return f"{self.good.what} scored {good:.4g} instead of more than {self.bad.what}, which scored {bad:.4g}"


@dataclass(frozen=True)
class Different:
    """The two examples do not score the same."""

    first: Example
    second: Example

    @property
    def examples(self) -> Sequence[Example]:
        return (self.first, self.second)

    def contradiction(self, values: Sequence[float]) -> str | None:
        first, second = values
        if first != second:
            return None
        return f"{self.first.what} and {self.second.what} both scored {first:.4g}"


@dataclass(frozen=True)
class Matching:
    """Two pictures with their own prompts together score above the same two with the prompts exchanged."""

    first: Example
    second: Example

    @property
    def examples(self) -> Sequence[Example]:
        one, two = self.first, self.second
        crossed = [replace(one, prompt=two.prompt, metadata=two.metadata)]
        crossed += [replace(two, prompt=one.prompt, metadata=one.metadata)]
        return (one, two, *crossed)

    def contradiction(self, values: Sequence[float]) -> str | None:
        own, exchanged = sum(values[:2]), sum(values[2:])
        if own > exchanged:
            return None
        return (
            f"{self.first.what} and {self.second.what} scored {own:.4g} together instead of more than with their "
            f"prompts exchanged, which scored {exchanged:.4g}"
        )


def check(reward: Reward) -> None:
    """Ask a reward, or each part of a mixture, for the answers it states. KnownAnswerError names what contradicts."""
    if isinstance(reward, Mixture):
        for part in reward.rewards.values():
            check(part)
    if not isinstance(reward, StatesAnswers):
        return
    for answer in reward.known_answers():
        problem = answer.contradiction([_value(reward, example) for example in answer.examples])
        if problem is not None:
            raise _error(reward, problem)


def _value(reward: Reward, example: Example) -> float:
    batch = RewardBatch(torch.tensor(example.image)[None], [example.prompt], [example.metadata], ["known answer"])
    with torch.no_grad():
        output = checked(reward, batch)
    if not output.valid.item():
        [reason] = output.details.get("error", [None])
        raise _error(reward, f"{example.what} could not be scored: {reason or 'no reason given'}")
    return output.values.item()


def _error(reward: Reward, problem: str) -> KnownAnswerError:
    return KnownAnswerError(
        f"reward '{reward.name}' fails its known answers: {problem}. Its scores mean nothing here: "
        "check its options, its weights and the versions of its libraries"
    )


def _range(low: float, high: float) -> str:
    if low == high:
        return f"{low:.4g}"
    if low == -float("inf"):
        return f"at most {high:.4g}"
    return f"at least {low:.4g}" if high == float("inf") else f"{low:.4g} to {high:.4g}"
