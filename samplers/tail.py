"""The short tail of MixGRPO-Flash: after the last stochastic step, few solver steps replace the rest of the grid.

Only trained transitions need the fine grid. Rollouts get cheaper by the steps the tail leaves out; the pictures that
are scored then come from the tail, so a tail that is too short lowers every reward.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field

import torch
from torch import Tensor

from flowrl_img.samplers.loop import Noise, Trajectory, Velocity, sample
from flowrl_img.samplers.solve import solve
from flowrl_img.samplers.solvers.dpm2_published import DPM2Published
from flowrl_img.samplers.solvers.table import Solver
from flowrl_img.samplers.steps.table import StepRule, check_sigmas

__all__ = ["FlashTail", "sample_with_tail"]


@dataclass(frozen=True)
class FlashTail:
    """ratio: share of the remaining steps to take, in (0, 1]. shift: time shift of the grid (FLUX: e^mu); 1 means none.

    With r = N - last of N steps, last being the last stochastic one, the tail has max(1, floor(ratio r) - 1) steps: the
    published count, which counts both end nodes, except that published code stops short of sigma 0 when it finds one.
    The tail begins without the history of the stochastic part, so its first step is first order. No step of an evenly
    spaced tail is as long as the one `dpm2` guards against, hence the published solver.
    Source: MixGRPO-Flash, arXiv 2507.21802, and its code; published ratios are 0.4, and 0.2 with a frozen window.
    """

    ratio: float = 0.4
    shift: float = 3.0
    solver: Solver = field(default_factory=DPM2Published)

    def __post_init__(self) -> None:
        if not 0 < self.ratio <= 1 or self.shift <= 0:
            raise ValueError(f"ratio must be in (0, 1] and shift positive, got ratio={self.ratio}, shift={self.shift}")
        # Thousands of levels, so that noise in a narrow range of them is not overlooked.
        if self.solver.coefficients(torch.linspace(0.999, 0, 4001)).std.any():
            raise ValueError("the tail adds no noise: set the noise level of its solver to 0, or choose another solver")

    def num_steps(self, total: int, last: int) -> int:
        """Steps of the tail after step `last` of `total`."""
        if not 0 <= last < total - 1:
            raise ValueError(f"step {last} of {total} leaves none for a tail: end the window earlier")
        return max(1, int(self.ratio * (total - last)) - 1)

    def sigmas(self, sigmas: Tensor, last: int) -> Tensor:
        """float64 [n+1]: sigmas[last + 1], then n levels down to the end, evenly spaced before the shift."""
        sigmas = check_sigmas(sigmas)
        num_steps = self.num_steps(len(sigmas) - 1, last)
        start, end = sigmas[last + 1], sigmas[-1]
        line = torch.linspace(self._unshifted(start), self._unshifted(end), num_steps + 1, dtype=torch.float64)
        levels = self.shift * line / (1 + (self.shift - 1) * line)
        levels[0], levels[-1] = start, end
        return levels

    def _unshifted(self, sigma: Tensor) -> float:
        return float(sigma / (self.shift - (self.shift - 1) * sigma))


def sample_with_tail(
    velocity: Velocity,
    x_1: Tensor,
    sigmas: Tensor,
    step_rule: StepRule,
    stochastic_steps: Collection[int],
    noise: Noise,
    tail: FlashTail,
    keep: Collection[int] = (),
) -> Trajectory:
    """`sample` up to the last stochastic step, then the tail. Kept steps are those of the full grid, bit for bit.

    In the tail, velocity is called with step indices that go on counting and sigmas that are not in the grid.
    """
    if not stochastic_steps:
        raise ValueError(
            "a tail follows the last stochastic step, and there is none: use `solve` for a plain ODE rollout"
        )
    last = max(stochastic_steps)
    levels = tail.sigmas(sigmas, last)
    head = sample(velocity, x_1, sigmas[: last + 2], step_rule, stochastic_steps, noise, keep)
    x0 = solve(lambda x, i, sigma: velocity(x, last + 1 + i, sigma), head.x0, levels, tail.solver, noise=None)
    return Trajectory(x0=x0, kept=head.kept)
