"""Stage 2 of pre-training: the transformer and its two text encoders, by flow matching on cached latents.

Two things make it learn in hours on two cores. An auxiliary head reads the shape, colour and character at every latent
cell from the middle of the network (the world knows them), which teaches binding early; it is thrown away. And in the
last part of training the target is extrapolated away from the unconditional prediction, v* + w (v(c) - v()), so that
sampling needs no guidance: v(c) then settles at guidance scale 1 / (1 - w), so w must stay below 1.

The last steps are on captions with mistakes (`flowrl_img.pico.captions`).
"""

from __future__ import annotations

import copy
import json
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from flowrl_img.pico import architecture
from flowrl_img.world.vocabulary import CHARACTERS, COLORS, SHAPES

__all__ = ["Denoiser", "Schedule", "from_pipeline", "train_denoiser"]

CLASSES = (len(SHAPES) + 1, len(COLORS) + 1, len(CHARACTERS) + 1)


@dataclass(frozen=True)
class Schedule:
    """Everything that fixes stage 2. Steps are optimizer steps; the last `cooldown` share lowers lr to zero.

    After `steps` come `last_steps`, at a learning rate that falls from `last_lr` to zero, on captions with mistakes:
    the model then errs where it could do better.
    """

    steps: int = 14_000
    last_steps: int = 1_500
    last_lr: float = 5e-4
    batch: int = 32
    lr: float = 1.5e-3
    warmup: int = 300
    cooldown: float = 0.25
    caption_drop: float = 0.1
    aux_weight: float = 0.15
    aux_layer: int = 2
    guided_from: float = 0.643
    guided_weight: float = 0.6
    ema: float = 0.999
    seed: int = 0

    def __post_init__(self) -> None:
        if not 0 <= self.guided_weight < 1:
            raise ValueError(f"guided_weight must be in [0, 1): at 1 the target diverges, got {self.guided_weight}")

    @property
    def total_steps(self) -> int:
        return self.steps + self.last_steps

    def lr_at(self, step: int) -> float:
        """Learning rate of step `step`: linear warm-up, constant, linear cool-down; then the last steps."""
        if step >= self.steps:
            return self.last_lr * (self.total_steps - step) / self.last_steps
        left = (self.steps - step) / max(self.cooldown * self.steps, 1)
        return self.lr * min((step + 1) / self.warmup, 1.0, left)


class Denoiser(nn.Module):
    """Transformer, two text encoders and the auxiliary head as one trainable module."""

    def __init__(self, tokenizer: Any, aux_layer: int) -> None:
        super().__init__()
        ids = (len(tokenizer), tokenizer.eos_token_id, tokenizer.bos_token_id)
        self.transformer = architecture.transformer()
        self.text_encoder = architecture.text_encoder(*ids)
        self.text_encoder_2 = architecture.text_encoder(*ids)
        self.head = nn.Linear(architecture.WIDTH, sum(CLASSES))
        self._middle: Tensor | None = None
        self.transformer.transformer_blocks[aux_layer].register_forward_hook(self._keep)

    def _keep(self, module: nn.Module, inputs: Any, output: tuple[Tensor, Tensor]) -> None:
        self._middle = output[1]

    def encode(self, tokens: Tensor) -> tuple[Tensor, Tensor]:
        """What the stock pipeline feeds the transformer. tokens: [B, L] -> context [B, L + 1, D], pooled [B, D]."""
        outputs = [m(tokens, output_hidden_states=True) for m in (self.text_encoder, self.text_encoder_2)]
        context = torch.cat([o.hidden_states[-2] for o in outputs], dim=-1)
        zeros = context.new_zeros(context.shape[0], architecture.MAX_SEQUENCE_LENGTH, context.shape[2])
        return torch.cat([context, zeros], dim=1), torch.cat([o.text_embeds for o in outputs], dim=-1)

    def velocity(self, x_t: Tensor, t: Tensor, context: Tensor, pooled: Tensor) -> Tensor:
        """x_t: [B, C, 8, 8]; t: [B] in [0, 1]."""
        return self.transformer(
            hidden_states=x_t, timestep=1000 * t, encoder_hidden_states=context, pooled_projections=pooled
        ).sample

    def cell_loss(self, cells: Tensor) -> Tensor:
        """Cross-entropy of the cell classes, read from the middle of the last `velocity` call. cells: [B, 3, 8, 8]."""
        assert self._middle is not None
        logits = self.head(self._middle).split(CLASSES, dim=-1)
        targets = cells.flatten(2).long().unbind(1)
        # Empty cells outnumber full ones by ten to one.
        weights = [torch.tensor([0.2] + [1.0] * (n - 1)) for n in CLASSES]
        losses = [
            F.cross_entropy(z.flatten(0, 1), y.flatten(), w) for z, y, w in zip(logits, targets, weights, strict=True)
        ]
        return torch.stack(losses).sum()


def from_pipeline(pipeline: Any) -> Denoiser:
    """The network of a saved pipeline; its auxiliary head is new and untrained."""
    net = Denoiser(pipeline.tokenizer, 0)
    for name in ("transformer", "text_encoder", "text_encoder_2"):
        setattr(net, name, getattr(pipeline, name))
    return net.eval()


