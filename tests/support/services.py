"""Services on this machine for tests of remote rewards: the real one in a thread or a process, and one by script."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from typing import Any

from flowrl_img.rewards.score import Scorer
from flowrl_img.rewards.wire import unpack_batch

ROOT = Path(__file__).parents[2]


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return probe.getsockname()[1]


@contextmanager
def serving(
    scorers: Mapping[str, Scorer], token: str | None = None, port: int | None = None, **options: Any
) -> Iterator[str]:
    """The real application under uvicorn, in a thread. Gives its address."""
    import uvicorn

    from flowrl_img.rewards.server import create_app

    port = port or free_port()
    config = uvicorn.Config(create_app(scorers, token, **options), port=port, log_level="error", lifespan="off")
    server = uvicorn.Server(config)
    thread = threading.Thread(target=server.run, daemon=True)
    thread.start()
    while not server.started:
        time.sleep(0.01)
    try:
        yield f"http://127.0.0.1:{port}"
    finally:
        server.should_exit = True
        thread.join(10)


class Process:
    """`flowrl-img rewards serve` as a process of its own."""

    def __init__(self, *words: str, port: int, host: str = "127.0.0.1", **env: str) -> None:
        command = [sys.executable, "-m", "flowrl_img", "rewards", "serve", *words, "--port", str(port), "--host", host]
        path = f"{ROOT}:{ROOT / 'tests' / 'support'}"
        self.process = subprocess.Popen(
            command, env={**os.environ, "PYTHONPATH": path, "OMP_NUM_THREADS": "1", **env}, cwd=ROOT,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
        self.port = port

    def wait_until_up(self, seconds: float = 60.0) -> Process:
        until = time.monotonic() + seconds
        while time.monotonic() < until:
            with socket.socket() as probe:
                if probe.connect_ex(("127.0.0.1", self.port)) == 0:
                    return self
            assert self.process.poll() is None, self.process.communicate()[0]
            time.sleep(0.05)
        raise TimeoutError("the server did not come up")

    def kill(self) -> None:
        self.process.kill()
        if self.process.stdout is not None and not self.process.stdout.closed:
            self.process.communicate()


Reply = Callable[[BaseHTTPRequestHandler, bytes], None]


def as_json(content: Any, status: int = 200) -> Reply:
    return as_bytes(json.dumps(content).encode(), status)


def as_bytes(content: bytes, status: int = 200, length: int | None = None) -> Reply:
    """length: what the header promises, where that is to be a lie."""

    def reply(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        handler.send_response(status)
        handler.send_header("Content-Type", "application/json")
        handler.send_header("Content-Length", str(len(content) if length is None else length))
        handler.end_headers()
        handler.wfile.write(content)

    return reply


def slow(seconds: float, then: Reply) -> Reply:
    def reply(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        time.sleep(seconds)
        then(handler, body)

    return reply


def rows_of(body: bytes, **changes: Any) -> list[dict[str, Any]]:
    """A right answer to a request: for each picture its first pixel's level."""
    batch = unpack_batch(body)
    values = batch.images[:, 0, 0, 0].tolist()
    return [{"id": i, "value": float(v), "details": {}, **changes} for i, v in zip(batch.ids, values, strict=True)]


def answered(change: Callable[[list[dict[str, Any]]], Any] = lambda rows: rows) -> Reply:
    """The right answer, its rows changed."""

    def reply(handler: BaseHTTPRequestHandler, body: bytes) -> None:
        as_json({"rows": change(rows_of(body))})(handler, body)

    return reply


INFO = {"reward": "level", "needs": [], "scope": "point", "fingerprint": {"v": "1"}, "known_answers": []}


@dataclass
class Scripted:
    """Replies to scoring requests in turn, the last one for good. asked: (path, headers, body) of every request."""

    replies: Sequence[Reply]
    info: Mapping[str, Any] = field(default_factory=lambda: INFO)
    asked: list[tuple[str, dict[str, str], bytes]] = field(default_factory=list)
    scored: int = 0
    url: str = ""


@contextmanager
def scripted(*replies: Reply, info: Mapping[str, Any] = INFO) -> Iterator[Scripted]:
    """A server that misbehaves as told."""
    script, lock = Scripted(replies, info), threading.Lock()

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            as_json(script.info)(self, b"")

        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            with lock:
                script.asked.append((self.path, dict(self.headers), body))
                if self.path.endswith("/validate"):
                    reply = as_json({"valid": True})
                else:
                    reply = script.replies[min(script.scored, len(script.replies) - 1)]
                    script.scored += 1
            with suppress(BrokenPipeError, ConnectionResetError):  # the client gave up
                reply(self, body)

        def log_message(self, *arguments: Any) -> None: ...

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()
    script.url = f"http://127.0.0.1:{server.server_port}"
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
