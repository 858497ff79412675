"""Scenes of the embedded world and how a true one is drawn for a prompt.

Positions and radii are in pixels of a 64 x 64 picture, x to the right and y down. All randomness comes from the
`numpy.random.Generator` that the caller passes, so a scene is a pure function of (metadata, seed).
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowrl_img.world.vocabulary import COLORS

__all__ = ["GAP", "SIZE", "Scene", "SceneObject", "Sign", "relation_strength", "scene_for"]

RGB = tuple[float, float, float]

SIZE = 64
GAP = 3.0  # pixels between the bounding discs of two objects
EDGE = 2.5  # pixels between an object and the border of the picture
RADII = {1: (9.0, 15.0), 2: (8.0, 12.5), 3: (7.5, 11.0), 4: (7.0, 9.5)}
REACH = {
    "square": 1.21,
    "triangle": 1.32,
    "cross": 1.06,
    "heart": 1.19,
}  # bounding-disc radius in units of the nominal one
PANELS = ((238, 236, 226), (246, 226, 120), (176, 224, 236), (190, 232, 176))
INKS = ((20, 20, 26), (24, 44, 120), (130, 20, 28))


@dataclass(frozen=True)
class SceneObject:
    """One flat shape. Example: SceneObject("star", "red", x=20.0, y=31.5, r=9.0)."""

    shape: str
    color: str
    x: float
    y: float
    r: float

    @property
    def reach(self) -> float:
        """Radius of the bounding disc in pixels."""
        return self.r * REACH.get(self.shape, 1.0)


@dataclass(frozen=True)
class Sign:
    """A panel with text, centred at (x, y). Example: Sign("AB4", 32.0, 30.0, (238, 236, 226), (20, 20, 26))."""

    text: str
    x: float
    y: float
    panel: tuple[int, int, int]
    ink: tuple[int, int, int]


@dataclass(frozen=True)
class Scene:
    """A dark background (linear gradient from `corner`, with `slope_x`, `slope_y` per pixel) with objects or a sign."""

    objects: tuple[SceneObject, ...]
    corner: tuple[float, float, float]
    slope_x: tuple[float, float, float]
    slope_y: tuple[float, float, float]
    sign: Sign | None = None


def scene_for(metadata: Mapping, rng: np.random.Generator) -> Scene:
    """A true scene for one metadata record (GenEval schema, or `ocr_target` for a sign)."""
    if "ocr_target" in metadata:
        corner, slope_x, slope_y = _background(rng)
        return Scene((), corner, slope_x, slope_y, sign=_sign(metadata["ocr_target"], rng))
    wanted = [clause for clause in metadata["include"] for _ in range(clause["count"])]
    if len(wanted) not in RADII:
        raise ValueError(f"a scene holds 1 to {max(RADII)} objects, not {len(wanted)}: {metadata.get('prompt')!r}")
    for _ in range(2000):
        objects = _place(wanted, rng)
        if objects is not None and _relations_hold(metadata["include"], objects):
            return Scene(objects, *_background(rng))
    raise ValueError(f"no room for a true scene of {metadata.get('prompt')!r}: fewer or smaller objects are needed")


def relation_strength(a: SceneObject, b: SceneObject, relation: str) -> float:
    """How clearly `a` stands in `relation` to `b`: GenEval's revised offset over the raw one, in [-1, 1]."""
    offset = np.array([a.x - b.x, a.y - b.y])
    slack = 0.1 * 2 * (a.r + b.r)
    revised = np.sign(offset) * np.maximum(np.abs(offset) - slack, 0)
    x, y = revised / max(float(np.linalg.norm(offset)), 1e-9)
    return float({"left of": -x, "right of": x, "above": -y, "below": y}[relation])


def _background(rng: np.random.Generator) -> tuple[RGB, RGB, RGB]:
    corners = rng.uniform(8, 62, size=3) * rng.uniform(0.5, 1.0)
    opposite = rng.uniform(8, 62, size=3) * rng.uniform(0.5, 1.0)
    along = rng.uniform(0, 1)
    slope = (opposite - corners) / (SIZE - 1)
    return _rgb(corners), _rgb(slope * along), _rgb(slope * (1 - along))


def _rgb(values: NDArray[np.float64]) -> RGB:
    red, green, blue = (float(c) for c in values)
    return red, green, blue


def _sign(text: str, rng: np.random.Generator) -> Sign:
    panel = PANELS[rng.integers(len(PANELS))]
    ink = INKS[rng.integers(len(INKS))]
    return Sign(text, 32 + rng.uniform(-2.0, 2.0), 32 + rng.uniform(-8, 8), panel, ink)


def _place(wanted: Sequence[Mapping], rng: np.random.Generator) -> tuple[SceneObject, ...] | None:
    low, high = RADII[len(wanted)]
    placed: list[SceneObject] = []
    names = list(COLORS)
    shared = names[rng.integers(len(names))] if rng.uniform() < 0.5 else None
    for clause in wanted:
        color = clause.get("color") or shared or names[rng.integers(len(names))]
        r = rng.uniform(low, high)
        for _ in range(20):
            x, y = rng.uniform(r + EDGE, SIZE - r - EDGE, size=2)
            candidate = SceneObject(clause["class"], color, float(x), float(y), float(r))
            if all(math.dist((x, y), (o.x, o.y)) >= candidate.reach + o.reach + GAP for o in placed):
                placed.append(candidate)
                break
        else:
            return None
    return tuple(placed)


def _relations_hold(include: Sequence[Mapping], objects: Sequence[SceneObject]) -> bool:
    """Position clauses hold with room to spare, so that the truth does not hang on a pixel."""
    by_class = {o.shape: o for o in objects}
    for clause in include:
        if "position" in clause:
            relation, index = clause["position"]
            target = by_class[include[index]["class"]]
            if relation_strength(by_class[clause["class"]], target, relation) < 0.62:
                return False
    return True
