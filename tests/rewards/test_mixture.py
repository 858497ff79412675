"""The weighted sum of rewards."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.protocol import RewardOutput
from flowrl_img.rewards.registry import FunctionReward
from flowrl_img.rewards.score import score


def constant(name: str, *values: float | None) -> FunctionReward:
    return FunctionReward(lambda images, prompts, metadata: list(values), name)


def ask(mixture: Mixture, rows: int = 2) -> RewardOutput:
    ids = [str(k) for k in range(rows)]
    return score(mixture, torch.rand(rows, 3, 2, 2), [""] * rows, [{}] * rows, ids, policy="mask")


def mix(weights: dict[str, float], **values: Any) -> Mixture:
    return Mixture(weights, {name: constant(name, *row) for name, row in values.items()})


def test_the_sum_is_weighted_and_parts_are_logged_raw() -> None:
    out = ask(mix({"a": 0.5, "b": -2.0}, a=(1.0, 2.0), b=(10.0, 0.25)))
    assert out.values.tolist() == [-19.5, 0.5]
    assert out.details["a"] == [1.0, 2.0] and out.details["b"] == [10.0, 0.25]


def test_a_row_is_invalid_where_a_weighted_part_failed() -> None:
    out = ask(mix({"a": 1.0, "b": 1.0}, a=(1.0, 2.0), b=(None, 3.0)))
    assert out.valid.tolist() == [False, True]
    assert out.values[0].isnan() and out.values[1] == 5.0
    assert out.details["error"] == ["b: no reason given", None]


def test_a_part_of_weight_zero_is_logged_but_counts_for_nothing() -> None:
    out = ask(mix({"a": 1.0, "b": 0.0}, a=(1.0, 2.0), b=(None, 3.0)))
    assert out.valid.all() and out.values.tolist() == [1.0, 2.0]
    assert out.details["b"][1] == 3.0


@pytest.mark.parametrize("weights", [{}, {"a": 0.0}, {"a": float("nan")}, {"b": 1.0}])
def test_weights_that_make_no_sum_are_errors(weights: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="weight"):
        mix(weights, a=(1.0, 2.0))


def test_a_mixture_of_mixtures_is_a_reward() -> None:
    inner = mix({"a": 2.0}, a=(1.0, 2.0))
    assert ask(Mixture({"inner": 3.0}, {"inner": inner})).values.tolist() == [6.0, 12.0]
