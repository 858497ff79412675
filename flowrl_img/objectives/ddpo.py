"""DDPO: policy gradients on denoising transitions, importance-sampled (clipped) or as the plain score function.

    importance:  loss = max(-A r, -A clip(r, 1 - c, 1 + c)),   r = exp(log p - log p_old)
    score:       loss = -A log p(x_s | x_t)

with log p the mean over latent elements. The score form is exact on policy alone: use one update a rollout. With the
DDIM step and running statistics per prompt (`advantage.baseline: history`) this is the published method. A row of
advantage 0 has no gradient. Source: DDPO, arXiv 2305.13301, Eqs. 5 and 6; the mean over elements is that of its
published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.kernels.logprob import Density
from flowrl_img.needs import Needs
from flowrl_img.objectives.surrogate import ClipRange, clip_bounds, clipped_surrogate, exponential
from flowrl_img.types import Moments

__all__ = ["DDPO"]

DENSITY = Density()


@dataclass(frozen=True)
class DDPO:
    """form: "importance" or "score". clip_range: c > 0, or (low, high), of the importance form."""

    form: Literal["importance", "score"] = "importance"
    clip_range: ClipRange = 1e-4

    name: ClassVar[str] = "ddpo"
    penalties: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        clip_bounds(self.clip_range)
        if self.form not in ("importance", "score"):
            raise ValueError(f"form must be importance or score, not {self.form!r}")

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        return clip_bounds(self.clip_range)

    @property
    def needs(self) -> Needs:
        """The transitions of the rollout, with the velocity that drew them."""
        return Needs({"old"}, smallest_clip=min(self.clip))

    def log_ratio(self, moments: Moments) -> Tensor:
        """[R] log of the ratio; exactly 0 where the velocities are equal."""
        return DENSITY.log_ratio(moments.dold2, moments.cross, moments.table.B, moments.table.std)

    def __call__(self, moments: Moments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]. Returns (loss [R], metrics [R] each)."""
        delta = self.log_ratio(moments)
        if self.form == "score":
            log_p = DENSITY.log_prob(moments.e2, moments.table.std)
            policy = -advantage.to(log_p) * log_p
            return policy, {"policy_loss": policy.detach(), "log_ratio": delta.detach(), "log_prob": log_p.detach()}
        ratio = exponential(delta)
        policy, clipped = clipped_surrogate(ratio, advantage, self.clip)
        metrics = {
            "policy_loss": policy.detach(),
            "ratio": ratio.detach(),
            "log_ratio": delta.detach(),
            "clipped": clipped,
        }
        return policy, metrics
