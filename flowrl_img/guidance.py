"""Velocities under classifier-free guidance, evaluated one way by rollout, training and evaluation."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img.kernels.guidance import guided_velocity

__all__ = ["branches", "guided"]

NEGATIVE = ""  # the stock pipelines' negative prompt


def branches(
    model: Any, x_t: Tensor, sigma: Tensor, texts: Sequence[str], guidance: float
) -> tuple[Tensor, Tensor | None]:
    """(v_cond, v_uncond) in the network's dtype; one batch of 2 B rows, or B rows and None when guidance is 1."""
    if guidance == 1.0:
        return model.velocity(x_t, sigma, model.encode(texts)), None
    both = model.encode([*texts, *[NEGATIVE] * len(texts)])
    v = model.velocity(torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), both)
    v_cond, v_uncond = v.chunk(2)
    return v_cond, v_uncond


def guided(model: Any, x_t: Tensor, sigma: Tensor, texts: Sequence[str], guidance: float) -> Tensor:
    """The guided velocity in float32, by the same arithmetic that the transition moments use."""
    return guided_velocity(*branches(model, x_t, sigma, texts, guidance), guidance)
