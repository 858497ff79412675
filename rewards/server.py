# No `from __future__ import annotations` here: FastAPI evaluates the annotations of handlers, and their types are
# imported inside the function so that the package works without it.
"""Rewards as an HTTP service, for scorers that live in another environment or on another machine.

One picture batch a request (see `wire`), one lock a reward, health answered while scoring. Off the loopback interface
it serves only with a token. Left out: encryption; put a tunnel or a proxy before it on networks that are not yours.
"""

import hmac
import threading
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import replace
from functools import cached_property
from typing import Any

import torch

from flowrl_img.rewards.addresses import TOKEN_VARIABLE, is_loopback
from flowrl_img.rewards.known_answers import StatesAnswers, check
from flowrl_img.rewards.pretrained import library
from flowrl_img.rewards.protocol import Fingerprinted, RewardBatch, RewardOutput
from flowrl_img.rewards.score import Scorer
from flowrl_img.rewards.wire import CONTENT_TYPE, WireError, pack_answer, pack_known_answers, unpack_batch

__all__ = ["MAX_BYTES", "create_app", "serve"]

MAX_BYTES = 512 * 1024 * 1024  # of one request
EXTRA = "pip install 'flowrl-img[serve]'"
MAX_WAITING = 64  # requests for one reward; the next is told to come back


def serve(scorers: Mapping[str, Scorer], host: str, port: int, token: str | None) -> None:
    """Check the known answers of every reward, then serve until interrupted. scorers: by the name in the address.

    ValueError when `host` is open to others and there is no token, or when a reward contradicts its known answers.
    """
    if not is_loopback(host) and not token:
        raise ValueError(
            f"{host} can be reached from other machines: set a secret in the environment variable {TOKEN_VARIABLE}, "
            "here and where the scores are asked for, or serve on 127.0.0.1"
        )
    uvicorn = library("serving", "uvicorn", EXTRA)
    for scorer in scorers.values():
        check(scorer.reward)
    uvicorn.run(create_app(scorers, token), host=host, port=port, log_level="warning", timeout_graceful_shutdown=5)


def create_app(scorers: Mapping[str, Scorer], token: str | None = None, max_bytes: int = MAX_BYTES) -> Any:
    """The FastAPI application of `serve`. WeightsError when FastAPI is not installed."""
    fastapi = library("serving", "fastapi", EXTRA)
    from anyio.to_thread import run_sync
    from fastapi import Depends, HTTPException, Request
    from starlette.concurrency import run_in_threadpool

    async def authorised(request: Request) -> None:  # async: it must not wait for a free thread
        given = request.headers.get("authorization", "")
        if token and not hmac.compare_digest(given.encode(), f"Bearer {token}".encode()):
            raise HTTPException(401, f"a token is needed: Authorization: Bearer <the value of {TOKEN_VARIABLE}>")

    def desk_of(name: str) -> _Desk:
        if name not in desks:
            raise HTTPException(404, f"no reward {name!r} is served here, but {', '.join(desks)}")
        return desks[name]

    async def body_of(request: Request) -> bytes:
        body = bytearray()
        async for chunk in request.stream():
            body += chunk
            if len(body) > max_bytes:
                raise HTTPException(413, f"a request may have {max_bytes:,} bytes: send fewer pictures at once")
        return bytes(body)

    desks = {name: _Desk(scorer) for name, scorer in scorers.items()}
    for desk in desks.values():
        desk.info()
    app = fastapi.FastAPI(
        title="flowrl-img rewards", dependencies=[Depends(authorised)], docs_url=None, redoc_url=None, openapi_url=None
    )

    @app.get("/health")
    async def health() -> dict[str, Any]:
        return {"status": "ok", "rewards": list(desks)}

    @app.get("/v1/rewards/{name}")
    async def info(name: str) -> dict[str, Any]:
        return await run_in_threadpool(desk_of(name).info)

    @app.post("/v1/rewards/{name}/validate")
    async def validate(name: str, request: Request) -> dict[str, Any]:
        desk, asked = desk_of(name), await _json(body_of, request)
        try:
            await run_in_threadpool(desk.scorer.reward.validate, asked["prompts"], asked["metadata"])
        except (ValueError, KeyError, TypeError) as error:
            raise HTTPException(422, str(error)) from error
        return {"valid": True}

    @app.post("/v1/rewards/{name}/score")
    async def score(name: str, request: Request) -> dict[str, Any]:
        desk = desk_of(name)
        if request.headers.get("content-type") != CONTENT_TYPE:
            raise HTTPException(415, f"the content type must be {CONTENT_TYPE}")
        if desk.waiting >= MAX_WAITING:
            raise HTTPException(503, f"{MAX_WAITING} requests wait for {name!r}: come back later")
        desk.waiting += 1
        try:
            batch = await run_in_threadpool(unpack_batch, await body_of(request))
            return pack_answer(await run_sync(desk.score, batch, limiter=desk.gate))
        except WireError as error:
            raise HTTPException(400, str(error)) from error
        except ValueError as error:  # metadata that the reward needs, an answer that breaks the protocol
            raise HTTPException(422, str(error)) from error
        except HTTPException:
            raise
        except Exception as error:
            raise HTTPException(500, f"{type(error).__name__}: {error}") from error
        finally:
            desk.waiting -= 1

    return app


