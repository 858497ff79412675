"""Stable Diffusion 3 family, from any folder or hub id that holds a stock `StableDiffusion3Pipeline`.

The network's inputs are those of the stock pipeline: prompt embeddings come from its own `encode_prompt`, the network
gets 1000 * sigma, latents are decoded with the VAE's scaling and shift. Left out: image-to-image and ControlNet.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, field, replace
from typing import Any, ClassVar

import torch
from torch import Tensor

from flowrl_img.samplers.schedules import scheduler_sigmas

__all__ = ["SD3", "Conditioning"]

CACHE = 4096  # prompts whose embeddings are kept


@dataclass(frozen=True)
class Conditioning:
    """context: [B, L, D]; pooled: [B, P]; on the network's device."""

    context: Tensor
    pooled: Tensor


@dataclass
class SD3:
    """One loaded pipeline. `network` is the only part that is trained."""

    pipeline: Any
    device: torch.device
    dtype: torch.dtype
    """autocast dtype of the network's matmuls; float32 means none"""
    resolution: int
    max_sequence_length: int
    decode_batch: int = 32
    _cache: OrderedDict[str, tuple[Tensor, Tensor]] = field(default_factory=OrderedDict)
    calls: int = 0
    """network evaluations so far, in samples"""

    name: ClassVar[str] = "sd3"
    process: ClassVar[str] = "flow"
    lora_targets = (
        "attn.to_q", "attn.to_k", "attn.to_v", "attn.to_out.0",
        "attn.add_q_proj", "attn.add_k_proj", "attn.add_v_proj", "attn.to_add_out",
    )  # fmt: skip

    @classmethod
    def load(
        cls, path: str, *, dtype: torch.dtype, weights_dtype: torch.dtype, device: torch.device, resolution: int,
        max_sequence_length: int,
    ) -> SD3:  # fmt: skip
        """path: local folder or hub id. weights_dtype: of the network's frozen weights; the VAE is always float32."""
        from diffusers import StableDiffusion3Pipeline

        # diffusers loads a pipeline that was saved without T5 only if the absence is spelled out.
        index = StableDiffusion3Pipeline.load_config(path)
        absent = {name: None for name in ("text_encoder_3", "tokenizer_3") if list(index[name]) == [None, None]}
        pipeline = StableDiffusion3Pipeline.from_pretrained(
            path,
            dtype={"transformer": weights_dtype, "vae": torch.float32, "default": dtype},
            use_safetensors=True,
            **absent,
        )
        pipeline.set_progress_bar_config(disable=True)
        for module in pipeline.components.values():
            if isinstance(module, torch.nn.Module):
                module.to(device).requires_grad_(False).eval()
        return cls(pipeline, device, dtype, resolution, max_sequence_length)

    @staticmethod
    def blueprint(path: str) -> torch.nn.Module:
        """The network of a pipeline without its weights (they are on the meta device); only its config is read."""
        from accelerate import init_empty_weights
        from diffusers import SD3Transformer2DModel

        with init_empty_weights():
            network: torch.nn.Module = SD3Transformer2DModel.from_config(
                SD3Transformer2DModel.load_config(path, subfolder="transformer")
            )
        return network

    @property
    def network(self) -> Any:
        return self.pipeline.transformer

    def with_network(self, network: Any) -> SD3:
        """The same generator around another transformer; everything else is shared."""
        return replace(self, pipeline=type(self.pipeline)(**{**self.pipeline.components, "transformer": network}))

    @property
    def latent_shape(self) -> tuple[int, int, int]:
        side = self.resolution // self.pipeline.vae_scale_factor
        return (self.network.config.in_channels, side, side)

    def sigmas(self, num_steps: int) -> Tensor:
        """float64 [num_steps + 1], the grid of the stock pipeline."""
        tokens = (self.latent_shape[1] // self.network.config.patch_size) ** 2
        scheduler = self.pipeline.scheduler
        return scheduler_sigmas(scheduler, num_steps, tokens if scheduler.config.use_dynamic_shifting else None)

    @torch.no_grad()
    def encode(self, texts: Sequence[str]) -> Conditioning:
        """Embeddings of prompts, each encoded alone (so no result depends on its batch mates) and cached."""
        for text in dict.fromkeys(texts):
            if text not in self._cache:
                context, _, pooled, _ = self.pipeline.encode_prompt(
                    text, None, None, device=self.device, do_classifier_free_guidance=False,
                    max_sequence_length=self.max_sequence_length,
                )  # fmt: skip
                self._cache[text] = (context[0], pooled[0])
        rows = [self._cache[text] for text in texts]
        while len(self._cache) > CACHE:
            self._cache.popitem(last=False)
        return Conditioning(torch.stack([r[0] for r in rows]), torch.stack([r[1] for r in rows]))

    def velocity(self, x_t: Tensor, sigma: Tensor, conditioning: Conditioning) -> Tensor:
        """v, as the network returns it. x_t: [B, C, h, w] float32; sigma: [B] in [0, 1]."""
        self.calls += len(x_t)
        with self._autocast():
            v: Tensor = self.network(
                hidden_states=x_t if self.dtype == torch.float32 else x_t.to(self.dtype),
                timestep=(1000 * sigma).to(x_t.device, torch.float32),
                encoder_hidden_states=conditioning.context,
                pooled_projections=conditioning.pooled,
                return_dict=False,
            )[0]
        return v

    def stock_call(self, num_steps: int, guidance: float) -> dict[str, Any]:
        """Arguments with which the stock pipeline draws what this generator draws from the same noise."""
        return {
            "height": self.resolution, "width": self.resolution, "num_inference_steps": num_steps,
            "guidance_scale": guidance, "max_sequence_length": self.max_sequence_length,
        }  # fmt: skip

    def _autocast(self) -> AbstractContextManager[Any]:
        if self.dtype == torch.float32:
            return nullcontext()
        return torch.autocast(self.device.type, self.dtype)

    @torch.no_grad()
    def decode(self, latents: Tensor) -> Tensor:
        """latents: [B, C, h, w] -> images float32 [B, 3, H, W] in [0, 1], decoded in bounded chunks."""
        vae = self.pipeline.vae
        shift = getattr(vae.config, "shift_factor", None) or 0.0
        chunks = (latents.float() / vae.config.scaling_factor + shift).split(self.decode_batch)
        images = torch.cat([vae.decode(chunk, return_dict=False)[0] for chunk in chunks])
        return (images / 2 + 0.5).clamp(0, 1)
