"""The loop for rollouts that need no log-prob: walk a grid with a solver and return the final state.

Left out, as in `loop.py`: models, guidance, random streams and gradients. The velocity is called with a step index and
its sigma; a solver with a second pass calls it at the index of the level it has reached.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable

import torch
from torch import Tensor

from flowrl_img.samplers.loop import Noise, Velocity
from flowrl_img.samplers.solvers.table import Solver, SolverTable
from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["solve"]


@torch.no_grad()
def solve(velocity: Velocity, x_1: Tensor, sigmas: Tensor, solver: Solver, noise: Noise | None = None) -> Tensor:
    """Integrate from sigmas[0] to sigmas[-1]. Returns the final state, [B, ...] in the dtype of x_1.

    x_1: [B, ...] float32 start, noise of level sigmas[0] (float64 is kept, for checks). sigmas: float64 [N+1].
    noise: needed, and called, for the stochastic steps of the solver alone. The network is never called at sigma 0.
    """
    if x_1.dtype not in (torch.float32, torch.float64):
        raise ValueError(f"x_1 is {x_1.dtype}: solve in float32 and cast inside the velocity function")
    sigmas = check_sigmas(sigmas)
    table, levels = solver.coefficients(sigmas), sigmas.tolist()
    history: deque[Tensor] = deque(maxlen=table.predictor.shape[1])
    x, known = x_1, None
    for i in range(len(table.keep)):
        history.appendleft(_clean(velocity, x, i, levels[i]) if known is None else known)
        base = float(table.keep[i]) * x + _fresh(table, i, x, noise)
        x, known = base + _blend(table.predictor[i], history), None
        if table.corrects(i):
            clean = _clean(velocity, x, i + 1, levels[i + 1])
            x = base + _blend(table.corrector[i], [clean, *history])
            known = clean if table.reuse else None
    return x


def _clean(velocity: Velocity, x: Tensor, i: int, sigma: float) -> Tensor:
    """The predicted clean image x - sigma v, in the dtype of x."""
    v = velocity(x, i, sigma)
    if v.shape != x.shape:
        raise ValueError(f"velocity at step {i} has shape {tuple(v.shape)}, the state has {tuple(x.shape)}")
    return x - sigma * v.to(x.dtype)


def _fresh(table: SolverTable, i: int, x: Tensor, noise: Noise | None) -> Tensor | float:
    if table.std[i] == 0:
        return 0.0
    if noise is None:
        raise ValueError(f"step {i} of this solver is stochastic: pass `noise`, or set its noise level to 0")
    z = noise(i)
    if z.shape != x.shape:
        raise ValueError(f"noise of step {i} has shape {tuple(z.shape)}, the state has {tuple(x.shape)}")
    return float(table.std[i]) * z.to(x.dtype)


def _blend(weights: Tensor, predictions: Iterable[Tensor]) -> Tensor:
    """Weighted sum of predictions, newest first; weights beyond the history are 0 by construction."""
    terms = [weight * x0 for weight, x0 in zip(weights.tolist(), predictions) if weight != 0]
    return torch.stack(terms).sum(0) if len(terms) > 2 else sum(terms[1:], terms[0])
