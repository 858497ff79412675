"""What every step rule produces: p(x_s | x_t) = N(A x_t + B v, std^2), three scalars per step.

Sampling, log-prob, ratio and KL read the same table, so the std that drew x_s is the std that scores it. Rules come
in two kinds, each with its one builder: discretised SDEs (`sde_table`) and recombinations of the predicted clean and
noise parts (`recombine`), which serve flow matching and diffusion alike.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

__all__ = ["StepRule", "StepTable", "Part", "check_sigmas", "ddim_std", "recombine", "sde_table"]

Part = tuple[Tensor, Tensor]
"""A quantity that is linear in the state and the network output: (factor of x_t, factor of the output), each [N]."""


@dataclass(frozen=True)
class StepTable:
    """Scalars of N denoising steps (or of R rows, after `rows`); host float64, cast to fp32 where they are used.

    Example: `FlowSDE(0.7).coefficients(flow_match_sigmas(10)).rows(torch.tensor([0, 0, 3]))` has std .700, .700, .446.
    """

    A: Tensor
    """[N] factor of x_t in the mean."""
    B: Tensor
    """[N] factor of the network output in the mean: of the velocity, where it is negative since time runs down, or of
    whatever a diffusion network predicts."""
    std: Tensor
    """[N] standard deviation of x_s given x_t, sqrt(-dt) included; 0 for a deterministic step."""
    sigma_t: Tensor
    """[N] diffusion coefficient, std without sqrt(-dt); only the published form of the Flow-GRPO KL reads it. Rules
    that discretise no SDE (CPS, DDIM) have none and put std here, which makes that form the true KL."""
    dt: Tensor
    """[N] s - t, negative: the length of the step, by which GRPO-Guard divides a loss."""

    def rows(self, index: Tensor) -> StepTable:
        """index: [R] int64 step of each row, in [0, N). Returns the same scalars per row, each [R]."""
        index = index.to(self.A.device)
        return StepTable(self.A[index], self.B[index], self.std[index], self.sigma_t[index], self.dt[index])


class StepRule(Protocol):
    """A recipe for the scalars of every step of a grid.

    A class attribute `process` = "diffusion" says that it steps models of the noising x_t = sqrt(1 - t^2) x0 + t eps;
    "flow", or none, that it steps flow-matching models. A diffusion rule has an attribute `calm`, its rule without
    noise, which takes the steps that are not stochastic; those of a flow are Euler's.
    """

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], strictly falling within [0, 1]. Returns a table of N steps."""
        ...


def check_sigmas(sigmas: Tensor) -> Tensor:
    """sigmas as float64 [N+1] on the host. Raises ValueError unless 1 >= sigma_0 > ... > sigma_N >= 0."""
    sigmas = sigmas.detach().to("cpu", torch.float64)
    if sigmas.ndim != 1 or len(sigmas) < 2:
        raise ValueError(f"sigmas must be [N+1] with N >= 1, got shape {tuple(sigmas.shape)}")
    if not (sigmas.diff() < 0).all() or sigmas[0] > 1 or sigmas[-1] < 0:
        raise ValueError("sigmas must fall strictly from at most 1 (noise) to at least 0 (data): flip or rescale them")
    return sigmas


def sde_table(sigmas: Tensor, sigma_t: Tensor) -> StepTable:
    r"""One Euler-Maruyama step of the SDE that shares its marginals with the flow, for any diffusion coefficient.

        mean = x_t + [v + sigma_t^2 / (2 t) * (x_t + (1 - t) v)] dt,   std = sigma_t sqrt(-dt)

    sigmas: float64 [N+1], checked. sigma_t: [N], finite. x_t + (1 - t) v is the predicted noise, -t times the score.
    Source: Flow-GRPO, arXiv 2505.05470, Eq. 9; DanceGRPO, arXiv 2505.07818, whose SDE is the same one.
    """
    t, dt = sigmas[:-1], sigmas.diff()
    drift = sigma_t**2 / (2 * t)
    B = (1 + drift * (1 - t)) * dt
    return StepTable(A=1 + drift * dt, B=B, std=sigma_t * (-dt).sqrt(), sigma_t=sigma_t, dt=dt)


def recombine(x0: Part, eps: Part, alpha_s: Tensor, direction: Tensor, std: Tensor, dt: Tensor) -> StepTable:
    """mean = alpha_s x0 + direction eps, of the predicted clean part x0 and noise part eps of x_t. All [N]."""
    A = alpha_s * x0[0] + direction * eps[0]
    B = alpha_s * x0[1] + direction * eps[1]
    return StepTable(A=A, B=B, std=std, sigma_t=std, dt=dt)


def ddim_std(eta: float, alpha: Tensor, sigmas: Tensor) -> tuple[Tensor, Tensor]:
    r"""(std, direction) of DDIM: eta times the std of x_s given x_t and x0, and what is left of the noise level s.

        std^2 = eta^2 s^2 (1 - (alpha_t s / (alpha_s t))^2),   direction^2 = s^2 - std^2

    for x_t = alpha_t x0 + t eps; with alpha^2 + t^2 = 1 it is eta^2 (1 - a_s) / (1 - a_t) (1 - a_t / a_s), a = alpha^2.
    alpha, sigmas: [N+1]. Source: DDIM, arXiv 2010.02502, Eq. 16, in a form that no rescaling of x changes.
    """
    t, s = sigmas[:-1], sigmas[1:]
    fresh = eta**2 * (1 - (alpha[:-1] * s / (alpha[1:] * t)) ** 2)
    return s * fresh.sqrt(), s * (1 - fresh).sqrt()
