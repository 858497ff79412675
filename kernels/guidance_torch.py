r"""Reference body of guidance and of the blend of two guided models, and `guide`, the one arithmetic of guidance.

    v_tuned = u + guidance (c - u),   v_base likewise from its own branches,   v = v_base + weight (v_tuned - v_base).

Classifier-free guidance, and reinforcement learning guidance: weight interpolates (0..1) or extrapolates (above 1)
along what training changed, as if the penalty to the base model had been divided by weight.
Everything is computed in float32, or in float64 when an input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.latents import compute_dtype

__all__ = ["forward", "guide"]


def guide(v_cond: Tensor, v_uncond: Tensor | None, guidance: float, dtype: torch.dtype = torch.float32) -> Tensor:
    """Classifier-free guidance: v_uncond + guidance * (v_cond - v_uncond), or v_cond alone when v_uncond is None.

    Inputs of one shape and any float dtype, widened to `dtype` first. The Triton bodies round in the same order, so a
    rollout that guides with this function stores exactly the velocity that scoring forms again.
    """
    v = v_cond.to(dtype)
    if v_uncond is None:
        return v
    u = v_uncond.to(dtype)
    return u + guidance * (v - u)


def forward(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    base_cond: Tensor | None,
    base_uncond: Tensor | None,
    weight: float,
) -> Tensor:
    """All [R, ...]. Returns v, contiguous, in the compute dtype. base_cond None: guidance alone."""
    dtype = compute_dtype(v_cond, v_uncond, base_cond, base_uncond)
    v = guide(v_cond, v_uncond, guidance, dtype)
    if base_cond is not None:
        base = guide(base_cond, base_uncond, guidance, dtype)
        v = base + weight * (v - base)
    # An op may not return its input, which is what `to` and `contiguous` do when there is nothing to change.
    return v.clone(memory_format=torch.contiguous_format) if v is v_cond else v.contiguous()
