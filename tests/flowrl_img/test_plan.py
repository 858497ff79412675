import dataclasses
import re

import pytest

from flowrl_img import recipes
from flowrl_img.config import Config, EvaluationConfig, RolloutConfig, RunConfig, WindowConfig
from flowrl_img.needs import Needs
from flowrl_img.plan import make_plan


def config(groups=8, size=12, updates=2, steps=10, window=None, guidance=1.0, **run) -> Config:
    return Config(
        rollout=RolloutConfig(
            groups=groups, group_size=size, steps=steps, guidance=guidance, window=WindowConfig(**(window or {}))
        ),
        run=RunConfig(updates_per_rollout=updates, **run),
    )


# groups, group size, updates, processes -> images, images per process, images per update; None: refused
GEOMETRIES = [
    (8, 12, 2, 1, (96, 96, 48)),
    (8, 12, 1, 1, (96, 96, 96)),
    (8, 12, 2, 2, (96, 48, 48)),
    (8, 12, 4, 8, (96, 12, 24)),
    (8, 12, 96, 1, (96, 96, 1)),
    (48, 24, 2, 32, (1152, 36, 576)),
    (48, 24, 2, 1, (1152, 1152, 576)),
    (48, 24, 2, 8, (1152, 144, 576)),
    (4, 6, 1, 1, (24, 24, 24)),
    (1, 2, 1, 1, (2, 2, 2)),
    (1, 2, 1, 2, (2, 1, 2)),
    (3, 5, 3, 5, (15, 3, 5)),
    (8, 11, 3, 1, None),
    (8, 12, 2, 5, None),
    (8, 12, 5, 1, None),
    (8, 12, 97, 1, None),
    (7, 7, 2, 1, None),
    (1, 2, 2, 2, None),
    (1, 3, 1, 2, None),
    (48, 24, 2, 7, None),
]


@pytest.mark.parametrize(("groups", "size", "updates", "processes", "expected"), GEOMETRIES)
def test_twenty_geometries_divide_or_are_refused(groups, size, updates, processes, expected):
    if expected is None:
        with pytest.raises(ValueError, match="do not divide"):
            make_plan(config(groups, size, updates), processes, needs=Needs())
        return
    plan = make_plan(config(groups, size, updates), processes, needs=Needs())
    assert (plan.images, plan.images_per_process, plan.images_per_update) == expected


@pytest.mark.parametrize(
    ("groups", "size", "updates", "processes", "expected"), [g for g in GEOMETRIES if g[-1] is None]
)
def test_every_value_that_a_refusal_names_is_accepted(groups, size, updates, processes, expected):
    with pytest.raises(ValueError) as caught:
        make_plan(config(groups, size, updates), processes, needs=Needs())
    advice = str(caught.value).partition("nearest valid: ")[2]
    ways = re.findall(r"(groups|group_size|updates_per_rollout) = ([\d or]+)", advice)
    assert {name for name, _ in ways} >= {"groups", "group_size"}
    for name, values in ways:
        for value in map(int, values.split(" or ")):
            better = {"groups": groups, "size": size, "updates": updates}
            better[{"groups": "groups", "group_size": "size", "updates_per_rollout": "updates"}[name]] = value
            make_plan(config(**better), processes, needs=Needs())


@pytest.mark.parametrize(
    ("window", "trained"),
    [
        ({}, 9),
        ({"size": 4}, 4),
        ({"size": 9}, 9),
        ({"low": 3}, 6),
        ({"high": 10}, 10),
        ({"low": 2, "high": 5, "size": 3}, 3),
    ],
)
def test_trained_steps_follow_the_window(window, trained):
    assert make_plan(config(window=window), needs=Needs()).trained_steps == trained


@pytest.mark.parametrize(
    ("window", "steps", "fix"),
    [
        ({"size": 10}, 10, "use 9 or fewer"),
        ({"low": 8, "size": 2}, 10, "use 1 or fewer"),
        ({"high": 11}, 10, "rollout.steps = 11"),
        ({"low": 9}, 10, "rollout.steps = 11"),
        ({}, 1, "rollout.steps = 2"),
        ({"low": 5, "high": 5}, 10, "rollout.window.low = 4"),
    ],
)
def test_a_window_outside_the_path_is_refused_with_the_fix(window, steps, fix):
    with pytest.raises(ValueError, match=re.escape(fix)):
        make_plan(config(window=window, steps=steps), needs=Needs())


def test_window_and_division_problems_are_told_together():
    with pytest.raises(ValueError) as caught:
        make_plan(config(size=11, updates=3, window={"size": 10}), needs=Needs())
    assert len(str(caught.value).splitlines()) == 2


def test_network_evaluations_by_hand():
    plan = make_plan(
        config(groups=2, size=3, updates=1, steps=5, window={"size": 2}, rollouts=4), needs=Needs({"reference"})
    )
    assert plan.sampling_evaluations == 2 * 3 * 5
    assert plan.training_evaluations == plan.reference_evaluations == 2 * 3 * 2
    assert plan.heldout_evaluations == 192 * 20
    assert plan.evaluations == 4 * (30 + 12 + 12) + 2 * 3840


def test_guidance_doubles_network_evaluations():
    one = make_plan(config(), needs=Needs({"reference"}))
    two = make_plan(config(guidance=4.5), needs=Needs({"reference"}))
    assert two.sampling_evaluations == 2 * one.sampling_evaluations
    assert two.training_evaluations == 2 * one.training_evaluations
    assert two.reference_evaluations == 2 * one.reference_evaluations
    assert two.heldout_evaluations == one.heldout_evaluations


