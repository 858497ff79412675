"""Triton body of row-wise scaling: one read of x, one write per factor. Signature and maths of `scale_torch.py`."""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.launch_triton import by_block, load, packed

__all__ = ["forward", "scale_kernel"]


@triton.jit
def scale_kernel(x, first, second, to_first, to_second, D, BLOCK: tl.constexpr):
    """Program (row, block) writes factor * x for each factor that is given."""
    row = tl.program_id(0).to(tl.int64)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = column < D
    offsets = row * D + column
    value = load(x, offsets, mask)
    if first is not None:
        tl.store(to_first + offsets, tl.load(first + row) * value, mask=mask)
    if second is not None:
        tl.store(to_second + offsets, tl.load(second + row) * value, mask=mask)


def forward(
    x: Tensor, first: Tensor | None, second: Tensor | None, dtypes: tuple[torch.dtype, torch.dtype]
) -> tuple[Tensor, Tensor]:
    """x: [R, ...]; factors [R]. Returns both products, contiguous, each in its dtype; empty where a factor is None."""
    outputs = [
        torch.empty((0,) if factor is None else x.shape, dtype=dtype, device=x.device)
        for factor, dtype in zip((first, second), dtypes)
    ]
    given = [out if factor is not None else None for factor, out in zip((first, second), outputs)]
    by_block(scale_kernel, (*packed(x, first, second), *given), x)
    return outputs[0], outputs[1]
