"""What the configuration says about drawing, checked before a model is loaded and used by the rollouts."""

from __future__ import annotations

import dataclasses
import sys
from types import ModuleType

import pytest
import torch
from drawing import pictures_of

from flowrl_img import recipes, sampling
from flowrl_img.kernels.logprob import DeterministicStepError
from flowrl_img.needs import Needs
from flowrl_img.plan import make_plan
from flowrl_img.rollout import draw, roll
from flowrl_img.samplers.solvers.dpm2 import DPM2
from flowrl_img.samplers.solvers.euler import Euler
from flowrl_img.samplers.solvers.heun import Heun
from flowrl_img.samplers.solvers.sa import SASolver
from flowrl_img.samplers.steps.cps import CPS
from flowrl_img.samplers.steps.ddim import DDIM
from flowrl_img.samplers.tail import FlashTail
from flowrl_img.trainer import Trainer
from flowrl_img.types import Sample
from flowrl_img.validation import validate

SAMPLES = [Sample(0, "0/0/0", 0), Sample(0, "0/0/0", 1), Sample(1, "0/1/1", 0)]
GRID = {"num_steps": 4, "guidance": 1.0, "seed": 5, "batch": 2}


@pytest.fixture
def my_parts(monkeypatch) -> str:
    """A family of diffusion models."""
    module = ModuleType("my_parts")
    module.Family = type("Family", (), {"name": "mine", "process": "diffusion"})
    monkeypatch.setitem(sys.modules, "my_parts", module)
    return "my_parts"


# --- fit -----------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ("rollout.step={name: ddim}", "rollout.step: ddim is for diffusion models and model.family = sd3 is a flow"),
        ("rollout.step={name: ddim}", "use cps or dance_sde or"),
        ("rollout.step={name: ode}", "rollout.step: ode adds no noise, so no step can be trained"),
        ("rollout.step={name: flow_sde, noise_level: 0}", "flow_sde adds no noise, so no step can be trained"),
        ("rollout.step={name: flow_sde, noise_level: 1.0e-25}", "flow_sde adds no noise, so no step can be trained"),
        ("rollout.window={high: 11}", "rollout.window.high = 11"),
        ("rollout.solver={name: dpm2}", "objective flow_grpo trains on the noisy steps of rollout.step"),
        ("evaluation.solver={name: dpm3}", "evaluation.solver: no solver is called 'dpm3'; did you mean 'dpm2'?"),
        ("evaluation.solver={name: dpm2, first_order_end: 0}", "evaluation.solver: first_order_end must be at least 1"),
        ("evaluation.solver={name: heun, order: 2}", "evaluation.solver: unknown key 'order'"),
        (
            "evaluation.solver={name: sa, few_step_term: true}",
            "evaluation.solver: sa cannot walk the grid of this model",
        ),
        ("rollout.tail={ratio: 0}", "rollout.tail.ratio = 0: should be greater than 0"),
        ("rollout.tail={solver: {name: sa}}", "rollout.tail: the tail adds no noise"),
        ("objective.log_prob=cube", "objective.log_prob = 'cube'"),
    ],
)
def test_what_does_not_fit_is_refused_before_a_model_is_loaded(change, expected):
    with pytest.raises(ValueError) as caught:
        validate(recipes.load("pico", [change]))
    assert expected in str(caught.value)


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        (["rollout.step={name: cps}", "rollout.window={high: 10}"], "cps adds no noise at step 9 of 10"),
        (["rollout.step={name: cps}", "rollout.window={steps: [8, 9]}"], "cps adds no noise at step 9 of 10"),
        (["rollout.tail={ratio: 0.4}", "rollout.window={high: 10}"], "leaves none for a tail: end the window earlier"),
    ],
)
def test_a_window_that_reaches_too_far_is_refused_before_a_model_is_loaded(changes, expected):
    with pytest.raises(ValueError, match=expected):
        validate(recipes.load("pico", changes))


def test_a_step_that_does_not_exist_is_one_mistake():
    with pytest.raises(ValueError, match="none negative") as caught:
        validate(recipes.load("pico", ["rollout.window={steps: [-1]}"]))
    assert len(str(caught.value).splitlines()) == 1


def test_every_flow_rule_with_noise_and_every_solver_is_accepted():
    for name in ("flow_sde", "dance_sde", "cps", "flow_ddim"):
        validate(recipes.load("pico", [f"rollout.step={{name: {name}}}"]))
    for name in ("euler", "heun", "dpm2", "dpm2_published", "sa"):
        validate(recipes.load("pico", [f"evaluation.solver={{name: {name}}}"]))


