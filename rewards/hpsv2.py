"""HPS v2 and v2.1: an open_clip ViT-H-14 fine-tuned on human preferences. The score is the plain cosine.

Pictures keep their shape: the long side is resized and black bars fill the square. Values lie near 0.24 to 0.30 (v2.0)
or 0.20 to 0.35 (v2.1). Source: arXiv 2306.09341; weights and code of the HPSv2 repository.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.neural import Truncation, frozen, pick_device, unit
from flowrl_img.rewards.pairs import cosine, differentiable_pairs, score_pairs
from flowrl_img.rewards.pixels import PadPixels
from flowrl_img.rewards.pretrained import WeightsError, fingerprint, library, load_strict, locate_file, read
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.rewards.scene_answers import matched_scenes

__all__ = ["BACKENDS", "CHECKPOINTS", "HPSv2", "OpenClip"]

CHECKPOINTS: Mapping[str, str] = {
    "v2.0": "xswu/HPSv2/HPS_v2_compressed.pt",
    "v2.1": "xswu/HPSv2/HPS_v2.1_compressed.pt",
}
BACKENDS: Mapping[str, tuple[str, str]] = {  # module, extra
    "open_clip": ("open_clip", "flowrl-img[openclip]"),
    "hpsv2": ("hpsv2.src.open_clip", "flowrl-img[hpsv2]"),
}


@dataclass(frozen=True)
class HPSv2:
    """cos(picture, prompt). version: "v2.0" or "v2.1"; their scores do not compare.

    weights: a file, or owner/name/file on the hub, in place of the published checkpoint of the version; revision: of
    the hub repository. antialias: of the resize; torchvision before 0.17 had none. backend: "open_clip" or "hpsv2", the
    package whose network is run. architecture: an open_clip name, or its JSON file. device: "auto" or torch's name.
    Details: `truncated`.
    """

    version: str
    weights: str | None = None
    revision: str | None = None
    antialias: bool = True
    backend: str = "open_clip"
    architecture: str = "ViT-H-14"
    device: str = "auto"

    name: ClassVar[str] = "hpsv2"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("open_clip_torch>=2.30", "safetensors>=0.5")

    def __post_init__(self) -> None:
        if self.version not in CHECKPOINTS:
            raise ValueError(f"hpsv2 version must be one of {sorted(CHECKPOINTS)}, got {self.version!r}")
        if self.backend not in BACKENDS:
            raise ValueError(f"hpsv2 backend must be one of {sorted(BACKENDS)}, got {self.backend!r}")

    @cached_property
    def _towers(self) -> OpenClip:
        weights = self.weights or CHECKPOINTS[self.version]
        return OpenClip(self.name, weights, self.revision, self.antialias, self.backend, self.architecture, self.device)

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Version, revision and hash of the weights, preprocessing and versions of the libraries."""
        return {"version": self.version, **self._towers.fingerprint}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Any prompt will do; warns of those longer than the model reads. WeightsError when the backend is missing."""
        self._towers.count_truncated(prompts)

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A red circle and a blue square fit their own prompts better than each other's."""
        return [matched_scenes()]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        return score_pairs(self._towers, batch, cosine)

    def differentiable(self, images: Tensor, prompts: Sequence[str]) -> Tensor:
        """images: float [B, 3, H, W] in [0, 1]. The scores float32 [B], with gradients to the images."""
        return differentiable_pairs(self._towers, images, prompts, cosine)


@dataclass(frozen=True)
class OpenClip:
    """An open_clip model as two encoders, loaded at first use. The fields are those of `HPSv2`."""

    owner: str
    weights: str
    revision: str | None
    antialias: bool
    backend: str
    architecture: str
    device_name: str

    @cached_property
    def device(self) -> torch.device:
        return pick_device(self.device_name)

    @cached_property
    def pixels(self) -> PadPixels:
        return PadPixels(self._config["vision_cfg"]["image_size"], self.antialias)

    @cached_property
    def network(self) -> Any:
        """The CLIP of the backend: float32, GELU, every weight from the checkpoint, in eval mode, frozen."""
        return frozen(self._load, self.device)

    def _load(self) -> Any:
        checkpoint = read(self._file)
        if self._file.suffix != ".safetensors":
            if "state_dict" not in checkpoint:
                raise WeightsError(f"{self.owner}.weights = {self._file} has no 'state_dict'; give an HPS checkpoint")
            checkpoint = checkpoint["state_dict"]
        if self._config.get("quick_gelu", False):
            raise WeightsError(
                f"{self.owner}.architecture = {self.architecture!r} runs QuickGELU, HPS is made with GELU"
            )
        network = self._library.CLIP(**self._config)
        load_strict(network, checkpoint, f"{self.owner}.weights = {self._file}")
        return network

    @cached_property
    def tokenizer(self) -> Any:
        """The backend's byte-pair tokenizer: repairs broken Unicode, unescapes HTML, lower-cases."""
        return self._library.SimpleTokenizer()

    @cached_property
    def truncation(self) -> Truncation:
        return Truncation(self.owner, self._config["text_cfg"]["context_length"])

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of the weights, preprocessing and versions."""
        facts = {"model": self.weights, "backend": self.backend, "preprocessing": repr(self.pixels)}
        return fingerprint({"model": self._file}, **facts)

    def count_truncated(self, prompts: Sequence[str]) -> list[bool]:
        """Which prompts are longer than the model reads."""
        return self.truncation.count([len(self.tokenizer.encode(prompt)) + 2 for prompt in prompts])

    def tokens(self, prompts: Sequence[str]) -> Tensor:
        """Ids [B, limit] between start and end, padded with 0; the end stays last where a prompt is cut."""
        begin, end = (self.tokenizer.encoder[mark] for mark in ("<start_of_text>", "<end_of_text>"))
        rows = torch.zeros(len(prompts), self.truncation.limit, dtype=torch.long)
        for row, prompt in zip(rows, prompts, strict=True):
            ids = [begin, *self.tokenizer.encode(prompt)[: len(row) - 2], end]
            row[: len(ids)] = torch.tensor(ids)
        return rows

    def embed_pixels(self, pixels: Tensor) -> Tensor:
        """pixels: float32 [B, 3, size, size]. Unit rows [B, D]."""
        return unit(self.network.encode_image(pixels))

    def embed_prompts(self, prompts: Sequence[str]) -> tuple[Tensor, list[bool]]:
        """Unit rows [B, D], and which prompts were cut."""
        cut = self.count_truncated(prompts)
        return unit(self.network.encode_text(self.tokens(prompts).to(self.device))), cut

    @cached_property
    def _library(self) -> Any:
        module, extra = BACKENDS[self.backend]
        return library(self.owner, module, f"pip install '{extra}', with torch and torchvision of one release")

    @cached_property
    def _file(self) -> Path:
        return locate_file(f"{self.owner}.weights", self.weights, self.revision)

    @cached_property
    def _config(self) -> dict[str, Any]:
        """embed_dim, vision_cfg and text_cfg of the architecture."""
        path = Path(self.architecture)
        if path.suffix == ".json" and path.is_file():
            return json.loads(path.read_text())
        config = self._library.get_model_config(self.architecture)
        if config is None:
            raise WeightsError(f"{self.owner}.architecture = {self.architecture!r} is no open_clip model or JSON file")
        return config
