r"""Reference body of the transition moments, in plain PyTorch. `transition_triton.py` is the same maths, fused.

Per row, over its D latent elements, with v = v_uncond + guidance (v_cond - v_uncond) and mu = A x_t + B v:

    E2    = mean (x_s - mu)^2                    DREF2 = mean (v - v_ref)^2
    DOLD2 = mean (v - v_old)^2                   CROSS = mean (v - v_old)(x_s - mu_old),  mu_old = A x_t + B v_old

and the gradient with respect to v, for cotangents g of the four columns,

    dL/dv = [-2 B g_E2 (x_s - mu) + 2 g_DREF2 (v - v_ref) + 2 g_DOLD2 (v - v_old) + g_CROSS (x_s - mu_old)] / D.

Everything is computed in float32, or in float64 when an input is float64.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
from torch import Tensor

from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = ["CROSS", "DOLD2", "DREF2", "E2", "NUM_MOMENTS", "Inputs", "backward", "forward"]

E2, DREF2, DOLD2, CROSS = range(4)
NUM_MOMENTS = 4


class Inputs(NamedTuple):
    """What both bodies are given: latents [R, ...] of one shape, A and B [R]."""

    v_cond: Tensor
    v_uncond: Tensor | None
    guidance: float
    x_t: Tensor
    x_s: Tensor
    A: Tensor
    B: Tensor
    v_old: Tensor | None = None
    v_ref: Tensor | None = None

    def compute_dtype(self) -> torch.dtype:
        """float64 if any latent is, else float32."""
        return compute_dtype(self.v_cond, self.v_uncond, self.x_t, self.x_s, self.v_old, self.v_ref)


def forward(a: Inputs) -> Tensor:
    """Returns [R, 4] in the compute dtype; absent v_old or v_ref leave a 0."""
    dtype = a.compute_dtype()
    v, drift, target, b = _parts(a, dtype)
    columns = [(target - (drift + b * v)).square().mean(1)] + [v.new_zeros(len(v))] * 3
    if a.v_ref is not None:
        columns[DREF2] = (v - rows(a.v_ref, dtype)).square().mean(1)
    if a.v_old is not None:
        old = rows(a.v_old, dtype)
        columns[DOLD2] = (v - old).square().mean(1)
        columns[CROSS] = ((v - old) * (target - (drift + b * old))).mean(1)
    return torch.stack(columns, 1)


def backward(grad: Tensor, a: Inputs, into_uncond: bool) -> tuple[Tensor, Tensor]:
    """grad: [R, 4]. Returns the gradients of v_cond and v_uncond, contiguous, each in the dtype of its tensor.

    The second is empty unless `into_uncond`: no gradient is asked for, or there is no unconditional branch.
    """
    dtype = a.compute_dtype()
    v, drift, target, b = _parts(a, dtype)
    g = (grad.to(dtype) / v.shape[1]).unsqueeze(-1).unbind(1)
    total = (-2 * b * g[E2]) * (target - (drift + b * v))
    if a.v_ref is not None:
        total = total + (2 * g[DREF2]) * (v - rows(a.v_ref, dtype))
    if a.v_old is not None:
        old = rows(a.v_old, dtype)
        total = total + (2 * g[DOLD2]) * (v - old) + g[CROSS] * (target - (drift + b * old))
    total = total.reshape(a.v_cond.shape)
    empty = a.v_cond.new_empty(0)
    if a.v_uncond is None:
        return total.to(a.v_cond.dtype), empty
    to_uncond = ((1 - a.guidance) * total).to(a.v_uncond.dtype) if into_uncond else empty
    return (a.guidance * total).to(a.v_cond.dtype), to_uncond


def _parts(a: Inputs, dtype: torch.dtype) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """v, A x_t and x_s [R, D], and B [R, 1]."""
    v = rows(guide(a.v_cond, a.v_uncond, a.guidance, dtype), dtype)
    return v, column(a.A, dtype) * rows(a.x_t, dtype), rows(a.x_s, dtype), column(a.B, dtype)