def test_a_diffusion_family_takes_the_rules_of_diffusion_models_alone(my_parts):
    config = recipes.load("pico", [f"model.family={my_parts}:Family", "rollout.step={name: ddim, prediction: v}"])
    assert sampling.step_rule_of(config) == DDIM(prediction="v")
    flow = recipes.load("pico", [f"model.family={my_parts}:Family"])
    with pytest.raises(ValueError, match=r"rollout\.step: flow_sde is for flow models .* use ddim"):
        sampling.step_rule_of(flow)
    with pytest.raises(ValueError, match=r"evaluation\.solver: euler is for flow models .* use a plug-in of your own"):
        sampling.evaluation_solver_of(config)


def test_a_diffusion_rule_says_how_it_steps_without_noise(my_parts):
    sys.modules[my_parts].Rule = type("Rule", (), {"process": "diffusion", "coefficients": DDIM().coefficients})
    config = recipes.load("pico", [f"model.family={my_parts}:Family", f"rollout.step={{name: '{my_parts}:Rule'}}"])
    with pytest.raises(ValueError, match=r"rollout\.step: my_parts:Rule: .* needs `calm`"):
        sampling.step_rule_of(config)


def test_a_process_of_another_name_is_refused(my_parts):
    sys.modules[my_parts].Family.process = "score"
    with pytest.raises(ValueError, match="mine: process must be flow or diffusion, not 'score'"):
        validate(recipes.load("pico", [f"model.family={my_parts}:Family"]))


def test_a_silent_step_of_the_models_own_grid_stops_the_trainer_before_its_first_rollout(tiny_trainer, monkeypatch):
    trainer = tiny_trainer()
    rollout = recipes.load("pico", ["rollout.steps=4", "rollout.window={high: 4}"]).rollout
    config = trainer.config.model_copy(update={"rollout": rollout})
    parts = dataclasses.replace(trainer.parts, config=config, step_rule=CPS())
    with pytest.raises(DeterministicStepError, match="step 3 of 4"):
        Trainer(config, parts, trainer.model, trainer.weights, trainer.processes)


# --- solvers -------------------------------------------------------------------------------------------------------


def test_leaves_of_a_solver_are_the_samples_it_is_asked_for(tiny_trainer):
    trainer = tiny_trainer()
    leaves = draw(trainer.model, trainer.prompts, SAMPLES, solver=DPM2(), **GRID)
    assert leaves.samples == tuple(SAMPLES)
    assert leaves.latents.shape == (3, *trainer.model.latent_shape)
    torch.testing.assert_close(trainer.model.decode(leaves.latents), leaves.images, rtol=0, atol=1e-5)
    assert torch.equal(pictures_of(trainer, SAMPLES, solver=DPM2(), **GRID), leaves.images)
    assert not leaves.latents.requires_grad


def test_leaves_of_euler_are_those_of_the_stochastic_rollout_without_noise(tiny_trainer):
    trainer = tiny_trainer()
    calm = roll(trainer.model, trainer.prompts, SAMPLES, step_rule=CPS(1e-6), stochastic=(0, 1, 2), **GRID).leaves
    plain = draw(trainer.model, trainer.prompts, SAMPLES, solver=Euler(), **GRID)
    torch.testing.assert_close(calm.latents, plain.latents, rtol=0, atol=2e-5)


def test_a_stochastic_solver_draws_noise_by_the_identity_of_the_sample(tiny_trainer):
    trainer = tiny_trainer()
    together = draw(trainer.model, trainer.prompts, SAMPLES, solver=SASolver(0.8, (0.0, 1.0)), **GRID)
    alone = draw(trainer.model, trainer.prompts, SAMPLES[1:2], solver=SASolver(0.8, (0.0, 1.0)), **GRID)
    torch.testing.assert_close(together.latents[1:2], alone.latents, rtol=0, atol=1e-5)
    quiet = draw(trainer.model, trainer.prompts, SAMPLES, solver=SASolver(0.0), **GRID)
    assert (together.latents - quiet.latents).abs().max() > 0.1


def test_a_solver_is_taken_by_objectives_on_clean_samples_alone():
    config = recipes.load("pico", ["objective={name: nft}", "rollout.solver={name: sa, noise_level: 0.2}"])
    assert sampling.solver_of(config, Needs(points="matching")) == SASolver(0.2)
    plan = validate(config)
    assert plan.sampling_evaluations == plan.images * config.rollout.steps
    diverges = recipes.load("pico", ["objective={name: nft}", "rollout.solver={name: sa, few_step_term: true}"])
    with pytest.raises(ValueError, match=r"rollout\.solver: sa cannot walk .* start the grid below 1"):
        validate(diverges)
    assert sampling.solver_of(recipes.load("pico"), Needs(points="matching")) == Euler()
    assert sampling.solver_of(recipes.load("pico"), Needs()) is None


