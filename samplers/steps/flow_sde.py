r"""Flow-SDE: the rectified-flow ODE turned into an SDE with the same marginals, one Euler-Maruyama step at a time.

With t = sigma_i, s = sigma_{i+1}, dt = s - t < 0 and sigma_t = noise_level * sqrt(t / (1 - t)):

    mean = x_t + [v + sigma_t^2 / (2 t) * (x_t + (1 - t) v)] dt
         = A x_t + B v,   A = 1 + sigma_t^2 dt / (2 t),   B = (1 + sigma_t^2 (1 - t) / (2 t)) dt
    std  = sigma_t sqrt(-dt)

For t < 1 this gives B = (1 + noise_level^2 / 2) dt: a constant times the Euler step. At t = 1 the square root has
a pole; there 1 - t is replaced by 1 - sigma_1 in sigma_t alone, which makes the first std equal to noise_level.
The marginals are kept to order min(1, noise_level^2) in the step: the endpoint rule costs the rest.
Source: Flow-GRPO, arXiv 2505.05470, Eq. 9, and the endpoint rule of its published code.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import StepTable, check_sigmas, sde_table

__all__ = ["FlowSDE"]

# A first level this close to 1 is the noise end. Compared with a margin, because a float32 grid may miss 1 by an ulp.
NOISE_END = 1.0 - 1e-6
# std / noise_level is at most about 1.3 on the grids of published pipelines; beyond 2 the step adds more noise
# than twice what x_t holds, which happens when a grid starts just below 1.
MAX_RELATIVE_STD = 2.0


@dataclass(frozen=True)
class FlowSDE:
    """noise_level: a >= 0. 0 is the Euler ODE; 0.7 is the published default for SD3, 0.9 for FLUX."""

    noise_level: float = 0.7

    name: ClassVar[str] = "flow_sde"
    process: ClassVar[str] = "flow"

    def __post_init__(self) -> None:
        if not 0 <= self.noise_level < float("inf"):
            raise ValueError(f"noise_level must be finite and at least 0, got {self.noise_level}")

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps.

        Raises ValueError for a step that starts so close to 1, without being the noise end, that its noise explodes.
        """
        sigmas = check_sigmas(sigmas)
        t, dt = sigmas[:-1], sigmas.diff()
        distance = 1 - t
        if t[0] >= NOISE_END:
            distance = torch.cat([1 - sigmas[1:2], distance[1:]])
        spread = t / distance
        if (worst := (spread * -dt).sqrt().max()) > MAX_RELATIVE_STD:
            raise ValueError(
                f"a Flow-SDE step on this grid adds {worst:.1f} times noise_level, since it starts just below 1: "
                "start the grid at 1 exactly, or make its first step shorter"
            )
        return sde_table(sigmas, self.noise_level * spread.sqrt())
