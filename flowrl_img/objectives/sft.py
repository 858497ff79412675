"""Supervised fine-tuning on the best of the group: velocity matching of the model's own best pictures.

    loss = f(mean (v - v*)^2, t) + w mean (v - v_ref)^2

on rows of positive advantage; the others are not drawn. What the pictures are compared by decides nothing but which is
best, so this is the baseline that any use of the advantages has to beat. A group without spread has no best picture and
is left out. A network with guidance folded in (FLUX.1-dev, the embedded model) loses it, as the velocity of its
pictures has none: there use an objective whose advantages have mean zero. Source: rejection-sampling fine-tuning, the
`sft` baseline of published Flow-GRPO code (arXiv 2505.05470).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.kernels.matching import DISCREPANCIES
from flowrl_img.needs import Needs
from flowrl_img.types import MatchingMoments

__all__ = ["SFT"]


@dataclass(frozen=True)
class SFT:
    """best: pictures of each group that are trained on. weighting: f. kl_weight: w >= 0; 0 skips the reference."""

    best: int = 1
    weighting: Literal["uniform", "t", "t2", "elbo", "huber", "ghuber"] = "uniform"
    kl_weight: float = 0.0

    name: ClassVar[str] = "sft"

    def __post_init__(self) -> None:
        if self.best < 1:
            raise ValueError(f"best must be at least 1 picture of a group, got {self.best}")
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be 0 or more, got {self.kl_weight}")
        if self.weighting not in DISCREPANCIES:
            raise ValueError(f"weighting must be one of {', '.join(DISCREPANCIES)}, not {self.weighting!r}")

    @property
    def needs(self) -> Needs:
        """Clean samples of the best pictures."""
        velocities = {"reference"} if self.kl_weight > 0 else ()
        return Needs(
            velocities, points="matching", rollouts=("independent",), guided=False, best_and_worst=(self.best, 0)
        )

    @property
    def penalties(self) -> Mapping[str, float]:
        return {"kl": self.kl_weight} if self.kl_weight > 0 else {}

    def __call__(self, moments: MatchingMoments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]. Returns (loss [R], metrics [R] each)."""
        policy = (advantage > 0).to(moments.e2) * DISCREPANCIES[self.weighting](moments.e2, moments.t)
        metrics = {"policy_loss": policy.detach(), "matching_error": moments.e2.detach()}
        if self.kl_weight == 0:
            return policy, metrics
        return policy + self.kl_weight * moments.dref2, metrics | {"kl": moments.dref2.detach()}
