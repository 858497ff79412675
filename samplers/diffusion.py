"""Grids of diffusion models (SD1.5, SDXL): noise levels sqrt(1 - alpha_bar) and the integer timesteps they belong to.

A level is the factor of the noise in x_t = sqrt(1 - t^2) x0 + t eps, so the grid is a falling float64 table within
[0, 1] like that of a flow, and the same loop and the same `StepTable` serve both. The network is called with the
integer `timesteps[i]`, never with a number derived from a level. alpha_bar values are the float32 numbers of the stock
scheduler, widened; 1 - alpha_bar is then taken in float64, where the stock scheduler loses digits.

Left out: Karras and exponential spacings, and clipping of x0.
"""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl_img.samplers.steps.table import check_sigmas

__all__ = ["DiffusionGrid", "diffusion_grid", "scaled_linear_alphas", "scheduler_grid", "sd15_grid", "sdxl_grid"]


@dataclass(frozen=True)
class DiffusionGrid:
    """Example: `grid = sd15_grid(50)`; `table = DDIM(eta=1.0).coefficients(grid.sigmas)`."""

    sigmas: Tensor
    """float64 [N+1], sqrt(1 - alpha_bar), strictly falling."""
    timesteps: Tensor
    """int64 [N], what the network is called with at each step."""


def diffusion_grid(alphas_cumprod: Tensor, timesteps: Tensor, final_alpha_cumprod: float) -> DiffusionGrid:
    """alphas_cumprod: [T] alpha_bar by training timestep. timesteps: int [N], falling. final: alpha_bar of the result.

    Each step ends at the level that the next one starts from, and the last at `final_alpha_cumprod`.
    """
    timesteps = timesteps.detach().to("cpu", torch.int64)
    table = alphas_cumprod.detach().to("cpu", torch.float64)
    if timesteps.ndim != 1 or not len(timesteps) or timesteps.min() < 0 or timesteps.max() >= len(table):
        raise ValueError(f"timesteps must be [N] indices into {len(table)} training steps, got {timesteps.tolist()}")
    levels = torch.cat([table[timesteps], torch.tensor([final_alpha_cumprod], dtype=torch.float64)])
    return DiffusionGrid(check_sigmas((1 - levels).sqrt()), timesteps)


def scaled_linear_alphas(beta_start: float = 0.00085, beta_end: float = 0.012, num_train: int = 1000) -> Tensor:
    """alpha_bar of Stable Diffusion: betas are the squares of a line of square roots. float64 [num_train]."""
    betas = torch.linspace(beta_start**0.5, beta_end**0.5, num_train, dtype=torch.float32) ** 2
    return torch.cumprod(1 - betas, dim=0).double()


def sd15_grid(num_steps: int) -> DiffusionGrid:
    """The grid of the SD1.5 pipeline under DDIM. It ends at alpha_bar of timestep 0: the last step may be stochastic.

    Source: diffusers DDIMScheduler with the SD1.5 configuration; DDPO's clamped last step is the same.
    """
    alphas = scaled_linear_alphas()
    return diffusion_grid(alphas, _leading(num_steps, len(alphas)), float(alphas[0]))


def sdxl_grid(num_steps: int) -> DiffusionGrid:
    """The grid of the SDXL pipeline: it ends at alpha_bar 1, so the last step is deterministic.

    Source: diffusers EulerDiscreteScheduler with the SDXL configuration, whose Euler step in x / sqrt(alpha_bar) is the
    deterministic DDIM step.
    """
    alphas = scaled_linear_alphas()
    return diffusion_grid(alphas, _leading(num_steps, len(alphas)), 1.0)


def scheduler_grid(scheduler: Any, num_steps: int) -> DiffusionGrid:
    """The grid that a diffusers DDIMScheduler would walk; the scheduler itself is left untouched.

    Raises ValueError where its steps do not end where the next one starts, which "trailing" and "linspace" spacings do
    when num_steps does not divide the number of training steps: there the stock sampler itself is inconsistent.
    """
    private = copy.deepcopy(scheduler)
    private.set_timesteps(num_steps)
    timesteps = private.timesteps.cpu().long()
    stride = private.config.num_train_timesteps // num_steps
    if len(timesteps) != num_steps or (timesteps.diff() != -stride).any():
        raise ValueError(
            f"{private.config.timestep_spacing!r} spacing of {num_steps} steps leaves gaps between steps: use "
            f"timestep_spacing='leading', or a number of steps that divides {private.config.num_train_timesteps}"
        )
    if timesteps[-1] >= stride:
        raise ValueError(f"the last step would end at timestep {int(timesteps[-1]) - stride}, not at the data")
    return diffusion_grid(private.alphas_cumprod, timesteps, float(private.final_alpha_cumprod))


def _leading(num_steps: int, num_train: int) -> Tensor:
    """1 + (0, k, 2k, ...) with k = num_train // num_steps, falling: "leading" spacing with offset 1. int64 [N]."""
    if not 1 <= num_steps <= num_train:
        raise ValueError(f"num_steps must be in [1, {num_train}], got {num_steps}")
    return (torch.arange(num_steps) * (num_train // num_steps)).flip(0) + 1
