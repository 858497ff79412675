"""Which attention kernel a network uses: `model.attention = auto | sdpa | xformers`.

The switch is diffusers' own: its attention backends where a network's processors know them, and its xFormers
processors where they do not (Stable Diffusion 3 calls PyTorch's attention directly, so the backend switch alone would
be accepted and do nothing). What was asked for is what runs, or an error says why not. `auto` is `sdpa`: PyTorch's
fused attention needs no extra package and equals it elsewhere.
"""

from __future__ import annotations

import importlib.util
from importlib import metadata
from typing import Any

__all__ = ["set_attention", "xformers_problem"]

BACKENDS = {"sdpa": "native", "xformers": "xformers"}


def set_attention(network: Any, attention: str) -> str:
    """Switch `network` (a diffusers model) and return what is used: "sdpa" or "xformers".

    Raises ValueError when xFormers is asked for and cannot run here, naming the extra and the torch to match.
    """
    chosen = "sdpa" if attention == "auto" else attention
    if chosen not in BACKENDS:
        raise ValueError(f"model.attention = {attention!r}: choose auto, {' or '.join(BACKENDS)}")
    if chosen == "xformers" and (problem := xformers_problem()):
        raise ValueError(f"model.attention = 'xformers': {problem}")
    processors = list(network.attn_processors.values())
    if any(hasattr(processor, "_attention_backend") for processor in processors):
        network.set_attention_backend(BACKENDS[chosen])
    elif chosen == "xformers":
        network.enable_xformers_memory_efficient_attention()
        switched = [p for p in network.attn_processors.values() if "XFormers" in type(p).__name__]
        if len(switched) < len(processors):
            raise ValueError(
                f"model.attention = 'xformers': only {len(switched)} of {len(processors)} attention layers of "
                f"{type(network).__name__} can use it; set model.attention = sdpa"
            )
    return chosen


def xformers_problem() -> str | None:
    """Why xFormers cannot run here, with the fix; None if it can."""
    import torch

    if importlib.util.find_spec("xformers") is None:
        return f"xformers is not installed: pip install 'flowrl-img[xformers]', built for torch {torch.__version__}"
    try:
        import xformers.ops  # noqa: F401
    except (ImportError, OSError, RuntimeError) as error:
        return (
            f"xformers {_version('xformers')} does not load with torch {torch.__version__} ({error}): "
            f"install the release of 'flowrl-img[xformers]' that matches this torch ({_wanted_torch()})"
        )
    if not torch.cuda.is_available():
        return "its kernels need a CUDA device and torch sees none: set model.attention = sdpa"
    return None


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return "(unknown version)"


def _wanted_torch() -> str:
    """The torch requirement that the installed xformers states."""
    try:
        requirements = metadata.requires("xformers") or []
    except metadata.PackageNotFoundError:
        requirements = []
    return next((r for r in requirements if r.startswith("torch")), "its metadata names none")
