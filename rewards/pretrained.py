"""The one way to weights: find them by hub id or path, read them without running code, load them completely.

Everything is float32, whatever the file holds: in bf16 a logit scale of 100 becomes 99 and scores move as much as the
pictures of a group differ. Left out: downloading anything but the named files, and remote code.
"""

from __future__ import annotations

import hashlib
import importlib
import pickle
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import metadata
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from flowrl_img.resources import asset

__all__ = [
    "WEIGHTS", "WeightsError", "fingerprint", "from_pretrained", "library", "load_strict", "locate", "locate_file",
    "read", "transformers_class",
]  # fmt: skip

WEIGHTS = ("model.safetensors", "pytorch_model.bin")  # in the order of preference of transformers
PACKAGED = "assets:"
HUB_ID = re.compile(r"[\w.-]+/[\w.-]+")
HUB_FILE = re.compile(r"([\w.-]+/[\w.-]+)/(\S+)")
COMPUTED = ("position_ids", "relative_position_index")
LIBRARIES = (
    "flowrl-img", "torch", "transformers", "open_clip_torch", "hpsv2", "hpsv2x", "hpsv3", "pillow",
    "rapidocr-onnxruntime", "onnxruntime", "scipy",
)  # fmt: skip


class WeightsError(ValueError):
    """Weights are not there, or are not those of this model."""


def library(owner: str, module: str, fix: str) -> Any:
    """An optional module. WeightsError with what to do where it cannot be imported, for whatever reason."""
    try:
        return importlib.import_module(module)
    except (ImportError, OSError, RuntimeError) as error:  # not there, without its files, of another torch
        raise WeightsError(f"{owner}: {module} cannot be imported ({error}); {fix}") from error


def transformers_class(owner: str, name: str) -> Any:
    """A class of transformers, which imports its parts at first use: a torchvision of another torch shows only then."""
    fix = "install torch and torchvision of one release (or no torchvision) and transformers 4.57 or newer"
    found = library(owner, "transformers", fix)
    try:
        return getattr(found, name)
    except (ImportError, AttributeError, OSError, RuntimeError) as error:
        raise WeightsError(f"{owner}: transformers.{name} cannot be imported ({error}); {fix}") from error


def locate(option: str, source: str, wanted: Sequence[Sequence[str]], revision: str | None = None) -> list[Path]:
    """For each entry of `wanted` the first of its file names that `source`, a folder or a hub id, holds.

    option: the reward and key that name the source, for messages. Files of a hub id come from its cache or the network;
    `assets:folder` is packaged with flowrl-img.
    Example: locate("pickscore.model", "/models/pick", [("config.json",), WEIGHTS])
    """
    folder = _path(option, source)
    if folder.is_dir():
        return [_first(option, folder, names) for names in wanted]
    if not HUB_ID.fullmatch(source):
        raise WeightsError(f"{option}: no folder {source}; give the folder of a saved model, or a hub id owner/name")
    return [_download(option, source, names, revision, place="FOLDER") for names in wanted]


def locate_file(option: str, source: str, revision: str | None = None) -> Path:
    """The file at a path, or of a hub repository as `owner/name/file`. WeightsError when it is nowhere."""
    path = _path(option, source)
    if path.is_file():
        return path
    in_hub = HUB_FILE.fullmatch(source)
    if in_hub is None:
        raise WeightsError(f"{option}: no file {source}; give the path of a checkpoint, or owner/name/file of the hub")
    return _download(option, in_hub[1], [in_hub[2]], revision, place=f"FOLDER/{in_hub[2]}")


def _path(option: str, source: str) -> Path:
    """`assets:folder` is packaged with flowrl-img; anything else is a path."""
    if not source.startswith(PACKAGED):
        return Path(source).expanduser()
    try:
        return asset(source.removeprefix(PACKAGED))
    except FileNotFoundError as error:
        raise WeightsError(f"{option}: {error}") from error


def _first(option: str, folder: Path, names: Sequence[str]) -> Path:
    found = next((folder / name for name in names if (folder / name).is_file()), None)
    if found is None:
        raise WeightsError(f"{option}: {folder} holds no {' or '.join(names)}; give the folder of a saved model")
    return found


