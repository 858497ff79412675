"""What a run will do, by arithmetic alone: sizes, updates and network evaluations, before any model is loaded.

An *evaluation* is one latent through the network once; classifier-free guidance takes two. Impossible sizes are errors
that name the nearest values that work. Left out: seconds and bytes, which depend on the machine and the model.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from itertools import pairwise
from typing import TYPE_CHECKING

from flowrl_img import plugins
from flowrl_img.config import Config
from flowrl_img.geometry import forked, group_rows, paths_of, size_problems
from flowrl_img.needs import Needs
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
    """stochastic steps of each path that are trained on, or times at which each picture is noised again"""
    steps: int
    rollouts: int | None
    updates_per_rollout: int
    updates: int | None
    images_per_update: int
    points_per_update: int
    """(picture, step or time) points behind one optimizer update"""
    micro_batches_per_process: int
    """forward-backward passes of each process for one update"""
    sampling_evaluations: int
    """per rollout, no gradient; at most, where the window moves and a tail follows it or the noise is shared"""
    training_evaluations: int
    """per rollout, with gradient, each trained state once"""
    reference_evaluations: int
    """per rollout, no gradient, of the frozen network"""
    policy_evaluations: int
    """per rollout, no gradient, of the old and trust weights at trained states"""
    rescoring_evaluations: int
    """per rollout, no gradient, of the rollout's weights in the training layout: low precision alone"""
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
        return self.rollouts * self.rollout_evaluations + self.heldout_rounds * self.heldout_evaluations

    @property
    def rollout_evaluations(self) -> int:
        """Network evaluations of one rollout and its updates."""
        without_gradient = self.reference_evaluations + self.policy_evaluations + self.rescoring_evaluations
        return self.sampling_evaluations + self.training_evaluations + without_gradient

    def rows(self) -> list[tuple[str, str]]:
        """The plan as (what, how much) lines."""
        update = f"{self.images_per_update:,} pictures, {self.points_per_update:,} points"
        heldout = f"{self.heldout_pictures:,} pictures, {self.heldout_evaluations:,} evaluations"
        return [
            ("rollouts", _count(self.rollouts)),
            ("groups per rollout", f"{self.groups} prompts x {self.group_size} pictures = {self.images:,} pictures"),
            ("per process", f"{self.images_per_process:,} pictures in each of {self.num_processes}"),
            ("trained", f"{self.trained_steps} steps or times per path of {self.steps} steps"),
            ("updates", f"{self.updates_per_rollout} per rollout, {_count(self.updates)} in all"),
            ("per update", f"{update}, {self.micro_batches_per_process} micro-batches per process"),
            ("policy", _policy(self.updates_per_rollout)),
            ("network, sampling", f"{self.sampling_evaluations:,} evaluations per rollout"),
            ("network, training", f"{self.training_evaluations:,} forward and backward per rollout"),
            ("network, reference", f"{self.reference_evaluations:,} per rollout"),
            *_further(self),
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


def make_plan(config: Config, num_processes: int = 1, needs: Needs | None = None) -> Plan:
    """The plan of `config` on `num_processes`. Raises ValueError naming every group of sizes that do not go together.

    needs: of the objective; None asks the objective itself, which imports torch.
    """
    if needs is None:
        needs = plugins.build("objectives", config.objective.section(), where="objective").needs
    _check(config, num_processes, needs)
    rollout, run, evaluation = config.rollout, config.run, config.evaluation
    paths, steps, work = paths_of(config), _trained_steps(config, needs), _work(config, needs)
    images = paths * (steps * rollout.branches if forked(config) else 1)
    updates = None if run.rollouts is None else run.rollouts * run.updates_per_rollout
    heldout = evaluation.pictures * _evaluation_calls(config) * (1 if evaluation.guidance == 1 else 2)
    share = images // num_processes
    return Plan(
        num_processes=num_processes,
        groups=rollout.groups,
        group_size=rollout.group_size,
        images=images,
        images_per_process=share,
        trained_steps=steps,
        steps=rollout.steps,
        rollouts=run.rollouts,
        updates_per_rollout=run.updates_per_rollout,
        updates=updates,
        images_per_update=images // run.updates_per_rollout,
        points_per_update=work.points // run.updates_per_rollout,
        micro_batches_per_process=_micro_batches(config, needs, num_processes, work),
        sampling_evaluations=_sampling_evaluations(config, needs, num_processes),
        training_evaluations=work.states * work.passes,
        reference_evaluations=work.states * work.reference_passes,
        policy_evaluations=work.states * work.passes * work.stored_sets,
        rescoring_evaluations=work.states * work.passes if _rescores(config, needs) else 0,
        heldout_evaluations=heldout,
        heldout_pictures=evaluation.pictures,
        heldout_rounds=_rounds(updates, evaluation.every),
        peak_decoded_per_process=min(share, rollout.batch),
        peak_latents_per_process=_latents(config, needs, steps) // num_processes,
    )


@dataclass(frozen=True)
class _Work:
    """One rollout's updates: scored points, evaluated states, and the passes of the network at each state."""

    points: int
    states: int
    passes: int
    reference_passes: int
    stored_sets: int


def _work(config: Config, needs: Needs) -> _Work:
    rollout, steps, paths = config.rollout, _trained_steps(config, needs), paths_of(config)
    passes = _passes(needs.trained_guidance(rollout.guidance))
    reference_passes = _passes(needs.compared_guidance(rollout.guidance)) if "reference" in needs.velocities else 0
    if not needs.matching:
        stored = "trust" in needs.velocities
        branches = rollout.branches if forked(config) else 1
        return _Work(paths * steps * branches, paths * steps, passes, reference_passes, int(stored))
    states = rollout.groups * needs.trained_of(rollout.group_size) * steps
    return _Work(states, states, passes, reference_passes, len({"old", "trust"} & set(needs.velocities)))


def _passes(guidance: float) -> int:
    return 1 if guidance == 1 else 2


def _trained_steps(config: Config, needs: Needs) -> int:
    """Trained steps of a path, or times of a picture."""
    if not needs.matching:
        return window_size(config.rollout.window, config.rollout.steps)
    from flowrl_img import sampling

    law = sampling.times_of(config, needs)
    assert law is not None
    return law.num_times(config.rollout.steps)


def _rescores(config: Config, needs: Needs) -> bool:
    """In low precision the old velocity of a transition is taken again in the training layout."""
    return not needs.matching and config.model.dtype != "fp32"


def _micro_batches(config: Config, needs: Needs, num_processes: int, work: _Work) -> int:
    """Forward and backward passes of each process for one update."""
    size, updates = config.run.micro_batch, config.run.updates_per_rollout
    states = work.states // updates
    if needs.unit == "group":
        rows = needs.trained_of(config.rollout.group_size)
        fit = size // group_rows(config.rollout.group_size, num_processes, needs)
        groups = config.rollout.groups // updates
        return math.ceil(groups / fit) * (states // (groups * rows))
    if needs.unit == "sample":
        times = _trained_steps(config, needs)
        size = max(1, size // times) * times
    return math.ceil(states // num_processes / size)


def _latents(config: Config, needs: Needs, steps: int) -> int:
    """Latents held between rollout and update: states and velocities of the trained steps, and x0 of every picture."""
    paths = paths_of(config)
    if needs.matching:
        return paths
    if forked(config):
        return paths * steps * (2 + 2 * config.rollout.branches)
    return paths * (2 * steps + 2)


def _sampling_evaluations(config: Config, needs: Needs, num_processes: int) -> int:
    """Evaluations of one rollout. Members of a group that shares its noise are one state until the first draw."""
    rollout, paths = config.rollout, paths_of(config)
    evaluations = paths * _sampling_calls(config, needs)
    if rollout.shared_noise and not needs.matching and not forked(config):
        bounds = [k * paths // num_processes for k in range(num_processes + 1)]
        chunks = [range(k, min(k + rollout.batch, b)) for a, b in pairwise(bounds) for k in range(a, b, rollout.batch)]
        states = sum(len({k // rollout.group_size for k in chunk}) for chunk in chunks)
        evaluations -= (candidates(rollout.window, rollout.steps)[0] + 1) * (paths - states)
    return evaluations * _passes(rollout.guidance)


def _sampling_calls(config: Config, needs: Needs) -> int:
    """Network calls that walk one path of a rollout, its forks included, guidance aside; at most."""
    from flowrl_img import sampling
    from flowrl_img.samplers.fork import fork_calls

    rollout = config.rollout
    solver = sampling.solver_of(config, needs)
    if solver is not None:
        return sampling.network_calls(solver, rollout.steps)
    if forked(config):
        size, possible = window_size(rollout.window, rollout.steps), candidates(rollout.window, rollout.steps)
        starts = range(len(possible) - size + 1)
        return max(fork_calls(rollout.steps, possible[k : k + size], rollout.branches) for k in starts)
    tail = sampling.tail_of(config)
    if tail is None:
        return rollout.steps
    ends = candidates(rollout.window, rollout.steps)[window_size(rollout.window, rollout.steps) - 1 :]
    return max(i + 1 + sampling.network_calls(tail.solver, tail.num_steps(rollout.steps, i)) for i in ends)


def _evaluation_calls(config: Config) -> int:
    """Network calls that draw one held-out picture, guidance aside."""
    from flowrl_img import sampling

    return sampling.network_calls(sampling.evaluation_solver_of(config), config.evaluation.steps)


def _check(config: Config, num_processes: int, needs: Needs) -> None:
    if num_processes < 1:
        raise ValueError(f"num_processes = {num_processes}: must be at least 1")
    window = [] if needs.matching else window_problems(config.rollout.window, config.rollout.steps)
    problems = [*window, *size_problems(config, num_processes, needs), *_sample_problems(config, needs)]
    if problems:
        raise ValueError("\n".join(problems))


def _sample_problems(config: Config, needs: Needs) -> list[str]:
    """Where a picture is scored at all its times together, a micro-batch holds one."""
    if needs.unit != "sample":
        return []
    times, size = _trained_steps(config, needs), config.run.micro_batch
    if size >= times:
        return []
    return [
        f"run.micro_batch = {size}: objective {config.objective.name} scores a picture at its {times} times at once; "
        f"use run.micro_batch = {times} or more"
    ]


def _rounds(updates: int | None, every: int | None) -> int | None:
    """Held-out evaluations: before, after, and every `every` updates between."""
    if every is None:
        return 2
    return None if updates is None else 2 + (updates - 1) // every


def _count(number: int | None) -> str:
    return "open (ends by run.minutes)" if number is None else f"{number:,}"


def _further(plan: Plan) -> list[tuple[str, str]]:
    """Evaluations that only some objectives and precisions take."""
    rows = {"network, old weights": plan.policy_evaluations, "network, training layout": plan.rescoring_evaluations}
    return [(what, f"{count:,} per rollout") for what, count in rows.items() if count]


def _times(plan: Plan) -> str:
    return "number of times open" if plan.heldout_rounds is None else f"{plan.heldout_rounds} times"


def _policy(updates: int) -> str:
    return "on-policy, ratio 1 expected" if updates == 1 else f"{updates - 1} of {updates} updates off-policy"


def _peaks(plan: Plan) -> str:
    return (
        f"{plan.peak_decoded_per_process:,} decoded pictures, {plan.images_per_process:,} scored pictures, "
        f"{plan.peak_latents_per_process:,} latents per process"
    )
