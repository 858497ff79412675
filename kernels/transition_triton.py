"""Triton body of the transition moments: one read of every input forward, one read and one write backward.

Same signature and maths as `transition_torch.py`, in float32. The reduction has two stages and no atomics: a program
sums one fixed chunk of one row, a second kernel sums a row's chunks in order. Chunks depend on D alone, so a row's
moments are the same bits on every run and in every batch. Floating-point contraction is off, so that v rounds
exactly as PyTorch's v_uncond + guidance * (v_cond - v_uncond) does and equal velocities give a ratio of exactly 1.
No autotuning: the op is bound by bandwidth, and block sizes that varied between machines would vary the sums.

This module is imported only when it is chosen to run; see `backend.py`.
"""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.transition_torch import NUM_MOMENTS

__all__ = ["backward", "forward", "gradient_kernel", "partial_moments_kernel", "sum_chunks_kernel"]

CHUNK = 4096  # elements of a row per program: 16 programs per row of SD3 at 512 px, enough to fill a GPU from 8 rows
BLOCK = 1024
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def _load(pointer, offsets, mask):
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def _load_velocity(v_cond, v_uncond, guidance, offsets, mask):
    v = _load(v_cond, offsets, mask)
    if v_uncond is not None:
        u = _load(v_uncond, offsets, mask)
        v = u + guidance * (v - u)
    return v


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
        v = _load_velocity(v_cond, v_uncond, guidance, offsets, mask)
        drift = a * _load(x_t, offsets, mask)
        target = _load(x_s, offsets, mask)
        e = target - (drift + b * v)
        e2 += e * e
        if v_ref is not None:
            d_ref = v - _load(v_ref, offsets, mask)
            dref2 += d_ref * d_ref
        if v_old is not None:
            old = _load(v_old, offsets, mask)
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
def sum_chunks_kernel(partial, moments, chunks, D, BLOCK: tl.constexpr):
    """Program i adds the chunks of one (row, moment) pair in a fixed order and divides by D."""
    i = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(partial + i * chunks + column, mask=column < chunks, other=0.0)
    tl.store(moments + i, tl.sum(total) / D)


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
    v = _load_velocity(v_cond, v_uncond, guidance, offsets, mask)
    drift = a * _load(x_t, offsets, mask)
    target = _load(x_s, offsets, mask)
    total = (-2 * b * g_e2) * (target - (drift + b * v))
    if v_ref is not None:
        g_dref2 = tl.load(grad + row * 4 + 1) / D
        total += (2 * g_dref2) * (v - _load(v_ref, offsets, mask))
    if v_old is not None:
        g_dold2 = tl.load(grad + row * 4 + 2) / D
        g_cross = tl.load(grad + row * 4 + 3) / D
        old = _load(v_old, offsets, mask)
        total += (2 * g_dold2) * (v - old) + g_cross * (target - (drift + b * old))
    if v_uncond is None:
        tl.store(to_cond + offsets, total, mask=mask)
    else:
        tl.store(to_cond + offsets, guidance * total, mask=mask)
        if to_uncond is not None:
            tl.store(to_uncond + offsets, (1 - guidance) * total, mask=mask)


def forward(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    x_t: Tensor,
    x_s: Tensor,
    A: Tensor,
    B: Tensor,
    v_old: Tensor | None,
    v_ref: Tensor | None,
) -> Tensor:
    """Latents [R, ...], A and B [R]. Returns [R, 4] float32; absent v_old or v_ref leave a 0."""
    rows, D = len(v_cond), v_cond[:1].numel()
    moments = v_cond.new_empty((rows, NUM_MOMENTS), dtype=torch.float32)
    if rows == 0:
        return moments
    chunks = triton.cdiv(D, CHUNK)
    partial = torch.empty((rows, NUM_MOMENTS, chunks), dtype=torch.float32, device=v_cond.device)
    inputs = _packed(v_cond, v_uncond, guidance, x_t, x_s, A, B, v_old, v_ref)
    with _on(v_cond.device):
        partial_moments_kernel[(rows, chunks)](*inputs, partial, D, CHUNK=CHUNK, BLOCK=BLOCK, **OPTIONS)
        sum_chunks_kernel[(rows * NUM_MOMENTS,)](partial, moments, chunks, D, BLOCK=128, **OPTIONS)
    return moments


def backward(
    grad: Tensor,
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    x_t: Tensor,
    x_s: Tensor,
    A: Tensor,
    B: Tensor,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    into_uncond: bool,
) -> tuple[Tensor, Tensor]:
    """grad: [R, 4]. Returns the gradients of v_cond and v_uncond, contiguous; the second empty unless asked for."""
    rows, D = len(v_cond), v_cond[:1].numel()
    to_cond = torch.empty(v_cond.shape, dtype=v_cond.dtype, device=v_cond.device)
    to_uncond = None
    if v_uncond is not None and into_uncond:
        to_uncond = torch.empty(v_uncond.shape, dtype=v_uncond.dtype, device=v_uncond.device)
    if rows > 0:
        inputs = _packed(v_cond, v_uncond, guidance, x_t, x_s, A, B, v_old, v_ref)
        with _on(v_cond.device):
            gradient_kernel[(rows, triton.cdiv(D, BLOCK))](
                grad.float().contiguous(), *inputs, to_cond, to_uncond, D, BLOCK=BLOCK, **OPTIONS
            )
    return to_cond, v_cond.new_empty(0) if to_uncond is None else to_uncond


def _packed(*inputs: Any) -> tuple[Any, ...]:
    """Every tensor contiguous, so that one offset addresses an element in all of them."""
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
