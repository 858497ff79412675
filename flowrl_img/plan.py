"""What a run will do, by arithmetic alone: sizes, updates and network evaluations, before any model is loaded.

An *evaluation* is one latent through the network once; classifier-free guidance takes two. Impossible sizes are errors
that name the nearest values that work. Left out: seconds and bytes, which depend on the machine and the model.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import TYPE_CHECKING

from flowrl_img import plugins
from flowrl_img.config import Config
from flowrl_img.window import candidates, window_problems, window_size

if TYPE_CHECKING:
    from rich.console import RenderableType

__all__ = ["Plan", "make_plan"]


@dataclass(frozen=True)
class Plan:
    """Sizes of a run. Example: `make_plan(Config(), num_processes=2).images_per_process` is 48.

    Numbers are totals over all processes unless the name says `per_process`. None: open, the run ends by time.
    """

    num_processes: int
    groups: int
    group_size: int
    images: int
    """pictures per rollout"""
    images_per_process: int
    trained_steps: int
    """stochastic steps of each picture's path that are trained on"""
    steps: int
    rollouts: int | None
    updates_per_rollout: int
    updates: int | None
    images_per_update: int
    points_per_update: int
    """(picture, step) points behind one optimizer update"""
    micro_batches_per_process: int
    """forward-backward passes of each process for one update"""
    sampling_evaluations: int
    """per rollout, no gradient; at most, where a tail follows a moving window"""
    training_evaluations: int
    """per rollout, with gradient, each trained point once"""
    reference_evaluations: int
    """per rollout, no gradient, of the frozen network"""
    heldout_evaluations: int
    """per held-out evaluation"""
    heldout_pictures: int
    heldout_rounds: int | None
    """held-out evaluations in the run, before and after included"""
    peak_decoded_per_process: int
    """pictures decoded at once"""
    peak_latents_per_process: int
    """latents held between rollout and update: the states of each picture's window, the velocities between them, x0"""

    @property
    def evaluations(self) -> int | None:
        """Network evaluations of the whole run."""
        if self.rollouts is None or self.heldout_rounds is None:
            return None
        rollout = self.sampling_evaluations + self.training_evaluations + self.reference_evaluations
        return self.rollouts * rollout + self.heldout_rounds * self.heldout_evaluations

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (what, how much) lines."""
        update = f"{self.images_per_update:,} pictures, {self.points_per_update:,} points"
        heldout = f"{self.heldout_pictures:,} pictures, {self.heldout_evaluations:,} evaluations"
        return [
            ("rollouts", _count(self.rollouts)),
            ("groups per rollout", f"{self.groups} prompts x {self.group_size} pictures = {self.images:,} pictures"),
            ("per process", f"{self.images_per_process:,} pictures in each of {self.num_processes}"),
            ("trained steps", f"{self.trained_steps} of {self.steps}"),
            ("updates", f"{self.updates_per_rollout} per rollout, {_count(self.updates)} in all"),
            ("per update", f"{update}, {self.micro_batches_per_process} micro-batches per process"),
            ("policy", _policy(self.updates_per_rollout)),
            ("network, sampling", f"{self.sampling_evaluations:,} evaluations per rollout"),
            ("network, training", f"{self.training_evaluations:,} forward and backward per rollout"),
            ("network, reference", f"{self.reference_evaluations:,} per rollout"),
            ("held-out", f"{heldout}, {_times(self)}"),
            ("network, whole run", _count(self.evaluations)),
            ("held at once", _peaks(self)),
        ]

    def render(self) -> RenderableType:
        """A table for the terminal."""
        from rich.table import Table

        table = Table(title="plan", title_justify="left", title_style="bold", show_header=False, box=None)
        for what, value in self.rows():
            table.add_row(what, value)
        return table


def make_plan(config: Config, num_processes: int = 1, needs: Collection[str] | None = None) -> Plan:
    """The plan of `config` on `num_processes`. Raises ValueError naming every group of sizes that do not go together.

    needs: the weight sets that the objective reads; None asks the objective itself, which imports torch.
    """
    _check(config, num_processes)
    if needs is None:
        needs = plugins.build("objectives", config.objective.section(), where="objective").needs
    rollout, run = config.rollout, config.run
    images = rollout.groups * rollout.group_size
    share = images // num_processes
    trained = window_size(rollout.window, rollout.steps)
    passes = 1 if rollout.guidance == 1 else 2
    points = images * trained
    updates = None if run.rollouts is None else run.rollouts * run.updates_per_rollout
    evaluation = config.evaluation
    heldout = evaluation.pictures * _evaluation_calls(config) * (1 if evaluation.guidance == 1 else 2)
    return Plan(
        num_processes=num_processes,
        groups=rollout.groups,
        group_size=rollout.group_size,
        images=images,
        images_per_process=share,
        trained_steps=trained,
        steps=rollout.steps,
        rollouts=run.rollouts,
        updates_per_rollout=run.updates_per_rollout,
        updates=updates,
        images_per_update=images // run.updates_per_rollout,
        points_per_update=points // run.updates_per_rollout,
        micro_batches_per_process=math.ceil(points // run.updates_per_rollout // num_processes / run.micro_batch),
        sampling_evaluations=images * _sampling_calls(config) * passes,
        training_evaluations=points * passes,
        reference_evaluations=points * passes if "reference" in needs else 0,
        heldout_evaluations=heldout,
        heldout_pictures=evaluation.pictures,
        heldout_rounds=_rounds(updates, evaluation.every),
        peak_decoded_per_process=min(share, rollout.batch),
        peak_latents_per_process=share * (2 * trained + 2),
    )


def _sampling_calls(config: Config) -> int:
    """Network calls that draw one picture of a rollout, guidance aside."""
    from flowrl_img import sampling

    rollout = config.rollout
    if rollout.solver is not None:
        solver = plugins.build("solvers", rollout.solver.section(), where="rollout.solver")
        return sampling.network_calls(solver, rollout.steps)
    tail = sampling.tail_of(config)
    if tail is None:
        return rollout.steps
    ends = candidates(rollout.window, rollout.steps)[window_size(rollout.window, rollout.steps) - 1 :]
    return max(i + 1 + sampling.network_calls(tail.solver, tail.num_steps(rollout.steps, i)) for i in ends)


def _evaluation_calls(config: Config) -> int:
    """Network calls that draw one held-out picture, guidance aside."""
    from flowrl_img import sampling

    return sampling.network_calls(sampling.evaluation_solver_of(config), config.evaluation.steps)


def _check(config: Config, num_processes: int) -> None:
    if num_processes < 1:
        raise ValueError(f"num_processes = {num_processes}: must be at least 1")
    window = window_problems(config.rollout.window, config.rollout.steps)
    problems = [*window, *_division_problems(config, num_processes)]
    if problems:
        raise ValueError("\n".join(problems))


def _division_problems(config: Config, num_processes: int) -> list[str]:
    """Every update takes equally many pictures of every process."""
    groups, size, updates = config.rollout.groups, config.rollout.group_size, config.run.updates_per_rollout
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


def _nearest(value: int, valid: Callable[[int], bool]) -> list[int]:
    """The closest valid number below and above."""
    below = next((n for n in range(value - 1, 0, -1) if valid(n)), None)
    above = next(n for n in range(value + 1, value + 10**7) if valid(n))
    return [n for n in (below, above) if n is not None]


def _either(numbers: list[int]) -> str:
    return " or ".join(str(n) for n in numbers)


def _rounds(updates: int | None, every: int | None) -> int | None:
    """Held-out evaluations: before, after, and every `every` updates between."""
    if every is None:
        return 2
    return None if updates is None else 2 + (updates - 1) // every


def _count(number: int | None) -> str:
    return "open (ends by run.minutes)" if number is None else f"{number:,}"


def _times(plan: Plan) -> str:
    return "number of times open" if plan.heldout_rounds is None else f"{plan.heldout_rounds} times"


def _policy(updates: int) -> str:
    return "on-policy, ratio 1 expected" if updates == 1 else f"{updates - 1} of {updates} updates off-policy"


def _peaks(plan: Plan) -> str:
    return (
        f"{plan.peak_decoded_per_process:,} decoded pictures, {plan.images_per_process:,} scored pictures, "
        f"{plan.peak_latents_per_process:,} latents per process"
    )
