"""Randomness keyed by identity: a seed is a pure function of names, never of a position in a stream.

Resuming, sharding over more processes and replaying one sample are therefore exact by construction. Normals are drawn
on the CPU, so a GPU run and a CPU run start from the same noise.
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import torch
from torch import Tensor

__all__ = ["key", "normal", "permutation"]


def key(*parts: int | str) -> int:
    """A 63-bit seed from the parts, e.g. `key(run_seed, "sde", rollout, prompt_id, image, step)`."""
    text = "\x1f".join(f"{type(part).__name__}:{part}" for part in parts)
    return int.from_bytes(hashlib.blake2b(text.encode(), digest_size=8).digest(), "big") >> 1


def normal(keys: Sequence[int], shape: Sequence[int], device: torch.device | str = "cpu") -> Tensor:
    """Standard normals, float32 [len(keys), *shape]; row i depends on keys[i] alone."""
    rows = [torch.randn(tuple(shape), generator=torch.Generator().manual_seed(k)) for k in keys]
    return torch.stack(rows).to(device)


def permutation(count: int, *parts: int | str) -> list[int]:
    """A permutation of range(count) that is the same on every process."""
    return torch.randperm(count, generator=torch.Generator().manual_seed(key(*parts))).tolist()
