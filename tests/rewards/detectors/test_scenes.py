"""The classical detector: it accepts true scenes, crisp or softened, and rejects wrong ones and pictures of nothing.

A blur of 0.6 px with noise of 6 levels stands in for a pass through an autoencoder at about 30 dB.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import cache

import numpy as np
import pytest
from scipy.ndimage import gaussian_filter

from flowrl_img.rewards.detectors.scenes import NARROW, UNKNOWN, WIDE, Scenes, background_plane, sharpness
from flowrl_img.rewards.geneval import GenEval
from flowrl_img.rewards.protocol import RewardBatch
from flowrl_img.world import COLORS, SHAPES, TASKS, Scene, SceneObject, load_split, render, scene_for

Pictures = list[np.ndarray]
OPPOSITE = {"left of": "right of", "right of": "left of", "above": "below", "below": "above"}
DARK = Scene((), corner=(20.0, 30.0, 40.0), slope_x=(0.3, -0.2, 0.1), slope_y=(0.1, 0.2, -0.3))
QUICK = 40  # scenes a task; one failure is 2.5 %, so these demand all right
FULL = 300


def draw(*objects: SceneObject) -> np.ndarray:
    return np.array(render(Scene(objects, DARK.corner, DARK.slope_x, DARK.slope_y)))


def softened(picture: np.ndarray, rng: np.random.Generator, sigma: float = 0.6, noise: float = 6.0) -> np.ndarray:
    soft = gaussian_filter(picture.astype(float), (sigma, sigma, 0)) + rng.normal(0, noise, picture.shape)
    return soft.round().clip(0, 255).astype(np.uint8)


@cache
def prompts(task: str) -> list[dict]:
    return [row for split in ("train", "test") for row in load_split(split) if row["tag"] == task]


def chosen(task: str, count: int, rng: np.random.Generator) -> list[dict]:
    rows = prompts(task)
    return [rows[k] for k in rng.integers(len(rows), size=count)]


def strict_share(rows: list[dict], pictures: Pictures) -> float:
    import torch

    ids = [str(k) for k in range(len(rows))]
    batch = RewardBatch(torch.from_numpy(np.stack(pictures)), [""] * len(rows), rows, ids)
    return GenEval(mode="strict")(batch).values.mean().item()


def with_other_shape(include: list[dict], rng: np.random.Generator) -> None:
    names = {clause["class"] for clause in include}
    include[rng.integers(len(include))]["class"] = str(rng.choice([s for s in SHAPES if s not in names]))


def with_other_count(include: list[dict], rng: np.random.Generator) -> None:
    clause = include[rng.integers(len(include))]
    room = sum(c["count"] for c in include) < 4
    clause["count"] += 1 if clause["count"] == 1 or (room and rng.uniform() < 0.5) else -1
    for other in include:
        other.pop("position", None)


def with_other_color(include: list[dict], rng: np.random.Generator) -> None:
    clause = include[rng.integers(len(include))]
    clause["color"] = str(rng.choice([c for c in COLORS if c != clause["color"]]))


def with_swapped_colors(include: list[dict], rng: np.random.Generator) -> None:
    include[0]["color"], include[1]["color"] = include[1]["color"], include[0]["color"]


def with_swapped_side(include: list[dict], rng: np.random.Generator) -> None:
    relation, reference = include[1]["position"]
    include[1]["position"] = [OPPOSITE[relation], reference]


WRONG: dict[tuple[str, str], Callable[[list[dict], np.random.Generator], None]] = {
    **{(task, "shape"): with_other_shape for task in TASKS},
    **{(task, "count"): with_other_count for task in TASKS},
    ("colors", "color"): with_other_color,
    ("color_attr", "color"): with_other_color,
    ("color_attr", "binding"): with_swapped_colors,
    ("position", "side"): with_swapped_side,
}


def wrong_pictures(rows: list[dict], change: Callable, rng: np.random.Generator) -> Pictures:
    """For each record a true picture of the record with one thing changed."""
    pictures = []
    for row in rows:
        include = [dict(clause) for clause in row["include"]]
        change(include, rng)
        pictures.append(np.array(render(scene_for({"include": include}, rng))))
    return pictures


def true_and_soft_shares(task: str, count: int) -> tuple[float, float]:
    rng = np.random.default_rng(TASKS.index(task))
    rows = chosen(task, count, rng)
    pictures = [np.array(render(scene_for(row, rng))) for row in rows]
    return strict_share(rows, pictures), strict_share(rows, [softened(picture, rng) for picture in pictures])


@pytest.mark.parametrize("task", TASKS)
def test_true_scenes_are_accepted_crisp_and_softened(task: str) -> None:
    assert true_and_soft_shares(task, QUICK) == (1.0, 1.0)


@pytest.mark.full
@pytest.mark.parametrize("task", TASKS)
def test_nearly_all_of_many_true_scenes_are_accepted(task: str) -> None:
    crisp, soft = true_and_soft_shares(task, FULL)
    assert crisp >= 0.98 and soft >= 0.95


@pytest.mark.parametrize(("task", "thing"), WRONG)
def test_scenes_with_one_wrong_thing_are_rejected(task: str, thing: str) -> None:
    rng = np.random.default_rng(7)
    rows = chosen(task, 20, rng)
    pictures = wrong_pictures(rows, WRONG[task, thing], rng)
    assert strict_share(rows, pictures) == 0.0
    assert strict_share(rows, [softened(picture, rng) for picture in pictures]) == 0.0


@pytest.mark.full
@pytest.mark.parametrize(("task", "thing"), WRONG)
def test_nearly_all_of_many_wrong_scenes_are_rejected(task: str, thing: str) -> None:
    rng = np.random.default_rng(8)
    rows = chosen(task, 200, rng)
    assert strict_share(rows, wrong_pictures(rows, WRONG[task, thing], rng)) <= 0.02


def blank(rng: np.random.Generator) -> np.ndarray:
    return np.full((64, 64, 3), rng.integers(0, 256, 3), np.uint8)


def uniform_noise(rng: np.random.Generator) -> np.ndarray:
    return rng.integers(0, 256, (64, 64, 3), dtype=np.uint8)


def normal_noise(rng: np.random.Generator) -> np.ndarray:
    picture = rng.normal(rng.uniform(20, 200), rng.uniform(5, 80), (64, 64, 3))
    return picture.clip(0, 255).astype(np.uint8)


def clouds(rng: np.random.Generator) -> np.ndarray:
    sigma = rng.uniform(0.7, 8.0)
    smooth = gaussian_filter(rng.normal(size=(64, 64, 3)), (sigma, sigma, 0))
    return ((smooth - smooth.min()) / np.ptp(smooth) * 255).astype(np.uint8)


@pytest.mark.parametrize("nothing", [blank, uniform_noise, normal_noise, clouds])
def test_pictures_of_nothing_hold_no_object(nothing: Callable[[np.random.Generator], np.ndarray]) -> None:
    rng = np.random.default_rng(0)
    found = Scenes().detect([nothing(rng) for _ in range(100)])
    assert sum(any(d.score > 0.3 for d in objects) for objects in found) == 0


@pytest.mark.parametrize("sigma", [2.5, 4.0])
def test_heavily_blurred_scenes_are_rejected(sigma: float) -> None:
    rng = np.random.default_rng(1)
    rows = [row for task in TASKS for row in chosen(task, 17, rng)]
    pictures = [softened(np.array(render(scene_for(row, rng))), rng, sigma, 2.0) for row in rows]
    assert strict_share(rows, pictures) <= 0.01


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("radius", [7.0, 14.0])
def test_a_crisp_shape_scores_above_the_counting_threshold(shape: str, radius: float) -> None:
    for color in COLORS:
        picture = draw(SceneObject(shape, color, 30.3, 33.7, radius))
        (found,) = Scenes().detect([picture])[0]
        assert found.label == shape and found.score > 0.9
        assert Scenes().classify(picture, [found], shape) == [color]


def test_box_and_mask_are_those_of_the_object() -> None:
    picture = draw(SceneObject("square", "yellow", 20.5, 40.5, 10.0))  # half side 8.5
    (found,) = Scenes().detect([picture])[0]
    assert found.box == pytest.approx((12, 32, 29, 49))
    assert found.mask is not None and found.mask.shape == (64, 64)
    assert found.mask.sum() == 17**2


def test_an_object_of_two_colors_is_no_object() -> None:
    picture = draw(SceneObject("circle", "red", 32.0, 32.0, 14.0))
    other = draw(SceneObject("circle", "cyan", 32.0, 32.0, 14.0))
    picture[:, 32:] = other[:, 32:]
    assert not any(d.label == "circle" and d.score > 0.3 for d in Scenes().detect([picture])[0])


def test_a_color_far_from_the_palette_is_unknown() -> None:
    picture = draw(SceneObject("circle", "red", 32.0, 32.0, 12.0))
    (found,) = Scenes().detect([picture])[0]
    painted = picture.copy()
    painted[found.mask] = (130, 110, 100)
    assert Scenes().classify(painted, [found], "circle") == [UNKNOWN]


def test_the_background_is_found_under_an_object_at_the_border() -> None:
    empty, picture = draw(), draw(SceneObject("square", "white", 8.0, 8.0, 14.0))
    assert np.abs(background_plane(picture.astype(np.float32)) - empty).max() < 1.5


def test_sharpness_falls_with_the_width_of_the_edge() -> None:
    """A straight edge blurred by sigma has the width 4 sigma / sqrt(pi); corners and sampling change that a little."""
    crisp = np.zeros((64, 64))
    crisp[16:48, 16:48] = 1.0
    values = [sharpness(gaussian_filter(crisp, sigma)) for sigma in (0.0, 0.8, 1.2, 4.0)]
    assert values == pytest.approx([1.0, 1.0, (WIDE - 4 * 1.2 / np.sqrt(np.pi)) / (WIDE - NARROW), 0.0], abs=0.05)
