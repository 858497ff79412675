r"""Reference body of a sampling step, in plain PyTorch. `step_triton.py` is the same maths, fused.

    mean = a x + b y,   out = mean + c z (or mean, without z),   rounded to the dtype it is stored in,
    RESIDUAL2 = mean over a row of (out - mean)^2, taken at `out` as stored.

In the order of rounding of `samplers/loop.py`: both products, their sum, the noise term, the last sum.
Everything is computed in float32, or in float64 when an input is float64.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = ["forward"]


def forward(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, z: Tensor | None, c: Tensor | None, dtype: torch.dtype, measure: bool
) -> tuple[Tensor, Tensor]:
    """x, y, z: [R, ...]; a, b, c: [R]. Returns out [R, ...], contiguous, and RESIDUAL2 [R], empty unless `measure`."""
    wide = compute_dtype(x, y, z)
    mean = column(a, wide) * rows(x, wide) + column(b, wide) * rows(y, wide)
    value = mean if z is None or c is None else mean + column(c, wide) * rows(z, wide)
    out = value.to(dtype)
    residual2 = (out.to(wide) - mean).square().mean(1) if measure else mean.new_empty(0)
    return out.view(x.shape), residual2
