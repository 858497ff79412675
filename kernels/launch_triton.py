"""What the Triton bodies share: blocks, loads, the two-stage reduction and the launches.

The reduction has two stages and no atomics: a program sums one fixed chunk of one row, a second kernel adds a row's
chunks in order. Chunks depend on D alone, so a row's means are the same bits on every run and in every batch.
Floating-point contraction is off, so that arithmetic rounds exactly as PyTorch's, operation by operation.
No autotuning: the ops are bound by bandwidth, and block sizes that varied between machines would vary the sums.

Imported, as every `*_triton.py` here, only when Triton is chosen to run; see `backend.py`.
"""

# Triton reads annotations of kernel parameters as types, so pointers and blocks stay without.
# mypy: disable-error-code="no-untyped-def"
from __future__ import annotations

import contextlib
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

__all__ = ["BLOCK", "CHUNK", "OPTIONS", "by_block", "by_chunk", "load", "load_velocity", "packed", "row_means"]

CHUNK = 4096  # elements of a row per program: 16 programs per row of SD3 at 512 px, enough to fill a GPU from 8 rows
BLOCK = 1024
SUM_BLOCK = 128
OPTIONS: dict[str, Any] = {"num_warps": 4, "enable_fp_fusion": False}


@triton.jit
def load(pointer, offsets, mask):
    """A block of any float dtype, widened; masked lanes hold zeros."""
    return tl.load(pointer + offsets, mask=mask, other=0.0).to(tl.float32)


@triton.jit
def load_velocity(v_cond, v_uncond, guidance, offsets, mask):
    """`guidance_torch.guide`, in the same order of rounding."""
    v = load(v_cond, offsets, mask)
    if v_uncond is not None:
        u = load(v_uncond, offsets, mask)
        v = u + guidance * (v - u)
    return v


@triton.jit
def sum_chunks_kernel(partial, means, chunks, D, BLOCK: tl.constexpr):
    """Program i adds the chunks of one (row, column) pair in a fixed order and divides by D."""
    i = tl.program_id(0).to(tl.int64)
    total = tl.zeros([BLOCK], tl.float32)
    for start in range(0, chunks, BLOCK):
        column = start + tl.arange(0, BLOCK)
        total += tl.load(partial + i * chunks + column, mask=column < chunks, other=0.0)
    tl.store(means + i, tl.sum(total) / D)


def row_means(kernel: Any, inputs: tuple[Any, ...], like: Tensor, columns: int) -> Tensor:
    """Means over the D elements of each row. like: [R, ...], for its sizes. Returns [R, columns] float32.

    `kernel(*inputs, partial, D, CHUNK, BLOCK)`: its program (row, chunk) writes sums to partial [R, columns, chunks].
    """
    num_rows, D = len(like), like[:1].numel()
    means = like.new_empty((num_rows, columns), dtype=torch.float32)
    if num_rows == 0:
        return means
    chunks = triton.cdiv(D, CHUNK)
    partial = torch.empty((num_rows, columns, chunks), dtype=torch.float32, device=like.device)
    by_chunk(kernel, (*inputs, partial), like)
    with _on(like.device):
        sum_chunks_kernel[(num_rows * columns,)](partial, means, chunks, D, BLOCK=SUM_BLOCK, **OPTIONS)
    return means


def by_chunk(kernel: Any, arguments: tuple[Any, ...], like: Tensor) -> None:
    """Run `kernel(*arguments, D, CHUNK, BLOCK)` once for every (row, chunk) of `like` [R, ...]."""
    num_rows, D = len(like), like[:1].numel()
    if num_rows > 0:
        with _on(like.device):
            kernel[(num_rows, triton.cdiv(D, CHUNK))](*arguments, D, CHUNK=CHUNK, BLOCK=BLOCK, **OPTIONS)


def by_block(kernel: Any, arguments: tuple[Any, ...], like: Tensor) -> None:
    """Run `kernel(*arguments, D, BLOCK)` once for every (row, block) of `like` [R, ...]."""
    num_rows, D = len(like), like[:1].numel()
    if num_rows > 0:
        with _on(like.device):
            kernel[(num_rows, triton.cdiv(D, BLOCK))](*arguments, D, BLOCK=BLOCK, **OPTIONS)


def packed(*inputs: Any) -> tuple[Any, ...]:
    """Every tensor contiguous, so that one offset addresses an element in all of them."""
    return tuple(x.contiguous() if isinstance(x, Tensor) else x for x in inputs)


def _on(device: torch.device) -> contextlib.AbstractContextManager[Any]:
    """Triton launches on the current GPU, which need not be the one that holds the tensors."""
    return torch.cuda.device(device) if device.type == "cuda" else contextlib.nullcontext()
