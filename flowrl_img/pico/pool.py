"""Pre-training pictures: scenes of the training combinations with captions and per-cell labels.

Every scene comes from its own seed, so a pool of any size is a prefix of a longer one. Only combinations of the
training split occur, in captions and in pictures.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
from numpy.typing import NDArray

from flowrl_img.world.render import CELL, render
from flowrl_img.world.scenes import SIZE, Scene, scene_for
from flowrl_img.world.splits import prompts_of, random_text
from flowrl_img.world.vocabulary import CHARACTERS, COLORS, SHAPES, color_attr_prompt, sign_prompt

__all__ = ["CELLS", "MIX", "Pool", "cell_labels", "draw", "make_pool", "rich_caption"]

CELLS = 8
# Share of each task: harder ones are seen more often.
MIX = {
    "single_object": 0.07,
    "two_object": 0.15,
    "counting": 0.20,
    "colors": 0.09,
    "position": 0.16,
    "color_attr": 0.15,
    "ocr": 0.18,
}
RICH = 0.4  # share of position scenes whose caption also names the colours
RECORDS = {task: prompts_of("train", task) for task in MIX if task != "ocr"}


@dataclass(frozen=True)
class Pool:
    """images: uint8 [N, 64, 64, 3]; captions: N strings; cells: int8 [N, 3, 8, 8], see `cell_labels`."""

    images: NDArray[np.uint8]
    captions: list[str]
    cells: NDArray[np.int8]


def draw(seed: int) -> tuple[Scene, str]:
    """The scene and caption of one seed."""
    rng = np.random.default_rng(seed)
    task = list(MIX)[rng.choice(len(MIX), p=np.array(list(MIX.values())))]
    if task == "ocr":
        record = sign_prompt(random_text("train", rng))
    else:
        record = RECORDS[task][rng.integers(len(RECORDS[task]))]
    scene = scene_for(record, rng)
    rich = task == "position" and rng.uniform() < RICH
    return scene, rich_caption(record, scene) if rich else record["prompt"]


def rich_caption(record: dict, scene: Scene) -> str:
    """`a photo of a red circle left of a blue square`: the second clause stands in relation to the first."""
    target, subject = scene.objects
    caption = color_attr_prompt((subject.color, subject.shape), (target.color, target.shape))["prompt"]
    return caption.replace(" and ", f" {record['include'][1]['position'][0]} ")


def cell_labels(scene: Scene) -> NDArray[np.int8]:
    """What stands at each latent cell: int8 [3, 8, 8], shape, colour and character indices from 1; 0 is none."""
    labels = np.zeros((3, CELLS, CELLS), np.int8)
    centres = (np.arange(CELLS) + 0.5) * SIZE / CELLS
    x, y = np.meshgrid(centres, centres)
    for item in scene.objects:
        inside = (x - item.x) ** 2 + (y - item.y) ** 2 <= max(item.r, 5.0) ** 2
        labels[0][inside] = 1 + SHAPES.index(item.shape)
        labels[1][inside] = 1 + list(COLORS).index(item.color)
    if scene.sign is not None:
        for k, character in enumerate(scene.sign.text):
            centre = scene.sign.x + (k - (len(scene.sign.text) - 1) / 2) * CELL
            labels[2][(np.abs(x - centre) <= CELL / 2) & (np.abs(y - scene.sign.y) <= 12)] = 1 + CHARACTERS.index(
                character
            )
    return labels


def make_pool(first: int, count: int) -> Pool:
    """Scenes of seeds `first` to `first + count - 1`."""
    images = np.empty((count, SIZE, SIZE, 3), np.uint8)
    cells = np.empty((count, 3, CELLS, CELLS), np.int8)
    captions = []
    for k in range(count):
        scene, caption = draw(first + k)
        images[k] = np.asarray(render(scene))
        cells[k] = cell_labels(scene)
        captions.append(caption)
    return Pool(images, captions, cells)
