"""The forked loop: one deterministic trunk, several noisy successors at chosen steps, each finished without noise.

A reward of a finished successor is then the reward of one step's noise. The trunk is evaluated once a step, whatever
the number of successors, and all states that are alive at a step go through the velocity function together. Left out,
as in `loop.py`: models, guidance, random streams and gradients. Source: the rollout of TempFlow-GRPO, arXiv 2508.04324.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl_img.kernels.logprob import DeterministicStepError
from flowrl_img.kernels.step import ode_step, sde_step
from flowrl_img.samplers.loop import calm_rule
from flowrl_img.samplers.steps.table import StepRule, StepTable, check_sigmas

__all__ = ["Anchor", "Forked", "LanedVelocity", "fork", "fork_calls"]

LanedVelocity = Callable[[Tensor, Tensor, int, float], Tensor]
"""(x_t [n, ...], lane [n] int64, step index, sigma) -> v [n, ...]; lane: which of the B trunks a state comes from."""


@dataclass(frozen=True)
class Anchor:
    """The fork at one step: x_s = A x_t + B v + std z for every successor."""

    x_t: Tensor
    """[B, ...] trunk states."""
    v: Tensor
    """[B, ...] their velocities."""
    x_s: Tensor
    """[B, K, ...] successors."""
    e2: Tensor
    """[B, K] mean (x_s - A x_t - B v)^2 at the stored successors."""


@dataclass(frozen=True)
class Forked:
    """What a forked rollout leaves behind. Example: `forked.x0[3]` are the K finished successors of step 3."""

    anchors: Mapping[int, Anchor]
    x0: Mapping[int, Tensor]
    """[B, K, ...] finished successors by the step they left the trunk at."""


def fork_calls(num_steps: int, anchors: Collection[int], branches: int) -> int:
    """Network calls of one trunk: its own up to the last fork, and every successor's to the end."""
    return max(anchors) + 1 + branches * sum(num_steps - 1 - i for i in anchors)


@torch.no_grad()
def fork(
    velocity: LanedVelocity,
    x_1: Tensor,
    sigmas: Tensor,
    step_rule: StepRule,
    anchors: Collection[int],
    branches: int,
    noise: Callable[[int], Tensor],
) -> Forked:
    """x_1: [B, ...] float32. anchors: steps with noise, each with std > 0. noise(step) -> z [B, K, ...], K = branches.

    sigmas: float64 [N+1]. Raises DeterministicStepError for an anchor without noise, ValueError for one outside.
    """
    sigmas = check_sigmas(sigmas)
    random, calm = step_rule.coefficients(sigmas), calm_rule(step_rule).coefficients(sigmas)
    steps = sorted(set(anchors))
    if not steps or steps[0] < 0 or steps[-1] >= len(random.std) or branches < 1:
        raise ValueError(f"fork at steps of [0, {len(random.std)}) into at least 1 successor, got {steps}, {branches}")
    if silent := [i for i in steps if random.std[i] <= 0]:
        raise DeterministicStepError(f"steps {silent} have std 0: successors would be equal; leave these steps out")
    own = torch.arange(len(x_1))
    trunk, alive, lanes = x_1, x_1[:0], own[:0]
    kept: dict[int, Anchor] = {}
    for i, sigma in enumerate(sigmas[:-1].tolist()):
        walking = trunk if i <= steps[-1] else trunk[:0]
        x, lane = torch.cat([walking, alive]), torch.cat([own[: len(walking)], lanes])
        v = velocity(x, lane, i, sigma)
        if v.shape != x.shape:
            raise ValueError(f"velocity at step {i} has shape {tuple(v.shape)}, the states have {tuple(x.shape)}")
        row = calm.rows(torch.full((len(x),), i))
        moved = ode_step(x, v, row.A, row.B)
        alive = moved[len(walking) :]
        if i in steps:
            kept[i] = _anchor(random, i, trunk, v[: len(walking)], noise(i))
            alive = torch.cat([alive, kept[i].x_s.flatten(0, 1)])
            lanes = torch.cat([lanes, own.repeat_interleave(branches)])
        trunk = moved[: len(walking)]
    finished = alive.unflatten(0, (len(steps), len(x_1), branches))
    return Forked(kept, dict(zip(steps, finished, strict=True)))


def _anchor(table: StepTable, step: int, x_t: Tensor, v: Tensor, z: Tensor) -> Anchor:
    """Noisy successors of the states x_t, one for each noise z [B, K, ...]."""
    size = z.shape[:2]
    if z.shape[2:] != x_t.shape[1:] or size[0] != len(x_t):
        raise ValueError(
            f"noise of step {step} is {tuple(z.shape)}, the states are {tuple(x_t.shape)}: give [B, K, ...]"
        )
    row = table.rows(torch.full((size[0] * size[1],), step))
    x, w = (x.repeat_interleave(size[1], 0) for x in (x_t, v))
    x_s, e2 = sde_step(x, w, z.flatten(0, 1), row.A, row.B, row.std)
    return Anchor(x_t, v, x_s.unflatten(0, size), e2.unflatten(0, size))
