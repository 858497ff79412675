"""The audit finds what it looks for."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
import torch

from flowrl_img.rewards import registry
from flowrl_img.rewards.audit import Finding, audit, calibration_set
from flowrl_img.rewards.protocol import Reward
from flowrl_img.rewards.registry import FunctionReward


def findings(reward: Reward) -> dict[str, Finding]:
    return {finding.name: finding for finding in audit(reward, calibration_set(reward, 8))}


def broken(reward: Reward) -> set[str]:
    return {name for name, finding in findings(reward).items() if finding.ok is False}


def function(make: Any) -> FunctionReward:
    return FunctionReward(make, "mine")


def levels(images: torch.Tensor) -> list[float]:
    return (images.double().mean(dim=(1, 2, 3)) / 255).tolist()


@pytest.mark.parametrize("name", ["geneval", "jpeg", "ocr"])
def test_built_ins_keep_every_law(name: str) -> None:
    found = findings(registry.load(name))
    assert not [f for f in found.values() if f.ok is False]
    assert sum(f.ok is True for f in found.values()) == 5  # known answers, three laws, a range


def test_a_reward_that_throws_dice_is_found() -> None:
    assert broken(function(lambda images, prompts, metadata: torch.rand(len(images)))) >= {"same scores twice"}


def test_a_reward_that_normalises_over_its_batch_is_found() -> None:
    def centred(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        values = torch.tensor(levels(images))
        return (values - values.mean()).tolist()

    assert broken(function(centred)) == {"a batch equals its parts"}


def test_a_reward_that_goes_by_the_place_in_the_batch_is_found() -> None:
    def placed(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        return [level + row for row, level in enumerate(levels(images))]

    assert broken(function(placed)) == {"a batch equals its parts", "scores follow a permutation"}


def test_a_constant_and_a_failure_are_found() -> None:
    assert broken(function(lambda images, prompts, metadata: [1.0] * len(images))) == {"range"}
    assert broken(function(lambda images, prompts, metadata: [None] * len(images))) == {"range"}


def test_a_groupwise_reward_is_checked_by_groups() -> None:
    reward = registry.load("sample_rewards:Contest")
    assert not broken(reward)


def test_the_calibration_set_is_half_right_and_fits_the_reward() -> None:
    batch = calibration_set(registry.load("geneval"), 12)
    values = registry.load("geneval")(batch).values
    assert values[::2].min() == 1.0 and values[1::2].max() < 1.0
    assert "ocr_target" in calibration_set(registry.load("ocr"), 4).metadata[0]


def test_a_reward_of_other_metadata_asks_for_pictures() -> None:
    class Styled:
        name, needs = "styled", frozenset({"style"})

        def validate(self, prompts: Any, metadata: Any) -> None:
            raise ValueError("line 1: no style")

        def __call__(self, batch: Any) -> Any: ...

    with pytest.raises(ValueError, match="give --images and --prompts: line 1: no style"):
        calibration_set(Styled())
