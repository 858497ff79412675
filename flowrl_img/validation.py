"""Checks of a configuration that need the plug-ins but no model: every named part exists and takes its fields."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING, TypeVar

from flowrl_img import plugins
from flowrl_img.config import Config
from flowrl_img.needs import Needs
from flowrl_img.plan import Plan, make_plan
from flowrl_img.tracking import check_tracker

if TYPE_CHECKING:
    from flowrl_img.rewards.mixture import Mixture

__all__ = ["validate"]

T = TypeVar("T")


def validate(config: Config, num_processes: int = 1) -> Plan:
    """The plan of a configuration whose parts all exist. Raises ValueError with one line for each mistake.

    Imports the plug-ins (and so torch), loads no weights and reads no prompts.
    """
    from flowrl_img import sampling
    from flowrl_img.weights import decay_of, sets_of

    problems: list[str] = []

    def attempt(check: Callable[[], T]) -> T | None:
        try:
            return check()
        except ValueError as error:
            if str(error) not in problems:
                problems.append(str(error))
            return None

    objective = attempt(lambda: plugins.build("objectives", config.objective.section(), where="objective"))
    needs = Needs() if objective is None else objective.needs
    plan = attempt(lambda: make_plan(config, num_processes, needs))
    if objective is not None:
        problems += sampling.rollout_problems(config, needs)
        attempt(lambda: sampling.solver_of(config, needs))
        attempt(lambda: sampling.times_of(config, needs))
    if not needs.matching:
        attempt(lambda: sampling.step_rule_of(config))
        attempt(lambda: sampling.tail_of(config))
    attempt(lambda: [decay_of(config.weights, name) for name in sorted(sets_of(config, needs))])
    attempt(lambda: sampling.evaluation_solver_of(config))
    attempt(lambda: check_tracker(config.run.tracker))
    mixture = attempt(lambda: _mixture(config))
    if mixture is not None:
        attempt(lambda: _whole_groups(mixture, config, needs, num_processes))
    attempt(lambda: _reported(config))
    attempt(lambda: _overlap(config))
    if problems or plan is None:
        raise ValueError("\n".join(problems))
    return plan


def _mixture(config: Config) -> Mixture:
    from flowrl_img.rewards import registry

    mixture = registry.load_mixture([reward.section() for reward in config.rewards], config.aggregate)
    mixture.held_out()
    return mixture


def _overlap(config: Config) -> None:
    if config.run.overlap and config.model.dtype != "fp32":
        raise ValueError(
            f"run.overlap with model.dtype = {config.model.dtype}: in low precision old velocities are taken anew "
            "before an update, when the weights that drew the rollout are gone; use run.overlap=false or fp32"
        )


def _reported(config: Config) -> None:
    from flowrl_img.rewards import registry

    registry.load_reported([reward.section() for reward in config.report_rewards])


def _whole_groups(mixture: Mixture, config: Config, needs: Needs, num_processes: int) -> None:
    """A reward that compares the pictures of a group needs them on one process."""
    grouped = [part.scorer.label for part in mixture.parts if part.scorer.scope != "point"]
    if grouped and needs.unit == "group" and num_processes > 1:
        raise ValueError(
            f"objective {config.objective.name} deals the pictures of a group over all processes, and reward "
            f"'{grouped[0]}' compares the pictures of a group: use one process"
        )
    if grouped and config.rollout.groups % num_processes:
        least = num_processes * max(config.rollout.groups // num_processes, 1)
        raise ValueError(
            f"rollout.groups = {config.rollout.groups} on {num_processes} processes splits a group, and reward "
            f"'{grouped[0]}' compares the pictures of a group: use a multiple of {num_processes}, such as {least}"
        )
