"""Two small CLIP dual encoders of the embedded world: one judges, the other can stand in for a learnt reward.

Stock `CLIPModel` with the tokenizer of the embedded model, trained by the symmetric contrastive loss over a batch of
scenes, with wrong captions among the candidates of every picture, so that attributes are what tells captions apart. The
two see other seeds, other captions and other noise: what one learns by accident the other need not share.
Source: CLIP, arXiv 2103.00020; wrong captions as further negatives: NegCLIP, arXiv 2210.01936.
"""

from __future__ import annotations

import json
import math
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl_img.pico import architecture
from flowrl_img.pico.pool import MIX, rich_caption
from flowrl_img.pico.wrong_captions import KINDS, kinds_in, wrong_caption
from flowrl_img.world.render import render
from flowrl_img.world.scenes import SIZE, scene_for
from flowrl_img.world.splits import prompts_of, random_text
from flowrl_img.world.vocabulary import sign_prompt

__all__ = ["JUDGES", "Judge", "build", "preferences", "save", "scenes", "train_judge"]

PATCH, VISION, TEXT, EMBED = 8, 144, 96, 64


@dataclass(frozen=True)
class Judge:
    """What makes one encoder. splits: whose combinations it sees. seed: namespace of its scenes and its start.

    Example: `JUDGES["held_out"]`.
    """

    seed: int
    splits: tuple[str, ...]
    rich: float
    """share of position captions that name the colours too"""
    noise: float
    """largest standard deviation of pixel noise, in [0, 1]"""
    steps: int = 6000
    batch: int = 64
    wrong: int = 2
    """wrong captions for every picture"""
    lr: float = 1e-3
    warmup: int = 300


JUDGES = {
    # Never trained on, so it may know every combination: it has to judge those of the test split.
    "held_out": Judge(seed=1_000_003, splits=("train", "tune", "test"), rich=0.4, noise=0.06),
    # A reward: it knows what the generator was taught and no more.
    "reward": Judge(seed=2_000_003, splits=("train",), rich=0.2, noise=0.03),
}


def build(tokenizer: Any) -> Any:
    """A CLIPModel for 64 x 64 pictures and the world's captions, randomly initialised: about 1.2 million weights."""
    from transformers import CLIPConfig, CLIPModel

    text = {
        "vocab_size": len(tokenizer), "hidden_size": TEXT, "intermediate_size": 4 * TEXT, "num_hidden_layers": 2,
        "num_attention_heads": 3, "max_position_embeddings": architecture.TOKENS, "hidden_act": "gelu",
        "eos_token_id": tokenizer.eos_token_id, "bos_token_id": tokenizer.bos_token_id,
        "pad_token_id": tokenizer.eos_token_id, "projection_dim": EMBED,
    }  # fmt: skip
    vision = {
        "image_size": SIZE, "patch_size": PATCH, "hidden_size": VISION, "intermediate_size": 4 * VISION,
        "num_hidden_layers": 3, "num_attention_heads": 4, "hidden_act": "gelu", "projection_dim": EMBED,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBED))


@cache
def _records(splits: tuple[str, ...]) -> dict[str, list[dict]]:
    return {task: [r for split in splits for r in prompts_of(split, task)] for task in MIX if task != "ocr"}


def scenes(splits: tuple[str, ...], rich: float, seed: int) -> Iterator[tuple[Tensor, str]]:
    """Pictures uint8 [64, 64, 3] with captions; the k-th is a pure function of (seed, k)."""
    records = _records(splits)
    tasks, shares = list(MIX), np.array(list(MIX.values()))
    k = 0
    while True:
        rng = np.random.default_rng([seed, k])
        task = tasks[rng.choice(len(tasks), p=shares)]
        if task == "ocr":
            record = sign_prompt(random_text(splits[rng.integers(len(splits))], rng))
        else:
            record = records[task][rng.integers(len(records[task]))]
        scene = scene_for(record, rng)
        caption = rich_caption(record, scene) if task == "position" and rng.uniform() < rich else record["prompt"]
        yield torch.from_numpy(np.array(render(scene))), caption
        k += 1


def pixels_of(pictures: Tensor) -> Tensor:
    """uint8 [B, 64, 64, 3] -> float32 [B, 3, 64, 64] in [-1, 1], as the saved preprocessing gives."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def embed(net: Any, tokenizer: Any, pixels: Tensor, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Unit rows of pictures [B, 64] and captions [C, 64]."""
    ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
    seen = net.visual_projection(net.vision_model(pixel_values=pixels).pooler_output)
    read = net.text_model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).pooler_output
    return F.normalize(seen, dim=-1), F.normalize(net.text_projection(read), dim=-1)


