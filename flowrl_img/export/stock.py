"""The other side of `export --verify`: a process that knows stock diffusers and not this package.

    python -P stock.py TASK.json

TASK.json names a base pipeline, tensors of one network input, the arguments of one picture, and jobs, each a file to
load. For each job it writes what the loaded weights give: `<name>.safetensors` with `v` and `picture`, and a row of
`results.json` with the number of tensors in the file and of those that took effect, or the error that stopped it.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

LAYERS = "joint_blocks."


def main(task_file: str) -> None:
    """Do every job of the task; an error in one does not stop the others."""
    import torch
    from safetensors.torch import load_file, save_file

    task = json.loads(Path(task_file).read_text())
    folder = Path(task["results"])
    inputs = {name: tensor.to(task["device"]) for name, tensor in load_file(task["inputs"]).items()}
    pipeline = load_pipeline(task["base"], task["device"])
    rows = {}
    for job in task["jobs"]:
        try:
            with torch.no_grad(), JOBS[job["kind"]](pipeline, Path(job["path"])) as (loaded, counts):
                v = loaded.transformer(**inputs, return_dict=False)[0]
                generator = torch.Generator().manual_seed(task["seed"])
                shown = loaded(**task["call"], generator=generator, output_type="pt").images[0]
                picture = (shown * 255).round().byte().permute(1, 2, 0)
                save_file(
                    {"v": v.float().cpu().contiguous(), "picture": picture.cpu().contiguous()},
                    folder / f"{job['name']}.safetensors",
                )
                rows[job["name"]] = counts
        except Exception as error:  # whatever stops the stock library is the answer
            rows[job["name"]] = {"error": f"{type(error).__name__}: {error}"}
    (folder / "results.json").write_text(json.dumps(rows))


def load_pipeline(base: str, device: str) -> Any:
    """The base in float32."""
    import torch
    from diffusers import DiffusionPipeline

    index = DiffusionPipeline.load_config(base)
    absent = {name: None for name, entry in index.items() if isinstance(entry, list) and entry == [None, None]}
    pipeline = DiffusionPipeline.from_pretrained(base, torch_dtype=torch.float32, use_safetensors=True, **absent)
    pipeline.set_progress_bar_config(disable=True)
    return pipeline.to(device)


@contextmanager
def lora(pipeline: Any, path: Path) -> Iterator[tuple[Any, dict[str, int]]]:
    """As every user of diffusers loads it."""
    written = len(tensors_of(path))
    try:
        pipeline.load_lora_weights(path.parent, weight_name=path.name, use_safetensors=True)
        names = [name for name, _ in pipeline.transformer.named_parameters()]
        matched = sum(".lora_A." in name or ".lora_B." in name for name in names)
        yield pipeline, {"written": written, "matched": matched}
    finally:
        pipeline.unload_lora_weights()


@contextmanager
def network(pipeline: Any, path: Path) -> Iterator[tuple[Any, dict[str, int]]]:
    """A whole network in the subfolder `transformer` of `path`."""
    import torch

    loaded = type(pipeline.transformer).from_pretrained(
        path, subfolder="transformer", torch_dtype=torch.float32, use_safetensors=True
    )
    written = sum(len(tensors_of(file)) for file in (path / "transformer").glob("*.safetensors"))
    matched = len(loaded.state_dict())
    device = pipeline.transformer.device
    with_it = type(pipeline)(**{**pipeline.components, "transformer": loaded.to(device).eval()})
    with_it.set_progress_bar_config(disable=True)
    yield with_it, {"written": written, "matched": matched}


@contextmanager
def comfyui_sd3(pipeline: Any, path: Path) -> Iterator[tuple[Any, dict[str, int]]]:
    """As ComfyUI reads it, by names of the original checkpoint; diffusers' own converter of such checkpoints says which
    weights those are here."""
    state = tensors_of(path)
    changes = _changes(state)
    used: set[str] = set()
    moved = _in_diffusers(pipeline.transformer, changes, used)
    kept = {}
    for name, change in moved.items():
        weight = pipeline.transformer.get_parameter(name)
        kept[name] = weight.detach().clone()
        weight.data += change.to(weight)
    try:
        loaded = sum(key.partition(".")[0] in used for key in state)
        yield pipeline, {"written": len(state), "matched": loaded}
    finally:
        for name, weight in kept.items():
            pipeline.transformer.get_parameter(name).data.copy_(weight)


def _changes(state: dict[str, Any]) -> dict[str, Any]:
    """(alpha / rank) up @ down by the name before the first dot; a missing alpha counts as the rank, as there."""
    found = {}
    for key in state:
        stem, _, end = key.partition(".")
        if end == "lora_up.weight":
            down = state[f"{stem}.lora_down.weight"].float()
            alpha = float(state[f"{stem}.alpha"]) if f"{stem}.alpha" in state else float(len(down))
            found[stem] = (alpha / len(down)) * state[key].float() @ down
    return found


def _in_diffusers(transformer: Any, changes: dict[str, Any], used: set[str]) -> dict[str, Any]:
    """The changes by diffusers' parameter names. used: gets the names that the converter asked for."""
    import torch
    from diffusers.loaders.single_file_utils import convert_sd3_transformer_checkpoint_to_diffusers

    class Checkpoint(dict):
        """Gives the changes under the original checkpoint's names, and placeholders for every other weight."""

        def pop(self, key: str, *default: Any) -> Any:
            stem = "lora_unet_" + key.removesuffix(".weight").replace(".", "_")
            if key.endswith(".weight") and stem in changes:
                used.add(stem)
                return changes[stem]
            return torch.zeros(6, 0)

    config = transformer.config
    held = Checkpoint({"context_embedder.weight": torch.zeros(6, 0), f"{LAYERS}{config.num_layers - 1}.": None})
    for layer in getattr(config, "dual_attention_layers", ()):
        held[f"{LAYERS}{layer}.x_block.attn2."] = None
    converted = convert_sd3_transformer_checkpoint_to_diffusers(held)
    return {name: change for name, change in converted.items() if change.numel()}


def tensors_of(path: Path) -> dict[str, Any]:
    """Every tensor of a safetensors file."""
    from safetensors.torch import load_file

    return load_file(path)


JOBS: dict[str, Callable[[Any, Path], Any]] = {"lora": lora, "network": network, "comfyui_sd3": comfyui_sd3}

if __name__ == "__main__":
    main(sys.argv[1])
