"""Triton body of the matching moments: one read of every input forward, one read and one write backward.

Same signature and maths as `matching_moments_torch.py`, in float32.
"""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.launch_triton import by_block, load, packed, row_means
from flowrl_img.kernels.matching_moments_torch import NUM_MOMENTS, Inputs

__all__ = ["backward", "forward", "matching_gradient_kernel", "partial_matching_kernel"]


@triton.jit
def _load_target(x0, end, slope, row, offsets, mask):
    target = load(end, offsets, mask) - load(x0, offsets, mask)
    if slope is not None:
        target = target * tl.load(slope + row)
    return target


@triton.jit
def _compare(v, e, target, w):
    """Summands of mean (v - w)^2 and of mean (v - w)(e + w - v*)."""
    d = v - w
    return d * d, d * (e + (w - target))


@triton.jit
def _sign(x):
    return tl.where(x > 0, 1.0, 0.0) - tl.where(x < 0, 1.0, 0.0)


@triton.jit
def partial_matching_kernel(
    v, x0, end, slope, v_old, v_ref, v_ema, beta, partial, D, CHUNK: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (row, chunk) writes eleven sums over its chunk to partial [R, 11, chunks]. Masked lanes hold zeros."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    e2 = tl.zeros([BLOCK], tl.float32)
    dold2, gain_old = e2, e2
    dref2, gain_ref = e2, e2
    dema2, gain_ema = e2, e2
    plus2, minus2 = e2, e2
    plus1, minus1 = e2, e2
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        mask = column < D
        offsets = row * D + column
        ours = load(v, offsets, mask)
        target = _load_target(x0, end, slope, row, offsets, mask)
        e = ours - target
        e2 += e * e
        if v_old is not None:
            old = load(v_old, offsets, mask)
            square, gain = _compare(ours, e, target, old)
            dold2 += square
            gain_old += gain
            if beta is not None:
                e_old = old - target
                move = beta * (ours - old)
                plus = e_old + move
                minus = e_old - move
                plus2 += plus * plus
                minus2 += minus * minus
                plus1 += tl.abs(plus)
                minus1 += tl.abs(minus)
        if v_ref is not None:
            square, gain = _compare(ours, e, target, load(v_ref, offsets, mask))
            dref2 += square
            gain_ref += gain
        if v_ema is not None:
            square, gain = _compare(ours, e, target, load(v_ema, offsets, mask))
            dema2 += square
            gain_ema += gain
    chunks = tl.num_programs(1)
    out = partial + row * 11 * chunks + chunk
    tl.store(out, tl.sum(e2))
    tl.store(out + chunks, tl.sum(dold2))
    tl.store(out + 2 * chunks, tl.sum(gain_old))
    tl.store(out + 3 * chunks, tl.sum(dref2))
    tl.store(out + 4 * chunks, tl.sum(gain_ref))
    tl.store(out + 5 * chunks, tl.sum(dema2))
    tl.store(out + 6 * chunks, tl.sum(gain_ema))
    tl.store(out + 7 * chunks, tl.sum(plus2))
    tl.store(out + 8 * chunks, tl.sum(minus2))
    tl.store(out + 9 * chunks, tl.sum(plus1))
    tl.store(out + 10 * chunks, tl.sum(minus1))


@triton.jit
def _pull(g, ours, e, w, gain, distance):
    """Gradient through GAIN and D2 of one other velocity, before the division by D."""
    return 2 * tl.load(g + gain) * e + 2 * tl.load(g + distance) * (ours - w)


@triton.jit
def matching_gradient_kernel(grad, v, x0, end, slope, v_old, v_ref, v_ema, beta, to_v, D, BLOCK: tl.constexpr):
    """Program (row, block) writes the gradient of v."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    offsets = row * D + column
    g = grad + row * 11
    ours = load(v, offsets, mask)
    target = _load_target(x0, end, slope, row, offsets, mask)
    e = ours - target
    total = 2 * tl.load(g) * e
    if v_old is not None:
        old = load(v_old, offsets, mask)
        total += _pull(g, ours, e, old, 2, 1)
        if beta is not None:
            e_old = old - target
            move = beta * (ours - old)
            plus = e_old + move
            minus = e_old - move
            total += beta * (2 * tl.load(g + 7) * plus + tl.load(g + 9) * _sign(plus))
            total -= beta * (2 * tl.load(g + 8) * minus + tl.load(g + 10) * _sign(minus))
    if v_ref is not None:
        total += _pull(g, ours, e, load(v_ref, offsets, mask), 4, 3)
    if v_ema is not None:
        total += _pull(g, ours, e, load(v_ema, offsets, mask), 6, 5)
    tl.store(to_v + offsets, total / D, mask=mask)


def forward(a: Inputs) -> Tensor:
    """Returns [R, 11] float32; what is absent leaves a 0."""
    return row_means(partial_matching_kernel, packed(*a), a.v, NUM_MOMENTS)


def backward(grad: Tensor, a: Inputs) -> Tensor:
    """grad: [R, 11]. Returns the gradient of v, contiguous, in its dtype."""
    to_v = torch.empty(a.v.shape, dtype=a.v.dtype, device=a.v.device)
    by_block(matching_gradient_kernel, (*packed(grad.float(), *a), to_v), a.v)
    return to_v
