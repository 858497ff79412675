"""TempFlow-GRPO: Flow-GRPO on forked rollouts, so that a reward belongs to one step, weighted by that step's noise.

    loss = w_t max(-A r, -A clip(r, 1 - c, 1 + c)) + k KL,    w_t = std_t / mean of std over the trained steps

The rollout walks one deterministic path, draws several noisy successors at every trained step and finishes each without
noise; A compares the successors of one state with each other. So this file is a recipe over `FlowGRPO`: the rollout
`anchor_fork` and `time_weight: noise` are all there is to it. A row of advantage 0 has no policy gradient. Source:
TempFlow-GRPO, arXiv 2508.04324; its published code writes w_t as kappa std_t with kappa 2.25 (SD3) or 1.73 (FLUX).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.needs import Needs
from flowrl_img.objectives.flow_grpo import FlowGRPO
from flowrl_img.objectives.surrogate import ClipRange
from flowrl_img.types import Moments

__all__ = ["TempFlowGRPO"]


@dataclass(frozen=True)
class TempFlowGRPO:
    """clip_range, kl_weight, kl_form, detach_uncond: as in `flow_grpo`.

    kappa: a constant in place of 1 / mean std; the published constants are that number, rounded.
    """

    clip_range: ClipRange = 1e-4
    kl_weight: float = 0.0
    kl_form: Literal["variance", "published"] = "variance"
    detach_uncond: bool = False
    kappa: float | None = None

    name: ClassVar[str] = "tempflow_grpo"

    def __post_init__(self) -> None:
        _ = self.flow_grpo  # refuses wrong fields

    @property
    def flow_grpo(self) -> FlowGRPO:
        """The objective that this one is, on a forked rollout."""
        return FlowGRPO(
            self.clip_range, self.kl_weight, self.kl_form, self.detach_uncond, time_weight="noise", kappa=self.kappa
        )

    @property
    def needs(self) -> Needs:
        """Forked transitions."""
        return replace(self.flow_grpo.needs, rollouts=("anchor_fork",))

    @property
    def penalties(self) -> Mapping[str, float]:
        return self.flow_grpo.penalties

    def __call__(self, moments: Moments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R], among the successors of one state. Returns (loss [R], metrics [R] each)."""
        return self.flow_grpo(moments, advantage)