@pytest.mark.parametrize(("solver", "calls"), [(Euler(), 7), (Heun(), 13), (DPM2(), 7), (SASolver(0.4), 7)])
def test_network_calls_of_a_solver_are_those_of_the_plan(tiny_trainer, solver, calls):
    trainer = tiny_trainer()
    pictures_of(trainer, SAMPLES, solver=solver, **(GRID | {"num_steps": 7}))
    assert trainer.model.calls == calls * len(SAMPLES)
    assert sampling.network_calls(solver, 7) == calls
    config = recipes.load("pico", ["evaluation.steps=7", f"evaluation.solver={{name: {solver.name}}}"])
    assert make_plan(config, needs=Needs()).heldout_evaluations == config.evaluation.pictures * calls


# --- shared noise ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("batch", [16, 6, 1])  # whole groups, groups that are split, single samples
def test_members_of_a_group_with_shared_noise_are_one_state_until_the_first_draw(tiny_trainer, monkeypatch, batch):
    rollout = {"steps": 6, "window": {"size": 2, "low": 3, "high": 5}, "shared_noise": True, "batch": batch}
    trainer = tiny_trainer(rollout=rollout)
    scored = trainer.collect(0).rollout
    assert trainer.model.calls == make_plan(trainer.config, needs=Needs()).sampling_evaluations
    monkeypatch.setattr("flowrl_img.rollout.common_steps", lambda stochastic: 0)
    apart = trainer.collect(0).rollout
    torch.testing.assert_close(scored.leaves.latents, apart.leaves.latents, rtol=0, atol=1e-5)
    assert torch.equal(scored.edges.step, apart.edges.step)
    for name in ("states", "v_old"):
        torch.testing.assert_close(getattr(scored.edges, name), getattr(apart.edges, name), rtol=0, atol=1e-5)


def test_a_plan_counts_a_group_once_in_each_process_that_holds_a_part_of_it():
    rollout = "rollout={groups: 1, group_size: 8, steps: 10, shared_noise: true, window: {size: 1, low: 4, high: 5}}"
    config = recipes.load("pico", [rollout, "run={updates_per_rollout: 1, rollouts: 1}"])
    assert make_plan(config, 1, Needs()).sampling_evaluations == 5 * 1 + 5 * 8
    assert make_plan(config, 2, Needs()).sampling_evaluations == 5 * 2 + 5 * 8


# --- tail ----------------------------------------------------------------------------------------------------------


def test_a_tail_changes_the_pictures_and_no_kept_step(tiny_trainer):
    trainer, grid = tiny_trainer(), GRID | {"num_steps": 10, "step_rule": CPS(), "stochastic": (1, 2)}
    full = roll(trainer.model, trainer.prompts, SAMPLES, **grid)
    calls = trainer.model.calls
    short = roll(trainer.model, trainer.prompts, SAMPLES, tail=FlashTail(0.5), **grid)
    for name in ("states", "v_old", "residual", "step"):
        assert torch.equal(getattr(short.edges, name), getattr(full.edges, name))
    assert not torch.equal(short.leaves.images, full.leaves.images)
    # 3 steps to the end of the window, then int(0.5 * 8) - 1 = 3
    assert trainer.model.calls - calls == 6 * len(SAMPLES)


def test_a_run_with_a_tail_makes_the_network_calls_of_its_plan(tiny_trainer):
    rollout = {"steps": 8, "window": {"steps": [0, 1]}, "tail": {"ratio": 0.6, "solver": {"name": "heun"}}}
    trainer = tiny_trainer(rollout=rollout)
    assert trainer.parts.tail == FlashTail(0.6, 3.0, Heun())
    trainer.collect(0)
    plan = make_plan(trainer.config, needs=Needs())
    assert trainer.model.calls == plan.sampling_evaluations == 8 * (2 + 2 * 3 - 1)
    assert plan.trained_steps == 2


def test_training_with_the_square_log_prob_a_tail_and_cps_starts_at_ratio_one(tiny_trainer):
    window = {"size": 2, "high": 4, "schedule": "decay", "every": 2}
    trainer = tiny_trainer(
        rollout={"steps": 6, "step": {"name": "cps"}, "window": window, "tail": {"ratio": 0.5}},
        objective={"log_prob": "square", "clip_range": 1e-5},
    )
    updates = list(trainer.run())
    assert updates[0].metrics["check_ratio_error"] <= 1e-6
    assert updates[0].metrics["max_ratio_error"] <= 1e-6
    assert updates[1].metrics["max_ratio_error"] > 0
