"""The target x0 ~ N(M, C^2): what a network predicts is known, and every step rule is a recursion of two moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

M, C = 1.5, 0.5


def slope_of(t: float, std: float) -> float:
    """v(x, t) = slope (x - (1 - t) mean) - mean for N(mean, std^2), from E[eps - x0 | x_t] of Gaussian variables."""
    return (t - (1 - t) * std**2) / ((1 - t) ** 2 * std**2 + t**2)


def slope(t: float) -> float:
    """That of the target N(M, C^2)."""
    return slope_of(t, C)


def exact_velocity(x: Any, i: int, t: float) -> Any:
    """v of the flow x_t = (1 - t) x0 + t eps at state x."""
    return slope(t) * (x - (1 - t) * M) - M


def exact_output(prediction: str) -> Callable[[Any, int, float], Any]:
    """What a diffusion network predicts ("epsilon", "v", "x0") at x_t = alpha x0 + t eps, alpha = sqrt(1 - t^2)."""

    def output(x: Any, i: int, t: float) -> Any:
        alpha = (1 - t**2) ** 0.5
        share = (x - alpha * M) / (alpha**2 * C**2 + t**2)
        eps, x0 = t * share, M + alpha * C**2 * share
        return {"epsilon": eps, "v": alpha * eps - t * x0, "x0": x0}[prediction]

    return output


def propagate(
    table: Any, sigmas: Tensor, mean: float = 0.0, variance: float = 1.0, output: Any = exact_velocity
) -> tuple[float, float]:
    """Mean and variance of the final state of a step rule, from those of the first. output: linear in the state."""
    for A, B, std, t in zip(*(x.tolist() for x in (table.A, table.B, table.std, sigmas[:-1]))):
        gain = output(1.0, 0, t) - output(0.0, 0, t)
        mean = A * mean + B * output(mean, 0, t)
        variance = (A + B * gain) ** 2 * variance + std**2
    return mean, variance


def law(t: float) -> tuple[float, float]:
    """Mean and variance of x_t of the flow."""
    return (1 - t) * M, (1 - t) ** 2 * C**2 + t**2


def exact_state(x: Tensor, t: float, s: float) -> Tensor:
    """Where the probability-flow ODE carries x from t to s: the same number of deviations from the mean."""
    deviations = [((1 - r) ** 2 * C**2 + r**2) ** 0.5 for r in (t, s)]
    return (1 - s) * M + (x - (1 - t) * M) * deviations[1] / deviations[0]


def line(num_steps: int, start: float = 1.0, end: float = 0.0) -> Tensor:
    """Evenly spaced levels, float64 [N+1]."""
    return torch.linspace(start, end, num_steps + 1, dtype=torch.float64)