def test_an_objective_without_reference_pays_for_none():
    assert make_plan(config(), needs=Needs({"old"})).reference_evaluations == 0


def test_the_objective_itself_says_whether_it_reads_the_reference():
    plan = make_plan(recipes.load("pico", ["objective.kl_weight=0.1"]))
    assert plan.reference_evaluations == plan.training_evaluations
    assert make_plan(recipes.load("pico", ["objective.kl_weight=0"])).reference_evaluations == 0


def test_the_number_of_processes_changes_shares_and_nothing_else():
    plans = [make_plan(config(48, 24, 2), n, needs=Needs()) for n in (8, 2, 1)]
    varying = {f.name for f in dataclasses.fields(plans[0]) if len({getattr(p, f.name) for p in plans}) > 1}
    assert {name for name in varying if not name.endswith("_per_process")} == {"num_processes"}


@pytest.mark.parametrize(
    ("rollouts", "updates", "every", "rounds"), [(5, 2, None, 2), (5, 2, 4, 4), (5, 2, 10, 2), (1, 1, 1, 2)]
)
def test_held_out_rounds_are_before_after_and_between(rollouts, updates, every, rounds):
    cfg = config(updates=updates, rollouts=rollouts).model_copy(update={"evaluation": EvaluationConfig(every=every)})
    assert make_plan(cfg, needs=Needs()).heldout_rounds == rounds


def test_a_run_that_ends_by_time_has_no_totals():
    plan = make_plan(config(rollouts=None, minutes=3), needs=Needs())
    assert plan.rollouts is plan.updates is plan.evaluations is None
    assert ("rollouts", "open (ends by run.minutes)") in plan.rows()


def test_micro_batches_round_up():
    assert make_plan(config(window={"size": 4}, micro_batch=32), needs=Needs()).micro_batches_per_process == 6
    assert make_plan(config(window={"size": 4}, micro_batch=100), needs=Needs()).micro_batches_per_process == 2


def test_one_update_per_rollout_is_called_on_policy():
    assert ("policy", "on-policy, ratio 1 expected") in make_plan(config(updates=1), needs=Needs()).rows()
    assert ("policy", "1 of 2 updates off-policy") in make_plan(config(updates=2), needs=Needs()).rows()


def test_render_shows_every_row():
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(make_plan(config(), needs=Needs()).render())
    assert "96 pictures" in capture.get() and "network, whole run" in capture.get()


def test_zero_processes_are_refused():
    with pytest.raises(ValueError, match="at least 1"):
        make_plan(config(), 0, needs=Needs())


def test_evaluations_of_a_forked_rollout_by_hand():
    """2 prompts, 1 path of 3 branches each, 5 steps, all but the last fork: trunk 4, branches 3 (4 + 3 + 2 + 1)."""
    config = Config(rollout=RolloutConfig(kind="anchor_fork", groups=2, group_size=3, branches=3, steps=5))
    plan = make_plan(config, needs=Needs({"old", "reference"}))
    assert plan.images == 2 * 4 * 3
    assert plan.sampling_evaluations == 2 * (4 + 3 * 10)
    assert plan.training_evaluations == plan.reference_evaluations == 2 * 4  # every state once
    assert plan.points_per_update == 2 * 4 * 3 // 2


def test_published_tempflow_takes_279_evaluations_a_path():
    plan = make_plan(recipes.load("sd35-tempflow-geneval", ["rollout.guidance=1"]))
    assert plan.sampling_evaluations == 8 * 4 * 279


def test_evaluations_on_clean_samples_by_hand():
    changes = ["rollout.groups=2", "rollout.group_size=4", "rollout.steps=5", "matching.times={name: grid, count: 3}"]
    needs = Needs({"old", "trust", "reference"}, points="matching", guided=False, reference_guidance=4.5)
    plan = make_plan(recipes.load("pico", ["objective={name: nft}", *changes, "rollout.guidance=4.5"]), needs=needs)
    assert plan.sampling_evaluations == 2 * 4 * 5 * 2
    assert plan.training_evaluations == 2 * 4 * 3
    assert plan.policy_evaluations == 2 * plan.training_evaluations
    assert plan.reference_evaluations == 2 * plan.training_evaluations
    assert plan.peak_latents_per_process == 8
    best = make_plan(recipes.load("pico", ["objective={name: sft}", *changes]))
    assert best.training_evaluations == 2 * 1 * 3


def test_low_precision_takes_the_old_velocity_of_transitions_again():
    for dtype, passes in (("fp32", 0), ("bf16", 1)):
        plan = make_plan(recipes.load("pico", [f"model.dtype={dtype}"]))
        assert plan.rescoring_evaluations == passes * plan.training_evaluations
        assert make_plan(recipes.load("pico-nft", [f"model.dtype={dtype}"])).rescoring_evaluations == 0


@pytest.mark.parametrize(("processes", "batches"), [(1, 32), (2, 16), (4, 8)])
def test_micro_batches_of_whole_groups_hold_more_groups_on_more_processes(processes, batches):
    changes = ["run.micro_batch=12", "rollout.groups=8", "matching.times={name: grid, count: 4}"]
    assert make_plan(recipes.load("pico-dgpo", changes), processes).micro_batches_per_process == batches
