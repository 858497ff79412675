"""Checkpoints: safetensors and JSON, written whole or not at all, and nothing is ever unpickled.

checkpoint-000120/
    manifest.json        counters, rewards remembered per prompt, and the list of tensors; written last
    state.safetensors    trained weights, other weight sets, optimizer moments
    adapter/             what stock diffusers loads (averaged weights where there is an average)
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl_img.weights import ADAPTER, WeightSets

__all__ = ["MANIFEST", "latest", "load_adapter_tensors", "load_checkpoint", "save_adapter", "save_checkpoint"]

MANIFEST = "manifest.json"


def save_checkpoint(folder: Path, trainer: Any) -> Path:
    """Write `folder/checkpoint-<update>` through a temporary folder; returns it."""
    from safetensors.torch import save_file

    final = folder / f"checkpoint-{trainer.update:06d}"
    partial = folder / f".{final.name}.part"
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    state = _tensors(trainer)
    save_file(state, partial / "state.safetensors")
    export(partial / "adapter", trainer.model, trainer.weights)
    histories = {name: history.rewards for name, history in trainer.histories.items()}
    manifest = {
        "update": trainer.update, "rollout": trainer.rollout, "histories": histories, "tensors": sorted(state),
    }  # fmt: skip
    (partial / MANIFEST).write_text(json.dumps(manifest, indent=1))
    if final.exists():
        shutil.rmtree(final)
    partial.rename(final)
    return final


def export(folder: Path, model: Any, weights: WeightSets) -> None:
    """The tuned weights in diffusers' own layout: a LoRA with rank and alpha, or the full transformer."""
    with weights.use("ema" if "ema" in weights.sets else "current"):
        if weights.config.kind == "lora":
            save_adapter(folder, model, weights.network)
        else:
            model.network.save_pretrained(folder / "transformer", max_shard_size="4GB")


def save_adapter(folder: Path, model: Any, network: Any) -> None:
    """The current weights of the adapter as diffusers loads them, rank and alpha in the file's metadata."""
    from peft.utils import get_peft_model_state_dict

    layers = get_peft_model_state_dict(network, adapter_name=ADAPTER)
    config = network.peft_config[ADAPTER]
    # A set of names has no order, and the file should be the same each time.
    facts = {**config.to_dict(), "target_modules": sorted(config.target_modules)}
    type(model.pipeline).save_lora_weights(
        folder,
        transformer_lora_layers={name: tensor.detach().cpu().contiguous() for name, tensor in layers.items()},
        transformer_lora_adapter_metadata=facts,
    )


def _tensors(trainer: Any) -> dict[str, Tensor]:
    """Every stateful tensor of a run, by name."""
    named = trainer.weights.trainable
    state = {f"current.{name}": p.detach().cpu().clone() for name, p in named.items()}
    for label, tensors in trainer.weights.sets.items():
        state |= {f"{label}.{name}": t.cpu().clone() for name, t in zip(named, tensors, strict=True)}
    for name, parameter in named.items():
        for key, value in trainer.optimizer.state.get(parameter, {}).items():
            state[f"optimizer.{key}.{name}"] = torch.as_tensor(value).cpu().clone()
    return state


def latest(folder: Path) -> Path:
    """The newest complete checkpoint of a run folder, or `folder` itself if it is one. FileNotFoundError if none."""
    if (folder / MANIFEST).is_file():
        return folder
    complete = [p.parent for p in folder.glob(f"checkpoint-*/{MANIFEST}") if p.parent.name[11:].isdigit()]
    if not complete:
        raise FileNotFoundError(f"no complete checkpoint in {folder}: a checkpoint holds a {MANIFEST}")
    return max(complete, key=lambda p: int(p.name[11:]))


def _read(file: Path) -> dict[str, torch.Tensor]:
    """ValueError for a file that is cut off or something else."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        return load_file(file)
    except SafetensorError as error:
        raise ValueError(f"{file} is damaged ({error}): delete its checkpoint to go on from the one before") from error


def load_adapter_tensors(folder: Path, weights: WeightSets, label: str) -> None:
    """Load the set `label` ("ema", "current") of a checkpoint into the current weights."""
    state = _read(latest(folder) / "state.safetensors")
    _check(set(state), {f"{label}.{n}" for n in weights.trainable}, subset=True)
    with torch.no_grad():
        for name, parameter in weights.trainable.items():
            parameter.copy_(state[f"{label}.{name}"])


def load_checkpoint(folder: Path, trainer: Any) -> None:
    """Put a run back exactly where the checkpoint was taken. ValueError on a damaged file or unequal tensors."""
    source = latest(folder)
    manifest = json.loads((source / MANIFEST).read_text())
    state = _read(source / "state.safetensors")
    _check(set(state), set(manifest["tensors"]))
    if set(manifest["histories"]) != set(trainer.histories):
        raise ValueError(
            f"the checkpoint remembers rewards for {sorted(manifest['histories'])}, this run for "
            f"{sorted(trainer.histories)}; use the advantage section it was made with"
        )
    weights = trainer.weights
    current = {f"current.{n}" for n in weights.trainable}
    sets = {f"{label}.{n}" for label in weights.sets for n in weights.trainable}
    moments = {name for name in state if name.startswith("optimizer.")}
    _check(set(state) - moments, current | sets)
    with torch.no_grad():
        for index, (name, parameter) in enumerate(weights.trainable.items()):
            parameter.copy_(state[f"current.{name}"])
            for label, tensors in weights.sets.items():
                tensors[index].copy_(state[f"{label}.{name}"])
            keys = ("step", "exp_avg", "exp_avg_sq")
            found = {key: state[f"optimizer.{key}.{name}"] for key in keys if f"optimizer.{key}.{name}" in state}
            if found:
                trainer.optimizer.state[parameter] = {
                    key: value if key == "step" else value.to(parameter.device) for key, value in found.items()
                }
    trainer.update, trainer.rollout = manifest["update"], manifest["rollout"]
    for name, history in trainer.histories.items():
        history.rewards = manifest["histories"][name]


def _check(found: set[str], wanted: set[str], subset: bool = False) -> None:
    missing, extra = sorted(wanted - found), [] if subset else sorted(found - wanted)
    if missing or extra:
        raise ValueError(
            f"the checkpoint does not fit this run: {len(missing)} tensors missing {missing[:3]}, "
            f"{len(extra)} extra {extra[:3]}; use the recipe and model it was made with"
        )
