"""DGPO: a preference between the better and the worse part of a group, in matching errors, with a trust clip.

    S = mean over the group of A b (e2 - e2_ref),   loss = b sigmoid(S) A e2  + w mean (v - v_ref)^2

at one time and with one noise for the whole group; e2 = mean (v - v*)^2. sigmoid(S) carries no gradient, so the first
term has that of -log sigmoid(-S) times the group size: the better part (A > 0) shall be matched better than under the
reference, by more than the worse part. The advantages of a group add up to 0, which cancels the unknown partition.
Trust clip: with r = exp(e2_old - e2), a row whose r has already left [1 - c, 1 + c] in the direction of its advantage
gets no gradient. A row of advantage 0 has no preference gradient; the penalty acts on it.
Source: DGPO, arXiv 2510.08425, and its published code, which leaves the factor b out of the loss.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl_img.needs import Needs
from flowrl_img.objectives.surrogate import ClipRange, clip_bounds
from flowrl_img.types import MatchingMoments

__all__ = ["DGPO"]


@dataclass(frozen=True)
class DGPO:
    """beta_dpo: b > 0. clip_range: c > 0, (low, high), or None for no trust clip. kl_weight: w >= 0.

    compare_with: the errors in S are measured against those of the "reference", or of "old", the weights' average.
    clip_kl: the trust clip stops the penalty too. reference_guidance: guidance of the reference, which the trained
    conditional branch then learns; 1 is none. scale: "paper" as above, "published" without the factor b.
    """

    beta_dpo: float = 100.0
    clip_range: ClipRange | None = 1e-2
    kl_weight: float = 0.02
    compare_with: Literal["reference", "old"] = "reference"
    clip_kl: bool = False
    reference_guidance: float = 1.0
    scale: Literal["paper", "published"] = "paper"

    name: ClassVar[str] = "dgpo"

    def __post_init__(self) -> None:
        if not self.beta_dpo > 0:
            raise ValueError(f"beta_dpo must be positive, got {self.beta_dpo}")
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be 0 or more, got {self.kl_weight}")
        if self.reference_guidance < 0:
            raise ValueError(f"reference_guidance must be 0 or more, got {self.reference_guidance}")
        if self.compare_with not in ("reference", "old"):
            raise ValueError(f"compare_with must be reference or old, not {self.compare_with!r}")
        if self.scale not in ("paper", "published"):
            raise ValueError(f"scale must be paper or published, not {self.scale!r}")
        _ = self.clip  # refuses wrong ranges

    @property
    def clip(self) -> tuple[float, float] | None:
        """(low, high): how far r may leave 1 either way; None for no trust clip."""
        return None if self.clip_range is None else clip_bounds(self.clip_range)

    @property
    def needs(self) -> Needs:
        """Whole groups that share times and noise, and the velocities of the terms in use."""
        velocities = {self.compare_with}
        if self.kl_weight > 0:
            velocities.add("reference")
        if self.clip is not None:
            velocities.add("old")
        return Needs(
            velocities, points="matching", rollouts=("independent",), unit="group", shared_noise=True, guided=False,
            reference_guidance=self.reference_guidance, smallest_clip=1.0 if self.clip is None else min(self.clip),
        )  # fmt: skip

    @property
    def penalties(self) -> Mapping[str, float]:
        return {"kl": self.kl_weight} if self.kl_weight > 0 else {}

    def unit_score(self, moments: MatchingMoments, advantage: Tensor) -> Tensor:
        """[R] whose mean over the group is S."""
        gain = moments.gain_ref if self.compare_with == "reference" else moments.gain_old
        return (advantage.to(gain) * self.beta_dpo * gain).detach()

    def outside(self, moments: MatchingMoments, advantage: Tensor) -> Tensor:
        """bool [R]: rows that the trust clip stops."""
        if self.clip is None:
            return torch.zeros_like(moments.e2, dtype=torch.bool)
        low, high = self.clip
        growth = torch.expm1(-moments.gain_old.detach())  # r - 1, of the difference form
        return torch.where(advantage.to(growth) > 0, growth > high, growth < -low)

    def __call__(self, moments: MatchingMoments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]; moments.unit_mean: S of the row's group. Returns (loss [R], metrics [R] each)."""
        if moments.unit_mean is None:
            raise ValueError("DGPO compares the pictures of a group: give the group's mean as moments.unit_mean")
        error, score = moments.e2, moments.unit_mean.to(moments.e2)
        advantage, outside = advantage.to(error), self.outside(moments, advantage)
        weight = score.sigmoid()
        policy = weight * advantage * torch.where(outside, error.detach(), error)
        if self.scale == "paper":
            policy = policy * self.beta_dpo
        metrics = {
            "policy_loss": policy.detach(),
            "group_weight": weight,
            "preference_loss": torch.nn.functional.softplus(score),
            "clipped": outside.float(),
            "matching_error": error.detach(),
        }
        if self.clip is not None:
            metrics["log_ratio"] = -moments.gain_old.detach()
        if self.kl_weight == 0:
            return policy, metrics
        kl = torch.where(outside, moments.dref2.detach(), moments.dref2) if self.clip_kl else moments.dref2
        return policy + self.kl_weight * kl, metrics | {"kl": kl.detach()}
