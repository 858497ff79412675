"""What every built-in reward keeps: one value a pair, whatever the batch and its order."""

from __future__ import annotations

from functools import cache
from typing import Any

import numpy as np
import pytest
import tiny_models
import torch

from flowrl_img.rewards import registry
from flowrl_img.rewards.protocol import Differentiable, Fingerprinted, Reward, RewardOutput, scope_of
from flowrl_img.rewards.score import score
from flowrl_img.world import SHAPES, render, scene_for

ROWS = [
    {
        "tag": "single_object", "include": [{"class": shape, "count": 1}], "ocr_target": text, "prompt": f'"{text}"',
        "source": tiny_models.source_picture(),
    }
    for shape, text in zip(SHAPES, ["AB", "X4T", "HEN", "F2"], strict=False)
]  # fmt: skip
GROUPS = ["p", "p", "q", "q"]


@cache
def pictures() -> torch.Tensor:
    """[4, 3, 64, 64]: a true scene, a wrong one, a true sign, a blank."""
    rng = np.random.default_rng(0)
    sign = scene_for({"ocr_target": ROWS[2]["ocr_target"]}, rng)
    scenes = [scene_for({"include": ROWS[0]["include"]}, rng), scene_for({"include": ROWS[0]["include"]}, rng), sign]
    drawn = [np.array(render(scene)) for scene in scenes] + [np.full((64, 64, 3), 30, np.uint8)]
    return torch.from_numpy(np.stack(drawn)).permute(0, 3, 1, 2) / 255


@cache
def reward(name: str) -> Reward:
    return registry.load(name, **tiny_models.options(name))


def same(one: Any, two: Any) -> None:
    """Equal up to float32 rounding: matrix products of other sizes round differently, by parts in 10^7 of a score."""
    torch.testing.assert_close(one, two, rtol=1e-6, atol=1e-6)


def ask(name: str, order: list[int]) -> RewardOutput:
    rows = [ROWS[k] for k in order]
    prompts, ids = [str(row["prompt"]) for row in rows], [f"s{k}" for k in order]
    return score(reward(name), pictures()[order], prompts, rows, ids, group_ids=[GROUPS[k] for k in order])


def units(name: str) -> list[list[int]]:
    """The rows that may be scored apart: single ones, or whole groups."""
    return [[0], [1], [2], [3]] if scope_of(reward(name)) == "point" else [[0, 1], [2, 3]]


@cache
def straight(name: str) -> RewardOutput:
    return ask(name, [0, 1, 2, 3])


every = pytest.mark.parametrize("name", registry.builtins())


@every
def test_a_batch_equals_its_singles_or_groups(name: str) -> None:
    parts = [ask(name, unit) for unit in units(name)]
    same(torch.cat([part.values for part in parts]), straight(name).values)
    for key, column in straight(name).details.items():
        assert [entry for part in parts for entry in part.details[key]] == column


@every
def test_values_follow_a_permutation(name: str) -> None:
    order = [2, 0, 3, 1]
    same(ask(name, order).values, straight(name).values[order])


@every
def test_values_differ_between_pictures(name: str) -> None:
    assert len(set(straight(name).values.tolist())) > 1


@every
def test_values_are_valid_float32_numbers(name: str) -> None:
    out = straight(name)
    assert out.values.dtype == torch.float32 and out.valid.all() and out.values.isfinite().all()


@every
def test_the_name_is_the_file_and_prompts_are_checked_before_a_run(name: str) -> None:
    made = reward(name)
    assert made.name == name
    made.validate([str(row["prompt"]) for row in ROWS], ROWS)
    for key in made.needs:
        with pytest.raises(ValueError, match="line 1"):
            made.validate(["x"], [{k: v for k, v in ROWS[0].items() if k != key}])


@every
def test_the_differentiable_score_is_the_score_and_has_gradients(name: str) -> None:
    made = reward(name)
    if not isinstance(made, Differentiable):
        assert not hasattr(made, "differentiable")
        return
    # At the size the model reads nothing is resized, so the two paths differ by float32 rounding alone.
    images = torch.nn.functional.interpolate(pictures(), size=(224, 224)).requires_grad_()
    prompts = [str(row["prompt"]) for row in ROWS]
    values = made.differentiable(images, prompts)
    expected = score(made, images.detach(), prompts, ROWS, list("abcd")).values
    torch.testing.assert_close(values.detach(), expected, rtol=1e-6, atol=1e-6)
    values.sum().backward()
    assert images.grad is not None and images.grad.isfinite().all() and (images.grad != 0).flatten(1).any(1).all()


@every
def test_scores_are_the_same_inside_autocast_and_inference_mode(name: str) -> None:
    with torch.autocast("cpu", dtype=torch.bfloat16), torch.inference_mode():
        inside = ask(name, [0, 1, 2, 3])
    assert inside.values.dtype == torch.float32 and torch.equal(inside.values, straight(name).values)


@every
def test_what_the_scores_depend_on_is_stated_as_text(name: str) -> None:
    made = reward(name)
    assert isinstance(made, Fingerprinted) and made.fingerprint
    assert all(isinstance(value, str) for value in made.fingerprint.values())


@every
def test_its_packages_are_stated_where_it_needs_any(name: str) -> None:
    from packaging.requirements import Requirement

    stated = getattr(reward(name), "requirements", ())
    assert [Requirement(text) for text in stated] or name == "jpeg"


@every
def test_an_unknown_option_is_refused(name: str) -> None:
    with pytest.raises(ValueError, match="unknown key 'modle'"):
        registry.load(name, modle="x")
