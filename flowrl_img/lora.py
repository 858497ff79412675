"""LoRA files: reading them strictly, checking that they fit a base, and putting them on a network.

Only safetensors are read. Layouts: diffusers' (`transformer.<module>.lora_A.weight`, rank and alpha in the file's
metadata) and ComfyUI's for Stable Diffusion 3. Left out: adapters of text encoders, DoRA, LoKr.
"""

from __future__ import annotations

import json
import math
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor, nn

__all__ = ["LoraFile", "Pair", "pairs_of", "read_lora"]

PREFIXES = ("transformer", "unet")
METADATA = "lora_adapter_metadata"  # where diffusers keeps the configuration of an adapter
OTHER_BASE = "give the base it was made for with model.path=..."
NAME = re.compile(rf"({'|'.join(PREFIXES)})\.(.+)\.lora_([AB])\.weight")


@dataclass(frozen=True)
class Pair:
    """The adapter of one linear layer: its weight changes by scale * up @ down. down: [r, in]; up: [out, r]."""

    down: Tensor
    up: Tensor
    alpha: float

    def __post_init__(self) -> None:
        if self.down.ndim != 2 or self.up.ndim != 2 or self.down.shape[0] != self.up.shape[1]:
            raise ValueError(f"the ranks of {list(self.down.shape)} and {list(self.up.shape)} differ")
        if not self.down.shape[0] or not math.isfinite(self.alpha):
            raise ValueError(f"an adapter needs a rank and a finite alpha, got {self.down.shape[0]} and {self.alpha}")

    @property
    def scale(self) -> float:
        """alpha / r."""
        return self.alpha / self.down.shape[0]


@dataclass(frozen=True)
class LoraFile:
    """pairs: by module name inside the network."""

    path: Path
    pairs: Mapping[str, Pair]

    def check_fits(self, network: nn.Module, base: str) -> None:
        """ValueError where a module or a width differs. network: weights are not read, it may be on the meta device."""
        modules = dict(network.named_modules())
        for name, pair in self.pairs.items():
            module = modules.get(name)
            if not isinstance(module, nn.Linear):
                raise ValueError(f"{self.path} adapts {name!r}, which {base} does not have: {OTHER_BASE}")
            found, wanted = (pair.down.shape[1], pair.up.shape[0]), (module.in_features, module.out_features)
            if found != wanted:
                raise ValueError(
                    f"{self.path} was made for another base than {base}: {name} maps {wanted[0]} to {wanted[1]} there, "
                    f"{found[0]} to {found[1]} in the file; {OTHER_BASE}"
                )

    def attach(self, network: Any, adapter: str) -> None:
        """Add the pairs to a diffusers network as the adapter `adapter`, in float32, frozen."""
        state = {f"{m}.lora_A.weight": p.down for m, p in self.pairs.items()}
        state |= {f"{m}.lora_B.weight": p.up for m, p in self.pairs.items()}
        ranks = {m: p.down.shape[0] for m, p in self.pairs.items()}
        alphas = {m: p.alpha for m, p in self.pairs.items()}
        rank, alpha = (Counter(values.values()).most_common(1)[0][0] for values in (ranks, alphas))
        facts = {
            "r": rank, "lora_alpha": alpha, "target_modules": sorted(self.pairs),
            "rank_pattern": {m: r for m, r in ranks.items() if r != rank},
            "alpha_pattern": {m: a for m, a in alphas.items() if a != alpha},
        }  # fmt: skip
        network.load_lora_adapter(state, prefix=None, adapter_name=adapter, metadata=facts)
        loaded = {
            n: p for n, p in network.named_parameters() if f".lora_A.{adapter}." in n or f".lora_B.{adapter}." in n
        }
        if len(loaded) != len(state):
            raise RuntimeError(f"{len(loaded)} of {len(state)} tensors of {self.path} arrived in the network")
        for parameter in loaded.values():
            parameter.data = parameter.data.float()
            parameter.requires_grad_(False)


