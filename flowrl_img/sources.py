"""What is sampled: a base model and tuned weights, found and checked before any weights are loaded.

Tuned weights are named by a run folder (its latest checkpoint, averaged weights where there are some), a checkpoint, a
LoRA file or folder, a folder with a whole tuned network in `transformer/`, or a hub id `owner/name[/file.safetensors]`.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any, Protocol

import torch

from flowrl_img import plugins, recipes
from flowrl_img.adapters import adapter_layers, adapters_off, only_adapter
from flowrl_img.attention import set_attention
from flowrl_img.blend import Blend, Side
from flowrl_img.checkpoint import MANIFEST, latest
from flowrl_img.config import Config
from flowrl_img.loading import load_model, model_source
from flowrl_img.lora import LoraFile, read_lora
from flowrl_img.scales import Scale

__all__ = ["Sides", "Source", "Subject", "open_subject", "split_words"]

NETWORK_FILE = "diffusion_pytorch_model.safetensors"
LORA_NAME = "pytorch_lora_weights.safetensors"
KINDS = "a run folder, a checkpoint, a LoRA (.safetensors or its folder), a folder with transformer/, or a hub id"


class Source(Protocol):
    """Tuned weights that are not loaded yet."""

    @property
    def title(self) -> str:
        """Where they came from, in words."""
        ...

    @property
    def file(self) -> Path:
        """The file or folder that holds them."""
        ...

    def check(self, config: Config) -> None:
        """ValueError where they do not fit the base model of the configuration."""
        ...

    def side(self, model: Any, name: str) -> Side:
        """The weights on a loaded base model, under a name that no other source has."""
        ...


@dataclass(frozen=True)
class LoraSource:
    """An adapter, put beside others on the base network."""

    title: str
    lora: LoraFile

    @property
    def file(self) -> Path:
        return self.lora.path

    def check(self, config: Config) -> None:
        family = plugins.resolve("models", config.model.family, where="model.family")
        self.lora.check_fits(family.blueprint(model_source(config.model.path)), config.model.path)

    def side(self, model: Any, name: str) -> Side:
        self.lora.attach(model.network, name)
        return Side(model, lambda: only_adapter(adapter_layers(model.network), name))


@dataclass(frozen=True)
class NetworkSource:
    """A whole network, a second set of weights beside the base."""

    title: str
    file: Path

    def check(self, config: Config) -> None:
        family = plugins.resolve("models", config.model.family, where="model.family")
        base, tuned = (family.blueprint(path) for path in (model_source(config.model.path), str(self.file)))
        if _shapes(base.named_parameters()) != _shapes(tuned.named_parameters()):
            raise ValueError(
                f"the network in {self.file} has another architecture than {config.model.path}: "
                "give the base it was made from with model.path=..."
            )
        wanted, held = _shapes(tuned.state_dict().items()), _held(self.file / "transformer")
        wrong = sorted(name for name in {**wanted, **held} if wanted.get(name) != held.get(name))
        if wrong:
            raise ValueError(
                f"the weights in {self.file / 'transformer'} are not those of its config.json: {len(wrong)} tensors "
                f"are missing, too many or of another shape, such as {wrong[0]}"
            )

    def side(self, model: Any, name: str) -> Side:
        network = type(model.network).from_pretrained(
            self.file, subfolder="transformer", torch_dtype=model.network.dtype, use_safetensors=True
        )
        return Side(model.with_network(network.to(model.device).requires_grad_(False).eval()))


def _shapes(tensors: Iterable[tuple[str, torch.Tensor]]) -> dict[str, tuple[int, ...]]:
    return {name: tuple(tensor.shape) for name, tensor in tensors}


def _held(folder: Path) -> dict[str, tuple[int, ...]]:
    """Shapes of the tensors in a folder's safetensors files; ValueError for a damaged one."""
    from safetensors import SafetensorError, safe_open

    index = folder / f"{NETWORK_FILE}.index.json"
    found: dict[str, tuple[int, ...]] = {}
    names = sorted(set(json.loads(index.read_text())["weight_map"].values())) if index.is_file() else [NETWORK_FILE]
    for name in names:
        if not (folder / name).is_file():
            raise FileNotFoundError(f"{folder} holds no {name}: give {KINDS}")
        try:
            with safe_open(folder / name, framework="pt") as file:
                found |= {key: tuple(file.get_slice(key).get_shape()) for key in file.keys()}  # noqa: SIM118
        except SafetensorError as error:
            raise ValueError(f"{folder / name} is not a safetensors file: {error}") from None
    return found


@dataclass(frozen=True)
class Sides:
    """A loaded base and tuned sides."""

    base: Side
    tuned: tuple[Side, ...]

    def blend(self, scales: Sequence[Scale]) -> Blend:
        """One scale for each tuned side."""
        return Blend(self.base, self.tuned, tuple(scales))