async def _json(body_of: Callable[[Any], Awaitable[bytes]], request: Any) -> dict[str, Any]:
    import json

    from fastapi import HTTPException

    try:
        asked = json.loads(await body_of(request))
    except ValueError as error:
        raise HTTPException(400, f"the body is not JSON: {error}") from error
    if not isinstance(asked, dict) or not {"prompts", "metadata"} <= asked.keys():
        raise HTTPException(400, "the body must hold prompts and metadata")
    return asked


class _Desk:
    """One reward at a time scores one batch: models keep state and share memory.

    waiting: requests for it under way, counted in the event loop.
    """

    def __init__(self, scorer: Scorer) -> None:
        self.scorer, self.lock, self.waiting = scorer, threading.Lock(), 0
        self._info: dict[str, Any] | None = None

    @cached_property
    def gate(self) -> Any:
        """Requests wait here and not in threads, of which the server has few for everything it answers."""
        from anyio import CapacityLimiter

        return CapacityLimiter(1)

    def info(self) -> dict[str, Any]:
        """Put together once, so that a client at its start does not wait for the batch of another."""
        if self._info is None:
            with self.lock:
                self._info = self._described()
        return self._info

    def _described(self) -> dict[str, Any]:
        reward = self.scorer.reward
        stated = dict(reward.fingerprint) if isinstance(reward, Fingerprinted) else {}
        answers = reward.known_answers() if isinstance(reward, StatesAnswers) else []
        return {
            "reward": reward.name, "needs": sorted(reward.needs), "scope": self.scorer.scope, "fingerprint": stated,
            "known_answers": pack_known_answers(answers),
        }  # fmt: skip

    def score(self, batch: RewardBatch) -> RewardOutput:
        """One picture that a scorer dies of fails alone, not with the others of its request."""
        with self.lock:
            return self._score(batch)

    def _score(self, batch: RewardBatch) -> RewardOutput:
        try:
            return self.scorer(batch)
        except ValueError:
            raise
        except Exception:
            if len(batch) == 1 or self.scorer.scope != "point":
                raise
            rows = [_alone(self.scorer, batch.rows([row])) for row in range(len(batch))]
            if not any(isinstance(row, RewardOutput) for row in rows):
                raise
            return _joined(rows, batch)


def _alone(scorer: Scorer, row: RewardBatch) -> RewardOutput | str:
    try:
        return scorer(row)
    except Exception as error:
        return f"{type(error).__name__}: {error}"


def _joined(rows: list[RewardOutput | str], batch: RewardBatch) -> RewardOutput:
    outputs = [
        RewardOutput(torch.tensor([torch.nan]), torch.tensor([False]), {"error": [row]})
        if isinstance(row, str)
        else row
        for row in rows
    ]
    names = dict.fromkeys(name for output in outputs for name in output.details)
    details = {name: [output.details.get(name, [None])[0] for output in outputs] for name in names}
    values, valid = torch.cat([o.values for o in outputs]), torch.cat([o.valid for o in outputs])
    return replace(outputs[0], values=values, valid=valid, details=details, ids=list(batch.ids))
