"""Triton body of guidance and blend: one read of every branch, one write. Signature of `guidance_torch.py`."""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.launch_triton import by_block, load_velocity, packed

__all__ = ["forward", "guidance_kernel"]


@triton.jit
def guidance_kernel(v_cond, v_uncond, guidance, base_cond, base_uncond, weight, out, D, BLOCK: tl.constexpr):
    """Program (row, block) writes the guided, blended velocity."""
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    offsets = tl.program_id(0).to(tl.int64) * D + column
    v = load_velocity(v_cond, v_uncond, guidance, offsets, mask)
    if base_cond is not None:
        base = load_velocity(base_cond, base_uncond, guidance, offsets, mask)
        v = base + weight * (v - base)
    tl.store(out + offsets, v, mask=mask)


def forward(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    base_cond: Tensor | None,
    base_uncond: Tensor | None,
    weight: float,
) -> Tensor:
    """All [R, ...]. Returns v, contiguous, in float32. base_cond None: guidance alone."""
    out = torch.empty(v_cond.shape, dtype=torch.float32, device=v_cond.device)
    by_block(guidance_kernel, (*packed(v_cond, v_uncond, guidance, base_cond, base_uncond, weight), out), v_cond)
    return out
