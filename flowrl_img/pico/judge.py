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
from flowrl_img.pico.pool import MIX, cell_labels, rich_caption
from flowrl_img.pico.wrong_captions import KINDS, kinds_in, wrong_caption
from flowrl_img.world.render import render
from flowrl_img.world.scenes import SIZE, Scene, scene_for
from flowrl_img.world.splits import prompts_of, random_text
from flowrl_img.world.vocabulary import CHARACTERS, COLORS, SHAPES, sign_prompt

__all__ = ["JUDGES", "Judge", "build", "preferences", "save", "scenes", "train_judge"]

PATCH, VISION, TEXT, EMBED = 8, 128, 96, 96
LAYERS, CELL_LAYER = 4, 2
NEAR = 8  # pixels: nearer than this along an axis, neither object is to that side of the other
CELL_CLASSES = (1 + len(SHAPES), 1 + len(COLORS), 1 + len(CHARACTERS))


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
    steps: int = 4000
    batch: int = 64
    wrong: int = 4
    """wrong captions for every picture"""
    cell_weight: float = 0.5
    """weight of the loss that names the content of cells"""
    side_weight: float = 0.0
    """weight of the loss that names the side of the other object that each of two shapes is on"""
    lr: float = 2e-3
    warmup: int = 300


JUDGES = {
    # Never trained on, so it may know every combination: it has to judge those of the test split.
    "held_out": Judge(seed=1_000_003, splits=("train", "tune", "test"), rich=0.4, noise=0.06),
    # A reward: it knows what the generator was taught and no more.
    "reward": Judge(seed=2_000_003, splits=("train",), rich=0.2, noise=0.03, steps=3000, side_weight=0.5),
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
        "num_hidden_layers": LAYERS, "num_attention_heads": 4, "hidden_act": "gelu", "projection_dim": EMBED,
    }  # fmt: skip
    return CLIPModel(CLIPConfig(text_config=text, vision_config=vision, projection_dim=EMBED))


@cache
def _records(splits: tuple[str, ...]) -> dict[str, list[dict]]:
    return {task: [r for split in splits for r in prompts_of(split, task)] for task in MIX if task != "ocr"}


def scenes(splits: tuple[str, ...], rich: float, seed: int) -> Iterator[tuple[Tensor, str, Tensor, Tensor]]:
    """Pictures uint8 [64, 64, 3], captions, cell labels int64 [3, 64], `sides`; the k-th is a function of (seed, k)."""
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
        cells = torch.from_numpy(cell_labels(scene)).flatten(1).long()
        yield torch.from_numpy(np.array(render(scene))), caption, cells, sides(scene)
        k += 1


def sides(scene: Scene) -> Tensor:
    """int64 [2, 8], along x and y: 0 for a shape with a smaller coordinate than the other object's, 1 for a larger.

    -100, which losses leave out, where that is not said: other numbers of objects, equal shapes, nearly equal places.
    """
    labels = torch.full((2, len(SHAPES)), -100)
    if len(scene.objects) == 2 and scene.objects[0].shape != scene.objects[1].shape:
        for axis in range(2):
            places = [(item.x, item.y)[axis] for item in scene.objects]
            if abs(places[0] - places[1]) >= NEAR:
                for item, place in zip(scene.objects, places, strict=True):
                    labels[axis, SHAPES.index(item.shape)] = int(place > min(places))
    return labels


def pixels_of(pictures: Tensor) -> Tensor:
    """uint8 [B, 64, 64, 3] -> float32 [B, 3, 64, 64] in [-1, 1], as the saved preprocessing gives."""
    return pictures.permute(0, 3, 1, 2).float() / 127.5 - 1


def embed(net: Any, tokenizer: Any, pixels: Tensor, captions: list[str]) -> tuple[Tensor, Tensor]:
    """Unit rows of pictures [B, EMBED] and captions [C, EMBED]."""
    return _embed_pictures(net, pixels)[0], _embed_captions(net, tokenizer, captions)


def _embed_pictures(net: Any, pixels: Tensor) -> tuple[Tensor, Tensor]:
    """Unit rows [B, EMBED] and the cells of the middle layer [B, 64, VISION]."""
    out = net.vision_model(pixel_values=pixels, output_hidden_states=True)
    return F.normalize(net.visual_projection(out.pooler_output), dim=-1), out.hidden_states[CELL_LAYER][:, 1:]


def _embed_captions(net: Any, tokenizer: Any, captions: list[str]) -> Tensor:
    ids = tokenizer(captions, padding="max_length", truncation=True, return_tensors="pt")
    read = net.text_model(input_ids=ids["input_ids"], attention_mask=ids["attention_mask"]).pooler_output
    return F.normalize(net.text_projection(read), dim=-1)


def contrastive_loss(scale: Tensor, pictures: Tensor, texts: Tensor, captions: list[str]) -> Tensor:
    """Pictures choose among true and wrong captions, true captions among pictures; equal captions do not compete.

    scale: logit scale. pictures: [B, E]. texts: [B + W, E], those of `captions`: B true ones, then W wrong ones.
    """
    count = len(pictures)
    logits = scale * pictures @ texts.T
    here = torch.tensor([[a == b for b in captions] for a in captions[:count]])
    here &= ~torch.eye(count, len(captions), dtype=torch.bool)
    logits = logits.masked_fill(here, -1e4)
    target = torch.arange(count)
    return (F.cross_entropy(logits, target) + F.cross_entropy(logits[:, :count].T, target)) / 2


