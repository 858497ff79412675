"""How pictures are drawn, from the configuration: step rule, solvers and tail that fit the model and the grid.

Everything that can be known without a model is checked without one; `check_noise` asks again on the model's own grid.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img import plugins
from flowrl_img.config import Config, PartConfig, RolloutConfig
from flowrl_img.kernels.logprob import DeterministicStepError
from flowrl_img.needs import Needs
from flowrl_img.samplers.loop import calm_rule
from flowrl_img.samplers.solvers.table import Solver
from flowrl_img.samplers.steps.table import StepRule
from flowrl_img.samplers.tail import FlashTail
from flowrl_img.samplers.times import TimeLaw
from flowrl_img.window import candidates

__all__ = [
    "check_noise",
    "evaluation_solver_of",
    "network_calls",
    "rollout_problems",
    "solver_of",
    "step_rule_of",
    "tail_of",
    "times_of",
]

PROBES = {"flow": (1.0, 0.0), "diffusion": (0.99, 0.05)}  # from and to which level the grids of every such model lead


def step_rule_of(config: Config) -> StepRule:
    """The rule of `rollout.step`. ValueError where it cannot be built, fit the model family or train the window."""
    rule: StepRule = _fitting("steps", config.rollout.step, "rollout.step", config)
    try:
        calm_rule(rule)
    except ValueError as error:
        raise ValueError(f"rollout.step: {config.rollout.step.name}: {error}") from error
    try:
        grid = torch.linspace(*PROBES[_process(rule)], config.rollout.steps + 1, dtype=torch.float64)
        rule.coefficients(grid)
    except ValueError:
        return rule  # the rule asks for a finer grid than this one; the model's own decides
    check_noise(rule, config.rollout, grid)
    return rule


def check_noise(rule: StepRule, rollout: RolloutConfig, sigmas: Tensor) -> None:
    """Raise DeterministicStepError if a step that may be trained has no noise on this grid. sigmas: [N+1].

    Noise below the rounding of a float32 state of size 1 is none: x_s does not hold it, and 1 / std^2 overflows.
    """
    std = rule.coefficients(sigmas).std
    noisy = [i for i in range(len(std)) if std[i] > torch.finfo(torch.float32).eps]
    silent = [i for i in candidates(rollout.window, rollout.steps) if 0 <= i < len(std) and i not in noisy]
    if silent and not noisy:
        raise DeterministicStepError(f"rollout.step: {rollout.step.name} adds no noise, so no step can be trained")
    if silent:
        raise DeterministicStepError(
            f"rollout.window: {rollout.step.name} adds no noise at step {', '.join(map(str, silent))} of {len(std)}, "
            "so it cannot be trained: leave it out of rollout.window"
        )


def tail_of(config: Config) -> FlashTail | None:
    """The tail of `rollout.tail`. ValueError where its solver has noise or no step is left for it."""
    tail = config.rollout.tail
    if tail is None:
        return None
    solver = _fitting("solvers", tail.solver, "rollout.tail.solver", config)
    try:
        built = FlashTail(tail.ratio, tail.shift, solver)
        for last in candidates(config.rollout.window, config.rollout.steps)[-1:]:
            built.num_steps(config.rollout.steps, last)
    except ValueError as error:
        raise ValueError(f"rollout.tail: {error}") from error
    return built


def solver_of(config: Config, needs: Needs) -> Solver | None:
    """What draws the rollouts of objectives on clean samples: `rollout.solver`, by default Euler. None for all others.

    ValueError where a solver is named and the objective trains on the rollout's own noisy steps.
    """
    part = config.rollout.solver
    if not needs.matching:
        if part is None:
            return None
        raise ValueError(
            f"rollout.solver: objective {config.objective.name} trains on the noisy steps of rollout.step; "
            "leave rollout.solver out"
        )
    return _walking(part or PartConfig(name="euler"), "rollout.solver", config)


def times_of(config: Config, needs: Needs) -> TimeLaw | None:
    """The law of `matching.times`, for objectives on clean samples. ValueError where it draws more than there is."""
    if not needs.matching:
        return None
    law: TimeLaw = plugins.build("times", config.matching.times.section(), where="matching.times")
    try:
        law.num_times(config.rollout.steps)
    except ValueError as error:
        raise ValueError(f"matching.times: {error}") from error
    return law


def rollout_problems(config: Config, needs: Needs) -> list[str]:
    """What the objective does not go with, each with the way out."""
    kind, policy, name = config.rollout.kind, config.rollout.policy, config.objective.name
    problems = []
    if kind not in needs.rollouts:
        problems.append(f"rollout.kind = {kind}: objective {name} needs {' or '.join(sorted(needs.rollouts))}")
    if needs.shared_noise and config.matching.share == "sample":
        problems.append(f"matching.share = sample: objective {name} compares pictures at the same times; use group")
    if config.advantage.baseline in ("history", "none") and (needs.unit == "group" or needs.best_and_worst is not None):
        problems.append(
            f"advantage.baseline = {config.advantage.baseline}: objective {name} compares the pictures of a group with "
            "each other; use group or leave_one_out"
        )
    if policy == "current" and config.rollout.policy_from:
        problems.append(
            f"rollout.policy_from = {config.rollout.policy_from}: rollout.policy = current draws every rollout; choose "
            "another policy, or leave policy_from out"
        )
    if policy == "ema" and config.weights.ema is None:
        problems.append("rollout.policy = ema: weights.ema is null, so there is no average; give it, or use old")
    if needs.matching and config.rollout.tail is not None:
        problems.append(
            f"rollout.tail: objective {name} has no noisy steps for a tail to follow; leave it out, and choose "
            "rollout.solver and rollout.steps"
        )
    if config.rollout.shared_noise and _draws_nothing(config, needs):
        problems.append(
            "rollout.shared_noise = true: rollout.solver draws no noise, so the pictures of a group would be one; use "
            "false, or a solver with noise"
        )
    paths = config.rollout.group_size // config.rollout.branches
    if config.rollout.shared_noise and kind == "anchor_fork" and paths > 1:
        problems.append(
            f"rollout.shared_noise = true: forked paths have no noise of their own, so the {paths} of a prompt would "
            f"be one; use false, or rollout.group_size = {config.rollout.branches}"
        )
    if kind == "anchor_fork" and config.rollout.tail is not None:
        problems.append("rollout.tail: a forked path has its own end; leave the tail out, or use independent rollouts")
    return problems


def _draws_nothing(config: Config, needs: Needs) -> bool:
    """Whether the solver of the rollouts has no noise at any step."""
    try:
        solver = solver_of(config, needs)
    except ValueError:
        return False  # reported on its own
    return solver is not None and not solver.coefficients(_probe(solver)).std.any()


def _probe(solver: Solver) -> torch.Tensor:
    """A fine grid of the solver's kind of model."""
    return torch.linspace(*PROBES[_process(solver)], 1001, dtype=torch.float64)


