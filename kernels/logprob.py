r"""Log-prob, log-ratio and KL of a denoising step, from its moments: a few lines on [rows].

All are **means** over latent elements, the convention of published code (their sums are D times larger). The moments
come from `transition_moments`; A, B, std and sigma_t from a `StepTable`, on any device and in any float dtype: they
are cast to the moments'. std must be positive: a deterministic step has no density, and gives inf or nan here.
"""

from __future__ import annotations

import math

from torch import Tensor

__all__ = ["kl", "kl_sigma", "log_prob", "log_ratio"]

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
