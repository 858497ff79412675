"""Pictures and prompts from disk, for scoring what lies in a folder.

Pictures are joined with prompts by file name where the prompt file names them (metadata key `file`), else one prompt
serves all; otherwise the number of prompts must be that of the pictures, in the order of their names.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import torch

from flowrl_img.prompts import load_prompts
from flowrl_img.rewards.images import read_picture
from flowrl_img.rewards.protocol import Metadata, RewardBatch
from flowrl_img.types import PromptSet

__all__ = ["SUFFIXES", "load_pictures"]

SUFFIXES = (".png", ".jpg", ".jpeg", ".webp", ".bmp")
GROUP = "group"  # metadata key: the group of a picture, for rewards that compare them


def load_pictures(folder: Path, prompts: str) -> list[RewardBatch]:
    """The pictures of `folder` as RGB in batches of one size; ids are file names.

    FileNotFoundError or ValueError says what is missing, or which picture has no prompt.
    """
    if not folder.is_dir():
        raise FileNotFoundError(f"no folder {folder}: give the folder of the pictures")
    files = sorted(path for path in folder.iterdir() if path.suffix.lower() in SUFFIXES)
    if not files:
        raise FileNotFoundError(f"{folder} holds no picture ({', '.join(SUFFIXES)})")
    rows = _joined(files, load_prompts(prompts), prompts)
    pixels = {path: read_picture(path) for path in files}
    return [_batch([path for path in files if pixels[path].shape == shape], pixels, rows) for shape in _shapes(pixels)]


def _shapes(pixels: dict[Path, np.ndarray]) -> Iterator[tuple[int, ...]]:
    yield from dict.fromkeys(image.shape for image in pixels.values())


def _joined(files: list[Path], prompts: PromptSet, name: str) -> dict[Path, tuple[str, Metadata]]:
    rows = list(zip(prompts.texts, prompts.metadata, strict=True))
    named = {str(row["file"]): (text, row) for text, row in rows if "file" in row}
    if named:
        missing = [path.name for path in files if path.name not in named]
        if missing:
            raise ValueError(f"{name} names no prompt for {missing[0]} ({len(missing)} pictures without one)")
        return {path: named[path.name] for path in files}
    if len(rows) not in (1, len(files)):
        raise ValueError(
            f"{name} holds {len(rows)} prompts for {len(files)} pictures: give one for each in the order of their "
            "names, one for all, or name the picture of each line by the key `file`"
        )
    return dict(zip(files, rows if len(rows) > 1 else rows * len(files), strict=True))


def _batch(files: list[Path], pixels: dict[Path, np.ndarray], rows: dict[Path, tuple[str, Metadata]]) -> RewardBatch:
    texts, metadata = [rows[path][0] for path in files], [rows[path][1] for path in files]
    groups = [str(row.get(GROUP, text)) for text, row in zip(texts, metadata, strict=True)]
    images = torch.from_numpy(np.stack([pixels[path] for path in files]))
    return RewardBatch(images, texts, metadata, [path.name for path in files], groups)