@dataclass(frozen=True)
class Subject:
    """A configuration (model, prompts, rewards, evaluation settings) with the tuned weights to sample."""

    config: Config
    sources: tuple[Source, ...]
    run: Path | None
    """the run folder that the first source is from"""

    @property
    def kl_weight(self) -> float:
        """Of the objective of the run; 0 where there is no run, or where it has no KL term."""
        if self.run is None:
            return 0.0
        objective = plugins.build("objectives", self.config.objective.section(), where="objective")
        return float(getattr(objective, "kl_weight", 0.0))

    def load(self, device: torch.device) -> Sides:
        """Load the base and put the tuned weights beside it."""
        model = load_model(self.config, device)
        tuned = tuple(source.side(model, f"tuned_{k}") for k, source in enumerate(self.sources))
        for side in tuned:
            if side.model is not model:
                set_attention(side.model.network, self.config.model.attention)
        layers = adapter_layers(model.network)
        return Sides(Side(model, partial(adapters_off, layers)) if layers else Side(model), tuned)

    def facts(self) -> dict[str, Any]:
        """Base and tuned weights in words."""
        return {"base": self.config.model.path, "tuned": [source.title for source in self.sources]}

    def fingerprints(self) -> list[str]:
        """Digests of the weights: of a local base (a hub id stands for itself), then of each source."""
        base = Path(model_source(self.config.model.path)) / "transformer"
        return [fingerprint(file) for file in ([base] if base.is_dir() else []) + [s.file for s in self.sources]]


def split_words(words: Sequence[str]) -> tuple[list[str], list[str]]:
    """(tuned weights, key=value changes) of a command line."""
    changes = [word for word in words if "=" in word and not Path(word).exists()]
    return [word for word in words if word not in changes], changes


def open_subject(words: Sequence[str], recipe: str) -> Subject:
    """Find and check everything that `[TUNED]... [KEY=VALUE]...` names; no weights are loaded.

    The configuration is that of the first run folder among the tuned weights, else of `recipe`. Raises ValueError or
    FileNotFoundError for weights that are not there or belong to another base, a missing base and wrong changes.
    """
    tuned, changes = split_words(words)
    runs = [run for run in map(_run_of, tuned) if run is not None]
    config = recipes.load(str(runs[0] / "config.yaml") if runs else recipe, changes)
    model_source(config.model.path)
    sources = tuple(find(name) for name in tuned)
    for source in sources:
        source.check(config)
    return Subject(config, sources, runs[0] if runs else None)


def _run_of(name: str) -> Path | None:
    """The run folder that `name` is or lies in."""
    path = Path(name)
    for folder in (path, path.parent):
        if (folder / "config.yaml").is_file() and (folder == path or (path / MANIFEST).is_file()):
            return folder
    return None


def find(name: str) -> Source:
    """The tuned weights called `name`."""
    path = Path(name)
    if path.is_file():
        return LoraSource(name, read_lora(path))
    if not path.is_dir():
        return LoraSource(name, read_lora(_from_hub(name)))
    if (path / "config.yaml").is_file() or (path / MANIFEST).is_file():
        checkpoint = latest(path)
        return _in_folder(f"{_run_of(name) or path}: {checkpoint.name}", checkpoint / "adapter")
    return _in_folder(name, path)


def _in_folder(title: str, folder: Path) -> Source:
    if (folder / "transformer" / "config.json").is_file():
        return NetworkSource(title, folder)
    files = sorted(folder.glob("*.safetensors"))
    named = [file for file in files if file.name == LORA_NAME]
    if not named and len(files) != 1:
        what = f"holds {len(files)} .safetensors files, none called {LORA_NAME}" if files else "holds no tuned weights"
        raise FileNotFoundError(f"{folder} {what}: give {KINDS}")
    return LoraSource(title, read_lora((named or files)[0]))


def _from_hub(name: str) -> Path:
    """Download `owner/name[/file]`, or find it in the hub's cache."""
    parts = name.split("/")
    if name.startswith((".", "/", "~")) or len(parts) < 2 or not all(parts):
        raise FileNotFoundError(f"no tuned weights at {name!r}: give {KINDS}")
    from huggingface_hub import hf_hub_download

    file = "/".join(parts[2:]) or LORA_NAME
    try:
        return Path(hf_hub_download("/".join(parts[:2]), file))
    except (OSError, ValueError) as error:  # the hub's errors are of these kinds
        reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
        raise FileNotFoundError(
            f"no folder {name!r}, and {file} of the hub's {'/'.join(parts[:2])} cannot be had: {reason}"
        ) from None


def fingerprint(path: Path) -> str:
    """A short digest of a file, or of the weights in a folder."""
    digest = hashlib.blake2b(digest_size=8)
    for file in [path] if path.is_file() else sorted(path.rglob("*.safetensors")):
        digest.update(file.name.encode())
        with file.open("rb") as stream:
            while block := stream.read(1 << 20):
                digest.update(block)
    return digest.hexdigest()
