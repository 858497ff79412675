"""Velocities of the weight sets that an objective compares with, without gradient and in as few passes as there are.

The old (or trust) set and the reference see the same inputs, so with LoRA and without guidance they are one batch.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence
from typing import Any

import torch
from torch import Tensor

from flowrl_img.guidance import guided
from flowrl_img.weights import WeightSets

__all__ = ["other_velocities"]


@torch.no_grad()
def other_velocities(
    model: Any, weights: WeightSets, names: Collection[str], x_t: Tensor, sigma: Tensor, texts: Sequence[str], *,
    guidance: float, reference_guidance: float,
) -> dict[str, Tensor]:  # fmt: skip
    """Guided velocities [R, ...], float32, by set. x_t: [R, ...]; sigma: [R]; texts: R prompts.

    reference_guidance: guidance of the set "reference"; `guidance` is that of all others.
    """
    stored = sorted(set(names) - {"reference"})
    found: dict[str, Tensor] = {}
    unguided = guidance == reference_guidance == 1.0
    if "reference" in names and stored and unguided and weights.config.kind == "lora":
        name = stored.pop()
        with weights.beside_reference(name, len(x_t)):
            both = guided(model, torch.cat([x_t, x_t]), torch.cat([sigma, sigma]), [*texts, *texts], 1.0)
        found[name], found["reference"] = both.chunk(2)
    elif "reference" in names:
        with weights.use("reference"):
            found["reference"] = guided(model, x_t, sigma, texts, reference_guidance)
    for name in stored:
        with weights.use(name):
            found[name] = guided(model, x_t, sigma, texts, guidance)
    return found
