"""Alarms for a reward that gives one constant, and for one that runs away."""

from __future__ import annotations

import pytest
import torch

from flowrl_img.rewards.alarm import Alarm
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.mixture import Mixture, Part
from flowrl_img.rewards.registry import FunctionReward
from flowrl_img.rewards.score import Scorer, score

NAN = float("nan")


def fed(*rollouts: list[float], alarm: Alarm | None = None) -> list[bool]:
    """Whether each rollout rang."""
    alarm = alarm or Alarm()
    return [alarm.observe([{"r": values}]) is not None for values in rollouts]


def test_three_constant_rollouts_in_a_row_ring_once() -> None:
    assert fed(*[[0.0, 0.0]] * 5) == [False, False, True, False, False]


@pytest.mark.parametrize(
    "rollouts",
    [
        [[0.0, 0.0], [0.0, 0.0], [0.0, 0.1], [0.0, 0.0], [0.0, 0.0]],  # it moved in between
        [[0.0, 0.0], [0.1, 0.1], [0.2, 0.2], [0.3, 0.3]],  # flat, but each time elsewhere
        [[0.0, 0.0], [0.0, 0.0], [NAN, NAN]],  # nothing valid: no third constant
        [[0.0, 0.00001]] * 4,  # small differences still rank
    ],
)
def test_anything_else_does_not_ring(rollouts: list[list[float]]) -> None:
    assert not any(fed(*rollouts))


def test_failures_and_rounding_hide_no_constant() -> None:
    assert fed([0.3, NAN], [NAN, NAN], [0.3, 0.3], [NAN, 0.3 + 1e-8]) == [False, False, False, True]


def test_a_constant_that_begins_late_rings_three_rollouts_later() -> None:
    assert fed([0.1, 0.2], [0.2, 0.2], [0.2, 0.2], [0.2, 0.2]) == [False, False, False, True]


def test_a_rollout_is_constant_only_over_all_processes() -> None:
    alarm = Alarm(rollouts=1)
    assert alarm.observe([{"r": [0.0, 0.0]}, {"r": [1.0, 1.0]}]) is None
    assert alarm.observe([{"r": [1.0]}, {"r": [1.0]}]) is not None


def test_each_part_of_a_mixture_is_watched_under_its_name() -> None:
    dead = FunctionReward(lambda images, prompts, metadata: [0.25] * len(images), "dead")
    alive = FunctionReward(lambda images, prompts, metadata: images.float().mean(dim=(1, 2, 3)), "alive")
    mixture = Mixture((Part(Scorer(dead)), Part(Scorer(alive))))
    output = score(
        mixture, torch.tensor([0.0, 1.0])[:, None, None, None].expand(2, 3, 4, 4), ["", ""], [{}, {}], ["a", "b"]
    )
    assert mixture.columns(output) == {"dead": [0.25, 0.25], "alive": [0.0, 255.0]}
    warning = Alarm(rollouts=1).observe([mixture.columns(output)])
    assert warning is not None and warning.startswith("reward 'dead' gave every picture of 1 rollouts")
    assert "the same score, 0.25:" in warning and "alive" not in warning


@pytest.mark.parametrize("broken", [slice(0, 1), slice(0, 2)])
def test_a_picture_that_was_not_scored_at_all_is_left_out(broken: slice) -> None:
    half = FunctionReward(lambda images, prompts, metadata: [0.5] * len(images), "half")
    mixture = Mixture((Part(Scorer(half, failures=FailureBudget("mask"))),))
    images = torch.zeros(2, 3, 4, 4)
    images[broken] = NAN
    output = score(mixture, images, ["", ""], [{}, {}], ["a", "b"])
    warning = Alarm(rollouts=1).observe([mixture.columns(output)])
    assert (warning is not None) == bool(output.valid.any())


def test_an_alarm_of_no_rollouts_is_refused() -> None:
    for wrong in ({"rollouts": 0}, {"far": 0.0}):
        with pytest.raises(ValueError, match="rollouts must be at least 1 and far above 0"):
            Alarm(**wrong)


def ring(*means: float, width: float = 1.0) -> list[bool]:
    """Whether rollouts of the given means, `width` wide, ring for running away."""
    alarm = Alarm()
    said = [alarm.observe([{"r": [mean - width / 2, mean + width / 2]}]) for mean in means]
    return [text is not None and "has run away" in text for text in said]


def test_a_mean_far_outside_the_first_rollouts_rings_once() -> None:
    assert ring(7, 7.5, 8, 9, 12, 14, 15, 16) == [False] * 6 + [True, False]  # 6.5 to 8.5, and 3 widths of 2 more
    assert ring(7, 7.5, 8, 0.6, 0.4) == [False] * 4 + [True]


def test_learning_inside_a_bounded_range_does_not_ring() -> None:
    assert not any(ring(0.1, 0.12, 0.15, *[k / 100 for k in range(15, 100)], width=0.3))


def test_a_runaway_is_told_with_both_ranges() -> None:
    alarm = Alarm(rollouts=1)
    alarm.observe([{"hps": [6.0, 8.0]}])
    assert "its mean is 20, where the first 1 rollouts lay in 6 to 8" in str(alarm.observe([{"hps": [19.0, 21.0]}]))
