"""Pictures of the embedded world as known answers for scorers of photographs: plain enough for any of them."""

from __future__ import annotations

import base64

import numpy as np

from flowrl_img.rewards.known_answers import Better, Example, matching
from flowrl_img.rewards.wire import png_of
from flowrl_img.world import render, scene_for

__all__ = ["circle", "edited_scenes", "matched_scenes", "square"]


def circle() -> Example:
    """A red circle on a dark ground, with its prompt."""
    return _scene("red", "circle")


def square() -> Example:
    """A blue square on a dark ground, with its prompt."""
    return _scene("blue", "square")


def matched_scenes() -> Better:
    """Each of the two fits its own prompt better than the other's."""
    return matching(circle(), square())


def edited_scenes() -> Better:
    """Told to replace a blue square by a red circle, a red circle is better than the same blue square."""
    source = f"data:image/png;base64,{base64.b64encode(png_of(square().image)).decode()}"
    told, row = "replace the blue square by a red circle", {"source": source}
    done = Example("a drawn red circle as the edit of a blue square", circle().image, told, row)
    return Better((done,), (Example("the blue square, left as it was,", square().image, told, row),))


def _scene(color: str, shape: str) -> Example:
    asked = {"include": [{"class": shape, "count": 1, "color": color}]}
    picture = np.asarray(render(scene_for(asked, np.random.default_rng(0))))
    return Example(f"a drawn {color} {shape}", picture, f"a photo of a {color} {shape}", asked)
