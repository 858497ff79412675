"""Captions of the world with one attribute wrong: a shape, a colour, a count, a relation or a letter of a sign.

The wrong caption is false of every scene that was drawn for the true one. Left out: captions that are wrong in two
ways.
"""

from __future__ import annotations

import re

import numpy as np

from flowrl_img.world.vocabulary import CHARACTERS, COLORS, NUMBERS, PLURALS, SHAPES

__all__ = ["KINDS", "kinds_in", "stated", "wrong_caption"]

OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
KINDS = ("shape", "color", "count", "relation", "letter")
SINGULAR = {plural: shape for shape, plural in PLURALS.items()}
PATTERNS = {
    "shape": re.compile(rf"\b({'|'.join([*PLURALS.values(), *SHAPES])})\b"),
    "color": re.compile(rf"\b({'|'.join(COLORS)})\b"),
    "count": re.compile(rf"\b({'|'.join(NUMBERS.values())})\b"),
    "relation": re.compile(rf"\b({'|'.join(OPPOSITE)})\b"),
    "letter": re.compile(r'(?<=")([^"]+)(?=")'),
}


def kinds_in(caption: str) -> list[str]:
    """The attributes that a caption states."""
    return [kind for kind in KINDS if PATTERNS[kind].search(caption)]


def stated(caption: str, kind: str) -> list[str]:
    """The words of one kind in a caption, shapes in the singular, the text of a sign whole."""
    return [SINGULAR.get(match[0], match[0]) for match in PATTERNS[kind].finditer(caption)]


def wrong_caption(caption: str, rng: np.random.Generator, kind: str | None = None) -> str:
    """`a photo of a red circle` -> `a photo of a red star`. kind: which attribute; None draws one of those stated.

    ValueError if the caption states nothing of that kind.
    """
    possible = kinds_in(caption)
    chosen = kind or (possible[rng.integers(len(possible))] if possible else "none")
    if chosen not in possible:
        raise ValueError(f"the caption {caption!r} states no {chosen}; it states {', '.join(possible) or 'nothing'}")
    found = list(PATTERNS[chosen].finditer(caption))
    match = found[rng.integers(len(found))]
    changed = caption[: match.start()] + _other(chosen, match[0], caption, rng) + caption[match.end() :]
    return changed if chosen == "letter" else _articles(changed)


def _other(kind: str, word: str, caption: str, rng: np.random.Generator) -> str:
    if kind == "relation":
        return OPPOSITE[word]
    if kind == "letter":
        place = int(rng.integers(len(word)))
        letters = [c for c in CHARACTERS if c != word[place]]
        return word[:place] + letters[rng.integers(len(letters))] + word[place + 1 :]
    if kind == "shape":
        others = [shape for shape in SHAPES if shape not in stated(caption, "shape")]
        other = others[rng.integers(len(others))]
        return PLURALS[other] if word in SINGULAR else other
    words = list(COLORS) if kind == "color" else list(NUMBERS.values())
    others = [w for w in words if w != word]
    return others[rng.integers(len(others))]


def _articles(caption: str) -> str:
    """a before consonants, an before vowels."""
    return re.sub(r"\ban? (?=(\w))", lambda m: "an " if m[1] in "aeiou" else "a ", caption)
