"""Known answers: pictures whose score a reward states itself, asked for at start-up.

A scorer can answer every request and still be useless: a detector without its weights finds nothing, a reader in the
wrong language reads nothing, and training goes on under a constant. So a reward may have a method `known_answers()`,
and `check` refuses one that contradicts it, or that gives all its examples one score. A plain function has none.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Protocol, runtime_checkable

import numpy as np
import torch
from numpy.typing import NDArray

from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch, scope_of
from flowrl_img.rewards.score import checked

__all__ = ["Better", "Example", "KnownAnswer", "KnownAnswerError", "Scores", "StatesAnswers", "check", "matching"]


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


@dataclass(frozen=True)
class Scores:
    """The example scores within [low, high]."""

    example: Example
    low: float = -float("inf")
    high: float = float("inf")

    @property
    def examples(self) -> tuple[Example, ...]:
        """The pictures to score."""
        return (self.example,)

    def contradiction(self, values: Sequence[float]) -> str | None:
        """values: one for each example. What is wrong with them, or None."""
        [value] = values
        if self.low <= value <= self.high:
            return None
        return f"{self.example.what} scored {value:.4g} instead of {_range(self.low, self.high)}"


@dataclass(frozen=True)
class Better:
    """The good examples score above the bad ones, taken together. A groupwise reward sees all of them as one group."""

    good: tuple[Example, ...]
    bad: tuple[Example, ...]

    @property
    def examples(self) -> tuple[Example, ...]:
        """The pictures to score."""
        return (*self.good, *self.bad)

    def contradiction(self, values: Sequence[float]) -> str | None:
        """values: one for each example. What is wrong with them, or None."""
        good, bad = sum(values[: len(self.good)]), sum(values[len(self.good) :])
        if good > bad:
            return None
        return f"{_names(self.good)} scored {good:.4g} instead of more than {_names(self.bad)}, which scored {bad:.4g}"


KnownAnswer = Scores | Better


@runtime_checkable
class StatesAnswers(Protocol):
    """A reward that can be checked. Keep it cheap: under a second, a few small pictures."""

    def known_answers(self) -> Sequence[KnownAnswer]:
        """What must hold for this reward with its present options."""
        ...


def matching(first: Example, second: Example) -> Better:
    """Two pictures with their own prompts together score above the same two with the prompts exchanged.

    Taken together, so that a liking for one of the pictures does not count.
    """

    def crossed(one: Example, other: Example) -> Example:
        what = f"{one.what} asked for {other.prompt!r}"
        return replace(one, what=what, prompt=other.prompt, metadata=other.metadata)

    return Better((first, second), (crossed(first, second), crossed(second, first)))


def check(reward: Reward) -> None:
    """Ask a reward for the answers it states, if it states any. KnownAnswerError names what contradicts them."""
    if not isinstance(reward, StatesAnswers):
        return
    seen: list[float] = []
    for answer in reward.known_answers():
        values = _values(reward, answer.examples)
        problem = answer.contradiction(values)
        if problem is not None:
            raise _error(reward, problem)
        seen += values
    if len(seen) > 1 and len(set(seen)) == 1:
        raise _error(reward, f"its {len(seen)} examples all scored {seen[0]:.4g}")


def _values(reward: Reward, examples: Sequence[Example]) -> list[float]:
    """Pictures may differ in size, so each is asked for alone, unless the reward compares them."""
    if scope_of(reward) == "point":
        return [value for example in examples for value in _asked(reward, [example])]
    return _asked(reward, examples)


def _asked(reward: Reward, examples: Sequence[Example]) -> list[float]:
    images = torch.from_numpy(np.stack([example.image for example in examples]))
    prompts, metadata = [example.prompt for example in examples], [example.metadata for example in examples]
    ids = [f"known answer {row}" for row in range(len(examples))]
    batch = RewardBatch(images, prompts, metadata, ids, ["known answers"] * len(examples))
    with torch.no_grad():
        output = checked(reward, batch)
    if not output.valid.all():
        row = int((~output.valid).nonzero()[0])
        reason = output.details["error"][row] if "error" in output.details else None
        raise _error(reward, f"{examples[row].what} could not be scored: {reason or 'no reason given'}")
    return output.values.tolist()


def _error(reward: Reward, problem: str) -> KnownAnswerError:
    return KnownAnswerError(
        f"reward '{reward.name}' fails its known answers: {problem}. Its scores mean nothing here: "
        "check its options, its weights and the versions of its libraries"
    )


def _names(examples: Sequence[Example]) -> str:
    together = " together" if len(examples) > 1 else ""
    return " and ".join(example.what for example in examples) + together


def _range(low: float, high: float) -> str:
    if low == high:
        return f"{low:.4g}"
    if low == -float("inf"):
        return f"at most {high:.4g}"
    return f"at least {low:.4g}" if high == float("inf") else f"{low:.4g} to {high:.4g}"
