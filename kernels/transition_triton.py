"""Triton body of the transition moments: one read of every input forward, one read and one write backward.

Same signature and maths as `transition_torch.py`, in float32. The velocity rounds exactly as PyTorch's
v_uncond + guidance * (v_cond - v_uncond) does, so equal velocities give a ratio of exactly 1.
"""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.launch_triton import by_block, load, load_velocity, packed, row_means
from flowrl_img.kernels.transition_torch import NUM_MOMENTS, Inputs

__all__ = ["backward", "forward", "gradient_kernel", "partial_moments_kernel"]


@triton.jit
def partial_moments_kernel(
    v_cond, v_uncond, guidance, x_t, x_s, A, B, v_old, v_ref, partial, D, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, chunk) writes four sums over its chunk to partial [R, 4, chunks]. Masked lanes hold zeros."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    a = tl.load(A + row)
    b = tl.load(B + row)
    e2 = tl.zeros([BLOCK], tl.float32)
    dref2 = tl.zeros([BLOCK], tl.float32)
    dold2 = tl.zeros([BLOCK], tl.float32)
    cross = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        mask = column < D
        offsets = row * D + column
        v = load_velocity(v_cond, v_uncond, guidance, offsets, mask)
        drift = a * load(x_t, offsets, mask)
        target = load(x_s, offsets, mask)
        e = target - (drift + b * v)
        e2 += e * e
        if v_ref is not None:
            d_ref = v - load(v_ref, offsets, mask)
            dref2 += d_ref * d_ref
        if v_old is not None:
            old = load(v_old, offsets, mask)
            d_old = v - old
            dold2 += d_old * d_old
            cross += d_old * (target - (drift + b * old))
    chunks = tl.num_programs(1)
    out = partial + row * 4 * chunks + chunk
    tl.store(out, tl.sum(e2))
    tl.store(out + chunks, tl.sum(dref2))
    tl.store(out + 2 * chunks, tl.sum(dold2))
    tl.store(out + 3 * chunks, tl.sum(cross))


@triton.jit
def gradient_kernel(
    grad, v_cond, v_uncond, guidance, x_t, x_s, A, B, v_old, v_ref, to_cond, to_uncond, D, BLOCK: tl.constexpr
):
    """Program (row, block) writes the gradient of v_cond and, unless to_uncond is None, of v_uncond."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    offsets = row * D + column
    a = tl.load(A + row)
    b = tl.load(B + row)
    g_e2 = tl.load(grad + row * 4) / D
    v = load_velocity(v_cond, v_uncond, guidance, offsets, mask)
    drift = a * load(x_t, offsets, mask)
    target = load(x_s, offsets, mask)
    total = (-2 * b * g_e2) * (target - (drift + b * v))
    if v_ref is not None:
        g_dref2 = tl.load(grad + row * 4 + 1) / D
        total += (2 * g_dref2) * (v - load(v_ref, offsets, mask))
    if v_old is not None:
        g_dold2 = tl.load(grad + row * 4 + 2) / D
        g_cross = tl.load(grad + row * 4 + 3) / D
        old = load(v_old, offsets, mask)
        total += (2 * g_dold2) * (v - old) + g_cross * (target - (drift + b * old))
    if v_uncond is None:
        tl.store(to_cond + offsets, total, mask=mask)
    else:
        tl.store(to_cond + offsets, guidance * total, mask=mask)
        if to_uncond is not None:
            tl.store(to_uncond + offsets, (1 - guidance) * total, mask=mask)


def forward(a: Inputs) -> Tensor:
    """Returns [R, 4] float32; absent v_old or v_ref leave a 0."""
    return row_means(partial_moments_kernel, packed(*a), a.v_cond, NUM_MOMENTS)


def backward(grad: Tensor, a: Inputs, into_uncond: bool) -> tuple[Tensor, Tensor]:
    """grad: [R, 4]. Returns the gradients of v_cond and v_uncond, contiguous; the second empty unless asked for."""
    to_cond = torch.empty(a.v_cond.shape, dtype=a.v_cond.dtype, device=a.v_cond.device)
    to_uncond = None
    if a.v_uncond is not None and into_uncond:
        to_uncond = torch.empty(a.v_uncond.shape, dtype=a.v_uncond.dtype, device=a.v_uncond.device)
    by_block(gradient_kernel, (*packed(grad.float(), *a), to_cond, to_uncond), a.v_cond)
    return to_cond, a.v_cond.new_empty(0) if to_uncond is None else to_uncond