def _download(option: str, repository: str, names: Sequence[str], revision: str | None, place: str) -> Path:
    """The first of `names` that the repository holds, from the cache where it is there. place: for the message."""
    from huggingface_hub import hf_hub_download
    from huggingface_hub.errors import EntryNotFoundError, HfHubHTTPError

    reasons: list[Exception] = []
    for name in names:
        try:
            return Path(hf_hub_download(repository, name, revision=revision))
        except (OSError, EntryNotFoundError, HfHubHTTPError) as error:
            reasons.append(error)
    reason = str(reasons[0]).splitlines()[0]
    raise WeightsError(
        f"{option}: no {' or '.join(names)} of {repository} on this machine, and the hub gave none ({reason}). "
        f"Where there is a network, run `hf download {repository} --local-dir FOLDER`, copy it here, "
        f"and set {option} to {place}"
    ) from reasons[0]


def read(path: Path) -> dict[str, Any]:
    """The content of a checkpoint on the CPU, tensors and plain containers only: unpickling never runs code."""
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    try:
        if path.suffix == ".safetensors":
            return dict(load_file(path))
        content = torch.load(path, map_location="cpu", weights_only=True)
    except (SafetensorError, EOFError, RuntimeError) as error:
        raise WeightsError(f"{path} is damaged or incomplete ({_first_line(error)}): get it again") from error
    except pickle.UnpicklingError as error:
        raise WeightsError(
            f"{path} holds more than tensors, and reading it could run foreign code. If you trust where it is from, "
            "save its tensors alone as .safetensors and give that file"
        ) from error
    if not isinstance(content, dict):
        raise WeightsError(f"{path} holds a {type(content).__name__} instead of named tensors; give another checkpoint")
    return content


def _first_line(error: Exception) -> str:
    return (str(error) or type(error).__name__).splitlines()[0]


def load_strict(module: nn.Module, weights: Mapping[str, Tensor], what: str) -> None:
    """Load `weights` as float32. WeightsError counts the keys that are missing, unexpected or of another shape."""
    own = module.state_dict()
    shapes = [key for key in own.keys() & weights.keys() if own[key].shape != weights[key].shape]
    _refuse_misfit(what, own.keys() - weights.keys(), weights.keys() - own.keys(), shapes)
    module.load_state_dict({key: tensor.float() for key, tensor in weights.items()})


def from_pretrained(model_class: Any, config_file: Path, what: str) -> nn.Module:
    """A transformers model from the folder of its config: float32, every weight loaded, else WeightsError as above.

    Buffers that old versions saved and new ones compute are no weights: they may be there and are not read.
    """
    model, report = model_class.from_pretrained(
        config_file.parent, dtype=torch.float32, output_loading_info=True, local_files_only=True
    )
    stray = [key for key in report["unexpected_keys"] if not key.endswith(COMPUTED)]
    _refuse_misfit(what, report["missing_keys"], stray, [key for key, *_ in report["mismatched_keys"]])
    return model


def _refuse_misfit(what: str, missing: Collection[str], unexpected: Collection[str], shapes: Collection[str]) -> None:
    kinds = {"missing": missing, "unexpected": unexpected, "of another shape": shapes}
    found = [f"{len(keys)} {kind} (such as {min(keys)})" for kind, keys in kinds.items() if keys]
    if found:
        raise WeightsError(f"{what}: the checkpoint is not of this model: keys {', '.join(found)}")


def fingerprint(files: Mapping[str, Path], **facts: str) -> dict[str, str]:
    """What scores depend on besides picture and prompt: SHA-256 and hub revision of files, further facts, versions."""
    marks = {f"{name}.sha256": _sha256(path) for name, path in files.items()}
    revisions = {f"{name}.revision": path.parent.name for name, path in files.items() if _in_snapshot(path)}
    return {**facts, **revisions, **marks, "libraries": ", ".join(filter(None, map(_version, LIBRARIES)))}


def _in_snapshot(path: Path) -> bool:
    return path.parent.parent.name == "snapshots"


def _sha256(path: Path) -> str:
    blob = path.resolve().name
    if re.fullmatch(r"[0-9a-f]{64}", blob):  # the hub's cache names large files by their own hash
        return blob
    with path.open("rb") as stream:
        return hashlib.file_digest(stream, "sha256").hexdigest()


def _version(library: str) -> str | None:
    try:
        return f"{library} {metadata.version(library)}"
    except metadata.PackageNotFoundError:
        return None
