"""Stage 1 of pre-training: the autoencoder, and the exact folding of a latent standardisation into it."""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl_img.pico import architecture
from flowrl_img.pico.pool import make_pool

__all__ = ["encode_all", "fold_standardisation", "psnr", "to_unit", "train_autoencoder"]

BATCH, PEAK_LR, WARMUP = 16, 2.5e-3, 100
HELD_OUT = 10**9  # seeds from here on are never trained on


def to_unit(images: np.ndarray) -> Tensor:
    """uint8 [N, H, W, 3] -> float32 [N, 3, H, W] in [-1, 1]."""
    return torch.from_numpy(images).permute(0, 3, 1, 2).float() / 127.5 - 1


def train_autoencoder(folder: Path, steps: int, seed: int = 0) -> Any:
    """Train or resume to `steps`; writes `vae.pt` every 200 steps and `vae_log.jsonl`. L1 + 2 MSE + 1e-3 KL."""
    torch.manual_seed(seed)
    vae = architecture.autoencoder()
    optimizer = torch.optim.AdamW(vae.parameters(), lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=1e-4, fused=True)
    state_file = folder / "vae.pt"
    start = 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    began = time.monotonic()
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / WARMUP, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.002)
        x = to_unit(make_pool(step * BATCH, BATCH).images)
        generator = torch.Generator().manual_seed(step)
        loss = _loss(vae, x, generator)
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(vae.parameters(), 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            _save({"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}, state_file)
            row = {"step": step + 1, "loss": loss.item(), "psnr": psnr(vae), "seconds": time.monotonic() - began}
            with (folder / "vae_log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
    return vae.eval()


def _loss(vae: Any, x: Tensor, generator: torch.Generator) -> Tensor:
    posterior = vae.encode(x).latent_dist
    error = vae.decode(posterior.sample(generator)).sample - x
    return error.abs().mean() + 2 * error.square().mean() + 1e-3 * posterior.kl().mean() / posterior.mean[0].numel()


def _save(state: dict, path: Path) -> None:
    partial = path.with_suffix(".part")
    torch.save(state, partial)
    partial.replace(path)


@torch.no_grad()
def psnr(vae: Any, count: int = 128) -> float:
    """Mean PSNR in dB of held-out scenes, latents at their mean."""
    x = to_unit(make_pool(HELD_OUT, count).images)
    y = vae.decode(vae.encode(x).latent_dist.mean).sample.clamp(-1, 1)
    return (-10 * torch.log10(((y - x) / 2).square().mean((1, 2, 3)))).mean().item()


@torch.no_grad()
def encode_all(vae: Any, first: int, count: int, chunk: int = 64) -> dict[str, Any]:
    """Latent means float16 [N, C, 8, 8], captions and cells of `count` scenes."""
    latents, captions, cells = [], [], []
    for start in range(first, first + count, chunk):
        pool = make_pool(start, min(chunk, first + count - start))
        latents.append(vae.encode(to_unit(pool.images)).latent_dist.mean)
        captions += pool.captions
        cells.append(torch.from_numpy(pool.cells))
    return {"latents": torch.cat(latents), "captions": captions, "cells": torch.cat(cells)}


@torch.no_grad()
def fold_standardisation(vae: Any, mean: Tensor, std: Tensor) -> None:
    """Make latents zero-mean and unit-variance per channel by folding (z - mean) / std into the two 1 x 1 convolutions.

    quant_conv emits (mean, log-variance), post_quant_conv takes z: the fold is exact up to rounding, and
    `scaling_factor = 1, shift_factor = 0` serve. mean, std: [C].
    """
    channels = mean.numel()
    quant, post = vae.quant_conv, vae.post_quant_conv
    quant.weight[:channels] /= std[:, None, None, None]
    quant.bias[:channels] = (quant.bias[:channels] - mean) / std
    quant.bias[channels:] -= 2 * std.log()
    post.bias += (post.weight[:, :, 0, 0] * mean).sum(1)
    post.weight *= std[None, :, None, None]
