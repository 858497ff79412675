"""The steps themselves, fused: stochastic and deterministic sampling steps, and re-noising of clean latents.

All are one op, `flowrl_img::step`: a row-wise combination of two latents and a noise, with the bodies `step_torch`
(reference) and `step_triton`. Linear, so it keeps no latent for the backward pass.
Left out: grids, step rules (`samplers/`) and random streams; gradients with respect to noise and scalars.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.latents import body, check_latents, check_scalars, compute_dtype, refuse_gradients
from flowrl_img.kernels.scale import scale_rows

__all__ = ["ode_step", "renoise", "sde_step"]


def sde_step(
    x_t: Tensor, v: Tensor, noise: Tensor, A: Tensor, B: Tensor, std: Tensor, *, dtype: torch.dtype | None = None
) -> tuple[Tensor, Tensor]:
    """x_s = A x_t + B v + std noise, rounded to `dtype` (default x_t's), and its E2 = mean (x_s - A x_t - B v)^2.

    x_t, v, noise: [R, ...] of one shape, any strides and float dtypes; v already guided. A, B, std: [R].
    Returns x_s [R, ...] and E2 [R] float32 (float64 if computed so). Rounded first, then measured: E2 is bit for bit
    the one that `transition_moments` finds for this x_s, so `log_prob(E2, std)` is that of the state as stored.
    Differentiable: x_s in x_t and v. E2 is a constant: v moves x_s and the mean alike.
    Raises ValueError on mismatched shapes, and if noise or a scalar asks for a gradient.
    """
    x_s, E2 = _checked_step({"x_t": x_t, "v": v, "noise": noise}, {"A": A, "B": B, "std": std}, dtype, measure=True)
    return x_s, E2.detach()


def ode_step(x_t: Tensor, v: Tensor, A: Tensor, B: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """A x_t + B v, rounded to `dtype` (default x_t's): `sde_step` without noise. Differentiable in x_t and v."""
    return _checked_step({"x_t": x_t, "v": v}, {"A": A, "B": B}, dtype)[0]


def renoise(x0: Tensor, eps: Tensor, t: Tensor, *, dtype: torch.dtype | None = None) -> Tensor:
    """x_t = (1 - t) x0 + t eps, rounded to `dtype` (default x0's).

    x0, eps: [R, ...]; t: [R] in [0, 1], on any device, best in float64. Differentiable in x0 and eps.
    """
    return _checked_step({"x0": x0, "eps": eps}, {"1 - t": 1 - t, "t": t}, dtype)[0]


def _checked_step(
    latents: dict[str, Tensor], scalars: dict[str, Tensor], dtype: torch.dtype | None, measure: bool = False
) -> tuple[Tensor, Tensor]:
    (name, x), (_, y), *_ = latents.items()
    check_latents(name, x, latents)
    check_scalars(len(x), scalars)
    z = latents.get("noise")
    refuse_gradients({"noise": z, **scalars})
    wide = compute_dtype(*latents.values())
    moved = {key: scalar.to(x.device, wide) for key, scalar in scalars.items()}
    a, b, *_ = moved.values()
    outputs: tuple[Tensor, Tensor] = _step(x, a, y, b, z, moved.get("std"), dtype or x.dtype, measure)
    return outputs


@torch.library.custom_op("flowrl_img::step", mutates_args=())
def _step(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, z: Tensor | None, c: Tensor | None, dtype: torch.dtype, measure: bool
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = body("step", x, y, z).forward(x, a, y, b, z, c, dtype, measure)
    return outputs


@_step.register_fake
def _(x, a, y, b, z, c, dtype, measure):  # type: ignore[no-untyped-def]
    residual2 = x.new_empty(len(x) if measure else 0, dtype=compute_dtype(x, y, z))
    return x.new_empty(x.shape, dtype=dtype), residual2


def _save(ctx: Any, inputs: tuple[Any, ...], output: tuple[Tensor, Tensor]) -> None:
    x, a, y, b, *_ = inputs
    ctx.dtypes = x.dtype, y.dtype
    ctx.save_for_backward(a, b)


def _differentiate(ctx: Any, grad: Tensor, _: Tensor) -> tuple[Tensor | None, ...]:
    a, b = (factor if ctx.needs_input_grad[i] else None for factor, i in zip(ctx.saved_tensors, (0, 2)))
    to_x, to_y = scale_rows(grad, a, b, *ctx.dtypes)
    return to_x, None, to_y, *[None] * 5


_step.register_autograd(_differentiate, setup_context=_save)
