"""Generator and trainable weights as a configuration asks for them, on the device of this process."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import torch

from flowrl_img import plugins
from flowrl_img.attention import set_attention
from flowrl_img.config import Config
from flowrl_img.needs import Needs
from flowrl_img.resources import asset
from flowrl_img.seeds import key
from flowrl_img.weights import WeightSets, sets_of

__all__ = ["DTYPES", "accelerator", "load_model", "load_weights", "model_source"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}


def model_source(path: str) -> str:
    """`pico` is the packaged model; a path must exist; anything else of the form owner/name is a hub id."""
    if path == "pico":
        return str(asset("pico/model_index.json").parent)
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"model.path: {path} holds no model_index.json: give the folder of a saved pipeline"
            )
        return path
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise FileNotFoundError(f"model.path: no folder {path!r}, and it is no hub id of the form owner/name")
    return path


def load_model(config: Config, device: torch.device) -> Any:
    """The generator with every parameter frozen. Full fine-tuning keeps its weights in float32."""
    family = plugins.resolve("models", config.model.family, where="model.family")
    dtype = DTYPES[config.model.dtype]
    model = family.load(
        model_source(config.model.path), dtype=dtype, device=device, resolution=config.model.resolution,
        weights_dtype=dtype if config.weights.kind == "lora" else torch.float32,
        max_sequence_length=config.model.max_sequence_length,
    )  # fmt: skip
    set_attention(model.network, config.model.attention)
    if config.model.gradient_checkpointing:
        model.network.enable_gradient_checkpointing()
    return model


def load_weights(config: Config, model: Any, needs: Needs) -> WeightSets:
    """The trainable weights on a loaded model, with the sets that the objective and the rollout read."""
    return WeightSets(
        model.network, config.weights, model.lora_targets, seed=key(config.run.seed, "adapter"),
        keep=sets_of(config, needs),
    )  # fmt: skip


def accelerator() -> Any:
    """An accelerate.Accelerator where a launcher or a GPU asks for one; a plain CPU run needs none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.cuda.is_available():
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())
