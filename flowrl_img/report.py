"""What a run leaves for people: the before/after sheet and the last line."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from flowrl_img.evaluate import Evaluation, gain, level
from flowrl_img.sheets import Group, contact_sheet
from flowrl_img.types import PromptSet

__all__ = ["before_after_sheet", "summary", "time_split"]


def before_after_sheet(path: Path, prompts: PromptSet, before: Evaluation, after: Evaluation) -> None:
    """Fixed prompts and seeds, each pair side by side with its rewards, as one PNG."""
    if not len(before.images):
        return
    groups = [
        Group(
            (before.images[k], after.images[k]),
            (
                prompts.texts[before.samples[k].prompt],
                f"reward {before.columns['reward'][k]:.2f} -> {after.columns['reward'][k]:.2f}",
            ),
        )
        for k in range(len(before.images))
    ]
    means = f"mean reward of {len(before.samples)} pictures {before.mean():.2f} -> {after.mean():.2f}"
    contact_sheet(f"left: before, right: after training (same prompt, same seed); {means}", groups).save(path)


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
