"""A vision-language model behind an OpenAI-compatible server (vLLM, SGLang, a hosted one), asked about pictures.

What the rewards that ask one share: messages with pictures, many requests at once, the reading of replies. A reply that
cannot be read is a missing score, not a bad one. Left out: streaming, tools, chats of more than one turn.
"""

from __future__ import annotations

import base64
import io
import json
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from PIL import Image

from flowrl_img.rewards.addresses import checked_urls, secret_of
from flowrl_img.rewards.images import read_picture
from flowrl_img.rewards.protocol import Metadata, RewardOutput, require_keys
from flowrl_img.rewards.remote import RemoteError
from flowrl_img.rewards.transport import Retry, ServiceError, Transport, run_together
from flowrl_img.rewards.wire import png_of

__all__ = [
    "Judge", "Question", "Reply", "output_of_replies", "picture_of", "require_sources", "source_of", "text_of",
    "why_unread",
]  # fmt: skip

START_SECONDS = 8.0
SOURCE = "source"  # metadata key: path of the picture that was to be edited, or a data URI of its PNG
DATA_URI = "data:image/png;base64,"

Pixels = NDArray[np.uint8]


@dataclass(frozen=True)
class Question:
    """pictures: uint8 [H, W, 3] each, shown in this order before `text`. sampling: further keys of the request."""

    pictures: tuple[Pixels, ...]
    text: str
    sampling: Mapping[str, Any]


@dataclass(frozen=True)
class Reply:
    """text: what the model said. first: log-probability by token of the first place, where asked for.

    cut: it was stopped for its length.
    """

    text: str
    first: Mapping[str, float]
    cut: bool = False


@dataclass(frozen=True)
class Judge:
    """url: http://host:port/v1 of a server, or several with the same model. model: its name there.

    concurrency: requests at once. deadline: seconds for one with all its tries. The key of a hosted server is read from
    the environment variable `key_variable`.
    """

    url: str | tuple[str, ...]
    model: str
    concurrency: int = 16
    deadline: float = 120.0
    tries: int = 6
    key_variable: str = "OPENAI_API_KEY"

    def __post_init__(self) -> None:
        checked_urls("judge", self.url)
        Retry(self.deadline, self.tries)
        if self.concurrency < 1:
            raise ValueError(f"judge concurrency must be at least 1, got {self.concurrency}")

    @cached_property
    def transport(self) -> Transport:
        """Its counters `retries` and `failures` tell how reliable the service was."""
        key = secret_of(self.key_variable)
        headers = {"authorization": f"Bearer {key}"} if key else {}
        urls = checked_urls("judge", self.url)
        return Transport(urls, headers, Retry(self.deadline, self.tries), self.concurrency)

    @property
    def fingerprint(self) -> dict[str, str]:
        """Its name and where it is; a server states nothing of its weights."""
        return {"judge": self.model, "urls": ", ".join(checked_urls("judge", self.url))}

    def check(self) -> None:
        """RemoteError within seconds when no server answers, or when it does not know the model."""
        [found] = run_together([self.transport.ask("GET", "/models", _models, deadline=START_SECONDS)])
        if isinstance(found, ServiceError):
            raise RemoteError(f"judge: {found}") from found
        if found and self.model not in found:
            raise RemoteError(f"judge: {self.transport.urls[0]} serves {', '.join(found)}, not {self.model!r}")

    def ask(self, questions: Sequence[Question]) -> list[Reply | ServiceError]:
        """The replies in order; a question that failed for good has its error in place of a reply."""
        bodies = [self._body(question) for question in questions]
        return run_together([self.transport.ask("POST", "/chat/completions", _reply, json=body) for body in bodies])

    def _body(self, question: Question) -> dict[str, Any]:
        shown = [{"type": "image_url", "image_url": {"url": _data_uri(image)}} for image in question.pictures]
        content = [*shown, {"type": "text", "text": question.text}]
        return {"model": self.model, "messages": [{"role": "user", "content": content}], **question.sampling}


def picture_of(image: Pixels | torch.Tensor, size: int) -> Pixels:
    """image: uint8 [H, W, 3]. Resized to size x size (bicubic); 0 leaves it as it is."""
    pixels = image.numpy() if isinstance(image, torch.Tensor) else image
    if not size or pixels.shape[:2] == (size, size):
        return pixels
    return np.asarray(Image.fromarray(pixels).resize((size, size), Image.Resampling.BICUBIC))


def source_of(name: str, row: Metadata) -> Pixels:
    """The picture that was to be edited. ValueError when it is not there."""
    given = str(row[SOURCE])
    inside = given.startswith(DATA_URI)
    try:
        stream = io.BytesIO(base64.b64decode(given.removeprefix(DATA_URI))) if inside else Path(given)
        return read_picture(stream)
    except (OSError, ValueError) as error:
        shown = f"{DATA_URI}..." if inside else given
        raise ValueError(
            f"reward '{name}': the metadata key '{SOURCE}' must be the path of a picture or the data URI of a PNG, "
            f"got {shown} ({error})"
        ) from error


def require_sources(name: str, metadata: Sequence[Metadata]) -> None:
    """ValueError for the first line (counted from 1) whose source picture is not there."""
    require_keys(name, frozenset({SOURCE}), metadata)
    for line, row in enumerate(metadata, start=1):
        try:
            source_of(name, row)
        except ValueError as error:
            raise ValueError(f"line {line}: {error}") from error


def text_of(name: str, own: str, file: str) -> str:
    """The instructions in `file`, or the reward's own where it is empty. ValueError when there is no such file."""
    if not file:
        return own
    if not Path(file).is_file():
        raise ValueError(f"{name}: no file of instructions at {file}")
    return Path(file).read_text()


def output_of_replies(
    values: Sequence[float | None], errors: Sequence[str | None], details: Mapping[str, list[Any]]
) -> RewardOutput:
    """One row each; None is invalid for the reason in `errors`."""
    kept = [None if value is not None else error for value, error in zip(values, errors, strict=True)]
    return RewardOutput.of(values, {**details, "error": kept})


def why_unread(reply: Reply | ServiceError, wanted: str) -> str:
    """Why a reply gave no score: the service's error, or the end of a text without `wanted`."""
    if isinstance(reply, ServiceError):
        return str(reply)
    cut = "; it was cut, raise max_tokens" if reply.cut else ""
    return f"no {wanted} in the reply {reply.text[-80:]!r}{cut}"


def _data_uri(image: Pixels) -> str:
    return DATA_URI + base64.b64encode(png_of(image)).decode()


def _models(content: bytes) -> list[str]:
    """Names of the served models; ValueError for an answer of another form."""
    try:
        return [str(model["id"]) for model in json.loads(content)["data"]]
    except (KeyError, TypeError) as error:
        raise ValueError(f"no list of models: {content[:100]!r}") from error


def _reply(content: bytes) -> Reply:
    """ValueError for an answer of another form, which is then asked for again."""
    try:
        choice = json.loads(content)["choices"][0]
        text = choice["message"]["content"]
        tokens = (choice.get("logprobs") or {}).get("content") or [{}]
        first = {entry["token"]: float(entry["logprob"]) for entry in tokens[0].get("top_logprobs") or ()}
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"no chat completion: {content[:100]!r}") from error
    if not isinstance(text, str):
        raise ValueError(f"the reply holds no text: {content[:100]!r}")
    return Reply(text, {t: p for t, p in first.items() if math.isfinite(p)}, choice.get("finish_reason") == "length")