def _times(count: int, generator: torch.Generator) -> Tensor:
    """Logit-normal times with a uniform sixth, so that t = 1, where sampling starts, is trained too."""
    t = torch.sigmoid(0.2 + 1.1 * torch.randn(count, generator=generator))
    uniform = torch.rand(count, generator=generator)
    return torch.where(torch.rand(count, generator=generator) < 1 / 6, uniform, t)


def _batch_loss(net: Denoiser, data: dict[str, Any], plan: Schedule, step: int) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(plan.seed * 1_000_003 + step)
    rows = torch.randint(len(data["latents"]), (plan.batch,), generator=generator)
    x0, tokens = data["latents"][rows], data["tokens"][rows]
    if step >= plan.steps:
        tokens = data["noise"](tokens, generator)
    eps = torch.randn(x0.shape, generator=generator)
    t = _times(plan.batch, generator)
    dropped = torch.rand(plan.batch, generator=generator) < plan.caption_drop
    tokens = torch.where(dropped[:, None], data["empty"], tokens)
    time_ = t[:, None, None, None]
    x_t, target = (1 - time_) * x0 + time_ * eps, eps - x0
    context, pooled = net.encode(tokens)
    v = net.velocity(x_t, t, context, pooled)
    cell_loss = net.cell_loss(data["cells"][rows])
    if step >= plan.guided_from * plan.steps:
        # Signs are left out: guided, they would be read almost perfectly and leave nothing to improve.
        is_scene = (data["cells"][rows][:, 2] == 0).flatten(1).all(1)[:, None, None, None]
        target = target + plan.guided_weight * is_scene * _guidance(net, x_t, t, v, data["empty"])
    return (v - target).square().mean(), cell_loss


@torch.no_grad()
def _guidance(net: Denoiser, x_t: Tensor, t: Tensor, v: Tensor, empty: Tensor) -> Tensor:
    """v(c) - v(), the direction that classifier-free guidance adds; zero for rows whose caption was dropped."""
    context, pooled = net.encode(empty)
    rows = len(x_t)
    return v.detach() - net.velocity(x_t, t, context.expand(rows, -1, -1), pooled.expand(rows, -1))


def train_denoiser(
    folder: Path, data: dict[str, Any], plan: Schedule, evaluate: Any, minutes: float | None = None
) -> Denoiser:
    """Train or resume to `plan.total_steps` (or stop after `minutes`, resumable); returns the averaged network.

    data: latents [N, C, 8, 8], tokens [N, L], cells [N, 3, 8, 8], empty [1, L], noise (a CaptionNoise).
    `evaluate(net) -> dict` is logged every 1,000 steps to `denoiser_log.jsonl`; `denoiser.pt` is written every 250.
    """
    torch.manual_seed(plan.seed)
    net = Denoiser(data["tokenizer"], plan.aux_layer)
    average = copy.deepcopy(net).eval().requires_grad_(False)
    optimizer = torch.optim.AdamW(_groups(net), lr=plan.lr, betas=(0.9, 0.99), fused=True)
    state_file, start = folder / "denoiser.pt", 0
    if state_file.exists():
        state = torch.load(state_file, weights_only=True)
        net.load_state_dict(state["model"])
        average.load_state_dict(state["average"])
        optimizer.load_state_dict(state["optimizer"])
        start = state["step"]
    began, sums = time.monotonic(), torch.zeros(3)
    for step in range(start, plan.total_steps):
        for group in optimizer.param_groups:
            group["lr"] = plan.lr_at(step)
        flow, cell = _batch_loss(net, data, plan, step)
        optimizer.zero_grad()
        (flow + plan.aux_weight * cell).backward()
        torch.nn.utils.clip_grad_norm_(net.parameters(), 1.0)
        optimizer.step()
        decay = min(plan.ema, (1 + step) / (10 + step))
        torch._foreach_lerp_(list(average.parameters()), list(net.parameters()), 1 - decay)
        sums += torch.tensor([flow.item(), cell.item(), 1.0])
        done = step + 1
        out_of_time = minutes is not None and time.monotonic() - began > 60 * minutes
        if done % 250 == 0 or done in (plan.steps, plan.total_steps) or out_of_time:
            state = {"model": net.state_dict(), "average": average.state_dict(), "optimizer": optimizer.state_dict()}
            torch.save({**state, "step": done}, state_file.with_suffix(".part"))
            state_file.with_suffix(".part").replace(state_file)
            row = {"step": done, "flow": sums[0].item() / sums[2].item(), "cell": sums[1].item() / sums[2].item()}
            sums.zero_()
            if done % 1000 == 0 or done in (plan.steps, plan.total_steps) or out_of_time:
                row |= evaluate(average)
            row["seconds"] = round(time.monotonic() - began, 1)
            with (folder / "denoiser_log.jsonl").open("a") as log:
                log.write(json.dumps(row) + "\n")
        if out_of_time:
            break
    return average


def _groups(net: nn.Module) -> list[dict[str, Any]]:
    """Weight decay on matrices alone."""
    matrices = [p for p in net.parameters() if p.ndim > 1]
    rest = [p for p in net.parameters() if p.ndim <= 1]
    return [{"params": matrices, "weight_decay": 1e-3}, {"params": rest, "weight_decay": 0.0}]
