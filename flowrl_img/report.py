"""What a run leaves for people: the before/after sheet and the last line."""

from __future__ import annotations

import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np
from PIL import Image, ImageDraw, ImageFont
from torch import Tensor

from flowrl_img.evaluate import Evaluation, gain, level
from flowrl_img.types import PromptSet

__all__ = ["before_after_sheet", "summary", "time_split"]

CELL, TEXT, GUTTER, COLUMNS = 160, 46, 8, 3


def _picture(image: Tensor) -> Image.Image:
    pixels = (image.permute(1, 2, 0) * 255).round().clamp(0, 255).byte().numpy()
    return Image.fromarray(pixels).resize((CELL, CELL), Image.Resampling.LANCZOS)


def before_after_sheet(path: Path, prompts: PromptSet, before: Evaluation, after: Evaluation) -> None:
    """Fixed prompts and seeds, each pair side by side with its rewards, as one PNG."""
    count = len(before.images)
    if count == 0:
        return
    rows = -(-count // COLUMNS)
    width, height = 2 * CELL + GUTTER, CELL + TEXT
    sheet = Image.new("RGB", (COLUMNS * (width + GUTTER) + GUTTER, rows * (height + GUTTER) + 30), "white")
    draw, font, small = ImageDraw.Draw(sheet), ImageFont.load_default(14), ImageFont.load_default(12)
    draw.text((GUTTER, 7), "left: before, right: after training (same prompt, same seed)", fill="black", font=font)
    for k in range(count):
        x, y = GUTTER + (k % COLUMNS) * (width + GUTTER), 30 + (k // COLUMNS) * (height + GUTTER)
        sheet.paste(_picture(before.images[k]), (x, y))
        sheet.paste(_picture(after.images[k]), (x + CELL + 2, y))
        scores = f"{before.columns['reward'][k]:.2f} -> {after.columns['reward'][k]:.2f}"
        text = textwrap.shorten(prompts.texts[before.samples[k].prompt], 46)
        draw.text((x, y + CELL + 3), text, fill="black", font=small)
        draw.text((x, y + CELL + 20), f"reward {scores}", fill="black", font=small)
    sheet.save(path)


def summary(before: Evaluation, after: Evaluation) -> list[str]:
    """Per column: before, after and the paired gain with its interval; the reward comes last."""
    shared = [c for c in before.columns if c in after.columns and np.isfinite(before.columns[c]).any()]
    lines = []
    for column in sorted(shared, key=lambda c: c == "reward"):
        label = "reward" if column == "reward" else column
        lines.append(
            f"held-out {label}: {level(before, column).value:.4f} -> {level(after, column).value:.4f}, "
            f"gain {gain(before, after, column)} (95 %, n = {len(before.samples)})"
        )
    return lines


def time_split(
    clock: Mapping[str, float], total: float, phases: Sequence[str] = ("sampling", "scoring", "training")
) -> str:
    """`sampling 41 %, scoring 9 %, training 43 %, other 7 %`."""
    shares = {phase: clock.get(phase, 0.0) / max(total, 1e-9) for phase in phases}
    shares["other"] = max(0.0, 1 - sum(shares.values()))
    return ", ".join(f"{phase} {100 * share:.0f} %" for phase, share in shares.items())