def read_lora(path: Path) -> LoraFile:
    """Every tensor of `path` as a pair. ValueError names what is not understood; nothing is unpickled."""
    from safetensors import SafetensorError, safe_open

    from flowrl_img.export.comfyui import from_comfyui, is_comfyui

    try:
        with safe_open(path, framework="pt") as file:
            tensors = {name: file.get_tensor(name) for name in file.keys()}  # noqa: SIM118 - not a mapping
            metadata = file.metadata() or {}
    except SafetensorError as error:
        raise ValueError(f"{path} is not a safetensors file: {error}") from None
    try:
        pairs = from_comfyui(tensors) if is_comfyui(tensors) else pairs_of(tensors, metadata)
    except ValueError as error:
        raise ValueError(f"{path}: {error}") from None
    return LoraFile(path, pairs)


def pairs_of(tensors: Mapping[str, Tensor], metadata: Mapping[str, str]) -> dict[str, Pair]:
    """The pairs of a file in diffusers' layout. Without metadata alpha is the rank, as diffusers reads it."""
    halves: dict[str, dict[str, Tensor]] = {}
    for name, tensor in tensors.items():
        found = NAME.fullmatch(name)
        if not found:
            raise ValueError(
                f"{name!r} is no LoRA weight of a denoiser in diffusers' layout "
                "(transformer.<module>.lora_A.weight) or ComfyUI's"
            )
        halves.setdefault(found[2], {})[found[3]] = tensor.float()
    lonely = [module for module, pair in halves.items() if len(pair) < 2]
    if lonely or not halves:
        raise ValueError(f"lora_A and lora_B come in pairs: {lonely[:3] or 'the file is empty'}")
    facts = _facts(metadata)
    return {module: _pair(module, half["A"], half["B"], facts) for module, half in halves.items()}


def _facts(metadata: Mapping[str, str]) -> dict[str, Any]:
    """The adapter's configuration without the prefix of its network. ValueError where it is of another kind."""
    stored = json.loads(metadata.get(METADATA, "{}"))
    if not isinstance(stored, dict):
        raise ValueError(f"its metadata {METADATA} is no JSON object")
    facts = {name.partition(".")[2]: value for name, value in stored.items() if name.partition(".")[0] in PREFIXES}
    if facts.get("use_dora"):
        raise ValueError("it is a DoRA, whose weights are not the sum of base and adapter: merge it first")
    return facts


def _pair(module: str, down: Tensor, up: Tensor, facts: Mapping[str, Any]) -> Pair:
    rank = _by_pattern(module, facts.get("rank_pattern"), facts.get("r", down.shape[0]))
    if rank != down.shape[0]:
        raise ValueError(f"{module} has rank {down.shape[0]}, the file's metadata says {rank}")
    if up.shape[1] != rank:
        raise ValueError(f"{module}: lora_A has rank {rank}, lora_B has rank {up.shape[1]}")
    alpha = _by_pattern(module, facts.get("alpha_pattern"), facts.get("lora_alpha", rank))
    if isinstance(alpha, bool) or not isinstance(alpha, (int, float)):
        raise ValueError(f"{module}: the file's metadata says alpha is {alpha!r}, which is no number")
    # rank-stabilised adapters are scaled by alpha / sqrt(r)
    return Pair(down, up, alpha * math.sqrt(rank) if facts.get("use_rslora") else float(alpha))


def _by_pattern(module: str, patterns: Mapping[str, Any] | None, default: Any) -> Any:
    """peft's rule: a pattern names a module by its whole name or its end."""
    for pattern, value in (patterns or {}).items():
        try:
            found = re.fullmatch(rf"(.*\.)?({pattern})", module)
        except re.error as error:
            raise ValueError(f"the pattern {pattern!r} in the file's metadata is none: {error}") from None
        if found:
            return value
    return default
