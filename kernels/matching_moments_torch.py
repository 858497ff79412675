r"""Reference body of the matching moments, in plain PyTorch. `matching_moments_triton.py` is the same maths, fused.

Per row, over its D latent elements, with the target v* = (end - x0) slope: eps - x0 (slope None) or (x_t - x0) / t,
and e = v - v*. For each other velocity w of old, ref, ema:

    E2 = mean e^2      D..2 = mean (v - w)^2      GAIN_.. = mean (v - w)(e + w - v*) = mean e^2 - mean (w - v*)^2

and for the two branches v_old +- beta (v - v_old), whose errors are p = (v_old - v*) + beta (v - v_old) and m, with
the sign turned:

    PLUS2 = mean p^2      MINUS2 = mean m^2      PLUS1 = mean |p|      MINUS1 = mean |m|.

The gradient with respect to v, for cotangents g of the columns, is

    dL/dv = [2 (g_E2 + sum g_GAIN) e + sum 2 g_D2 (v - w)
             + beta (2 g_PLUS2 p + g_PLUS1 sign p - 2 g_MINUS2 m - g_MINUS1 sign m)] / D.

Everything is computed in float32, or in float64 when an input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = [
    "DEMA2",
    "DOLD2",
    "DREF2",
    "E2",
    "GAIN_EMA",
    "GAIN_OLD",
    "GAIN_REF",
    "MINUS1",
    "MINUS2",
    "NUM_MOMENTS",
    "PLUS1",
    "PLUS2",
    "backward",
    "forward",
]

E2, DOLD2, GAIN_OLD, DREF2, GAIN_REF, DEMA2, GAIN_EMA, PLUS2, MINUS2, PLUS1, MINUS1 = range(11)
NUM_MOMENTS = 11
PAIRS = ((DOLD2, GAIN_OLD), (DREF2, GAIN_REF), (DEMA2, GAIN_EMA))


def forward(
    v: Tensor,
    x0: Tensor,
    end: Tensor,
    slope: Tensor | None,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    v_ema: Tensor | None,
    beta: float | None,
) -> Tensor:
    """Latents [R, ...], slope [R]. Returns [R, 11] in the compute dtype; what is absent leaves a 0."""
    dtype = compute_dtype(v, x0, end, v_old, v_ref, v_ema)
    ours, target = rows(v, dtype), _target(x0, end, slope, dtype)
    e = ours - target
    columns = [e.square().mean(1)] + [e.new_zeros(len(e))] * (NUM_MOMENTS - 1)
    for other, (distance, gain) in zip((v_old, v_ref, v_ema), PAIRS):
        if other is not None:
            w = rows(other, dtype)
            columns[distance] = (ours - w).square().mean(1)
            columns[gain] = ((ours - w) * (e + (w - target))).mean(1)
    if v_old is not None and beta is not None:
        plus, minus = _branches(ours, rows(v_old, dtype), target, beta)
        columns[PLUS2], columns[MINUS2] = plus.square().mean(1), minus.square().mean(1)
        columns[PLUS1], columns[MINUS1] = plus.abs().mean(1), minus.abs().mean(1)
    return torch.stack(columns, 1)


def backward(
    grad: Tensor,
    v: Tensor,
    x0: Tensor,
    end: Tensor,
    slope: Tensor | None,
    v_old: Tensor | None,
    v_ref: Tensor | None,
    v_ema: Tensor | None,
    beta: float | None,
) -> Tensor:
    """grad: [R, 11]. Returns the gradient of v, contiguous, in its dtype."""
    dtype = compute_dtype(v, x0, end, v_old, v_ref, v_ema)
    ours, target = rows(v, dtype), _target(x0, end, slope, dtype)
    g = (grad.to(dtype) / ours.shape[1]).unsqueeze(-1).unbind(1)
    total = 2 * g[E2] * (ours - target)
    for other, (distance, gain) in zip((v_old, v_ref, v_ema), PAIRS):
        if other is not None:
            total = total + 2 * g[gain] * (ours - target) + 2 * g[distance] * (ours - rows(other, dtype))
    if v_old is not None and beta is not None:
        plus, minus = _branches(ours, rows(v_old, dtype), target, beta)
        total = total + beta * (2 * g[PLUS2] * plus + g[PLUS1] * plus.sign())
        total = total - beta * (2 * g[MINUS2] * minus + g[MINUS1] * minus.sign())
    return total.to(v.dtype).view(v.shape)


def _target(x0: Tensor, end: Tensor, slope: Tensor | None, dtype: torch.dtype) -> Tensor:
    """v* [R, D]."""
    rise = rows(end, dtype) - rows(x0, dtype)
    return rise if slope is None else rise * column(slope, dtype)


def _branches(v: Tensor, old: Tensor, target: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Errors of the two branches. Around v_old, so that they are the same bits when v is v_old."""
    e_old, move = old - target, beta * (v - old)
    return e_old + move, e_old - move
