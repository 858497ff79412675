"""Flow-GRPO: the clipped policy-gradient surrogate on denoising transitions, with an optional KL to the reference.

    loss = w_t max(-A r, -A clip(r, 1 - c, 1 + c)) + k KL,    r = exp(log_ratio)

Per row of a micro-batch; the loop averages. The ratio is the difference form of the mean log-prob over latent elements,
so clip ranges are small (1e-4 and below at published sizes). A row of advantage 0 (a group without spread) has no
policy gradient; the KL acts on it. Source: Flow-GRPO, arXiv 2505.05470, Eq. 5; with `log_prob: square` and the step
rule `cps`, Flow-CPS, arXiv 2509.05952; with the step rule `dance_sde`, DanceGRPO, arXiv 2505.07818; with `ratio: guard`
and `time_weight: inverse_dt`, GRPO-Guard, arXiv 2510.22319.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import ClassVar, Literal

from torch import Tensor

from flowrl_img.kernels.logprob import WEIGHTINGS, guard_log_ratio, kl, kl_sigma
from flowrl_img.needs import Needs
from flowrl_img.objectives.surrogate import ClipRange, clip_bounds, clipped_surrogate, exponential
from flowrl_img.types import Moments

__all__ = ["FlowGRPO"]

CHOICES = {
    "kl_form": ("variance", "published"),
    "log_prob": tuple(WEIGHTINGS),
    "ratio": ("plain", "guard"),
    "time_weight": ("uniform", "inverse_dt", "noise"),
}


@dataclass(frozen=True)
class FlowGRPO:
    """clip_range: c > 0, or (low, high). kl_weight: k >= 0; 0 skips the reference forward.

    kl_form: "variance" is the true KL, B^2 |v - v_ref|^2 / (2 std^2); "published" divides by 2 sigma_t^2, as the
    public Flow-GRPO code does, which is (-dt) times smaller. detach_uncond: no gradient into the unconditional branch.
    log_prob: "density", the Gaussian's own, or "square", minus the mean square error without 1 / (2 std^2) and the
    constants, as in Flow-CPS. Log-ratios differ by 2 std^2: a clip range belongs to one of the two (CPS: 1e-5).
    ratio: "guard" takes GRPO-Guard's exponent, of mean 0 and equal spread at every step, whatever log_prob says.
    time_weight: w_t is 1 ("uniform"), 1 / (-dt) ("inverse_dt"), or the step's std over its mean on the trained steps
    ("noise"). kappa: a constant in place of 1 / mean std, as published TempFlow-GRPO code has it.
    """

    clip_range: ClipRange = 1e-4
    kl_weight: float = 0.0
    kl_form: Literal["variance", "published"] = "variance"
    detach_uncond: bool = False
    log_prob: Literal["density", "square"] = "density"
    ratio: Literal["plain", "guard"] = "plain"
    time_weight: Literal["uniform", "inverse_dt", "noise"] = "uniform"
    kappa: float | None = None

    name: ClassVar[str] = "flow_grpo"

    def __post_init__(self) -> None:
        clip_bounds(self.clip_range)
        if self.kl_weight < 0:
            raise ValueError(f"kl_weight must be 0 or more, got {self.kl_weight}")
        for field, allowed in CHOICES.items():
            if getattr(self, field) not in allowed:
                raise ValueError(f"{field} must be one of {', '.join(allowed)}, not {getattr(self, field)!r}")
        if self.kappa is not None and not (self.kappa > 0 and self.time_weight == "noise"):
            raise ValueError(f"kappa must be positive and belongs to time_weight = noise, got {self.kappa}")

    @property
    def clip(self) -> tuple[float, float]:
        """(low, high): the ratio is clipped to [1 - low, 1 + high]."""
        return clip_bounds(self.clip_range)

    @property
    def needs(self) -> Needs:
        """The rollout's transitions, and the reference where it is penalised."""
        velocities = {"old", "reference"} if self.kl_weight > 0 else {"old"}
        return Needs(velocities, detach_uncond=self.detach_uncond, smallest_clip=min(self.clip))

    @property
    def penalties(self) -> Mapping[str, float]:
        return {"kl": self.kl_weight} if self.kl_weight > 0 else {}

    def log_ratio(self, moments: Moments) -> Tensor:
        """[R] log of the ratio; exactly 0 where the velocities are equal.

        DeterministicStepError where a density is asked of a step without noise.
        """
        table = moments.table
        if self.ratio == "guard":
            return guard_log_ratio(moments.cross, table.B, table.std)
        return WEIGHTINGS[self.log_prob].log_ratio(moments.dold2, moments.cross, table.B, table.std)

    def __call__(self, moments: Moments, advantage: Tensor) -> tuple[Tensor, dict[str, Tensor]]:
        """advantage: [R], already clipped. Returns (loss [R], metrics [R] each: ratio, clipped, kl, policy_loss)."""
        delta = self.log_ratio(moments)
        ratio = exponential(delta)
        policy, clipped = clipped_surrogate(ratio, advantage, self.clip)
        if self.time_weight != "uniform":
            policy = self._weight(moments) * policy
        metrics = {
            "ratio": ratio.detach(),
            "log_ratio": delta.detach(),
            "clipped": clipped,
            "policy_loss": policy.detach(),
        }
        if self.kl_weight == 0:
            return policy, metrics
        divergence = self._kl(moments)
        return policy + self.kl_weight * divergence, metrics | {"kl": divergence.detach()}

    def _weight(self, moments: Moments) -> Tensor:
        """w_t, [R]."""
        table = moments.table
        if self.time_weight == "inverse_dt":
            return (-1 / table.dt).to(moments.e2)
        scale = 1 / moments.mean_std if self.kappa is None else self.kappa
        return (scale * table.std).to(moments.e2)

    def _kl(self, moments: Moments) -> Tensor:
        if self.kl_form == "published":
            return kl_sigma(moments.dref2, moments.table.B, moments.table.sigma_t)
        return kl(moments.dref2, moments.table.B, moments.table.std)
