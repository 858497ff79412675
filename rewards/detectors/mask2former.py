"""Mask2Former on the 80 classes of COCO: the detector of GenEval on photographs, from transformers.

The network is the one that GenEval uses (Swin-S, COCO instances) from another training run, so absolute numbers may
differ by a point or two, most on counting. Sizes and post-processing follow mmdetection, which GenEval runs: the short
side to 800 (the long one to 1333 at most), masks brought back to the size of the picture before anything is measured.
Source: arXiv 2112.01527; mmdetection 2.x, MaskFormerFusionHead.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl_img.rewards.geneval.detection import Detection, Picture
from flowrl_img.rewards.images import read_picture
from flowrl_img.rewards.neural import frozen, pick_device, scoring
from flowrl_img.rewards.pretrained import (
    WEIGHTS,
    WeightsError,
    fingerprint,
    from_pretrained,
    locate,
    transformers_class,
)
from flowrl_img.rewards.protocol import Metadata

__all__ = ["COCO", "Mask2Former", "instances", "prepared"]

# In the order of the dataset: outputs are named by index, because checkpoints spell some names otherwise. Three carry
# the longer names that GenEval's prompts use: computer mouse, tv remote, computer keyboard.
COCO = (
    "person", "bicycle", "car", "motorcycle", "airplane", "bus", "train", "truck", "boat", "traffic light",
    "fire hydrant", "stop sign", "parking meter", "bench", "bird", "cat", "dog", "horse", "sheep", "cow", "elephant",
    "bear", "zebra", "giraffe", "backpack", "umbrella", "handbag", "tie", "suitcase", "frisbee", "skis", "snowboard",
    "sports ball", "kite", "baseball bat", "baseball glove", "skateboard", "surfboard", "tennis racket", "bottle",
    "wine glass", "cup", "fork", "knife", "spoon", "bowl", "banana", "apple", "sandwich", "orange", "broccoli",
    "carrot", "hot dog", "pizza", "donut", "cake", "chair", "couch", "potted plant", "bed", "dining table", "toilet",
    "tv", "laptop", "computer mouse", "tv remote", "computer keyboard", "cell phone", "microwave", "oven", "toaster",
    "sink", "refrigerator", "book", "clock", "vase", "scissors", "teddy bear", "hair drier", "toothbrush",
)  # fmt: skip
MEAN, STD = (0.485, 0.456, 0.406), (0.229, 0.224, 0.225)
STRIDE = 32  # of the deepest features: sides are padded to multiples of it
LEAST = 0.05  # detections below it are dropped: far below every threshold in use


@dataclass(frozen=True)
class Mask2Former:
    """model: hub id or folder of a Mask2FormerForUniversalSegmentation on COCO instances. revision: of the hub id.

    short, long: pixels of the sides that the network sees. batch: pictures at once. known: a JSONL file of pictures
    (key `file`, beside it) that show exactly what their `tag` and `include` ask for, looked at when a run starts.
    """

    model: str = "facebook/mask2former-swin-small-coco-instance"
    revision: str | None = None
    device: str = "auto"
    short: int = 800
    long: int = 1333
    batch: int = 4
    known: str = ""

    name: ClassVar[str] = "mask2former"
    classes: ClassVar[Sequence[str]] = COCO

    def __post_init__(self) -> None:
        if not 0 < self.short <= self.long or self.batch < 1:
            numbers = f"{self.short}, {self.long} and {self.batch}"
            raise ValueError(f"mask2former needs 0 < short <= long and a batch of 1 or more, got {numbers}")

    @cached_property
    def _files(self) -> list[Path]:
        return locate("mask2former.model", self.model, [("config.json",), WEIGHTS], self.revision)

    @cached_property
    def _device(self) -> torch.device:
        return pick_device(self.device)

    @cached_property
    def network(self) -> Any:
        """The network: float32, every weight from the checkpoint, in eval mode, frozen."""
        what = f"mask2former.model = {self.model}"
        model_class = transformers_class(self.name, "Mask2FormerForUniversalSegmentation")
        made: Any = frozen(lambda: from_pretrained(model_class, self._files[0], what), self._device)
        if made.config.num_labels != len(COCO):
            raise WeightsError(f"{what} knows {made.config.num_labels} classes; GenEval needs the 80 of COCO instances")
        return made

    @cached_property
    def fingerprint(self) -> dict[str, str]:
        """Revision and hash of the weights, sizes and versions."""
        sizes = f"short side {self.short}, long side at most {self.long}, bilinear, multiples of {STRIDE}"
        return fingerprint({"model": self._files[1]}, model=self.model, preprocessing=sizes)

    def detect(self, images: Sequence[Picture]) -> list[list[Detection]]:
        """images: uint8 [H, W, 3] RGB each. Detections of score above LEAST with box and mask, best first."""
        found: list[list[Detection]] = []
        for chunk in _equal_sizes(images, self.batch):
            pixels = torch.from_numpy(np.stack(chunk)).permute(0, 3, 1, 2).to(self._device)
            with scoring(self._device):
                inputs, inner = prepared(pixels, self.short, self.long)
                seen = self.network(pixel_values=inputs)
                if not all(out.isfinite().all() for out in (seen.class_queries_logits, seen.masks_queries_logits)):
                    raise WeightsError(  # compared with a threshold NaN would be "nothing found", which is a verdict
                        f"mask2former.model = {self.model} gives numbers that are not finite: its weights are broken"
                    )
                for classes, masks in zip(seen.class_queries_logits, seen.masks_queries_logits, strict=True):
                    found.append(instances(classes, masks, tuple(inputs.shape[2:]), inner, chunk[0].shape[:2]))
        return found

    def known_pictures(self) -> Sequence[tuple[Picture, Metadata]]:
        """Those that `known` names; none where it names none."""
        if not self.known:
            return []
        path = Path(self.known)
        rows = [json.loads(line) for line in path.read_text().splitlines() if line.strip()]
        return [(read_picture(path.parent / row["file"]), row) for row in rows]


def prepared(images: Tensor, short: int, long: int) -> tuple[Tensor, tuple[int, int]]:
    """images: uint8 [B, 3, H, W]. What the network sees, float32 [B, 3, h', w'], and the (h, w) without its padding."""
    height, width = images.shape[2:]
    scale = min(short / min(height, width), long / max(height, width))
    inner = round(height * scale), round(width * scale)
    levels = F.interpolate(images.float() / 255, size=inner, mode="bilinear", align_corners=False)
    mean, std = (torch.tensor(numbers, device=images.device)[:, None, None] for numbers in (MEAN, STD))
    bottom, right = (-side % STRIDE for side in inner)
    return F.pad((levels - mean) / std, (0, right, 0, bottom)), inner


def instances(
    classes: Tensor, masks: Tensor, outer: tuple[int, ...], inner: tuple[int, int], size: tuple[int, ...]
) -> list[Detection]:
    """classes: logits [Q, C + 1], "nothing" last. masks: logits [Q, h, w] over the padded input of size `outer`.

    inner: the input without its padding; size: (H, W) of the picture. The best Q of all (query, class) by probability;
    score = probability x mean mask probability over the mask, mask = logits above 0, box = its extent.
    """
    probabilities = classes.float().softmax(-1)[:, :-1]
    best, place = probabilities.flatten().topk(len(classes))
    queries, labels = place // probabilities.shape[1], place % probabilities.shape[1]
    whole = F.interpolate(masks.float()[None], size=outer, mode="bilinear", align_corners=False)
    within = whole[:, :, : inner[0], : inner[1]]
    logits = F.interpolate(within, size=tuple(size), mode="bilinear", align_corners=False)[0]
    inside = logits > 0
    sure = (logits.sigmoid() * inside).flatten(1).sum(1) / (inside.flatten(1).sum(1) + 1e-6)
    scores = best * sure[queries]
    order = scores.argsort(descending=True, stable=True)
    return [
        _detection(int(labels[k]), float(scores[k]), inside[queries[k]].cpu().numpy())
        for k in order.tolist()
        if scores[k] > LEAST
    ]


def _detection(label: int, score: float, mask: np.ndarray) -> Detection:
    rows, columns = np.flatnonzero(mask.any(axis=1)), np.flatnonzero(mask.any(axis=0))
    box = float(columns[0]), float(rows[0]), float(columns[-1] + 1), float(rows[-1] + 1)
    return Detection(COCO[label], score, box, mask)


def _equal_sizes(images: Sequence[Picture], most: int) -> Iterator[list[Picture]]:
    """Runs of neighbours of one size, at most `most` long, so that order is kept."""
    chunk: list[Picture] = []
    for image in images:
        if chunk and (len(chunk) == most or image.shape != chunk[0].shape):
            yield chunk
            chunk = []
        chunk.append(image)
    if chunk:
        yield chunk
