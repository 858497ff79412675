"""Sizes that must divide or fit: pictures into updates and processes, paths into branches, groups into micro-batches.

An impossible size is a line that names the nearest values that work. Left out: what the sizes cost, which is the
plan's.
"""

from __future__ import annotations

import math
from collections.abc import Callable

from flowrl_img.config import Config
from flowrl_img.needs import Needs

__all__ = ["forked", "group_rows", "paths_of", "size_problems"]


def forked(config: Config) -> bool:
    """Whether a path is a trunk whose forks are the pictures."""
    return config.rollout.kind == "anchor_fork"


def paths_of(config: Config) -> int:
    """Paths from noise that a rollout walks; a forked one has as many pictures as steps and branches."""
    rollout = config.rollout
    return rollout.groups * (rollout.group_size // rollout.branches if forked(config) else rollout.group_size)


def group_rows(group_size: int, num_processes: int, needs: Needs) -> int:
    """The most pictures of one group that a process trains on at one time, where groups are dealt over all."""
    return min(needs.trained_of(group_size), math.ceil(group_size / num_processes))


def size_problems(config: Config, num_processes: int, needs: Needs) -> list[str]:
    """What does not go together; an empty list for sizes that do."""
    if problems := _branch_problems(config):
        return problems
    groups = _group_problems(config, num_processes, needs) if needs.unit == "group" else []
    return groups or _division_problems(config, num_processes)


def _branch_problems(config: Config) -> list[str]:
    """The group of a forked rollout is a number of paths times the branches of each state."""
    size, branches = config.rollout.group_size, config.rollout.branches
    if not forked(config) or size % branches == 0:
        return []
    valid = _either(_nearest(size, lambda n: n % branches == 0))
    return [
        f"rollout.group_size = {size} is no multiple of rollout.branches = {branches}: each path forks into so many "
        f"pictures at every step; use rollout.group_size = {valid}"
    ]


def _group_problems(config: Config, num_processes: int, needs: Needs) -> list[str]:
    """Where groups are scored whole, an update takes whole groups and a micro-batch holds one, over all processes."""
    rollout, run = config.rollout, config.run
    rows = group_rows(rollout.group_size, num_processes, needs)
    problems = []
    if run.micro_batch < rows:
        problems.append(
            f"run.micro_batch = {run.micro_batch}: objective {config.objective.name} scores a group of "
            f"{needs.trained_of(rollout.group_size)} pictures at once, which is up to {rows} in each of "
            f"{num_processes} processes; use run.micro_batch = {rows} or more"
        )
    if rollout.groups % run.updates_per_rollout:
        valid = _either(_nearest(rollout.groups, lambda n: n % run.updates_per_rollout == 0))
        problems.append(
            f"rollout.groups = {rollout.groups} do not divide into run.updates_per_rollout = {run.updates_per_rollout} "
            f"updates of whole groups, as objective {config.objective.name} needs them; use rollout.groups = {valid}"
        )
    return problems


def _division_problems(config: Config, num_processes: int) -> list[str]:
    """Every update takes equally many pictures of every process; of a forked rollout, equally many paths."""
    groups, updates = config.rollout.groups, config.run.updates_per_rollout
    if forked(config):
        return _path_problems(config, num_processes)
    size = config.rollout.group_size
    images, shares = groups * size, num_processes * updates
    if images % shares == 0:
        return []
    by_updates = [n for n in range(1, images + 1) if images % (num_processes * n) == 0]
    ways = [
        f"rollout.groups = {_either(_nearest(groups, lambda n: n * size % shares == 0))}",
        f"rollout.group_size = {_either(_nearest(size, lambda n: n > 1 and groups * n % shares == 0))}",
    ]
    if by_updates:
        closest = sorted(by_updates, key=lambda n: (abs(n - updates), n))[:2]
        ways.append(f"run.updates_per_rollout = {_either(sorted(closest))}")
    return [
        f"rollout.groups x rollout.group_size = {groups} x {size} = {images} pictures do not divide into "
        f"run.updates_per_rollout x processes = {updates} x {num_processes} = {shares} equal shares; "
        f"nearest valid: {'; or '.join(ways)}"
    ]


def _path_problems(config: Config, num_processes: int) -> list[str]:
    paths, shares = paths_of(config), num_processes * config.run.updates_per_rollout
    if paths and paths % shares == 0:
        return []
    per_prompt = config.rollout.group_size // config.rollout.branches
    valid = _either(_nearest(config.rollout.groups, lambda n: n * per_prompt % shares == 0))
    return [
        f"rollout.groups x paths = {config.rollout.groups} x {per_prompt} = {paths} paths (rollout.group_size / "
        f"rollout.branches of each prompt) do not divide into run.updates_per_rollout x processes = "
        f"{config.run.updates_per_rollout} x {num_processes} = {shares} equal shares; "
        f"nearest valid: rollout.groups = {valid}"
    ]


def _nearest(value: int, valid: Callable[[int], bool]) -> list[int]:
    """The closest valid number below and above."""
    below = next((n for n in range(value - 1, 0, -1) if valid(n)), None)
    above = next(n for n in range(value + 1, value + 10**7) if valid(n))
    return [n for n in (below, above) if n is not None]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)
