"""Moments of velocity matching, fused: what the losses on clean samples (NFT, AWM, DGPO, FPO) are functions of.

One op, `flowrl_img::matching_moments`, with the bodies `matching_moments_torch` (reference) and
`matching_moments_triton`; its gradient is a second op, and neither keeps anything but its inputs. x_t is never formed:
the error of the predicted clean sample, x_t - t v - x0, is -t (v - v*), so its means are those here times t^2 or t.
Left out: guidance (give a velocity guided by `guided_velocity`), objectives, gradients into anything but v.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.latents import body, check_latents, check_scalars, compute_dtype, refuse_gradients
from flowrl_img.kernels.matching_moments_torch import (
    DEMA2,
    DOLD2,
    DREF2,
    E2,
    GAIN_EMA,
    GAIN_OLD,
    GAIN_REF,
    MINUS1,
    MINUS2,
    NUM_MOMENTS,
    PLUS1,
    PLUS2,
    Inputs,
)

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
    "PLUS1",
    "PLUS2",
    "matching_moments",
]


def matching_moments(
    v: Tensor,
    x0: Tensor,
    eps: Tensor | None = None,
    *,
    x_t: Tensor | None = None,
    t: Tensor | None = None,
    v_old: Tensor | None = None,
    v_ref: Tensor | None = None,
    v_ema: Tensor | None = None,
    beta: float | None = None,
) -> Tensor:
    """Per-row means over the latent elements of the error v - v* and of its comparison with other velocities.

    v: [R, ...] prediction at x_t = (1 - t) x0 + t eps. x0: [R, ...] clean latents.
    The target v* is eps - x0, or (x_t - x0) / t: give `eps` [R, ...], or `x_t` [R, ...] and `t` [R] in (0, 1]. The
    second is the target at the state as stored; it amplifies the rounding of x_t by 1 / t.
    v_old, v_ref, v_ema: [R, ...] velocities at the same point, without gradient. beta: width of the two branches
    v_old +- beta (v - v_old) of DiffusionNFT; None leaves them out.
    All of one shape, any strides and any mix of bf16, fp16, fp32; float64 is computed in float64.

    Returns [R, 11] float32 (float64 for float64 inputs), differentiable in v; absent inputs leave zeros. Columns:
    E2 = mean (v - v*)^2; DOLD2, DREF2, DEMA2 = mean (v - w)^2; GAIN_OLD, GAIN_REF, GAIN_EMA = E2 - mean (w - v*)^2,
    without the cancellation of that difference; PLUS2, MINUS2, PLUS1, MINUS1 = mean square and mean magnitude of the
    error of the plus and the minus branch.
    Raises ValueError on mismatched shapes or devices, a target given twice or not at all, beta without v_old, and if a
    tensor that gets no gradient asks for one.
    """
    others = {"x0": x0, "eps": eps, "x_t": x_t, "v_old": v_old, "v_ref": v_ref, "v_ema": v_ema}
    check_latents("v", v, others)
    refuse_gradients({**others, "t": t})
    end = _end(eps, x_t, t)
    if beta is not None and v_old is None:
        raise ValueError(f"beta {beta} sets branches around v_old: pass v_old, or leave beta out")
    slope = None
    if x_t is not None and t is not None:
        check_scalars(len(v), {"t": t})
        slope = t.reciprocal().to(v.device, compute_dtype(v, x0, end, v_old, v_ref, v_ema))
    moments: Tensor = _moments(v, x0, end, slope, v_old, v_ref, v_ema, None if beta is None else float(beta))
    return moments


def _end(eps: Tensor | None, x_t: Tensor | None, t: Tensor | None) -> Tensor:
    """The point that the straight line from x0 is drawn to: eps, or x_t."""
    if eps is not None and x_t is None and t is None:
        return eps
    if eps is None and x_t is not None and t is not None:
        return x_t
    raise ValueError("the target needs either eps alone, or x_t together with t")


ARGUMENTS = "Tensor v, Tensor x0, Tensor end, Tensor? slope, Tensor? v_old, Tensor? v_ref, Tensor? v_ema, float? beta"
"""The fields of `Inputs`, as both ops take them."""


def _body(a: Inputs) -> Any:
    return body("matching_moments", a.v, a.x0, a.end, a.v_old, a.v_ref, a.v_ema)


@torch.library.custom_op("flowrl_img::matching_moments", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def _moments(*inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    moments: Tensor = _body(a).forward(a)
    return moments


@torch.library.custom_op(
    "flowrl_img::matching_moments_backward", mutates_args=(), schema=f"(Tensor grad, {ARGUMENTS}) -> Tensor"
)
def _moments_backward(grad: Tensor, *inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    to_v: Tensor = _body(a).backward(grad, a)
    return to_v


@_moments.register_fake
def _(*inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    return a.v.new_empty((a.v.shape[0], NUM_MOMENTS), dtype=a.compute_dtype())


@_moments_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    return a.v.new_empty(a.v.shape)


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    *tensors, ctx.beta = inputs
    ctx.save_for_backward(*tensors)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    to_v = _moments_backward(grad, *ctx.saved_tensors, ctx.beta)
    return to_v, *[None] * 7


_moments.register_autograd(_differentiate, setup_context=_save)
