import sys
from types import ModuleType

import pytest

from flowrl_img import plugins, recipes
from flowrl_img.config import Config
from flowrl_img.validation import validate


@pytest.mark.parametrize("name", recipes.names())
def test_every_packaged_recipe_is_valid(name):
    assert validate(recipes.load(name)).images > 0


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("sd35-")])
def test_published_recipes_do_the_same_on_one_process_and_on_eight(name):
    one, eight = (validate(recipes.load(name), count) for count in (1, 8))
    for field in ("images", "updates", "images_per_update", "points_per_update", "evaluations"):
        assert getattr(one, field) == getattr(eight, field), field


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["objective={name: tempflow_grpo}"], "rollout.kind = independent: objective tempflow_grpo needs anchor_fork"),
        (["objective={name: nft}", "rollout.kind=anchor_fork"], "objective nft needs independent"),
        (["objective={name: dgpo}", "matching.share=sample"], "objective dgpo compares pictures at the same times"),
        (
            ["objective={name: online_dpo}", "advantage.baseline=history"],
            "advantage.baseline = history: objective online_dpo compares the pictures of a group with each other",
        ),
        (["objective={name: dgpo}", "advantage.baseline=none"], "use group or leave_one_out"),
        (["objective={name: sft}", "advantage.baseline=none"], "use group or leave_one_out"),
        (
            ["rollout.kind=anchor_fork", "rollout.shared_noise=true"],
            "so the 2 of a prompt would be one; use false, or rollout.group_size = 6",
        ),
        (["rollout.policy_from=9"], "rollout.policy = current draws every rollout"),
        (["objective={name: nft, kl_weight: .nan}"], "objective.kl_weight = nan: should be a number"),
        (["objective={name: dgpo, reference_guidance: -1}"], "reference_guidance must be 0 or more"),
        (["rollout.policy=ema", "weights.ema=null"], "weights.ema is null, so there is no average"),
        (["rollout.kind=anchor_fork", "rollout.tail={ratio: 0.5}"], "a forked path has its own end"),
        (["objective={name: nft}", "rollout.tail={ratio: 0.5}"], "nft has no noisy steps for a tail to follow"),
        (["objective={name: nft}", "rollout.shared_noise=true"], "the pictures of a group would be one"),
        (["objective={name: nft}", "matching.times={name: grid, count: 11}"], "only 10 steps lie in [0, 10)"),
        (["objective={name: nft}", "matching.times={name: gird}"], "did you mean 'grid'?"),
        (["objective={name: nft}", "weights.old.decay={name: coppy}"], "weights.old.decay: no decay is called 'coppy'"),
        (["objective={name: dgpo}", "run.micro_batch=8"], "scores a group of 12 pictures at once"),
        (
            ["objective={name: awm, level: sample}", "matching.times={name: strata, count: 6}", "run.micro_batch=5"],
            "objective awm scores a picture at its 6 times at once; use run.micro_batch = 6 or more",
        ),
        (["objective={name: dgpo}", "rollout.groups=8", "run.updates_per_rollout=3"], "use rollout.groups = 6 or 9"),
        (["rollout.kind=anchor_fork", "rollout.group_size=8"], "use rollout.group_size = 6 or 12"),
        (
            ["rollout.kind=anchor_fork", "rollout.groups=3", "rollout.group_size=6", "run.updates_per_rollout=2"],
            "rollout.groups = 2 or 4",
        ),
    ],
)
def test_what_an_objective_does_not_go_with_is_told_with_the_way_out(changes, expected):
    with pytest.raises(ValueError) as caught:
        validate(recipes.load("pico", changes))
    assert expected in str(caught.value)


def test_a_history_too_short_for_its_own_rule_is_refused():
    changes = ["advantage.baseline=history", "advantage.history={size: 8, min_count: 16}"]
    with pytest.raises(ValueError, match=r"min_count = 16 is never reached: 8 rewards of a prompt are kept; use size"):
        recipes.load("pico", changes)


def test_all_mistakes_are_told_in_one_error():
    names = ["rollout.step.name=x", "objective.name=y", "model.family=z", "rewards.0.name=w"]
    changes = ["rollout.window.size=99", *names]
    with pytest.raises(ValueError) as caught:
        validate(recipes.load("pico", changes))
    assert len(str(caught.value).splitlines()) == 5


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("rewards=[{name: ocr, weight: 0}]", "rewards: at least one weight must differ from 0"),
        ("rewards=[]", "rewards: at least one weight must differ from 0"),
        ("rewards=[{name: ocr}, {name: ocr}]", "rewards: two rewards are called 'ocr'"),
        ("rewards=[{name: ocr, transforms: [rnk]}]", "transforms.0: no transform is called 'rnk'; did you mean 'rank'"),
        ("rewards=[{name: 'sample_rewards:Contest'}]", "rewards contest compare pictures of a group"),
        (
            "report_rewards=[{name: 'sample_rewards:Contest'}]",
            "report_rewards.0: 'contest' compares pictures of a group",
        ),
        ("rewards=[{name: jpeg, quality: high}]", "rewards.0.quality = 'high': should be a valid integer"),
        ("report_rewards=[{name: oc}]", "report_rewards.0: no reward is called 'oc'; did you mean 'ocr'?"),
        ("rollout.step.noise_level=much", "rollout.step.noise_level = 'much': should be a valid number"),
        ("objective.clip_range=[0.1]", "objective.clip_range = [0.1]: "),
        ("objective.name=nowhere:Thing", "objective: no module 'nowhere'; is its folder on the Python path?"),
    ],
)
def test_parts_that_cannot_be_built_are_named(change, expected):
    with pytest.raises(ValueError) as caught:
        validate(recipes.load("pico", [change]))
    assert expected in str(caught.value)


def test_groups_that_a_reward_compares_stay_on_one_process():
    change = "rewards=[{name: 'sample_rewards:Contest'}, {name: jpeg, weight: 0}]"
    validate(recipes.load("pico", [change]), num_processes=4)
    with pytest.raises(ValueError, match="'contest' compares the pictures of a group: use a multiple of 5, such as 20"):
        validate(recipes.load("pico", [change]), num_processes=5)
    validate(recipes.load("pico-dgpo", [change]), num_processes=1)
    with pytest.raises(ValueError, match="objective dgpo deals the pictures of a group over all processes"):
        validate(recipes.load("pico-dgpo", [change]), num_processes=2)


def test_an_objective_of_ones_own_needs_no_registration(monkeypatch):
    from flowrl_img.objectives.flow_grpo import FlowGRPO

    module = ModuleType("my_objectives")
    module.Mine = type("Mine", (FlowGRPO,), {})
    monkeypatch.setitem(sys.modules, "my_objectives", module)
    config = recipes.load("pico", ["objective={name: 'my_objectives:Mine', kl_weight: 0.1}"])
    plan = validate(config)
    assert plan.reference_evaluations == plan.training_evaluations


def test_lists_of_a_recipe_become_the_tuples_of_a_field():
    built = plugins.build("objectives", {"name": "flow_grpo", "clip_range": [1e-4, 2e-4]})
    assert built.clip == (1e-4, 2e-4)


def test_every_builtin_is_available_under_its_file_name():
    assert {"flow_sde", "ode"} <= set(plugins.available("steps"))
    assert "flow_grpo" in plugins.available("objectives")
    assert "sd3" in plugins.available("models")


def test_the_default_configuration_is_valid():
    assert validate(Config()).images == 96
