import re

import pytest

from flowrl_img import recipes
from flowrl_img.config import WindowConfig
from flowrl_img.samplers import windows
from flowrl_img.window import candidates, window_of, window_problems, window_size

RULES = [
    ({}, windows.ListedSteps(tuple(range(9)))),
    ({"low": 2, "high": 10}, windows.ListedSteps(tuple(range(2, 10)))),
    ({"steps": (7, 0, 3)}, windows.ListedSteps((0, 3, 7))),
    ({"size": 3, "low": 1, "schedule": "fixed"}, windows.ListedSteps((1, 2, 3))),
    ({"size": 4, "high": 6, "every": 2}, windows.RandomWindow(4, (0, 6), 2)),
    ({"size": 2, "schedule": "progressive", "every": 5, "stride": 2}, windows.ProgressiveWindow(2, (0, 9), 5, 2)),
    (
        {"size": 2, "high": 7, "schedule": "decay", "every": 25, "shortest": 5, "stride": 2},
        windows.DecayWindow(2, (0, 7), longest=25, shortest=5, stride=2),
    ),
    (
        {"size": 4, "schedule": "exp_decay", "every": 25, "rate": 0.2, "knee": 3},
        windows.ExponentialWindow(4, (0, 9), longest=25, rate=0.2, knee=3),
    ),
]


@pytest.mark.parametrize(("keys", "rule"), RULES, ids=[str(keys) for keys, _ in RULES])
def test_the_keys_of_a_recipe_name_the_rule(keys, rule):
    window = WindowConfig(**keys)
    assert window_of(window, 10) == rule
    assert not window_problems(window, 10)
    drawn = [rule.steps(10, seed=0, iteration=i) for i in range(200)]
    assert {len(steps) for steps in drawn} == {window_size(window, 10)}
    assert {i for steps in drawn for i in steps} <= set(candidates(window, 10))


@pytest.mark.parametrize(
    ("keys", "unused"),
    [
        ({"steps": (0, 1), "size": 2}, "size"),
        ({"steps": (0, 1), "schedule": "decay", "high": 4}, "high, schedule"),
        ({"schedule": "progressive"}, "schedule"),
        ({"every": 3}, "every"),
        ({"size": 2, "stride": 2}, "stride"),
        ({"size": 2, "schedule": "progressive", "shortest": 2}, "shortest"),
        ({"size": 2, "schedule": "decay", "rate": 0.5}, "rate"),
        ({"size": 2, "schedule": "exp_decay", "shortest": 2}, "shortest"),
        ({"size": 2, "schedule": "fixed", "every": 2}, "every"),
    ],
)
def test_a_key_that_would_have_no_effect_is_refused(keys, unused):
    with pytest.raises(ValueError, match=f"does not use {unused}: leave it out"):
        WindowConfig(**keys)


@pytest.mark.parametrize(
    ("keys", "fix"),
    [
        ({"steps": (0, 10)}, "step 10 does not exist in a rollout of 10 steps"),
        ({"steps": (1, 1)}, "list at least one step, each once"),
        ({"steps": (-1,)}, "none negative"),
        ({"size": 2, "schedule": "decay", "every": 2, "shortest": 3}, "longest must be at least shortest"),
        ({"size": 10, "schedule": "decay"}, "use 9 or fewer"),
    ],
)
def test_what_does_not_fit_is_told_with_its_place(keys, fix):
    [problem] = window_problems(WindowConfig(**keys), 10)
    assert re.match(r"rollout\.window", problem)
    assert fix in problem


def test_a_list_of_steps_stands_in_a_recipe_and_comes_back():
    config = recipes.load("pico", ["rollout.window={steps: [1, 4]}"])
    assert config.rollout.window.steps == (1, 4)
    assert WindowConfig.model_validate(config.rollout.window.model_dump(mode="json")) == config.rollout.window


@pytest.mark.parametrize("empty", ["[]", "[a]", "3"])
def test_a_list_of_steps_holds_numbers(empty):
    with pytest.raises(ValueError, match=r"rollout\.window\.steps"):
        recipes.load("pico", [f"rollout.window={{steps: {empty}}}"])
