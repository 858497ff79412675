"""A stand-in for a vision-language model behind an OpenAI-compatible server, with eyes and a taste.

It likes pictures whose brightest colour is the one their prompt names, and bright ones. Its replies have the form that
each kind of question asks for.
"""

from __future__ import annotations

import base64
import io
import json
import math
import re
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import numpy as np
from PIL import Image

MODEL = "tiny-judge"
COLOURS = {"red": (1, 0, 0), "blue": (0, 0, 1), "green": (0, 1, 0)}
Answer = Callable[[dict[str, Any]], Any]


@dataclass
class Seen:
    """What a request shows and says."""

    body: dict[str, Any]
    pictures: list[np.ndarray] = field(default_factory=list)
    text: str = ""

    @classmethod
    def of(cls, body: dict[str, Any]) -> Seen:
        seen = cls(body)
        for part in body["messages"][0]["content"]:
            if part["type"] == "text":
                seen.text = part["text"]
            else:
                kind, _, data = part["image_url"]["url"].partition(";base64,")
                assert kind == "data:image/png", kind
                seen.pictures.append(np.asarray(Image.open(io.BytesIO(base64.b64decode(data)))))
        return seen


def taste(picture: np.ndarray, text: str) -> float:
    """In [0.1, 0.9]: half for the colour that the text names last, the rest for brightness."""
    levels = picture.astype(float) / 255
    saturated = levels.reshape(-1, 3)[levels.reshape(-1, 3).std(axis=1).argmax()]
    named = re.findall("|".join(COLOURS), text)
    fit = 0.0
    if named:
        wanted = np.array(COLOURS[named[-1]])
        fit = float(saturated @ wanted - saturated @ (1 - wanted) / 2)
    return float(np.clip(0.3 + 0.4 * fit + 0.4 * levels.mean(), 0.1, 0.9))


def completion(text: str, first: dict[str, float] | None = None, finish: str = "stop") -> dict[str, Any]:
    logprobs = None
    if first is not None:
        logprobs = {"content": [{"top_logprobs": [{"token": t, "logprob": math.log(p)} for t, p in first.items()]}]}
    return {"choices": [{"message": {"content": text}, "finish_reason": finish, "logprobs": logprobs}]}


def sensible(body: dict[str, Any]) -> dict[str, Any]:
    """The right form for whatever is asked."""
    seen = Seen.of(body)
    likes = [taste(picture, seen.text) for picture in seen.pictures]
    if body.get("logprobs"):
        yes = math.prod(likes) ** (1 / len(likes))
        return completion("Yes", {"Yes": yes, "No": 1 - yes})
    if "<answer>" in seen.text:
        return completion(f"<think>.</think><answer>Image {1 if likes[0] > likes[1] else 2} is better</answer>")
    if '"score"' in seen.text:
        return completion(json.dumps({"reasoning": "so", "score": [round(25 * likes[-1], 3), round(20 * likes[0], 3)]}))
    return completion(f"I think so.\nFinal Score: {1 + 4 * likes[0]:.3f}")


@dataclass
class Service:
    url: str = ""
    asked: list[Seen] = field(default_factory=list)


@contextmanager
def judging(answer: Answer = sensible, models: tuple[str, ...] = (MODEL,)) -> Iterator[Service]:
    """The service; `answer` gives the JSON of a completion, or (status, JSON)."""
    service, lock = Service(), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def reply(self, content: Any, status: int = 200) -> None:
            data = json.dumps(content).encode()
            self.send_response(status)
            self.send_header("Content-Length", str(len(data)))
            self.end_headers()
            self.wfile.write(data)

        def do_GET(self) -> None:
            self.reply({"data": [{"id": name} for name in models]})

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            with lock:
                service.asked.append(Seen.of(body))
            found = answer(body)
            self.reply(*((found[1], found[0]) if isinstance(found, tuple) else (found,)))

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    service.url = f"http://127.0.0.1:{server.server_port}/v1"
    try:
        yield service
    finally:
        server.shutdown()
        server.server_close()
