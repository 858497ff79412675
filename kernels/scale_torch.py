"""Reference body of row-wise scaling: the backward pass of every op that is linear in its velocities.

out_i = factor_i x, factor_i one number per row.
"""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.latents import column, compute_dtype, rows

__all__ = ["forward"]


def forward(
    x: Tensor, first: Tensor | None, second: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """x: [R, ...]; factors [R]. Returns both products, contiguous, each in its dtype; empty where a factor is None."""
    wide = compute_dtype(x)

    def scaled(factor: Tensor | None, dtype: torch.dtype) -> Tensor:
        if factor is None:
            return x.new_empty(0, dtype=dtype)
        return (column(factor, wide) * rows(x, wide)).to(dtype).view(x.shape)

    return scaled(first, dtypes[0]), scaled(second, dtypes[1])
