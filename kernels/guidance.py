"""Guidance, and the blend of a tuned and a base model, fused: one read of every branch, one write of the velocity.

One op, `flowrl_img::guidance`, with the bodies `guidance_torch` (reference) and `guidance_triton`. It keeps no tensor
for the backward pass, which scales the gradient. Left out: which model is the base, and gradients into it.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.latents import body, check_latents, compute_dtype, refuse_gradients
from flowrl_img.kernels.scale import scale_rows

__all__ = ["guided_velocity"]


def guided_velocity(
    v_cond: Tensor,
    v_uncond: Tensor | None = None,
    guidance: float = 1.0,
    *,
    base_cond: Tensor | None = None,
    base_uncond: Tensor | None = None,
    weight: float = 1.0,
) -> Tensor:
    """v_base + weight (v_tuned - v_base), each side with classifier-free guidance of its own branches.

    v_cond, v_uncond: [R, ...] the model's (tuned) branches; v_uncond None: no guidance on this side, v_cond alone.
    base_cond, base_uncond: [R, ...] the base model's, without gradient; None: guidance alone, and weight must be 1.
    All of one shape, any strides, any mix of bf16, fp16, fp32; float64 is computed in float64.
    weight: 0 gives the base and 1 the tuned velocity, exactly, and the other side is not read; usual 1..3.

    Returns [R, ...] float32 (float64 for float64 inputs), bit for bit the velocity that `transition_moments` forms from
    the same branches. Differentiable in v_cond and v_uncond.
    Raises ValueError on mismatched shapes, a base that asks for a gradient, and a weight or branch without its base.
    Source: classifier-free guidance, arXiv 2207.12598; reinforcement learning guidance, arXiv 2508.21016.
    """
    check_latents("v_cond", v_cond, {"v_uncond": v_uncond, "base_cond": base_cond, "base_uncond": base_uncond})
    refuse_gradients({"base_cond": base_cond, "base_uncond": base_uncond})
    if base_cond is None and (base_uncond is not None or weight != 1):
        raise ValueError(f"weight {weight} and base_uncond belong to a base model: pass base_cond")
    if base_cond is not None and weight == 0:
        v_cond, v_uncond = base_cond, base_uncond
    if weight in (0, 1):  # base + 1 * (tuned - base) would not round back to tuned
        base_cond = base_uncond = None
    if v_uncond is None and base_cond is None:
        return v_cond.to(compute_dtype(v_cond))
    v: Tensor = _guidance(v_cond, v_uncond, float(guidance), base_cond, base_uncond, float(weight))
    return v


@torch.library.custom_op("flowrl_img::guidance", mutates_args=())
def _guidance(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    base_cond: Tensor | None,
    base_uncond: Tensor | None,
    weight: float,
) -> Tensor:
    chosen = body("guidance", v_cond, v_uncond, base_cond, base_uncond)
    v: Tensor = chosen.forward(v_cond, v_uncond, guidance, base_cond, base_uncond, weight)
    return v


@_guidance.register_fake
def _(v_cond, v_uncond, guidance, base_cond, base_uncond, weight):  # type: ignore[no-untyped-def]
    return v_cond.new_empty(v_cond.shape, dtype=compute_dtype(v_cond, v_uncond, base_cond, base_uncond))


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v_cond, v_uncond, guidance, base_cond, _, weight = inputs
    ctx.dtypes = v_cond.dtype, v_cond.dtype if v_uncond is None else v_uncond.dtype
    strength = weight if base_cond is not None else 1.0
    ctx.factors = (strength, 0.0) if v_uncond is None else (strength * guidance, strength * (1 - guidance))


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    cond, uncond = (
        grad.new_full(grad.shape[:1], factor) if wanted else None
        for factor, wanted in zip(ctx.factors, ctx.needs_input_grad)
    )
    return *scale_rows(grad, cond, uncond, *ctx.dtypes), *[None] * 4


_guidance.register_autograd(_differentiate, setup_context=_save)
