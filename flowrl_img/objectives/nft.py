"""DiffusionNFT: supervised matching of two implicit policies around the old one, no likelihood and no guidance.

    v+- = v_old +- beta (v - v_old),   l+- = mean (x0_hat+- - x0)^2 / stopgrad(mean |x0_hat+- - x0|)
    loss = r l+ + (1 - r) l-  + w mean (v - v_ref)^2,   r = (1 + A / adv_range) / 2 in [0, 1]

At the old policy the gradient is 2 r - 1 times that of a self-normalised matching loss, whatever beta; further out the
second order, beta |v - v_old|^2, pulls back, so a smaller beta extrapolates more. A row of advantage 0 (a group without
spread) has r = 1/2: no force at the old policy, and a pull back to it elsewhere, so such rows are trained on.
Any solver may draw the rollout; times and noise are drawn anew. Source: DiffusionNFT, arXiv 2509.16117, Eq. 5; the
weights by mean magnitude and the factor adv_range / beta are those of its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.kernels.matching import branch_loss
from flowrl_img.needs import Needs
from flowrl_img.types import MatchingMoments

__all__ = ["NFT"]

MODES = ("all", "positive_only", "negative_only", "one_only", "binary")


@dataclass(frozen=True)
class NFT:
    """beta > 0: width of the two branches. kl_weight: w >= 0; 0 skips the reference forward.

    adv_range: advantages of this size and more mean certainty, r = 0 or 1. mode: "all"; "positive_only" and
    "negative_only" set the others to 0; "binary" takes their sign, "one_only" 1 for positive and 0 for all others.
    scale: "paper" is the loss above; "published" multiplies its first two terms by adv_range / beta, which changes
    their weight against the penalty and the gradient clip.
    """

    beta: float = 1.0
    kl_weight: float = 1e-4
    adv_range: float = 5.0
    mode: Literal["all", "positive_only", "negative_only", "one_only", "binary"] = "all"
    scale: Literal["paper", "published"] = "paper"

    name: ClassVar[str] = "nft"

    def __post_init__(self) -> None:
        for field in ("beta", "adv_range"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be 0 or more, got {self.kl_weight}")
        if self.mode not in MODES:
            raise ValueError(f"mode must be one of {', '.join(MODES)}, not {self.mode!r}")
        if self.scale not in ("paper", "published"):
            raise ValueError(f"scale must be paper or published, not {self.scale!r}")

    @property
    def needs(self) -> Needs:
        """Clean samples, the old policy, and the reference where it is penalised."""
        velocities = {"old", "reference"} if self.kl_weight > 0 else {"old"}
        return Needs(velocities, points="matching", rollouts=("independent",), guided=False, branch_width=self.beta)

    @property
    def penalties(self) -> Mapping[str, float]:
        return {"kl": self.kl_weight} if self.kl_weight > 0 else {}

    def optimality(self, advantage: Tensor) -> Tensor:
        """r in [0, 1]: the probability that a sample is optimal. advantage: [R]."""
        chosen = {
            "all": advantage,
            "positive_only": advantage.clamp(min=0),
            "negative_only": advantage.clamp(max=0),
            "one_only": (advantage > 0).to(advantage),
            "binary": advantage.sign(),
        }[self.mode]
        return (chosen / (2 * self.adv_range) + 0.5).clamp(0, 1)

    def __call__(self, moments: MatchingMoments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]. Returns (loss [R], metrics [R] each)."""
        r = self.optimality(advantage.to(moments.e2))
        plus = branch_loss(moments.plus2, moments.plus1, moments.t)
        minus = branch_loss(moments.minus2, moments.minus1, moments.t)
        policy = r * plus + (1 - r) * minus
        if self.scale == "published":
            policy = policy * (self.adv_range / self.beta)
        metrics = {
            "policy_loss": policy.detach(),
            "plus_loss": plus.detach(),
            "minus_loss": minus.detach(),
            "matching_error": moments.e2.detach(),
            "distance_to_old": moments.dold2.detach(),
        }
        if self.kl_weight == 0:
            return policy, metrics
        return policy + self.kl_weight * moments.dref2, metrics | {"kl": moments.dref2.detach()}