def cell_loss(logits: Tensor, cells: Tensor) -> Tensor:
    """What stands in each cell: cross entropy, mean over occupied cells plus a tenth of that over empty ones.

    logits: [B, 64, sum of CELL_CLASSES]. cells: int64 [B, 3, 64]. Only training has it; the saved encoder does not.
    """
    losses = []
    for k, part in enumerate(logits.split(CELL_CLASSES, dim=-1)):
        loss, full = F.cross_entropy(part.transpose(1, 2), cells[:, k], reduction="none"), cells[:, k] > 0
        losses += [loss[rows].mean() * weight for rows, weight in ((full, 1.0), (~full, 0.1)) if rows.any()]
    return torch.stack(losses).sum()


def side_loss(logits: Tensor, labels: Tensor) -> Tensor:
    """logits: [B, 32]; labels: `sides`, [B, 2, 8]. Mean cross entropy over what is said; 0 if nothing is."""
    said = labels != -100
    if not said.any():
        return logits.sum() * 0
    return F.cross_entropy(logits.unflatten(1, (2, len(SHAPES), 2))[said], labels[said])


class _Trained(torch.nn.Module):
    """The encoder, and the heads that name what it has seen while it is trained."""

    def __init__(self, tokenizer: Any) -> None:
        super().__init__()
        self.net = build(tokenizer)
        self.cells = torch.nn.Linear(VISION, sum(CELL_CLASSES))
        self.sides = torch.nn.Linear(EMBED, 4 * len(SHAPES))


def train_judge(folder: Path, plan: Judge, minutes: float | None = None) -> Any:
    """Train from nothing, or on from `folder/judge.pt`; returns the CLIPModel. minutes: stop after this time."""
    tokenizer = architecture.tokenizer()
    torch.manual_seed(plan.seed)
    model = _Trained(tokenizer).train()
    optimizer = torch.optim.AdamW(model.parameters(), lr=plan.lr, betas=(0.9, 0.98), weight_decay=0.05)
    state, step, began = folder / "judge.pt", 0, time.monotonic()
    if state.exists():
        saved = torch.load(state, weights_only=True)
        model.load_state_dict(saved["model"])
        optimizer.load_state_dict(saved["optimizer"])
        step = saved["step"]
    while step < plan.steps and (minutes is None or time.monotonic() - began < 60 * minutes):
        losses = _step(model, tokenizer, optimizer, plan, step)
        step += 1
        if step % 100 == 0 or step == plan.steps:
            with (folder / "judge_log.jsonl").open("a") as log:
                log.write(json.dumps({"step": step, **losses}) + "\n")
        if step % 500 == 0:
            _keep(state, model, optimizer, step)
    _keep(state, model, optimizer, step)
    return model.net.eval()


def _step(model: _Trained, tokenizer: Any, optimizer: Any, plan: Judge, step: int) -> dict[str, float]:
    pixels, captions, cells, placed = _batch(plan, step)
    pictures, middle = _embed_pictures(model.net, pixels)
    texts = _embed_captions(model.net, tokenizer, captions)
    losses = {
        "contrastive": contrastive_loss(model.net.logit_scale.exp().clamp(max=100.0), pictures, texts, captions),
        "cells": cell_loss(model.cells(middle), cells),
        "sides": side_loss(model.sides(10 * pictures), placed),  # rows of unit length
    }
    total = losses["contrastive"] + plan.cell_weight * losses["cells"] + plan.side_weight * losses["sides"]
    for group in optimizer.param_groups:
        group["lr"] = plan.lr * min((step + 1) / plan.warmup, 1.0) * (0.5 + 0.5 * math.cos(math.pi * step / plan.steps))
    optimizer.zero_grad()
    total.backward()
    torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
    optimizer.step()
    return {name: round(float(loss.detach()), 4) for name, loss in losses.items()}


def _batch(plan: Judge, step: int) -> tuple[Tensor, list[str], Tensor, Tensor]:
    """Noisy pixels [B, 3, 64, 64], B captions followed by their wrong ones, cells [B, 3, 64], sides [B, 2, 8]."""
    rng = np.random.default_rng([plan.seed, step, 1])
    source = scenes(plan.splits, plan.rich, plan.seed * 10_000 + step)
    pictures, captions, cells, placed = zip(*(next(source) for _ in range(plan.batch)))
    wrong = [wrong_caption(c, rng) for c in captions for _ in range(plan.wrong)]
    generator = torch.Generator().manual_seed(plan.seed + step)
    spread = plan.noise * torch.rand(plan.batch, 1, 1, 1, generator=generator)
    pixels = pixels_of(torch.stack(pictures))
    pixels = (pixels + 2 * spread * torch.randn(pixels.shape, generator=generator)).clamp(-1, 1)
    return pixels, [*captions, *wrong], torch.stack(cells), torch.stack(placed)


def _keep(state: Path, model: _Trained, optimizer: torch.optim.Optimizer, step: int) -> None:
    partial = state.with_suffix(".part")
    torch.save({"model": model.state_dict(), "optimizer": optimizer.state_dict(), "step": step}, partial)
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
        batch, captions, _, _ = zip(*(next(source) for _ in range(50)))
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
