"""Checks of a configuration that need the plug-ins but no model: every named part exists and takes its fields."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TypeVar

from flowrl_img import plugins
from flowrl_img.config import Config, RewardConfig
from flowrl_img.needs import Needs
from flowrl_img.plan import Plan, make_plan
from flowrl_img.tracking import check_tracker

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
    attempt(lambda: _rewards("rewards", config.rewards))
    attempt(lambda: _rewards("report_rewards", config.report_rewards))
    if problems or plan is None:
        raise ValueError("\n".join(problems))
    return plan


def _rewards(section: str, rewards: Sequence[RewardConfig]) -> None:
    from flowrl_img.rewards import registry

    if section == "rewards" and not any(reward.weight for reward in rewards):
        raise ValueError("rewards: at least one needs a weight other than 0, for example rewards=[{name: geneval}]")
    names = [reward.name for reward in rewards]
    for k, reward in enumerate(rewards):
        if names.index(reward.name) != k:
            raise ValueError(f"{section}.{k}: reward {reward.name!r} stands twice; give it once, with one weight")
        registry.build({"name": reward.name, **reward.options()}, where=f"{section}.{k}")
