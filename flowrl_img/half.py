"""The backward pass of a network in float16, kept inside that format's range.

Losses are means over D latent elements, so the gradient that enters the network is of the size 1 / (D N) for N points
of an update: at published sizes below 6e-8, the smallest float16, and every weight would get exactly 0. The loss is
therefore multiplied by a power of two near D, what enters the network is scaled until its largest element is near 1,
and the float32 gradients of the weights are scaled back. Powers of two round nothing, and no state is kept between
passes, so a run may stop and go on. Other precisions have the exponents of float32 and need none of this.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from typing import Any

import torch
from torch import Tensor, nn

__all__ = ["HalfBackward"]


class HalfBackward:
    """Backward passes through one network. Example: `HalfBackward(network, parameters, 65536)(loss.sum(), 1e4)`."""

    def __init__(self, network: nn.Module, parameters: Iterable[Tensor], elements: int) -> None:
        """parameters: the float32 weights that train. elements: of one latent."""
        self.lift = 2.0 ** round(math.log2(elements))
        self.back: Tensor | float = 1.0
        network.register_full_backward_pre_hook(self._entering)
        for parameter in parameters:
            parameter.register_hook(self._leaving)

    def __call__(self, loss: Tensor, total: float) -> None:
        """Add the gradient of `loss / total` to the parameters'. loss: sum over the rows of one forward."""
        self.total, self.back = total, 1.0
        (loss * self.lift).backward()

    def _entering(self, module: nn.Module, gradients: Any) -> Any:
        """Scale what enters the network, so that its largest element lies in [1/2, 1)."""
        largest = torch.stack([g.abs().max().float() for g in gradients if g is not None]).max()
        exponent = torch.frexp(largest).exponent.clamp(-40, 40)
        self.back = torch.ldexp(largest.new_ones(()), exponent)
        up = torch.ldexp(largest.new_ones(()), -exponent)
        return tuple(None if g is None else (g.float() * up).to(g.dtype) for g in gradients)

    def _leaving(self, gradient: Tensor) -> Tensor:
        return gradient * (self.back / (self.lift * self.total))
