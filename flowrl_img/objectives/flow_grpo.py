"""Flow-GRPO: the clipped policy-gradient surrogate on denoising transitions, with an optional KL to the reference.

    loss = max(-A r, -A clip(r, 1 - c, 1 + c)) + w KL,    r = exp(log_ratio)

Per row of a micro-batch; the loop averages. The ratio is the difference form of the mean log-prob over latent elements,
so clip ranges are small (1e-4 and below at published sizes). Source: Flow-GRPO, arXiv 2505.05470, Eq. 5; with
`log_prob: square` and the step rule `cps`, Flow-CPS, arXiv 2509.05952.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl_img.kernels.logprob import WEIGHTINGS, kl, kl_sigma
from flowrl_img.types import Moments

__all__ = ["FlowGRPO"]

LOG_RATIO_LIMIT = 20.0  # e^20 is finite in float32; beyond it the clipped branch decides anyway
KL_FORMS = ("variance", "published")


@dataclass(frozen=True)
class FlowGRPO:
    """clip_range: c > 0, or (low, high). kl_weight: w >= 0; 0 skips the reference forward.

    kl_form: "variance" is the true KL, B^2 |v - v_ref|^2 / (2 std^2); "published" divides by 2 sigma_t^2, as the
    public Flow-GRPO code does, which is (-dt) times smaller. detach_uncond: no gradient into the unconditional branch.
    log_prob: "density", the Gaussian's own, or "square", minus the mean square error without 1 / (2 std^2) and the
    constants, as in Flow-CPS. Log-ratios differ by 2 std^2: a clip range belongs to one of the two (CPS: 1e-5).
    """

    clip_range: float | tuple[float, float] = 1e-4
    kl_weight: float = 0.0
    kl_form: str = "variance"
    detach_uncond: bool = False
    log_prob: Literal["density", "square"] = "density"

    name: ClassVar[str] = "flow_grpo"
    points: ClassVar[str] = "transitions"

    def __post_init__(self) -> None:
        low, high = self.clip
        if not (0 < low < 1 and high > 0):
            raise ValueError(f"clip_range must be positive (and below 1 downwards), got {self.clip_range}")
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be 0 or more, got {self.kl_weight}")
        if self.log_prob not in WEIGHTINGS:
            raise ValueError(f"log_prob must be one of {', '.join(WEIGHTINGS)}, not {self.log_prob!r}")
        if self.kl_form not in KL_FORMS:
            raise ValueError(f"kl_form must be one of {', '.join(KL_FORMS)}, not {self.kl_form!r}")

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        if isinstance(self.clip_range, (int, float)):
            return (self.clip_range, self.clip_range)
        low, high = self.clip_range
        return (low, high)

    @property
    def needs(self) -> frozenset[str]:
        """Weight sets whose velocity is read besides the current one."""
        return frozenset({"old", "reference"} if self.kl_weight > 0 else {"old"})

    def log_ratio(self, moments: Moments) -> Tensor:
        """[R] log of the ratio; exactly 0 where the velocities are equal.

        DeterministicStepError where a density is asked of a step without noise.
        """
        table = moments.table
        return WEIGHTINGS[self.log_prob].log_ratio(moments.dold2, moments.cross, table.B, table.std)

    def __call__(self, moments: Moments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R], already clipped. Returns (loss [R], metrics [R] each: ratio, clipped, kl, policy_loss)."""
        delta = self.log_ratio(moments)
        ratio = delta.clamp(-LOG_RATIO_LIMIT, LOG_RATIO_LIMIT).exp()
        low, high = self.clip
        advantage = advantage.to(ratio)
        unclipped, clipped = -advantage * ratio, -advantage * ratio.clamp(1 - low, 1 + high)
        policy = torch.maximum(unclipped, clipped)
        loss = policy
        metrics = {
            "ratio": ratio.detach(),
            "log_ratio": delta.detach(),
            "clipped": ((clipped > unclipped) & (advantage != 0)).float(),
            "policy_loss": policy.detach(),
        }
        if self.kl_weight > 0:
            divergence = self._kl(moments)
            loss = policy + self.kl_weight * divergence
            metrics["kl"] = divergence.detach()
        return loss, metrics

    def _kl(self, moments: Moments) -> Tensor:
        if self.kl_form == "published":
            return kl_sigma(moments.dref2, moments.table.B, moments.table.sigma_t)
        return kl(moments.dref2, moments.table.B, moments.table.std)
