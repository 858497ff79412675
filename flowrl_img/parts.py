"""Everything of a run that can be built and checked before a model is loaded."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from torch import Tensor

from flowrl_img import plugins
from flowrl_img.config import Config
from flowrl_img.prompts import check_balance, draw_samples, load_prompts
from flowrl_img.rewards import known_answers, registry
from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.score import Scorer
from flowrl_img.sampling import check_noise, evaluation_solver_of, solver_of, step_rule_of, tail_of, times_of
from flowrl_img.types import PromptSet
from flowrl_img.window import window_of

__all__ = ["Inputs", "RunParts", "assemble", "read_inputs"]


@dataclass(frozen=True)
class RunParts:
    """Prompts, rewards, objective and sampler of a run.

    solver, times: for objectives on clean samples, else None; step_rule, window, tail: for all others.
    """

    config: Config
    train: PromptSet
    held_out: PromptSet
    reward: Mixture
    report: dict[str, Scorer]
    """by label"""
    objective: Any
    step_rule: Any
    window: Any
    tail: Any
    solver: Any
    times: Any
    evaluation_solver: Any

    def check_grid(self, sigmas: Tensor) -> None:
        """Raise if a step that is to be trained has no noise on the model's own grid. sigmas: [N+1]."""
        if not self.objective.needs.matching:
            check_noise(self.step_rule, self.config.rollout, sigmas)


@dataclass(frozen=True)
class Inputs:
    """The prompts, and the rewards that can score them; nothing has been scored."""

    train: PromptSet
    held_out: PromptSet
    reward: Mixture
    report: dict[str, Scorer]

    @property
    def scorers(self) -> tuple[Scorer, ...]:
        """Those of the reward that is trained on, then those that are only reported."""
        return (*(part.scorer for part in self.reward.parts), *self.report.values())


def read_inputs(config: Config) -> Inputs:
    """Read the prompt files and check them for the rewards. ValueError or FileNotFoundError tells what to change."""
    inputs = Inputs(
        load_prompts(config.prompts.train), load_prompts(config.prompts.evaluation),
        registry.load_mixture([r.section() for r in config.rewards], config.aggregate),
        registry.load_reported([r.section() for r in config.report_rewards]),
    )  # fmt: skip
    for name, prompts in ((config.prompts.train, inputs.train), (config.prompts.evaluation, inputs.held_out)):
        for scorer in inputs.scorers:
            try:
                scorer.reward.validate(prompts.texts, prompts.metadata)
            except ValueError as error:
                raise ValueError(f"prompt file {name}: {error}") from error
    try:
        check_balance(inputs.train, config.prompts.balance)
        draw_samples(inputs.train, 1, 1, config.prompts.balance, config.prompts.shares, seed=0, rollout=0)
    except ValueError as error:
        raise ValueError(f"prompt file {config.prompts.train}: {error}") from error
    return inputs


def assemble(config: Config) -> RunParts:
    """Build and check them. ValueError or FileNotFoundError tells what to change."""
    inputs = read_inputs(config)
    for scorer in inputs.scorers:
        known_answers.check(scorer.reward)
    objective = plugins.build("objectives", config.objective.section(), where="objective")
    needs = objective.needs
    return RunParts(
        config, inputs.train, inputs.held_out, inputs.reward, inputs.report, objective,
        None if needs.matching else step_rule_of(config),
        None if needs.matching else window_of(config.rollout.window, config.rollout.steps),
        None if needs.matching else tail_of(config),
        solver_of(config, needs), times_of(config, needs), evaluation_solver_of(config),
    )  # fmt: skip
