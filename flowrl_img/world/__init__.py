"""The embedded world: 64 x 64 scenes of coloured shapes and signs, posed as the six GenEval tasks and as OCR.

A leaf of the house: it knows NumPy and Pillow only, so scorers, pre-training and tests all stand on it.
"""

from flowrl_img.world.render import outline, render, shape_mask
from flowrl_img.world.scenes import SIZE, Scene, SceneObject, Sign, relation_strength, scene_for
from flowrl_img.world.splits import SPLITS, load_split, prompts_of
from flowrl_img.world.vocabulary import CHARACTERS, COLORS, NUMBERS, RELATIONS, SHAPES, TASKS

__all__ = [
    "CHARACTERS",
    "COLORS",
    "NUMBERS",
    "RELATIONS",
    "SHAPES",
    "SIZE",
    "SPLITS",
    "TASKS",
    "Scene",
    "SceneObject",
    "Sign",
    "load_split",
    "outline",
    "prompts_of",
    "relation_strength",
    "render",
    "scene_for",
    "shape_mask",
]
