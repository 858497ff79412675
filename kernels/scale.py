"""x times one number per row, twice over in one read: the gradient op `flowrl_img::scale_rows` of the linear ops."""

from __future__ import annotations

import torch
from torch import Tensor

from flowrl_img.kernels.latents import body

__all__ = ["scale_rows"]


@torch.library.custom_op("flowrl_img::scale_rows", mutates_args=())
def _scale_rows(
    x: Tensor, first: Tensor | None, second: Tensor | None, first_dtype: torch.dtype, second_dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    outputs: tuple[Tensor, Tensor] = body("scale", x).forward(x, first, second, (first_dtype, second_dtype))
    return outputs


@_scale_rows.register_fake
def _(x, first, second, first_dtype, second_dtype):  # type: ignore[no-untyped-def]
    shapes = ((0,) if factor is None else x.shape for factor in (first, second))
    return tuple(x.new_empty(shape, dtype=dtype) for shape, dtype in zip(shapes, (first_dtype, second_dtype)))


def scale_rows(
    x: Tensor, first: Tensor | None, second: Tensor | None, first_dtype: torch.dtype, second_dtype: torch.dtype
) -> tuple[Tensor | None, Tensor | None]:
    """x: [R, ...]; factors [R], in the compute dtype. (first x, second x), each rounded once; None for no factor."""
    if first is None and second is None:
        return None, None
    one, two = _scale_rows(x, first, second, first_dtype, second_dtype)
    return None if first is None else one, None if second is None else two
