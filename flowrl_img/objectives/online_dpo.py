"""Online Diffusion-DPO: in every group the best picture shall gain on the worst, against the reference.

    S = b [(e2 - e2_ref)(worst) - (e2 - e2_ref)(best)],   L = -log sigmoid(S),   e2 = mean (v - v*)^2

at one time and with one noise for the pair. With the sigmoid's weight taken as a constant, each row carries its own
part of the gradient of L: loss = +-2 b sigmoid(-S) e2, whose mean over the pair has it exactly. Only signs of
advantages are read. A group without spread has no pair and is left out. Source: Diffusion-DPO, arXiv 2311.12908, Eq.
14, on velocities with a uniform time weight, its constant T taken into b.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar

import torch
from torch import Tensor

from flowrl_img.needs import Needs
from flowrl_img.types import MatchingMoments

__all__ = ["OnlineDPO"]


@dataclass(frozen=True)
class OnlineDPO:
    """beta: b > 0, how much a difference of matching errors says."""

    beta: float = 100.0

    name: ClassVar[str] = "online_dpo"
    penalties: ClassVar[Mapping[str, float]] = {}

    def __post_init__(self) -> None:
        if not self.beta > 0:
            raise ValueError(f"beta must be positive, got {self.beta}")

    @property
    def needs(self) -> Needs:
        """The best and the worst of each group at the same time and noise, and the reference."""
        return Needs(
            {"reference"}, points="matching", rollouts=("independent",), unit="group", shared_noise=True, guided=False,
            best_and_worst=(1, 1),
        )  # fmt: skip

    def unit_score(self, moments: MatchingMoments, advantage: Tensor) -> Tensor:
        """[R] whose mean over the pair is -S / 2."""
        return (advantage.to(moments.e2).sign() * self.beta * moments.gain_ref).detach()

    def __call__(self, moments: MatchingMoments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]; moments.unit_mean: of the row's pair. Returns (loss [R], metrics [R] each)."""
        if moments.unit_mean is None:
            raise ValueError("online DPO compares two pictures: give the pair's mean as moments.unit_mean")
        score = -2 * moments.unit_mean.to(moments.e2)
        loss = 2 * self.beta * (-score).sigmoid() * advantage.to(moments.e2).sign() * moments.e2
        metrics = {
            "policy_loss": loss.detach(),
            "dpo_loss": torch.nn.functional.softplus(-score),
            "preferred": (score > 0).float(),
            "matching_error": moments.e2.detach(),
        }
        return loss, metrics
