"""How strong reinforcement learning guidance is at each step: a number, a switch between two, or a ramp.

In text: `1.6`; `1:0@12` is 1 for the first 12 steps and 0 from there on, `1:0@0.6` the same for the first 60 % of the
steps, whatever their number; `2..0` falls evenly from 2 at the first step to 0 at the last. 0 is the base model, 1 the
tuned one, between them lie interpolations, beyond them extrapolations. Several tuned models at once have one each, with
a slash between them: `1.5/0.5`.
"""

from __future__ import annotations

import math
import re
from collections.abc import Callable
from dataclasses import dataclass

__all__ = ["Constant", "Ramp", "Scale", "Switch", "Variant", "as_scale", "parse_scale", "parse_variants"]

Scale = Callable[[int, int], float]
"""(step from 0, number of steps) -> weight of that step. `str(scale)` is its text and the label in tables."""

NUMBER = r"[-+]?(?:\d+\.?\d*|\.\d+)(?:[eE][-+]?\d+)?"
DIGITS = ".15g"  # labels name rows and files, so unequal scales must not share one
FORMS = "write a number (1.6), early:late@step (1:0@12), early:late@share (1:0@0.6) or first..last (2..0)"


@dataclass(frozen=True)
class Constant:
    """The same weight at every step."""

    weight: float

    def __call__(self, step: int, num_steps: int) -> float:
        return self.weight

    def __str__(self) -> str:
        return f"{self.weight:{DIGITS}}"


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
        return f"{self.early:{DIGITS}}:{self.late:{DIGITS}}@{self.at}"


@dataclass(frozen=True)
class Ramp:
    """Linear in the step, from the first step to the last."""

    first: float
    last: float

    def __call__(self, step: int, num_steps: int) -> float:
        return self.first + (self.last - self.first) * step / max(num_steps - 1, 1)

    def __str__(self) -> str:
        return f"{self.first:{DIGITS}}..{self.last:{DIGITS}}"


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


@dataclass(frozen=True)
class Variant:
    """One strength of everything that was tuned: a scale for each tuned side."""

    scales: tuple[Scale, ...]

    @property
    def label(self) -> str:
        """`base`, `tuned` or `w=1.6`, as it stands in tables and file names."""
        for name, weight in (("base", 0), ("tuned", 1)):
            if all(scale == Constant(weight) for scale in self.scales):
                return name
        scales = self.scales[:1] if len(set(self.scales)) == 1 else self.scales
        return "w=" + "/".join(map(str, scales))

    @property
    def weight(self) -> float | None:
        """The one number that all scales are; None for schedules and for unequal scales."""
        scales = set(self.scales) or {Constant(0)}
        one = scales.pop()
        return one.weight if isinstance(one, Constant) and not scales else None


def parse_variants(text: str, sides: int) -> list[Variant]:
    """Strengths separated by commas, each once, for `sides` tuned sides. Example: `0,1,1.6` or `1,1.5/0.5`.

    ValueError for what is no scale, and for a strength other than 0 where nothing is tuned.
    """
    found = []
    for part in text.split(","):
        if part.strip():
            scales = tuple(parse_scale(one) for one in part.split("/"))
            found.append(Variant(scales * sides if len(scales) == 1 else scales))
            if len(found[-1].scales) != sides:
                raise ValueError(
                    f"{part.strip()!r} gives {len(scales)} scales for {sides} tuned models: one, or one each"
                )
            if not sides and scales != (Constant(0),):
                raise ValueError(f"scale {part.strip()}: nothing tuned is given, so there is only the base (0)")
    if not found:
        raise ValueError(f"no scale in {text!r}: {FORMS}")
    return list(dict.fromkeys(found))


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
