"""Moments of one denoising transition, fused: what log-prob, ratio, KL and their gradients are functions of.

One op, `flowrl_img::transition_moments`, with two bodies behind one signature: `transition_torch` (reference) and
`transition_triton`. Its gradient is a second op; neither keeps anything but its inputs for the backward pass. Both
are opaque to torch.compile and safe under activation checkpointing and autocast (they compute in float32).
Left out: double backward, and gradients with respect to states and scalars, which no objective uses.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.latents import body, check_latents, check_scalars, compute_dtype, refuse_gradients
from flowrl_img.kernels.transition_torch import CROSS, DOLD2, DREF2, E2, NUM_MOMENTS, Inputs

__all__ = ["CROSS", "DOLD2", "DREF2", "E2", "transition_moments"]


def transition_moments(
    v_cond: Tensor,
    v_uncond: Tensor | None,
    guidance: float,
    x_t: Tensor,
    x_s: Tensor,
    A: Tensor,
    B: Tensor,
    *,
    v_old: Tensor | None = None,
    v_ref: Tensor | None = None,
    detach_uncond: bool = False,
) -> Tensor:
    """Per-row means over the latent elements of the transition x_t -> x_s ~ N(A x_t + B v, std^2).

    v_cond, v_uncond: [R, ...] velocities of the two guidance branches; v_uncond None means v = v_cond and `guidance`
    is not used. x_t, x_s: [R, ...] states. v_old, v_ref: [R, ...], already guided, without gradient.
    All of one shape, any strides and any mix of bf16, fp16, fp32; float64 is computed in float64.
    A, B: [R] step scalars on any device, in fp32 or fp64.
    detach_uncond: no gradient into v_uncond, as in the first Flow-GRPO code (the default is the true gradient).

    Returns [R, 4] float32 (float64 for float64 inputs), columns E2, DREF2, DOLD2, CROSS:
    mean (x_s - mu)^2; mean (v - v_ref)^2; mean (v - v_old)^2; mean (v - v_old)(x_s - mu_old). An absent v_ref or
    v_old leaves zeros. Differentiable in v_cond (factor guidance) and v_uncond (factor 1 - guidance).
    Raises ValueError on mismatched shapes or devices, and if a tensor that gets no gradient asks for one.
    """
    states = {"x_t": x_t, "x_s": x_s, "v_old": v_old, "v_ref": v_ref}
    check_latents("v_cond", v_cond, {"v_uncond": v_uncond, **states})
    check_scalars(len(v_cond), {"A": A, "B": B})
    refuse_gradients({**states, "A": A, "B": B})
    dtype = compute_dtype(v_cond, v_uncond, *states.values())
    A, B = (scalar.to(v_cond.device, dtype) for scalar in (A, B))
    if v_uncond is not None and detach_uncond:
        v_uncond = v_uncond.detach()
    moments: Tensor = _moments(v_cond, v_uncond, float(guidance), x_t, x_s, A, B, v_old, v_ref)
    return moments


ARGUMENTS = (
    "Tensor v_cond, Tensor? v_uncond, float guidance, Tensor x_t, Tensor x_s, Tensor A, Tensor B, Tensor? v_old, "
    "Tensor? v_ref"
)
"""The fields of `Inputs`, as both ops take them."""


def _body(a: Inputs) -> Any:
    return body("transition", a.v_cond, a.v_uncond, a.x_t, a.x_s, a.v_old, a.v_ref)


@torch.library.custom_op("flowrl_img::transition_moments", mutates_args=(), schema=f"({ARGUMENTS}) -> Tensor")
def _moments(*inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    moments: Tensor = _body(a).forward(a)
    return moments


@torch.library.custom_op(
    "flowrl_img::transition_moments_backward",
    mutates_args=(),
    schema=f"(Tensor grad, {ARGUMENTS}, bool into_uncond) -> (Tensor, Tensor)",
)
def _moments_backward(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    *given, into_uncond = inputs
    a = Inputs(*given)
    gradients: tuple[Tensor, Tensor] = _body(a).backward(grad, a, into_uncond)
    return gradients


@_moments.register_fake
def _(*inputs: Any) -> Tensor:
    a = Inputs(*inputs)
    return a.v_cond.new_empty((a.v_cond.shape[0], NUM_MOMENTS), dtype=a.compute_dtype())


@_moments_backward.register_fake
def _(grad: Tensor, *inputs: Any) -> tuple[Tensor, Tensor]:
    *given, into_uncond = inputs
    a = Inputs(*given)
    to_uncond = a.v_cond.new_empty(0)
    if a.v_uncond is not None and into_uncond:
        to_uncond = a.v_uncond.new_empty(a.v_uncond.shape)
    return a.v_cond.new_empty(a.v_cond.shape), to_uncond


def _save(ctx: Any, inputs: tuple[Any, ...], output: Tensor) -> None:
    v_cond, v_uncond, ctx.guidance, *rest = inputs
    ctx.save_for_backward(v_cond, v_uncond, *rest)


def _differentiate(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
    v_cond, v_uncond, *rest = ctx.saved_tensors
    into_cond, into_uncond, *_ = ctx.needs_input_grad
    to_cond, to_uncond = _moments_backward(grad, v_cond, v_uncond, ctx.guidance, *rest, into_uncond)
    return (to_cond if into_cond else None, to_uncond if into_uncond else None, *[None] * 7)


_moments.register_autograd(_differentiate, setup_context=_save)