def contrastive_loss(net: Any, tokenizer: Any, pixels: Tensor, captions: list[str], wrong: list[str]) -> Tensor:
    """Pictures choose among true and wrong captions, true captions among pictures; equal captions do not compete."""
    pictures, texts = embed(net, tokenizer, pixels, [*captions, *wrong])
    logits = net.logit_scale.exp().clamp(max=100.0) * pictures @ texts.T
    here = torch.tensor([[a == b for b in [*captions, *wrong]] for a in captions])
    here &= ~torch.eye(len(captions), len(here[0]), dtype=torch.bool)
    logits = logits.masked_fill(here, -1e4)
    target = torch.arange(len(captions))
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits[:, : len(captions)].T, target)) / 2


def train_judge(folder: Path, plan: Judge, minutes: float | None = None) -> Any:
    """Train from nothing, or on from `folder/judge.pt`; returns the CLIPModel. minutes: stop after this time."""
    tokenizer = architecture.tokenizer()
    torch.manual_seed(plan.seed)
    net = build(tokenizer).train()
    optimizer = torch.optim.AdamW(net.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.05)
    state, step, began = folder / "judge.pt", 0, time.monotonic()
    if state.exists():
        saved = torch.load(state, weights_only=True)
        net.load_state_dict(saved["net"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < plan.steps and (minutes is None or time.monotonic() - began < 60 * minutes):
        loss = _step(net, tokenizer, optimizer, plan, step)
        step += 1
        if step % 100 == 0 or step == plan.steps:
            with (folder / "judge_log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, "loss": round(loss, 4)}) + "\n")
        if step % 500 == 0:
            _keep(state, net, optimizer, step)
    _keep(state, net, optimizer, step)
    return net.eval()


def _step(net: Any, tokenizer: Any, optimizer: torch.optim.Optimizer, plan: Judge, step: int) -> float:
    rng = np.random.default_rng([plan.seed, step, 1])
    source = scenes(plan.splits, plan.rich, plan.seed * 10_000 + step)
    pictures, captions = zip(*(next(source) for _ in range(plan.batch)))
    wrong = [wrong_caption(c, rng) for c in captions for _ in range(plan.wrong)]
    generator = torch.Generator().manual_seed(plan.seed + step)
    spread = plan.noise * torch.rand(plan.batch, 1, 1, 1, generator=generator)
    pixels = pixels_of(torch.stack(pictures))
    pixels = (pixels + 2 * spread * torch.randn(pixels.shape, generator=generator)).clamp(-1, 1)
    for group in optimizer.param_groups:
        group["lr"] = plan.lr * min((step + 1) / plan.warmup, 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / plan.steps))
    loss = contrastive_loss(net, tokenizer, pixels, list(captions), wrong)
    optimizer.zero_grad()
    loss.backward()
    torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
    optimizer.step()
    return float(loss.detach())


def _keep(state: Path, net: Any, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = state.with_suffix(".part")
    torch.save({"net": net.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
    partial.replace(state)


@torch.no_grad()
def preferences(net: Any, splits: tuple[str, ...], pictures: int = 1000, seed: int = 9) -> dict[str, float]:
    """How often the true caption scores above one with a wrong attribute, by kind and over all kinds equally.

    On scenes of `splits` from seeds that no training uses.
    """
    tokenizer, rng = architecture.tokenizer(), np.random.default_rng(seed)
    hits: dict[str, list[bool]] = {kind: [] for kind in KINDS}
    source = scenes(splits, 0.4, -seed % 2**31)
    for _ in range(0, pictures, 50):
        batch, captions = zip(*(next(source) for _ in range(50)))
        pairs = [(row, kind) for row, caption in enumerate(captions) for kind in kinds_in(caption)]
        wrong = [wrong_caption(captions[row], rng, kind) for row, kind in pairs]
        seen, read = embed(net, tokenizer, pixels_of(torch.stack(batch)), [*captions, *wrong])
        for (row, kind), false in zip(pairs, read[len(captions) :], strict=True):
            hits[kind].append(bool(seen[row] @ read[row] > seen[row] @ false))
    found = {kind: float(np.mean(rows)) for kind, rows in hits.items() if rows}
    return {**found, "mean": float(np.mean(list(found.values())))}


def save(net: Any, folder: Path) -> None:
    """Write a folder that `CLIPModel`, `CLIPProcessor` and the clip rewards read; weights in half precision."""
    from transformers import CLIPImageProcessor

    net.half().save_pretrained(folder)
    net.float()
    architecture.tokenizer().save_pretrained(folder)
    CLIPImageProcessor(
        size={"shortest_edge": SIZE}, crop_size={"height": SIZE, "width": SIZE}, image_mean=[0.5] * 3,
        image_std=[0.5] * 3, do_convert_rgb=True,
    ).save_pretrained(folder)  # fmt: skip
