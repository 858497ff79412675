"""LoRA of Stable Diffusion 3 in the key layout of ComfyUI and kohya's scripts, and back.

That layout names the modules of the original checkpoint, dots as underscores, such as
`lora_unet_joint_blocks_0_x_block_attn_qkv`, with `.lora_down.weight` [r, in], `.lora_up.weight` [out, r] and `.alpha`.
The change of a weight is (alpha / r) up @ down, and without `.alpha` readers take alpha = r, so it is always written.
The q, k and v projections, separate in diffusers, are one matrix there: three adapters of rank r become one of rank 3 r
whose up matrix is block diagonal. Left out: modules whose rows are in another order there (norm1_context, norm_out).
"""

from __future__ import annotations

import re
from collections import defaultdict
from collections.abc import Mapping

import torch
from torch import Tensor

from flowrl_img.lora import Pair
from flowrl_img.plugins import nearest

__all__ = ["from_comfyui", "is_comfyui", "to_comfyui"]

PREFIX = "lora_unet_"
ENDS = ("lora_down.weight", "lora_up.weight", "alpha")
# Of a transformer block, by the path inside `joint_blocks.<k>`; a fused matrix lists its parts in the order of rows.
BLOCK: Mapping[str, tuple[str, ...]] = {
    "x_block.attn.qkv": ("attn.to_q", "attn.to_k", "attn.to_v"),
    "x_block.attn.proj": ("attn.to_out.0",),
    "x_block.attn2.qkv": ("attn2.to_q", "attn2.to_k", "attn2.to_v"),
    "x_block.attn2.proj": ("attn2.to_out.0",),
    "x_block.mlp.fc1": ("ff.net.0.proj",),
    "x_block.mlp.fc2": ("ff.net.2",),
    "x_block.adaLN_modulation.1": ("norm1.linear",),
    "context_block.attn.qkv": ("attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj"),
    "context_block.attn.proj": ("attn.to_add_out",),
    "context_block.mlp.fc1": ("ff_context.net.0.proj",),
    "context_block.mlp.fc2": ("ff_context.net.2",),
}
OUTSIDE: Mapping[str, str] = {
    "context_embedder": "context_embedder",
    "t_embedder.mlp.0": "time_text_embed.timestep_embedder.linear_1",
    "t_embedder.mlp.2": "time_text_embed.timestep_embedder.linear_2",
    "y_embedder.mlp.0": "time_text_embed.text_embedder.linear_1",
    "y_embedder.mlp.2": "time_text_embed.text_embedder.linear_2",
    "final_layer.linear": "proj_out",
}
PLACES = {part: (path, k) for path, parts in BLOCK.items() for k, part in enumerate(parts)}


def is_comfyui(names: Mapping[str, object]) -> bool:
    """Whether the names of a file's tensors are in this layout."""
    return any(name.startswith(PREFIX) for name in names)


def to_comfyui(pairs: Mapping[str, Pair]) -> dict[str, Tensor]:
    """pairs: by diffusers module name. ValueError for a module that has no counterpart there."""
    fused: dict[str, dict[int, Pair]] = defaultdict(dict)
    for module, pair in pairs.items():
        path, place = _place(module)
        fused[path][place] = pair
    tensors = {}
    for path, parts in fused.items():
        count = 3 if path.endswith("qkv") else 1
        pair = _joined(parts, count)
        stem = PREFIX + path.replace(".", "_")
        tensors[f"{stem}.lora_down.weight"] = pair.down.contiguous()
        tensors[f"{stem}.lora_up.weight"] = pair.up.contiguous()
        tensors[f"{stem}.alpha"] = torch.tensor(pair.alpha, dtype=torch.float32)
    return tensors


