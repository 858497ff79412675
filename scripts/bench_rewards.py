"""Milliseconds a picture of the rewards that need no weights, on one core: CPU time, which a busy machine leaves alone.

`python scripts/bench_rewards.py` ends with exit code 1 when OCR takes more than its 80 ms at 128 pixels.
"""

from __future__ import annotations

import sys
import time

import numpy as np
import torch
from PIL import Image

from flowrl_img.rewards import registry
from flowrl_img.rewards.protocol import RewardBatch
from flowrl_img.world import load_split, render, scene_for

PICTURES, SIZES = 24, (64, 128, 256)
TARGETS = {("ocr", 128): 80.0}


def pictures(kind: str, size: int) -> RewardBatch:
    """Scenes of the world, or its signs, enlarged to `size`."""
    rows = load_split("tune", "ocr" if kind == "ocr" else "geneval")[:PICTURES]
    rng = np.random.default_rng(0)
    drawn = [render(scene_for(row, rng)).resize((size, size), Image.Resampling.BICUBIC) for row in rows]
    images = torch.from_numpy(np.stack([np.asarray(picture) for picture in drawn]))
    return RewardBatch(images, [row["prompt"] for row in rows], rows, [str(k) for k in range(len(rows))])


def milliseconds(name: str, size: int) -> float:
    """CPU milliseconds a picture, the best of three passes; the first use is not counted."""
    reward, batch = registry.load(name), pictures(name, size)
    reward(batch.rows([0]))
    times = []
    for _ in range(3):
        began = time.process_time()
        reward(batch)
        times.append(1000 * (time.process_time() - began) / len(batch))
    return min(times)


def main() -> int:
    """Print a line for each reward and size; 1 when a target is missed."""
    torch.set_num_threads(1)
    missed = False
    for name in ("jpeg", "geneval", "ocr"):
        for size in SIZES:
            took, target = milliseconds(name, size), TARGETS.get((name, size))
            wanted = "" if target is None else f"   target below {target:.0f} ms"
            missed |= target is not None and took > target
            print(f"{name:<10}{size:>4} px {took:8.2f} ms a picture{wanted}")
    return int(missed)


if __name__ == "__main__":
    sys.exit(main())
