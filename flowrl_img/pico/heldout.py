"""Held-out scores during pre-training: the tuning prompts, plain ODE, 20 steps, no guidance."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from flowrl_img.pico.denoiser import Denoiser
from flowrl_img.world.splits import load_split

__all__ = ["held_out_scores", "sample_ode"]

STEPS = 20


@torch.no_grad()
def sample_ode(
    net: Denoiser,
    tokens: Tensor,
    sigmas: Tensor,
    generator: torch.Generator,
    guidance: float = 1.0,
    empty: Tensor | None = None,
) -> Tensor:
    """Euler from t = 1 to 0. tokens: [B, L]; sigmas: [N + 1]. Returns latents [B, C, 8, 8]."""
    context, pooled = net.encode(tokens)
    channels = net.transformer.config.in_channels
    x = torch.randn(len(tokens), channels, 8, 8, generator=generator)
    if guidance != 1.0:
        assert empty is not None
        context_0, pooled_0 = (z.expand(len(x), *z.shape[1:]) for z in net.encode(empty))
    for t, s in pairwise(sigmas):
        times = t.expand(len(x)).float()
        v = net.velocity(x, times, context, pooled)
        if guidance != 1.0:
            v_0 = net.velocity(x, times, context_0, pooled_0)
            v = v_0 + guidance * (v - v_0)
        x = x + (s - t).float() * v
    return x


def _records(per_task: int, split: str) -> list[dict]:
    """`per_task` prompts of every GenEval task, evenly spread over the split's prompts."""
    chosen: list[dict] = []
    records = load_split(split)
    for tag in dict.fromkeys(r["tag"] for r in records):
        group = [r for r in records if r["tag"] == tag]
        chosen += [group[k % len(group)] for k in np.linspace(0, len(group) - 1, per_task).round().astype(int)]
    return chosen


@torch.no_grad()
def held_out_scores(
    net: Denoiser,
    vae: Any,
    tokenizer: Any,
    *,
    per_task: int = 24,
    signs: int = 32,
    shift: float = 3.0,
    guidance: float = 1.0,
    seed: int = 1234,
    split: str = "tune",
) -> dict[str, float]:
    """Strict and partial GenEval accuracy and OCR reward of a network, with fixed seeds; per-task strict accuracies."""
    from flowrl_img.rewards.registry import load
    from flowrl_img.rewards.score import score
    from flowrl_img.samplers.schedules import flow_match_sigmas

    was_training = net.training
    net.eval()
    sigmas = flow_match_sigmas(STEPS, shift=shift)
    generator = torch.Generator().manual_seed(seed)
    row: dict[str, float] = {}
    for name, records in (("geneval", _records(per_task, split)), ("ocr", load_split(split, "ocr")[:signs])):
        prompts = [r["prompt"] for r in records]
        ids = tokenizer([*prompts, ""], padding="max_length", truncation=True, return_tensors="pt")["input_ids"]
        latents = sample_ode(net, ids[:-1], sigmas, generator, guidance, ids[-1:])
        images = (vae.decode(latents).sample / 2 + 0.5).clamp(0, 1)
        output = score(load(name), images, prompts, records, [str(k) for k in range(len(prompts))])
        row[name] = output.values.mean().item()
        if name == "geneval":
            strict = torch.as_tensor(output.details["strict"]).float()
            row["strict"] = strict.mean().item()
            for tag in dict.fromkeys(r["tag"] for r in records):
                row[f"strict_{tag}"] = strict[[k for k, r in enumerate(records) if r["tag"] == tag]].mean().item()
    net.train(was_training)
    return {key: round(value, 4) for key, value in row.items()}
