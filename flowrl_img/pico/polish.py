"""Last stage of pre-training: the decoder alone, against the frozen encoder's latents.

The transformer learns the encoder's latents, so the encoder is final once they are cached; the decoder is free to get
sharper at any later time. Only its squared error is trained, which is what PSNR measures.
"""

from __future__ import annotations

import json
import math
import time
from pathlib import Path
from typing import Any

import torch

from flowrl_img.pico.autoencoder import BATCH, psnr, to_unit
from flowrl_img.pico.pool import make_pool

__all__ = ["polish_decoder"]

PEAK_LR = 1.5e-3
FIRST_SEED = 500_000  # pictures that the autoencoder stage has not seen


def polish_decoder(vae: Any, folder: Path, steps: int) -> Any:
    """Train `post_quant_conv` and the decoder for `steps`, resuming from `polish.pt`; returns the autoencoder."""
    parameters = [*vae.post_quant_conv.parameters(), *vae.decoder.parameters()]
    optimizer = torch.optim.AdamW(parameters, lr=PEAK_LR, betas=(0.9, 0.99), weight_decay=0.0, fused=True)
    state_file, start = folder / "polish.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        vae.load_state_dict(state["model"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    began = time.monotonic()
    for step in range(start, steps):
        for group in optimizer.param_groups:
            group["lr"] = PEAK_LR * min((step + 1) / 50, 0.5 * (1 + math.cos(math.pi * step / steps)) + 0.002)
        x = to_unit(make_pool(FIRST_SEED + step * BATCH, BATCH).images)
        with torch.no_grad():
            latents = vae.encode(x).latent_dist.mean
        # Sampled latents are not exact: a little noise keeps the decoder tolerant of them.
        noise = torch.randn(latents.shape, generator=torch.Generator().manual_seed(step))
        error = vae.decode(latents + 0.05 * noise).sample - x
        loss = error.square().mean() + 0.1 * error.abs().mean()
        optimizer.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(parameters, 1.0)
        optimizer.step()
        if (step + 1) % 200 == 0 or step + 1 == steps:
            saved = {"model": vae.state_dict(), "optimizer": optimizer.state_dict(), "step": step + 1}
            torch.save(saved, state_file.with_suffix(".part"))
            state_file.with_suffix(".part").replace(state_file)
            row = {"polish": step + 1, "loss": loss.item(), "psnr": psnr(vae), "seconds": time.monotonic() - began}
            with (folder / "vae_log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
    return vae.eval()
