"""Pictures of the embedded world as known answers for scorers of photographs: plain enough for any of them."""

from __future__ import annotations

import numpy as np

from flowrl_img.rewards.known_answers import Better, Example, matching
from flowrl_img.world import render, scene_for

__all__ = ["circle", "matched_scenes", "square"]


def circle() -> Example:
    """A red circle on a dark ground, with its prompt."""
    return _scene("red", "circle")


def square() -> Example:
    """A blue square on a dark ground, with its prompt."""
    return _scene("blue", "square")


def matched_scenes() -> Better:
    """Each of the two fits its own prompt better than the other's."""
    return matching(circle(), square())


def _scene(color: str, shape: str) -> Example:
    asked = {"include": [{"class": shape, "count": 1, "color": color}]}
    picture = np.asarray(render(scene_for(asked, np.random.default_rng(0))))
    return Example(f"a drawn {color} {shape}", picture, f"a photo of a {color} {shape}", asked)
