r"""DDIM with eta for diffusion models (SD1.5, SDXL), whose network predicts the noise, v or the clean image.

A diffusion grid (`samplers/diffusion.py`) holds t = sqrt(1 - alpha_bar), so x_t = alpha_t x0 + t eps with
alpha_t = sqrt(1 - t^2). The network's own output takes the place of the velocity: B is its factor, and log-prob, ratio
and KL are the usual ones. With x0 and eps read off that output:

    mean = alpha_s x0 + sqrt(s^2 - std^2) eps,   std^2 = eta^2 s^2 (1 - (alpha_t s / (alpha_s t))^2)

Left out: clipping or thresholding x0, which is not linear in the output; latent models do not use it.
Source: DDIM, arXiv 2010.02502, Eq. 12 and 16; with eta = 1 the sampler that DDPO, arXiv 2305.13301, trains.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import ClassVar, Literal

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import Part, StepTable, check_sigmas, ddim_std, recombine

__all__ = ["DDIM"]


def _from_noise(alpha: Tensor, t: Tensor) -> tuple[Part, Part]:
    """The network predicts eps."""
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    return (1 / alpha, -t / alpha), (zero, one)


def _from_v(alpha: Tensor, t: Tensor) -> tuple[Part, Part]:
    """The network predicts alpha eps - t x0 (arXiv 2202.00512), which is not the velocity of a flow."""
    return (alpha, -t), (t, alpha)


def _from_clean(alpha: Tensor, t: Tensor) -> tuple[Part, Part]:
    """The network predicts x0."""
    zero, one = torch.zeros_like(t), torch.ones_like(t)
    return (zero, one), (1 / t, -alpha / t)


PARTS: dict[str, Callable[[Tensor, Tensor], tuple[Part, Part]]] = {
    "epsilon": _from_noise,
    "v": _from_v,
    "x0": _from_clean,
}


@dataclass(frozen=True)
class DDIM:
    """eta: share of the ancestral std, in [0, 1]; 0 is deterministic. prediction: what the network was trained to give.

    For diffusion grids only; `flow_ddim` is the rule for flow matching.
    """

    name: ClassVar[str] = "ddim"
    process: ClassVar[str] = "diffusion"
    eta: float = 1.0
    prediction: Literal["epsilon", "v", "x0"] = "epsilon"

    def __post_init__(self) -> None:
        if not 0 <= self.eta <= 1:
            raise ValueError(f"eta must be in [0, 1]: 0 is deterministic, 1 is ancestral sampling; got {self.eta}")
        if self.prediction not in PARTS:
            raise ValueError(f"prediction must be one of {', '.join(PARTS)}, not {self.prediction!r}")

    @property
    def calm(self) -> DDIM:
        """The same without noise, for the steps that are not stochastic."""
        return DDIM(0.0, self.prediction)

    def coefficients(self, sigmas: Tensor) -> StepTable:
        """sigmas: float64 [N+1], sqrt(1 - alpha_bar), strictly falling. Returns a table of N steps.

        Raises ValueError for a noise prediction at level 1: pure noise predicted from pure noise says nothing of x0.
        """
        sigmas = check_sigmas(sigmas)
        if self.prediction == "epsilon" and sigmas[0] == 1:
            raise ValueError(
                "a grid that starts at 1 holds nothing of x0, so a noise prediction cannot be turned into it: "
                "use prediction v or x0 for a zero-terminal-SNR network, or step rule flow_ddim for flow matching"
            )
        alpha = ((1 - sigmas) * (1 + sigmas)).sqrt()
        x0, eps = PARTS[self.prediction](alpha[:-1], sigmas[:-1])
        std, direction = ddim_std(self.eta, alpha, sigmas)
        return recombine(x0, eps, alpha_s=alpha[1:], direction=direction, std=std, dt=sigmas.diff())
