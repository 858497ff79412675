"""Tiny stock pipelines of random weights: SD3, and FLUX (embedded guidance) and SDXL (a UNet) given embeddings."""

from __future__ import annotations

from typing import Any

import torch


def vae(latent_channels: int, blocks: int = 2) -> Any:
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        down_block_types=("DownEncoderBlock2D",) * blocks, up_block_types=("UpDecoderBlock2D",) * blocks,
        block_out_channels=(8,) * blocks, latent_channels=latent_channels, norm_num_groups=4, sample_size=16,
        scaling_factor=1.5, shift_factor=0.06, mid_block_add_attention=False,
    )  # fmt: skip


def flux() -> tuple[Any, dict[str, Any]]:
    """A FLUX pipeline with embedded guidance, and the arguments of a call of it."""
    from diffusers import FlowMatchEulerDiscreteScheduler, FluxPipeline, FluxTransformer2DModel

    torch.manual_seed(0)
    transformer = FluxTransformer2DModel(
        patch_size=1, in_channels=16, num_layers=1, num_single_layers=1, attention_head_dim=16, num_attention_heads=2,
        joint_attention_dim=32, pooled_projection_dim=32, guidance_embeds=True, axes_dims_rope=(4, 4, 8),
    )  # fmt: skip
    torch.nn.init.normal_(transformer.proj_out.weight, std=0.3)
    pipeline = FluxPipeline(
        scheduler=FlowMatchEulerDiscreteScheduler(shift=3.0, use_dynamic_shifting=True), vae=vae(4), text_encoder=None,
        tokenizer=None, text_encoder_2=None, tokenizer_2=None, transformer=transformer.eval().requires_grad_(False),
    )  # fmt: skip
    call = {"prompt_embeds": normal(1, 6, 32), "pooled_prompt_embeds": normal(1, 32), "guidance_scale": 3.5}
    return _quiet(pipeline), {**call, "height": 16, "width": 16}


def sdxl() -> tuple[Any, dict[str, Any]]:
    """An SDXL pipeline with classifier-free guidance, and the arguments of a call of it."""
    from diffusers import DDIMScheduler, StableDiffusionXLPipeline, UNet2DConditionModel

    torch.manual_seed(0)
    unet = UNet2DConditionModel(
        sample_size=8, block_out_channels=(16, 32), layers_per_block=1, norm_num_groups=4, attention_head_dim=8,
        down_block_types=("DownBlock2D", "CrossAttnDownBlock2D"), up_block_types=("CrossAttnUpBlock2D", "UpBlock2D"),
        cross_attention_dim=32, addition_embed_type="text_time", addition_time_embed_dim=8,
        projection_class_embeddings_input_dim=6 * 8 + 32, transformer_layers_per_block=1, use_linear_projection=True,
    )  # fmt: skip
    pipeline = StableDiffusionXLPipeline(
        vae=vae(4), text_encoder=None, text_encoder_2=None, tokenizer=None, tokenizer_2=None,
        unet=unet.eval().requires_grad_(False), add_watermarker=False, force_zeros_for_empty_prompt=False,
        scheduler=DDIMScheduler(beta_schedule="scaled_linear", steps_offset=1, clip_sample=False),
    )  # fmt: skip
    call = {
        "prompt_embeds": normal(1, 6, 32), "pooled_prompt_embeds": normal(1, 32), "guidance_scale": 4.0,
        "negative_prompt_embeds": normal(1, 6, 32, seed=2), "negative_pooled_prompt_embeds": normal(1, 32, seed=2),
    }  # fmt: skip
    return _quiet(pipeline), {**call, "height": 16, "width": 16}


def sd3(folder: str) -> tuple[Any, dict[str, Any]]:
    """The tiny SD3 pipeline of a folder, with classifier-free guidance, and the arguments of a call of it."""
    from diffusers import StableDiffusion3Pipeline

    pipeline = StableDiffusion3Pipeline.from_pretrained(folder, text_encoder_3=None, tokenizer_3=None)
    call = {"prompt": "a photo of a ring", "guidance_scale": 3.0, "max_sequence_length": 1}
    return _quiet(pipeline), {**call, "height": 64, "width": 64}


def denoiser(pipeline: Any) -> Any:
    return pipeline.unet if hasattr(pipeline, "unet") else pipeline.transformer


def add_adapter(network: Any, name: str, seed: int = 0, scale: float = 0.3) -> None:
    """A LoRA of rank 4 on the attention projections, with random weights of that standard deviation."""
    from peft import LoraConfig

    network.add_adapter(LoraConfig(r=4, lora_alpha=8, target_modules=["to_q", "to_k", "to_v"]), adapter_name=name)
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for parameter_name, parameter in network.named_parameters():
            if f".{name}." in parameter_name:
                parameter.copy_(scale * torch.randn(parameter.shape, generator=generator))


def picture(pipeline: Any, call: dict[str, Any], num_steps: int = 4, seed: int = 3) -> torch.Tensor:
    """Float [H, W, 3] of one call with a fixed seed."""
    generator = torch.Generator().manual_seed(seed)
    out = pipeline(**call, num_inference_steps=num_steps, generator=generator, output_type="np")
    return torch.from_numpy(out.images[0])


def normal(*shape: int, seed: int = 1) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def _quiet(pipeline: Any) -> Any:
    pipeline.set_progress_bar_config(disable=True)
    return pipeline
