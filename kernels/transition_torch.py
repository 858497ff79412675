r"""Reference body of the transition moments, in plain PyTorch. `transition_triton.py` is the same maths, fused.

Per row, over its D latent elements, with v = v_uncond + guidance (v_cond - v_uncond) and mu = A x_t + B v:

    E2    = mean (x_s - mu)^2                    DREF2 = mean (v - v_ref)^2
    DOLD2 = mean (v - v_old)^2                   CROSS = mean (v - v_old)(x_s - mu_old),  mu_old = A x_t + B v_old

and the gradient with respect to v, for cotangents g of the four columns,

    dL/dv = [-2 B g_E2 (x_s - mu) + 2 g_DREF2 (v - v_ref) + 2 g_DOLD2 (v - v_old) + g_CROSS (x_s - mu_old)] / D.

Everything is computed in float32, or in float64 when an input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = ["CROSS", "DOLD2", "DREF2", "E2", "NUM_MOMENTS", "backward", "forward"]

E2, DREF2, DOLD2, CROSS = range(4)
NUM_MOMENTS = 4


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
    """Latents [R, ...], A and B [R]. Returns [R, 4] in the compute dtype; absent v_old or v_ref leave a 0."""
    dtype = compute_dtype(v_cond, v_uncond, x_t, x_s, v_old, v_ref)
    v = rows(guide(v_cond, v_uncond, guidance, dtype), dtype)
    drift, target, b = _split(x_t, x_s, A, B, dtype)
    columns = [(target - (drift + b * v)).square().mean(1)] + [v.new_zeros(len(v))] * 3
    if v_ref is not None:
        columns[DREF2] = (v - rows(v_ref, dtype)).square().mean(1)
    if v_old is not None:
        old = rows(v_old, dtype)
        columns[DOLD2] = (v - old).square().mean(1)
        columns[CROSS] = ((v - old) * (target - (drift + b * old))).mean(1)
    return torch.stack(columns, 1)


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
    """grad: [R, 4]. Returns the gradients of v_cond and v_uncond, contiguous, each in the dtype of its tensor.

    The second is empty unless `into_uncond`: no gradient is asked for, or there is no unconditional branch.
    """
    dtype = compute_dtype(v_cond, v_uncond, x_t, x_s, v_old, v_ref)
    v = rows(guide(v_cond, v_uncond, guidance, dtype), dtype)
    drift, target, b = _split(x_t, x_s, A, B, dtype)
    g = (grad.to(dtype) / v.shape[1]).unsqueeze(-1).unbind(1)
    total = (-2 * b * g[E2]) * (target - (drift + b * v))
    if v_ref is not None:
        total = total + (2 * g[DREF2]) * (v - rows(v_ref, dtype))
    if v_old is not None:
        old = rows(v_old, dtype)
        total = total + (2 * g[DOLD2]) * (v - old) + g[CROSS] * (target - (drift + b * old))
    total = total.reshape(v_cond.shape)
    empty = v_cond.new_empty(0)
    if v_uncond is None:
        return total.to(v_cond.dtype), empty
    to_uncond = ((1 - guidance) * total).to(v_uncond.dtype) if into_uncond else empty
    return (guidance * total).to(v_cond.dtype), to_uncond


def _split(x_t: Tensor, x_s: Tensor, A: Tensor, B: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor]:
    """A x_t [R, D], x_s [R, D] and B [R, 1], in the compute dtype."""
    return column(A, dtype) * rows(x_t, dtype), rows(x_s, dtype), column(B, dtype)
