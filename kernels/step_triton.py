"""Triton body of a sampling step: one read of every input, one write. Signature and maths of `step_torch.py`."""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from flowrl_img.kernels.launch_triton import by_chunk, load, packed, row_means

__all__ = ["forward", "step_kernel"]


@triton.jit
def step_kernel(x, a, y, b, z, c, out, partial, D, CHUNK: tl.constexpr, BLOCK: tl.constexpr):
    """Program (row, chunk) writes its chunk of out and, unless partial is None, its sum of squared residuals."""
    row = tl.program_id(0).to(tl.int64)
    chunk = tl.program_id(1)
    scale_x = tl.load(a + row)
    scale_y = tl.load(b + row)
    residual2 = tl.zeros([BLOCK], tl.float32)
    for start in range(0, CHUNK, BLOCK):
        column = chunk * CHUNK + start + tl.arange(0, BLOCK)
        mask = column < D
        offsets = row * D + column
        mean = scale_x * load(x, offsets, mask) + scale_y * load(y, offsets, mask)
        value = mean
        if z is not None:
            value = mean + tl.load(c + row) * load(z, offsets, mask)
        stored = value.to(out.dtype.element_ty)
        tl.store(out + offsets, stored, mask=mask)
        residual = stored.to(tl.float32) - mean
        residual2 += residual * residual
    if partial is not None:
        tl.store(partial + row * tl.num_programs(1) + chunk, tl.sum(residual2))


def forward(
    x: Tensor, a: Tensor, y: Tensor, b: Tensor, z: Tensor | None, c: Tensor | None, dtype: torch.dtype, measure: bool
) -> tuple[Tensor, Tensor]:
    """x, y, z: [R, ...]; a, b, c: [R]. Returns out [R, ...], contiguous, and RESIDUAL2 [R], empty unless `measure`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    inputs = (*packed(x, a, y, b, z, c), out)
    if measure:
        return out, row_means(step_kernel, inputs, x, 1).squeeze(1)
    by_chunk(step_kernel, (*inputs, None), x)
    return out, x.new_empty(0, dtype=torch.float32)
