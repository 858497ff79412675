"""AWM: policy gradient with the matching error as the likelihood, advantage-weighted and clipped like PPO.

    log p = -f(mean (v - v*)^2, t),   r = exp(log p - log p_old)
    loss = max(-A' r, -A' clip(r, 1 - c, 1 + c)) + w mean (v - v_ref)^2 + u mean (v - v_trust)^2,   A' = A / adv_range

f is a time weighting (`kernels.matching`); the trust set follows the weights closely, so u bounds the step of an
update. While the old policy is the current one r is 1 and its gradient that of log p, and no old velocity is needed:
`ratio: on_policy`. With several updates a rollout, or a rollout of older weights, `ratio: old` reads the old policy's
velocity, and the clip acts. A row of advantage 0 has no policy gradient; the two penalties act on it. Source: AWM,
arXiv 2509.25050, and its published code.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.kernels.matching import DISCREPANCIES, Discrepancy, GeneralisedHuber
from flowrl_img.needs import Needs
from flowrl_img.objectives.surrogate import ClipRange, clip_bounds, clipped_surrogate, exponential
from flowrl_img.types import MatchingMoments

__all__ = ["AWM"]


@dataclass(frozen=True)
class AWM:
    """weighting: f, "ghuber" (of `power`), "huber", "uniform", "t" or "t2". adv_range: A' = A / adv_range.

    clip_range: c > 0, or (low, high). ratio: "on_policy" or "old". level: a ratio for each "time", or one for each
    "sample", of the mean log-ratio over its times. kl_weight w, trust_weight u: 0 skips a forward; penalty: their
    weighting, "uniform" or "elbo".
    """

    weighting: Literal["ghuber", "huber", "uniform", "t", "t2"] = "ghuber"
    power: float = 0.25
    adv_range: float = 5.0
    clip_range: ClipRange = 1.0
    ratio: Literal["on_policy", "old"] = "on_policy"
    level: Literal["time", "sample"] = "time"
    kl_weight: float = 1e-3
    trust_weight: float = 1.0
    penalty: Literal["uniform", "elbo"] = "uniform"

    name: ClassVar[str] = "awm"

    def __post_init__(self) -> None:
        clip_bounds(self.clip_range)
        for field, allowed in (
            ("weighting", ("ghuber", "huber", "uniform", "t", "t2")), ("ratio", ("on_policy", "old")),
            ("level", ("time", "sample")), ("penalty", ("uniform", "elbo")),
        ):  # fmt: skip
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}")
        for field in ("power", "adv_range"):
            if not getattr(self, field) > 0:
                raise ValueError(f"{field} must be positive, got {getattr(self, field)}")
        for field in ("kl_weight", "trust_weight"):
            if getattr(self, field) < 0:
                raise ValueError(f"{field} must be 0 or more, got {getattr(self, field)}")

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        return clip_bounds(self.clip_range)

    @property
    def discrepancy(self) -> Discrepancy:
        """f of the docstring of this module."""
        return GeneralisedHuber(self.power) if self.weighting == "ghuber" else DISCREPANCIES[self.weighting]

    @property
    def needs(self) -> Needs:
        """Clean samples and the velocities whose weights are not 0."""
        asked = {"old": self.ratio == "old", "reference": self.kl_weight > 0, "trust": self.trust_weight > 0}
        return Needs(
            {name for name, wanted in asked.items() if wanted}, points="matching", rollouts=("independent",),
            guided=False, unit="sample" if self.level == "sample" else "row", smallest_clip=min(self.clip),
        )  # fmt: skip

    @property
    def penalties(self) -> Mapping[str, float]:
        weights = {"kl": self.kl_weight, "kl_trust": self.trust_weight}
        return {name: weight for name, weight in weights.items() if weight > 0}

    def log_ratio(self, moments: MatchingMoments) -> Tensor:
        """log p - log p_old, [R]; on policy it is 0 with the gradient of log p."""
        if self.ratio == "old":
            return -self.discrepancy.difference(moments.e2, moments.gain_old, moments.t)
        log_p = -self.discrepancy(moments.e2, moments.t)
        return log_p - log_p.detach()

    def unit_score(self, moments: MatchingMoments, advantage: Tensor) -> Tensor:
        """[R] whose mean over a sample's times is its log-ratio."""
        return self.log_ratio(moments).detach()

    def __call__(self, moments: MatchingMoments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R]. Returns (loss [R], metrics [R] each)."""
        delta = self.log_ratio(moments)
        if moments.unit_mean is not None:
            # The value is the sample's; the gradient of a mean over times is the mean of the times' gradients.
            delta = moments.unit_mean.to(delta) + (delta - delta.detach())
        ratio = exponential(delta)
        policy, clipped = clipped_surrogate(ratio, advantage.to(ratio) / self.adv_range, self.clip)
        metrics = {
            "policy_loss": policy.detach(),
            "ratio": ratio.detach(),
            "log_ratio": delta.detach(),
            "clipped": clipped,
            "matching_error": moments.e2.detach(),
        }
        loss, weight = policy, DISCREPANCIES[self.penalty]
        for name, square in (("kl", moments.dref2), ("kl_trust", moments.dtrust2)):
            if name in self.penalties:
                value = weight(square, moments.t)
                loss = loss + self.penalties[name] * value
                metrics[name] = value.detach()
        return loss, metrics