def evaluation_solver_of(config: Config) -> Solver:
    """The solver of `evaluation.solver`."""
    return _walking(config.evaluation.solver, "evaluation.solver", config)


def network_calls(solver: Solver, num_steps: int) -> int:
    """Evaluations of the network in a walk of `num_steps` steps."""
    return solver.coefficients(torch.linspace(0.99, 0, num_steps + 1)).network_calls


def _walking(part: PartConfig, where: str, config: Config) -> Solver:
    """A solver that fits the model and walks from its first level. The probe is fine: how coarse is the model's own."""
    solver: Solver = _fitting("solvers", part, where, config)
    try:
        solver.coefficients(_probe(solver))
    except ValueError as error:
        raise ValueError(f"{where}: {part.name} cannot walk the grid of this model: {error}") from error
    return solver


def _fitting(kind: str, part: PartConfig, where: str, config: Config) -> Any:
    """The plug-in, built, if it is for the kind of model that is configured."""
    built = plugins.build(kind, part.section(), where=where)
    family = plugins.resolve("models", config.model.family, where="model.family")
    ours, theirs = _process(built), _process(family)
    if ours != theirs:
        fitting = [name for name in plugins.available(kind) if _process(plugins.resolve(kind, name)) == theirs]
        raise ValueError(
            f"{where}: {part.name} is for {ours} models and model.family = {config.model.family} is a {theirs} model; "
            f"use {' or '.join(fitting) or 'a plug-in of your own'}"
        )
    return built


def _process(part: Any) -> str:
    """Whether a step rule, solver or model family belongs to "flow" or "diffusion" models; flow where it is silent."""
    process = str(getattr(part, "process", "flow"))
    if process not in PROBES:
        raise ValueError(f"{getattr(part, 'name', part)}: process must be {' or '.join(PROBES)}, not {process!r}")
    return process
