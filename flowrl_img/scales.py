"""How strong reinforcement learning guidance is at each step: a number, a switch between two, or a ramp.

In text: `1.6`; `1:0@12` is 1 for the first 12 steps and 0 from there on, `1:0@0.6` the same for the first 60 % of the
steps, whatever their number; `2..0` falls evenly from 2 at the first step to 0 at the last. 0 is the base model, 1 the
tuned one, between them lie interpolations, beyond them extrapolations.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Constant", "Ramp", "Scale", "Switch", "as_scale", "parse_scale", "parse_scales"]

Scale = Callable[[int, int], float]
"""(step from 0, number of steps) -> weight of that step. `str(scale)` is its text and the label in tables."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
FORMS = "write a number (1.6), early:late@step (1:0@12), early:late@share (1:0@0.6) or first..last (2..0)"


@dataclass(frozen=True)
class Constant:
    """The same weight at every step."""

    weight: float

    def __call__(self, step: int, num_steps: int) -> float:
        return self.weight

    def __str__(self) -> str:
        return f"{self.weight:g}"


@dataclass(frozen=True)
class Switch:
    """`early` before the place `at`, `late` from there on. at: a number of steps (int), or a share of them (float)."""

    early: float
    late: float
    at: int | float

    def __post_init__(self) -> None:
        if self.at < 0 or (isinstance(self.at, float) and self.at > 1):
            raise ValueError(f"a switch lies at a step (an integer from 0) or a share (0.0 to 1.0), got {self.at}")

    def __call__(self, step: int, num_steps: int) -> float:
        boundary = self.at if isinstance(self.at, int) else round(self.at * num_steps)
        return self.early if step < boundary else self.late

    def __str__(self) -> str:
        return f"{self.early:g}:{self.late:g}@{self.at}"


@dataclass(frozen=True)
class Ramp:
    """Linear in the step, from the first step to the last."""

    first: float
    last: float

    def __call__(self, step: int, num_steps: int) -> float:
        return self.first + (self.last - self.first) * step / max(num_steps - 1, 1)

    def __str__(self) -> str:
        return f"{self.first:g}..{self.last:g}"


def parse_scale(text: str) -> Scale:
    """The scale that `text` writes. ValueError says how scales are written."""
    text = text.strip()
    if re.fullmatch(NUMBER, text):
        return Constant(_finite(text))
    if found := re.fullmatch(rf"({NUMBER}):({NUMBER})@(\d+|\d*\.\d+)", text):
        early, late, at = found.groups()
        return Switch(_finite(early), _finite(late), int(at) if at.isdecimal() else float(at))
    first, dots, last = text.partition("..")
    if dots and re.fullmatch(NUMBER, first) and re.fullmatch(NUMBER, last):
        return Ramp(_finite(first), _finite(last))
    raise ValueError(f"{text!r} is no scale: {FORMS}")


def parse_scales(text: str) -> list[Scale]:
    """Scales separated by commas, each once. Example: `0,1,1.6`."""
    scales = [parse_scale(part) for part in text.split(",") if part.strip()]
    if not scales:
        raise ValueError(f"no scale in {text!r}: {FORMS}")
    return list(dict.fromkeys(scales))


def as_scale(scale: float | str | Scale) -> Scale:
    """A number, a text or a function of (step, number of steps), as a scale."""
    if isinstance(scale, str):
        return parse_scale(scale)
    if isinstance(scale, (int, float)) and not isinstance(scale, bool):
        return Constant(_finite(scale))
    if callable(scale):
        return scale
    raise ValueError(f"{scale!r} is no scale: {FORMS}, or a function of (step, number of steps)")


def _finite(value: str | float) -> float:
    number = float(value)
    if not math.isfinite(number):
        raise ValueError(f"a scale must be finite, got {value}")
    return number
