"""The sampling loop: walk a grid from noise to data, stochastic at chosen steps and deterministic at all others.

Every step is the fused op that training's moments agree with (`kernels/step.py`). Left out: models, guidance, random
streams and gradients. The caller gives a velocity and a noise function; both are called with the step index, so
randomness can be keyed by identity and nothing depends on a hidden counter.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass

import torch
from torch import Tensor

from flowrl_img.kernels.logprob import DeterministicStepError
from flowrl_img.kernels.step import ode_step, sde_step
from flowrl_img.samplers.steps.ode import ODE
from flowrl_img.samplers.steps.table import StepRule, StepTable, check_sigmas

__all__ = ["KeptStep", "Noise", "Trajectory", "Velocity", "calm_rule", "sample"]

EULER = ODE()

Velocity = Callable[[Tensor, int, float], Tensor]
"""(x_t [B, ...], step index, sigma) -> v [B, ...] of any float dtype, guidance included."""
Noise = Callable[[int], Tensor]
"""step index -> z [B, ...], standard normal, on the device of x."""


@dataclass(frozen=True)
class KeptStep:
    """One transition as it happened: x_s = A x_t + B v + std z, after all rounding.

    Example: `moments = transition_moments(v, None, 1.0, kept.x_t, kept.x_s, A, B, v_old=kept.v)`.
    """

    x_t: Tensor
    """[B, ...] state before the step, in the dtype of x_1."""
    x_s: Tensor
    """[B, ...] state after it: the very tensor the next step started from, and the one a log-prob is taken at."""
    v: Tensor
    """[B, ...] velocity used, in the dtype the velocity function returned (widening it again is exact)."""
    e2: Tensor
    """[B] mean (x_s - A x_t - B v)^2 at the stored x_s: the E2 that `transition_moments` finds for it, bit for bit."""


@dataclass(frozen=True)
class Trajectory:
    """What a rollout leaves behind. Example: `trajectory.kept[3].x_s`."""

    x0: Tensor
    """[B, ...] final state, at the last sigma."""
    kept: Mapping[int, KeptStep]
    """Transitions by step index; exactly the steps named in `keep`."""


def calm_rule(step_rule: StepRule) -> StepRule:
    """What takes the steps that `step_rule` does not: its own `calm`, else Euler's rule, which is for flows alone.

    Raises ValueError for a rule of diffusion models that has none.
    """
    calm: StepRule | None = getattr(step_rule, "calm", None)
    if calm is None and getattr(step_rule, "process", "flow") != "flow":
        raise ValueError(
            "a step rule of diffusion models needs `calm`, its rule without noise, for the steps that are not "
            "stochastic: Euler's is for flow matching"
        )
    return calm or EULER


@torch.no_grad()
def sample(
    velocity: Velocity,
    x_1: Tensor,
    sigmas: Tensor,
    step_rule: StepRule,
    stochastic_steps: Collection[int],
    noise: Noise,
    keep: Collection[int] = (),
) -> Trajectory:
    """Integrate from sigmas[0] to sigmas[-1].

    x_1: [B, ...] float32 start, B rows, noise of level sigmas[0] (float64 is kept, for checks). sigmas: float64 [N+1].
    step_rule acts on `stochastic_steps`; every other step is its `calm_rule`, Euler's for a flow, DDIM's for diffusion.
    `noise` is called for stochastic steps alone. keep: steps to store, each stochastic and with std > 0. Raises
    ValueError otherwise; for std 0 it is a DeterministicStepError.
    """
    if x_1.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x_1 is {x_1.dtype}: sample in float32 and cast inside the velocity function")
    sigmas = check_sigmas(sigmas)
    random, calm = step_rule.coefficients(sigmas), calm_rule(step_rule).coefficients(sigmas)
    _check_steps(random, set(stochastic_steps), set(keep))
    x, kept = x_1, {}
    for i, sigma in enumerate(sigmas[:-1].tolist()):
        v = _shaped(velocity(x, i, sigma), x, f"velocity at step {i}")
        index, x_t = torch.full((len(x),), i), x
        if i not in stochastic_steps:
            row = calm.rows(index)
            x = ode_step(x_t, v, row.A, row.B)
            continue
        row = random.rows(index)
        x, e2 = sde_step(x_t, v, _shaped(noise(i), x, f"noise of step {i}"), row.A, row.B, row.std)
        if i in keep:
            kept[i] = KeptStep(x_t=x_t, x_s=x, v=v, e2=e2)
    return Trajectory(x0=x, kept=kept)


def _shaped(value: Tensor, x: Tensor, name: str) -> Tensor:
    if value.shape != x.shape:
        raise ValueError(f"{name} has shape {tuple(value.shape)}, the state has {tuple(x.shape)}: they must agree")
    return value


def _check_steps(table: StepTable, stochastic: set[int], keep: set[int]) -> None:
    num_steps = len(table.std)
    if outside := sorted(i for i in stochastic if not 0 <= i < num_steps):
        raise ValueError(f"stochastic steps {outside} are outside a grid of {num_steps} steps (0-based)")
    if missing := sorted(keep - stochastic):
        raise ValueError(f"steps {missing} are kept but not stochastic: only stochastic steps have a log-prob")
    if silent := sorted(i for i in keep if table.std[i] <= 0):
        raise DeterministicStepError(
            f"steps {silent} are kept but their std is 0, so they cannot be trained: raise the noise or leave them out"
        )
