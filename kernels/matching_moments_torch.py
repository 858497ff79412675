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

from typing import NamedTuple

import torch
from torch import Tensor

from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = ["NUM_MOMENTS", "Inputs", "backward", "forward"]

E2, DOLD2, GAIN_OLD, DREF2, GAIN_REF, DEMA2, GAIN_EMA, PLUS2, MINUS2, PLUS1, MINUS1 = range(11)
NUM_MOMENTS = 11
PAIRS = ((DOLD2, GAIN_OLD), (DREF2, GAIN_REF), (DEMA2, GAIN_EMA))


class Inputs(NamedTuple):
    """What both bodies are given: latents [R, ...] of one shape, slope [R]."""

    v: Tensor
    x0: Tensor
    end: Tensor
    slope: Tensor | None = None
    v_old: Tensor | None = None
    v_ref: Tensor | None = None
    v_ema: Tensor | None = None
    beta: float | None = None

    def compute_dtype(self) -> torch.dtype:
        """float64 if any latent is, else float32."""
        return compute_dtype(self.v, self.x0, self.end, self.v_old, self.v_ref, self.v_ema)


def forward(a: Inputs) -> Tensor:
    """Returns [R, 11] in the compute dtype; what is absent leaves a 0."""
    dtype = a.compute_dtype()
    ours, target = rows(a.v, dtype), _target(a, dtype)
    e = ours - target
    columns = [e.square().mean(1)] + [e.new_zeros(len(e))] * (NUM_MOMENTS - 1)
    for other, (distance, gain) in zip((a.v_old, a.v_ref, a.v_ema), PAIRS):
        if other is not None:
            w = rows(other, dtype)
            columns[distance] = (ours - w).square().mean(1)
            columns[gain] = ((ours - w) * (e + (w - target))).mean(1)
    if a.v_old is not None and a.beta is not None:
        plus, minus = _branches(ours, rows(a.v_old, dtype), target, a.beta)
        columns[PLUS2], columns[MINUS2] = plus.square().mean(1), minus.square().mean(1)
        columns[PLUS1], columns[MINUS1] = plus.abs().mean(1), minus.abs().mean(1)
    return torch.stack(columns, 1)


def backward(grad: Tensor, a: Inputs) -> Tensor:
    """grad: [R, 11]. Returns the gradient of v, contiguous, in its dtype."""
    dtype = a.compute_dtype()
    ours, target = rows(a.v, dtype), _target(a, dtype)
    g = (grad.to(dtype) / ours.shape[1]).unsqueeze(-1).unbind(1)
    total = 2 * g[E2] * (ours - target)
    for other, (distance, gain) in zip((a.v_old, a.v_ref, a.v_ema), PAIRS):
        if other is not None:
            total = total + 2 * g[gain] * (ours - target) + 2 * g[distance] * (ours - rows(other, dtype))
    if a.v_old is not None and a.beta is not None:
        plus, minus = _branches(ours, rows(a.v_old, dtype), target, a.beta)
        total = total + a.beta * (2 * g[PLUS2] * plus + g[PLUS1] * plus.sign())
        total = total - a.beta * (2 * g[MINUS2] * minus + g[MINUS1] * minus.sign())
    return total.to(a.v.dtype).view(a.v.shape)


def _target(a: Inputs, dtype: torch.dtype) -> Tensor:
    """v* [R, D]."""
    rise = rows(a.end, dtype) - rows(a.x0, dtype)
    return rise if a.slope is None else rise * column(a.slope, dtype)


def _branches(v: Tensor, old: Tensor, target: Tensor, beta: float) -> tuple[Tensor, Tensor]:
    """Errors of the two branches. Around v_old, so that they are the same bits when v is v_old."""
    e_old, move = old - target, beta * (v - old)
    return e_old + move, e_old - move
