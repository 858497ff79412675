"""Adapters merged into whole weights: in float32, and cast once at the end."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl_img.export.verify import Expected, VerificationError, output

__all__ = ["Merge", "merge"]

LIMIT = 1e-5  # of the merge in float32, relative to the largest output or 1
HALF = 0.5  # of the tuning's change: a cast that moves outputs by more has lost it


@dataclass(frozen=True)
class Merge:
    """Differences of outputs on the fixed input, and what the saved weights give."""

    largest: float
    mean: float
    cast: float
    """root mean square difference that the cast made, relative to the change that tuning made"""
    tuned: Tensor

    def __str__(self) -> str:
        text = f"merged: largest output difference {self.largest:.1e}, mean {self.mean:.1e} (in float32)"
        return (
            text
            if self.cast == 0
            else f"{text}; the cast moves outputs by {100 * self.cast:.1f} % of the tuning's change"
        )


def merge(network: Any, folder: Path, expected: Expected, dtype: torch.dtype) -> Merge:
    """Merge the adapters of `network` (float32, changed in place) and save it as `folder`/transformer in `dtype`.

    A network without adapters is saved as it is. VerificationError where the merged network differs from base and
    adapter by more than 1e-5 in float32, or where the cast moves outputs by half of what tuning did.
    """
    if getattr(network, "peft_config", None):
        network.fuse_lora(safe_fusing=True)
        network.unload_lora()
    merged = output(network, expected.inputs)
    difference = (merged - expected.tuned).abs()
    torch.nn.Module.to(network, dtype)  # diffusers' own warns, of parts to keep in float32, where there are none
    network.save_pretrained(folder / "transformer", max_shard_size="4GB")
    given = merged if dtype == torch.float32 else output(torch.nn.Module.float(network), expected.inputs)
    change = float((expected.tuned - expected.base).square().mean().sqrt())
    moved = float((given - merged).square().mean().sqrt())
    cast = moved / change if change else (float("inf") if moved else 0.0)
    found = Merge(float(difference.max()), float(difference.mean()), cast, given)
    if found.largest > LIMIT * max(1.0, float(expected.tuned.abs().max())):
        raise VerificationError(f"{found}: more than rounding")
    if cast > HALF:
        raise VerificationError(f"{found}: too coarse for this tuning, choose --dtype fp32 or the LoRA")
    return found