def from_comfyui(tensors: Mapping[str, Tensor]) -> dict[str, Pair]:
    """The same adapters by diffusers module name; exact for what `to_comfyui` wrote. ValueError for an unknown key."""
    stems = dict.fromkeys(name.partition(".")[0] for name in tensors)
    pairs: dict[str, Pair] = {}
    if strange := [name for name in tensors if name.partition(".")[2] not in ENDS]:
        raise ValueError(f"{strange[0]!r} is no part of a LoRA ({', '.join(ENDS)}): DoRA and LoKr are not read")
    for stem in stems:
        modules = _modules(stem)
        try:
            down, up = (tensors[f"{stem}.lora_{way}.weight"].float() for way in ("down", "up"))
        except KeyError as error:
            raise ValueError(f"the LoRA lacks {error.args[0]}") from None
        alpha = float(tensors[f"{stem}.alpha"]) if f"{stem}.alpha" in tensors else float(len(down))
        pairs |= dict(zip(modules, _parted(Pair(down, up, alpha), len(modules)), strict=True))
    return pairs


def _place(module: str) -> tuple[str, int]:
    """(path in the original checkpoint, place in a fused matrix) of a diffusers module."""
    found = re.fullmatch(r"transformer_blocks\.(\d+)\.(.+)", module)
    if found and found[2] in PLACES:
        path, place = PLACES[found[2]]
        return f"joint_blocks.{found[1]}.{path}", place
    for path, name in OUTSIDE.items():
        if name == module:
            return path, 0
    inner = module.split(".", 2)[-1]
    raise ValueError(
        f"no ComfyUI name for the adapter of {module!r} of Stable Diffusion 3; "
        f"{nearest(inner, [*PLACES, *OUTSIDE.values()])}"
    )


def _modules(stem: str) -> tuple[str, ...]:
    """The diffusers modules behind one adapter of that layout."""
    name = stem.removeprefix(PREFIX)
    if found := re.fullmatch(r"joint_blocks_(\d+)_(.+)", name):
        for path, parts in BLOCK.items():
            if path.replace(".", "_") == found[2]:
                return tuple(f"transformer_blocks.{found[1]}.{part}" for part in parts)
    for path, module in OUTSIDE.items():
        if path.replace(".", "_") == name:
            return (module,)
    raise ValueError(f"{stem!r} is no linear layer of Stable Diffusion 3 in ComfyUI's layout")


def _joined(parts: Mapping[int, Pair], count: int) -> Pair:
    """One adapter of all parts: downs stacked, ups block diagonal, zero rows where a part has no adapter."""
    if count == 1:
        return parts[0]
    scales = {pair.scale for pair in parts.values()}
    scale = scales.pop() if len(scales) == 1 else 1.0
    ranks = {k: len(pair.down) for k, pair in parts.items()}
    rank, rows = sum(ranks.values()), len(next(iter(parts.values())).up)
    up = torch.zeros(count * rows, rank)
    column = 0
    for k in sorted(parts):
        share = parts[k].up if parts[k].scale == scale else parts[k].up * (parts[k].scale / scale)
        up[k * rows : (k + 1) * rows, column : column + ranks[k]] = share
        column += ranks[k]
    return Pair(torch.cat([parts[k].down for k in sorted(parts)]), up, scale * rank)


def _parted(pair: Pair, count: int) -> list[Pair]:
    """The parts of a fused adapter, of lower rank where its up matrix is block diagonal with equal blocks."""
    if count == 1:
        return [pair]
    if pair.up.shape[0] % count:
        raise ValueError(f"a fused matrix of {count} parts cannot have {pair.up.shape[0]} rows")
    ups, rank = pair.up.chunk(count), len(pair.down)
    step = rank // count
    blocks = [slice(k * step, (k + 1) * step) for k in range(count)]
    if rank % count == 0 and all(
        not up[:, other].any() for k, up in enumerate(ups) for j, other in enumerate(blocks) if j != k
    ):
        return [Pair(pair.down[b], up[:, b], pair.alpha / count) for b, up in zip(blocks, ups, strict=True)]
    return [Pair(pair.down, up, pair.alpha) for up in ups]
