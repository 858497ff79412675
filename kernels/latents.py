"""What every op does with its latents around its own maths: check them, pick dtype and body, lay them out as rows.

Left out: the maths, and the Triton side of the same (`launch_triton.py`).
"""

from __future__ import annotations

import importlib
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.backend import use_triton

__all__ = ["body", "check_latents", "check_scalars", "column", "compute_dtype", "refuse_gradients", "rows"]


def compute_dtype(*tensors: Tensor | None) -> torch.dtype:
    """float64 if any tensor is, else float32."""
    return torch.float64 if any(x is not None and x.dtype == torch.float64 for x in tensors) else torch.float32


def rows(x: Tensor, dtype: torch.dtype) -> Tensor:
    """[R, ...] of any strides -> [R, D] contiguous in `dtype`, so that equal numbers are summed in equal order."""
    return x.to(dtype).contiguous().flatten(1)


def column(scalar: Tensor, dtype: torch.dtype) -> Tensor:
    """[R] -> [R, 1] in `dtype`."""
    return scalar.to(dtype).unsqueeze(1)


def check_latents(name: str, first: Tensor, others: Mapping[str, Tensor | None]) -> None:
    """ValueError unless `first` (called `name`) is [R, ...] with elements and the others share its shape and device."""
    if first.ndim < 2 or first[:1].numel() == 0 < first.shape[0]:
        raise ValueError(f"latents must be [rows, ...] with elements in each row, got shape {tuple(first.shape)}")
    for other, value in others.items():
        if value is not None and (value.shape != first.shape or value.device != first.device):
            raise ValueError(
                f"{other} is {tuple(value.shape)} on {value.device}, {name} is {tuple(first.shape)} on "
                f"{first.device}: they must agree"
            )


def check_scalars(num_rows: int, scalars: Mapping[str, Tensor]) -> None:
    """ValueError unless each scalar is one number per row, [R]."""
    for name, scalar in scalars.items():
        if scalar.shape != (num_rows,):
            raise ValueError(f"{name} must be one number per row, [{num_rows}], got {tuple(scalar.shape)}")


def refuse_gradients(constants: Mapping[str, Tensor | None]) -> None:
    """ValueError if a tensor that gets no gradient asks for one, which would otherwise be lost in silence."""
    if torch.is_grad_enabled():
        for name, value in constants.items():
            if value is not None and value.requires_grad:
                raise ValueError(f"{name} requires grad but no gradient flows into it: pass {name}.detach()")


def body(op: str, *latents: Tensor | None) -> Any:
    """The module that holds the body of `op` for these tensors; the first is never None.

    Triton is imported only when it is chosen.
    """
    first = latents[0]
    assert first is not None
    chosen = "triton" if use_triton(first.device, compute_dtype(*latents)) else "torch"
    return importlib.import_module(f"flowrl_img.kernels.{op}_{chosen}")
