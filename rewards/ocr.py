"""How well a picture shows the text that its prompt asks for, read by RapidOCR (weights inside its wheel).

A picture in which nothing is read scores 0: that is a verdict. A crash of the engine is not: the row is invalid.
Small pictures are enlarged (bicubic) until the short side has 256 pixels, the size the detector works at, so that
letters are cropped from the enlarged picture too.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
from numpy.typing import NDArray
from PIL import Image

from flowrl_img.rewards.known_answers import Example, KnownAnswer, Scores
from flowrl_img.rewards.ocr_text import MODES, join_lines, normalise, targets_of
from flowrl_img.rewards.pretrained import fingerprint, library
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput
from flowrl_img.world import render, scene_for

__all__ = ["Ocr", "read_text"]

SHORT_SIDE = 256  # pixels

_LOCK = threading.Lock()  # the engine keeps state between its stages


@dataclass(frozen=True)
class Ocr:
    """mode: "full" (the whole text read must be the text asked for) or "substring" (extra text is free).

    extra_text_penalty: taken off for every letter read beyond the number asked for, in units of 1 / that number.
    Mode "full" counts extra text already.
    Texts come from the metadata key `ocr_target` or the quoted parts of the prompt. values in [0, 1].
    Details: `text` as read, `exact` (the normalised texts agree in full).
    """

    mode: str = "full"
    extra_text_penalty: float = 0.0

    name: ClassVar[str] = "ocr"
    needs: ClassVar[frozenset[str]] = frozenset()
    requirements: ClassVar[tuple[str, ...]] = ("rapidocr-onnxruntime>=1.4.4", "rapidfuzz>=3.9")

    def __post_init__(self) -> None:
        if self.mode not in MODES:
            raise ValueError(f"ocr mode must be one of {sorted(MODES)}, got {self.mode!r}")
        if self.extra_text_penalty < 0:
            raise ValueError(f"ocr extra_text_penalty must be 0 or more, got {self.extra_text_penalty}")

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """ValueError for the first line (counted from 1) that asks for no text."""
        for line, (prompt, row) in enumerate(zip(prompts, metadata, strict=True), start=1):
            try:
                targets_of(prompt, row)
            except ValueError as error:
                raise ValueError(f"line {line}: {error}") from error

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Hashes of the engine's networks, enlargement and versions."""
        return fingerprint(_networks(), preprocessing=f"short side to {SHORT_SIDE}, bicubic")

    def known_answers(self) -> Sequence[KnownAnswer]:
        """A sign is read, up to one letter; no text is read on a blank picture, and no other text on the sign."""
        asked, other = {"ocr_target": "HEN7"}, {"ocr_target": "WORLD"}
        sign = np.asarray(render(scene_for(asked, np.random.default_rng(0))))
        blank = np.full_like(sign, 128)
        return [
            Scores(Example("a drawn sign HEN7, asked for HEN7,", sign, metadata=asked), low=0.75),
            Scores(Example("a drawn sign HEN7, asked for WORLD,", sign, metadata=other), high=0.5),
            Scores(Example("a blank picture, asked for HEN7,", blank, metadata=asked), high=0.0),
        ]

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]."""
        targets = [
            [normalise(text) for text in targets_of(prompt, row)]
            for prompt, row in zip(batch.prompts, batch.metadata, strict=True)
        ]
        texts, errors = _read_all([image.numpy() for image in batch.images])
        values = [
            None if text is None else self._value(normalise(text), wanted)
            for text, wanted in zip(texts, targets, strict=True)
        ]
        exact = [
            None if text is None else MODES["full"](normalise(text), wanted) == 1.0
            for text, wanted in zip(texts, targets, strict=True)
        ]
        return RewardOutput.of(values, {"text": texts, "exact": exact, "error": errors})

    def _value(self, read: str, targets: Sequence[str]) -> float:
        """Both sides normalised. In [0, 1]."""
        asked = sum(map(len, targets))
        extra = max(len(read) - asked, 0) / asked
        return max(MODES[self.mode](read, targets) - self.extra_text_penalty * extra, 0.0)


def read_text(image: NDArray[np.uint8]) -> str:
    """image: uint8 [H, W, 3] RGB. The text read in it, lines joined in reading order; "" when there is none."""
    bgr = np.ascontiguousarray(_enlarged(image)[:, :, ::-1])  # the engine follows OpenCV's channel order
    with _LOCK:
        lines, _ = _engine(os.getpid())(bgr, use_cls=False)  # the angle classifier turns some words upside down
    return join_lines([(corners, text) for corners, text, confidence in lines or [] if float(confidence) > 0])


def _read_all(images: Sequence[NDArray[np.uint8]]) -> tuple[list[str | None], list[str | None]]:
    """Texts and errors, one of the two None in each row."""
    with _LOCK:
        _engine(os.getpid())  # a broken installation stops the run; it is no property of one picture
    texts: list[str | None] = []
    errors: list[str | None] = []
    for image in images:
        try:
            texts.append(read_text(image))
            errors.append(None)
        except Exception as error:  # the engine's own errors have no common type; the row becomes invalid, not 0
            texts.append(None)
            errors.append(f"{type(error).__name__}: {error}")
    return texts, errors


def _enlarged(image: NDArray[np.uint8]) -> NDArray[np.uint8]:
    height, width = image.shape[:2]
    scale = SHORT_SIDE / min(height, width)
    if scale <= 1:
        return image
    size = (round(width * scale), round(height * scale))
    return np.asarray(Image.fromarray(image).resize(size, Image.Resampling.BICUBIC))


def _networks() -> dict[str, Path]:
    """The networks inside the wheel by name; WeightsError when the engine is not installed."""
    return {path.stem: path for path in sorted((Path(_library().__file__).parent / "models").glob("*.onnx"))}


def _library() -> Any:
    fix = "pip install rapidocr-onnxruntime, with one of opencv-python and opencv-python-headless"
    return library("ocr", "rapidocr_onnxruntime", fix)


@lru_cache(maxsize=1)
def _engine(pid: int) -> Any:
    """One engine for this process: sessions do not survive a fork, and one thread is the fastest per picture."""
    return _library().RapidOCR(
        det_limit_side_len=SHORT_SIDE, det_limit_type="min", intra_op_num_threads=1, inter_op_num_threads=1
    )
