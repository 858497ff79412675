r"""Log-prob, log-ratio and KL of a denoising step, from its moments: a few lines on [rows].

All are **means** over latent elements, the convention of published code (their sums are D times larger). The moments
come from `transition_moments`; A, B, std and sigma_t from a `StepTable`, on any device and in any float dtype: they
are cast to the moments'. std must be positive: a deterministic step has no density, and gives inf or nan here.

`Density` and `Square` are the two conventions of a step's log-prob under one interface, to be chosen by name: the
Gaussian density, and CPS's minus mean square. A clip range belongs to one of them: their ratios differ by 2 std^2.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

__all__ = [
    "WEIGHTINGS",
    "Density",
    "DeterministicStepError",
    "Square",
    "Weighting",
    "guard_log_ratio",
    "kl",
    "kl_sigma",
    "log_prob",
    "log_ratio",
    "square_log_prob",
    "square_log_ratio",
]

HALF_LOG_TWO_PI = 0.5 * math.log(2 * math.pi)


def log_prob(E2: Tensor, std: Tensor) -> Tensor:
    """log N(x_s; mu, std^2) per latent element, in nats: -E2 / (2 std^2) - log std - log(2 pi) / 2.

    E2, std: [rows]. Returns [rows].
    """
    std = std.to(E2)
    return -E2 / (2 * std**2) - std.log() - HALF_LOG_TWO_PI


def log_ratio(DOLD2: Tensor, CROSS: Tensor, B: Tensor, std: Tensor) -> Tensor:
    """log p(x_s) - log p_old(x_s) per element, in nats: (2 B CROSS - B^2 DOLD2) / (2 std^2).

    Equal to the difference of two `log_prob` values, without their cancellation: clip ranges are 1e-4 ... 2e-6, and
    subtracting float32 log-probs is off by several 1e-8. Exactly 0 when the velocities are equal.
    DOLD2, CROSS, B, std: [rows]. Returns [rows].
    """
    B, std = B.to(DOLD2), std.to(DOLD2)
    return (2 * B * CROSS - B**2 * DOLD2) / (2 * std**2)


def square_log_prob(E2: Tensor) -> Tensor:
    """-E2: the density without its 1 / (2 std^2) and its constants. E2: [rows]. Returns [rows].

    Source: Flow-CPS, arXiv 2509.05952, and its published code.
    """
    return -E2


def square_log_ratio(DOLD2: Tensor, CROSS: Tensor, B: Tensor) -> Tensor:
    """Difference of two `square_log_prob` values without their cancellation: 2 B CROSS - B^2 DOLD2.

    DOLD2, CROSS, B: [rows]. Returns [rows]. It is 2 std^2 times `log_ratio`.
    """
    B = B.to(DOLD2)
    return 2 * B * CROSS - B**2 * DOLD2


def guard_log_ratio(CROSS: Tensor, B: Tensor, std: Tensor) -> Tensor:
    """GRPO-Guard's exponent: mean (mu - mu_old) z = B CROSS / std, with z the noise that drew x_s.

    It is std (log_ratio + B^2 DOLD2 / (2 std^2)): of mean 0 under the old policy, and of one spread at every step for
    equal mu - mu_old. Per row, where published code takes batch means; published losses are also divided by -dt.
    CROSS, B, std: [rows]. Returns [rows]. Source: GRPO-Guard, arXiv 2510.22319.
    """
    return B.to(CROSS) * CROSS / std.to(CROSS)


def kl(DREF2: Tensor, B: Tensor, std: Tensor) -> Tensor:
    """KL(p || p_ref) of two Gaussians of equal std, per element, in nats: B^2 DREF2 / (2 std^2).

    DREF2, B, std: [rows]. Returns [rows]. Source: Flow-GRPO, arXiv 2505.05470, as written in the paper.
    """
    return B.to(DREF2) ** 2 * DREF2 / (2 * std.to(DREF2) ** 2)


def kl_sigma(DREF2: Tensor, B: Tensor, sigma_t: Tensor) -> Tensor:
    """The form in published Flow-GRPO code: B^2 DREF2 / (2 sigma_t^2), which is (-dt) times the true KL.

    Its published weights (0.04 on SD3) belong to this form. DREF2, B, sigma_t: [rows]. Returns [rows].
    """
    return kl(DREF2, B, sigma_t)


class DeterministicStepError(ValueError):
    """A step of std 0 was asked for a density: it has none, and cannot be trained."""


class Weighting(Protocol):
    """A convention for the log-prob of a step. All arguments [rows]; B and std in any float dtype."""

    def log_prob(self, E2: Tensor, std: Tensor) -> Tensor:
        """Log-prob of x_s per latent element, up to the convention's own scale and constants."""
        ...

    def log_ratio(self, DOLD2: Tensor, CROSS: Tensor, B: Tensor, std: Tensor) -> Tensor:
        """log_prob minus that of the old velocity, in difference form: exactly 0 when the velocities are equal."""
        ...


@dataclass(frozen=True)
class Density:
    """The Gaussian density. Raises DeterministicStepError where std is 0: a free check for a std on the host."""

    def log_prob(self, E2: Tensor, std: Tensor) -> Tensor:
        """See `log_prob`."""
        _refuse_zero(std)
        return log_prob(E2, std)

    def log_ratio(self, DOLD2: Tensor, CROSS: Tensor, B: Tensor, std: Tensor) -> Tensor:
        """See `log_ratio`."""
        _refuse_zero(std)
        return log_ratio(DOLD2, CROSS, B, std)


@dataclass(frozen=True)
class Square:
    """Minus the mean square, whatever the std: late, quiet steps weigh no more than early ones."""

    def log_prob(self, E2: Tensor, std: Tensor) -> Tensor:
        """See `square_log_prob`."""
        return square_log_prob(E2)

    def log_ratio(self, DOLD2: Tensor, CROSS: Tensor, B: Tensor, std: Tensor) -> Tensor:
        """See `square_log_ratio`."""
        return square_log_ratio(DOLD2, CROSS, B)


WEIGHTINGS: dict[str, Weighting] = {"density": Density(), "square": Square()}
"""By name, for configuration."""


def _refuse_zero(std: Tensor) -> None:
    if not (std > 0).all():
        raise DeterministicStepError(
            "a step of std 0 has no density: leave it out of the trained steps, or raise the noise of its step rule"
        )
