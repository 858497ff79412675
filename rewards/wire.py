"""How a batch of pictures travels to a scoring server and its scores come back.

Request: `FRW1` and the length of the header (8 bytes), the header as JSON, then the pictures, each a PNG, or all of
them as raw bytes. Answer: JSON with one entry per id; a score that could not be computed is null with a reason. Nothing
is ever unpickled, and no size is believed before it is checked.
"""

from __future__ import annotations

import base64
import io
import json
import math
import struct
from collections.abc import Mapping, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from PIL import Image

from flowrl_img.rewards.known_answers import Better, Example, KnownAnswer, Scores
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput

__all__ = [
    "CONTENT_TYPE", "ENCODINGS", "WireError", "answer_of", "known_answers_of", "pack_answer", "pack_batch",
    "pack_known_answers", "png_of", "unpack_batch",
]  # fmt: skip

CONTENT_TYPE = "application/vnd.flowrl-img.score"
MAGIC = b"FRW1"
ENCODINGS = ("png", "raw")
MAX_PIXELS = 2**28  # of one request: 256 pictures of 1024 x 1024


class WireError(ValueError):
    """Bytes that are no message of this kind, or one that contradicts itself."""


# -- requests


def pack_batch(batch: RewardBatch, encoding: str = "png") -> bytes:
    """The body of a request. ValueError when metadata is not JSON."""
    if encoding == "png":
        blobs = [png_of(image.numpy()) for image in batch.images]
    else:
        blobs = [batch.images.contiguous().numpy().tobytes()]
    header = {
        "ids": list(batch.ids), "prompts": list(batch.prompts), "metadata": [dict(row) for row in batch.metadata],
        "group_ids": None if batch.group_ids is None else list(batch.group_ids), "shape": list(batch.images.shape),
        "encoding": encoding, "sizes": [len(blob) for blob in blobs],
    }  # fmt: skip
    try:
        text = json.dumps(header, allow_nan=False).encode()
    except (TypeError, ValueError) as error:
        raise ValueError(f"metadata must be JSON to be sent to a server: {error}") from error
    return b"".join([MAGIC, struct.pack(">I", len(text)), text, *blobs])


def unpack_batch(body: bytes) -> RewardBatch:
    """WireError says what is wrong with the body."""
    if body[:4] != MAGIC or len(body) < 8:
        raise WireError(f"the body is no {CONTENT_TYPE}: it must begin with {MAGIC.decode()} and a length")
    (length,) = struct.unpack(">I", body[4:8])
    header, blobs = _header(body[8 : 8 + length], length), memoryview(body)[8 + length :]
    count, height, width = _shape(header)
    sizes = header.get("sizes")
    if not isinstance(sizes, list) or not all(isinstance(n, int) and n >= 0 for n in sizes) or sum(sizes) != len(blobs):
        raise WireError(f"the header promises pictures of {sizes} bytes, the body holds {len(blobs)}")
    images = _decoded(header, sizes, blobs, (count, height, width))
    try:
        return RewardBatch(
            images, header["prompts"], header["metadata"], header["ids"], header.get("group_ids")
        )  # fmt: skip
    except (KeyError, TypeError, ValueError) as error:
        raise WireError(f"the header does not describe a batch: {error}") from error


def _header(text: bytes, length: int) -> dict[str, Any]:
    if len(text) != length:
        raise WireError(f"the header should have {length} bytes, the body ends after {len(text)}")
    try:
        header = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the header is not JSON: {error}") from error
    lists = ("ids", "prompts", "metadata", "shape")
    if not isinstance(header, dict) or not all(isinstance(header.get(key), list) for key in lists):
        raise WireError(f"the header must hold the lists {', '.join(lists)}")
    if not all(isinstance(row, dict) for row in header["metadata"]):
        raise WireError("metadata must be one object a picture")
    groups = header.get("group_ids")
    if groups is not None and not isinstance(groups, list):
        raise WireError("group_ids must be a list or null")
    if not all(isinstance(text, str) for text in [*header["ids"], *header["prompts"], *(groups or ())]):
        raise WireError("ids, prompts and group_ids must be strings")
    return header


def _shape(header: Mapping[str, Any]) -> tuple[int, int, int]:
    shape = header["shape"]
    if len(shape) != 4 or not all(isinstance(n, int) and n > 0 for n in shape) or shape[3] != 3:
        raise WireError(f"the shape must be [B, H, W, 3] of positive numbers, got {shape}")
    if math.prod(shape[:3]) > MAX_PIXELS:
        raise WireError(f"{shape} are more than {MAX_PIXELS:,} pixels: send fewer pictures at once")
    return shape[0], shape[1], shape[2]


def _decoded(
    header: Mapping[str, Any], sizes: Sequence[int], blobs: memoryview, shape: tuple[int, int, int]
) -> torch.Tensor:
    if header.get("encoding") == "raw":
        if sum(sizes) != 3 * math.prod(shape):
            raise WireError(f"raw pictures of {list(shape)} have {3 * math.prod(shape)} bytes, got {sum(sizes)}")
        return torch.from_numpy(np.frombuffer(blobs, np.uint8).reshape(*shape, 3).copy())
    if header.get("encoding") != "png":
        raise WireError(f"encoding must be one of {', '.join(ENCODINGS)}, got {header.get('encoding')!r}")
    if len(sizes) != shape[0]:
        raise WireError(f"{shape[0]} pictures announced, {len(sizes)} sent")
    ends = np.cumsum([0, *sizes])
    return torch.from_numpy(np.stack([_png(bytes(blobs[a:b]), shape) for a, b in pairwise(ends)]))


