"""Sigma grids: the one table of noise levels a rollout walks down, from 1 (noise) to 0 (data).

A table is a float64 tensor [N+1]. Its values are the float32 numbers that the stock diffusers pipeline holds,
widened, so that the timesteps fed to the network (1000 * sigma) are the pipeline's own, bit for bit. It is made
once per rollout and indexed by integer step from then on; nothing here looks a sigma up by its value.

Left out: Karras grids (`scheduler_sigmas` returns whatever a configured scheduler makes) and the grids of diffusion
models, which are in `diffusion.py`.
"""

from __future__ import annotations

import copy
import math
from typing import Any

import numpy as np
import torch
from torch import Tensor

__all__ = [
    "dpm_flow_sigmas",
    "flow_match_sigmas",
    "flux_sigmas",
    "qwen_image_sigmas",
    "scheduler_sigmas",
    "token_shift",
    "uniform_sigmas",
]


def uniform_sigmas(num_steps: int) -> list[float]:
    """The N unshifted levels 1, (N-1)/N, ..., 1/N that the FLUX pipeline hands to its scheduler."""
    _check_steps(num_steps)
    levels: list[float] = np.linspace(1.0, 1 / num_steps, num_steps).tolist()
    return levels


def flow_match_sigmas(num_steps: int, *, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """The grid of the SD3 pipeline: sigma <- shift * sigma / (1 + (shift - 1) * sigma) of a line, then 0.

    The line ends at a level that is itself already shifted, so the last non-zero level is shifted twice (0.0089 and
    not 0.0030 at shift 3): the behaviour of the stock scheduler, kept because networks are sampled with it.

    num_steps: N >= 1 network calls. Returns float64 [N+1], strictly falling from 1 to 0.
    Source: diffusers FlowMatchEulerDiscreteScheduler.set_timesteps as called by StableDiffusion3Pipeline.
    """
    _check_steps(num_steps)
    if shift <= 0:
        raise ValueError(f"shift must be positive, got {shift}: SD3 uses 3.0, 1.0 means no shift")
    smallest = float(_shifted(np.float32(1) / np.float32(num_train_timesteps), shift))
    line = np.linspace(num_train_timesteps, smallest * num_train_timesteps, num_steps) / num_train_timesteps
    return _with_zero(_shifted(line, shift))


def flux_sigmas(
    num_steps: int,
    num_tokens: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 1.15,
    base_tokens: int = 256,
    max_tokens: int = 4096,
) -> Tensor:
    """The grid of the FLUX pipeline: sigma <- e^mu / (e^mu + 1/sigma - 1) of 1 ... 1/N, then 0.

    num_tokens: packed latent tokens, (height / 16) * (width / 16) in pixels. mu grows linearly with it.
    Returns float64 [N+1], strictly falling from 1 to 0.
    Source: diffusers FluxPipeline and FlowMatchEulerDiscreteScheduler with dynamic shifting.
    """
    return _with_zero(
        _token_shifted(num_steps, token_shift(num_tokens, base_shift, max_shift, base_tokens, max_tokens))
    )


def qwen_image_sigmas(
    num_steps: int,
    num_tokens: int,
    *,
    base_shift: float = 0.5,
    max_shift: float = 0.9,
    base_tokens: int = 256,
    max_tokens: int = 8192,
    terminal: float = 0.02,
) -> Tensor:
    """The grid of the Qwen-Image pipeline: FLUX with another line for mu, stretched to end at `terminal`, then 0.

    num_tokens: packed latent tokens, (height / 16) * (width / 16) in pixels. num_steps >= 2, since a single level
    cannot both start at 1 and end at `terminal`. Returns float64 [N+1], strictly falling from 1 to 0.
    Source: diffusers QwenImagePipeline and its scheduler's configuration (dynamic shifting with a shift_terminal).
    """
    if num_steps < 2:
        raise ValueError(f"num_steps must be at least 2 for a stretched grid, got {num_steps}")
    levels = _token_shifted(num_steps, token_shift(num_tokens, base_shift, max_shift, base_tokens, max_tokens))
    clean = 1 - levels
    return _with_zero(1 - clean / (clean[-1] / (1 - terminal)))


def dpm_flow_sigmas(num_steps: int, *, shift: float = 3.0, num_train_timesteps: int = 1000) -> Tensor:
    """The flow grid of diffusers' DPM-Solver scheduler: shifted levels of a line from 1 - 1/1000, then 0.

    It starts just below 1, so Flow-SDE refuses it. DGPO rolls out on it (and trains at its timesteps cut to integers).
    Source: diffusers DPMSolverMultistepScheduler.set_timesteps with use_flow_sigmas.
    """
    _check_steps(num_steps)
    line = (1 - np.linspace(1, 1 / num_train_timesteps, num_steps + 1))[::-1]
    return _with_zero(_shifted(line, shift)[:-1].copy())


def token_shift(num_tokens: int, base_shift: float, max_shift: float, base_tokens: int, max_tokens: int) -> float:
    """mu: the straight line through (base_tokens, base_shift) and (max_tokens, max_shift), not clamped."""
    if num_tokens < 1:
        raise ValueError(f"num_tokens must be at least 1, got {num_tokens}: pass the packed latent length")
    slope = (max_shift - base_shift) / (max_tokens - base_tokens)
    return num_tokens * slope + (base_shift - slope * base_tokens)


def scheduler_sigmas(
    scheduler: Any, num_steps: int, num_tokens: int | None = None, *, levels: list[float] | None = None
) -> Tensor:
    """The grid that a diffusers FlowMatchEulerDiscreteScheduler would use; the scheduler itself is left untouched.

    num_tokens: latent tokens per image; needed exactly when the scheduler shifts dynamically.
    levels: the N unshifted levels a pipeline passes as `sigmas` (FLUX: `uniform_sigmas(N)`; SD3: none).
    Returns float64 [N+1]. Raises ValueError when num_tokens is missing or the scheduler runs from data to noise.
    """
    _check_steps(num_steps)
    config = scheduler.config
    if config.invert_sigmas:
        raise ValueError("invert_sigmas runs from data to noise; convert it in the model adapter to 1 = noise")
    arguments: dict[str, Any] = {"num_inference_steps": num_steps} if levels is None else {"sigmas": levels}
    if config.use_dynamic_shifting:
        if num_tokens is None:
            raise ValueError("this scheduler shifts by resolution: pass num_tokens, the latent tokens per image")
        arguments["mu"] = token_shift(
            num_tokens, config.base_shift, config.max_shift, config.base_image_seq_len, config.max_image_seq_len
        )
    private = copy.deepcopy(scheduler)
    private.set_timesteps(**arguments)
    sigmas: Tensor = private.sigmas.detach().cpu().double()
    if sigmas.shape != (num_steps + 1,):
        raise ValueError(f"asked for {num_steps} steps but the scheduler made {len(sigmas) - 1}: check `levels`")
    return sigmas


def _token_shifted(num_steps: int, mu: float) -> Any:
    """e^mu / (e^mu + 1/sigma - 1) of 1 ... 1/N, in float32 as the stock scheduler computes it."""
    levels = np.array(uniform_sigmas(num_steps)).astype(np.float32)
    return math.exp(mu) / (math.exp(mu) + (1 / levels - 1))


def _shifted(sigma: Any, shift: float) -> Any:
    """Static time shift, in the precision of sigma (numpy keeps float32 beside Python floats)."""
    return shift * sigma / (1 + (shift - 1) * sigma)


def _with_zero(levels: Any) -> Tensor:
    rounded = torch.from_numpy(np.asarray(levels)).to(torch.float32)
    return torch.cat([rounded, torch.zeros(1)]).double()


def _check_steps(num_steps: int) -> None:
    if num_steps < 1:
        raise ValueError(f"num_steps must be at least 1, got {num_steps}")