def _png(blob: bytes, shape: tuple[int, int, int]) -> np.ndarray:
    try:
        picture = Image.open(io.BytesIO(blob), formats=["PNG"])
        if picture.size != (shape[2], shape[1]) or picture.mode != "RGB":  # before anything is inflated
            raise WireError(f"a PNG is {picture.mode} {picture.size}, announced as RGB {(shape[2], shape[1])}")
        return np.asarray(picture)
    except (OSError, SyntaxError) as error:
        raise WireError(f"a picture is no PNG: {error}") from error


def png_of(image: np.ndarray) -> bytes:
    """image: uint8 [H, W, 3]. Lossless, at the fastest compression."""
    buffer = io.BytesIO()
    Image.fromarray(image).save(buffer, format="PNG", compress_level=1)
    return buffer.getvalue()


# -- answers


def pack_answer(output: RewardOutput) -> dict[str, Any]:
    """JSON of the scores, rows named by id. Details that are no JSON become their text."""
    values, valid = output.values.tolist(), output.valid.tolist()
    details = {name: column for name, column in output.details.items() if name != "error"}
    errors = output.details.get("error", [None] * len(values))
    rows = [
        {
            "id": sample, "value": values[row] if valid[row] else None,
            "error": None if valid[row] else str(errors[row] or "no reason given"),
            "details": {name: _plain(column[row]) for name, column in details.items()},
        }
        for row, sample in enumerate(output.ids)
    ]  # fmt: skip
    return {"rows": rows}


def answer_of(content: bytes, ids: Sequence[str]) -> RewardOutput:
    """The scores of exactly `ids`, in their order, however the server ordered them.

    A value that is null or not a finite number is an invalid row. WireError for an answer that is no JSON of this form,
    or is not about these ids: then nothing in it can be trusted.
    """
    try:
        rows = json.loads(content)["rows"]
        found = {row["id"]: row for row in rows}
    except (ValueError, TypeError, KeyError, RecursionError) as error:
        raise WireError(f"the answer is no JSON of scores ({type(error).__name__}: {error})") from error
    if not all(isinstance(row, dict) and isinstance(row.get("details") or {}, dict) for row in rows):
        raise WireError("the answer is no JSON of scores (each row and its details must be an object)")
    if len(rows) != len(ids) or found.keys() != set(ids):
        raise WireError(f"the answer holds {len(rows)} rows for {len(ids)} pictures, or other ids than asked")
    ordered = [found[sample] for sample in ids]
    values = [_number(row.get("value")) for row in ordered]
    columns = {name for row in ordered for name in row.get("details") or {}}
    details: dict[str, list[Any]] = {
        name: [(row.get("details") or {}).get(name) for row in ordered] for name in sorted(columns)
    }
    details["error"] = [
        None if value is not None else str(row.get("error") or f"the server gave {row.get('value')!r}")
        for value, row in zip(values, ordered, strict=True)
    ]
    output = RewardOutput.of(values, details)
    return RewardOutput(output.values, output.valid, details, list(ids))


def _number(value: Any) -> float | None:
    """A finite number, which true and false are not."""
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        return None
    try:
        number = float(value)
    except OverflowError:  # JSON's whole numbers have no limit
        return None
    return number if math.isfinite(number) else None


def _plain(entry: Any) -> Any:
    return entry if isinstance(entry, (str, bool, int, float)) or entry is None else str(entry)


# -- known answers


def pack_known_answers(answers: Sequence[KnownAnswer]) -> list[dict[str, Any]]:
    """JSON of the pictures and of what must hold for them."""
    packed: list[dict[str, Any]] = []
    for answer in answers:
        if isinstance(answer, Scores):
            bounds = [None if math.isinf(bound) else bound for bound in (answer.low, answer.high)]
            packed.append({"scores": _pack_example(answer.example), "between": bounds})
        else:
            good, bad = ([_pack_example(e) for e in examples] for examples in (answer.good, answer.bad))
            packed.append({"better": good, "worse": bad})
    return packed


def known_answers_of(packed: Sequence[Mapping[str, Any]]) -> list[KnownAnswer]:
    """What `pack_known_answers` was given. WireError for another form."""
    try:
        return [_known_answer(entry) for entry in packed]
    except (KeyError, TypeError, ValueError, OSError) as error:
        raise WireError(f"the server's known answers cannot be read: {error}") from error


def _known_answer(entry: Mapping[str, Any]) -> KnownAnswer:
    if "scores" in entry:
        low, high = entry["between"]
        low, high = (-math.inf if low is None else float(low)), (math.inf if high is None else float(high))
        return Scores(_example(entry["scores"]), low, high)
    return Better(tuple(map(_example, entry["better"])), tuple(map(_example, entry["worse"])))


def _pack_example(example: Example) -> dict[str, Any]:
    picture = base64.b64encode(png_of(example.image)).decode()
    return {
        "what": example.what, "png": picture, "prompt": example.prompt, "metadata": dict(example.metadata),
        "size": [*example.image.shape[:2]],
    }  # fmt: skip


def _example(entry: Mapping[str, Any]) -> Example:
    height, width = entry["size"]
    image = _png(base64.b64decode(entry["png"]), (1, int(height), int(width)))
    return Example(str(entry["what"]), image, str(entry["prompt"]), dict(entry["metadata"]))
