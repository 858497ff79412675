"""Requests to services that fail now and then: retries within a deadline, fail-over, a circuit for each address.

One request is tried on the addresses in turn until it succeeds, the deadline has passed or its tries are used up. An
address that fails several times in a row is left alone for a while, then tried by one request; so a dead server costs
its users one probe now and then, and a short outage is waited out. What can never succeed (4xx) is not repeated.
All requests of a process share one event loop in a thread of its own, because clients and locks belong to a loop.
"""

from __future__ import annotations

import asyncio
import os
import random
import threading
import time
from collections.abc import Awaitable, Callable, Collection, Coroutine, Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, TypeVar
from urllib.parse import urlsplit

from flowrl_img.rewards.addresses import is_loopback
from flowrl_img.rewards.pretrained import library

__all__ = ["Circuit", "Retry", "ServiceError", "Transport", "run_together"]

T = TypeVar("T")
RETRIED = frozenset({408, 425, 429, 500, 502, 503, 504})
CONNECT_SECONDS = 5.0
CONNECTIONS = 64


class ServiceError(RuntimeError):
    """A request failed for good; the message holds the address and the last reason."""


class _Rejected(Exception):
    """The service understood the request and will never serve it."""


@dataclass(frozen=True)
class Retry:
    """deadline: seconds for one request with all its tries. tries: the most there may be.

    Between two tries lie base * 2^k seconds, at most `longest`, times a random factor in [0.5, 1.5]: clients that
    failed together do not come back together.
    """

    deadline: float = 120.0
    tries: int = 8
    base: float = 0.25
    longest: float = 8.0

    def __post_init__(self) -> None:
        if self.deadline <= 0 or self.tries < 1:
            raise ValueError(f"a request needs a deadline above 0 s and a try, got {self.deadline} and {self.tries}")

    def pause(self, number: int, rng: random.Random) -> float:
        """Seconds after the failed try `number`, counted from 0."""
        return min(self.base * 2**number, self.longest) * rng.uniform(0.5, 1.5)


@dataclass
class Circuit:
    """Whether an address may be asked. It opens after `threshold` failures in a row, for `cool_off` seconds that double
    with each failed probe up to `longest`; then one request probes, and its success closes it.
    """  # fmt: skip

    threshold: int = 5
    cool_off: float = 1.0
    longest: float = 10.0
    failures: int = 0
    open_until: float = 0.0
    probing: bool = False

    @property
    def closed(self) -> bool:
        """Asked freely."""
        return self.failures < self.threshold

    def succeeded(self) -> None:
        self.failures, self.probing = 0, False

    def failed(self, now: float) -> None:
        self.failures, self.probing = self.failures + 1, False
        if not self.closed:
            self.open_until = now + min(self.cool_off * 2 ** (self.failures - self.threshold), self.longest)

    def abandoned(self) -> None:
        """The request was given up before it said anything of the address."""
        self.probing = False


@dataclass
class Transport:
    """POST and GET to one of `urls`. headers: sent with each. concurrency: requests under way at once.

    retries, failures: how often a request was tried again, and how many failed for good.
    """

    urls: Sequence[str]
    headers: dict[str, str] = field(default_factory=dict)
    retry: Retry = field(default_factory=Retry)
    concurrency: int = 4
    retries: int = 0
    failures: int = 0

    def __post_init__(self) -> None:
        self._circuits = {url: Circuit() for url in self.urls}
        self._turn = 0
        self._rng = random.Random()  # jitter only: no score depends on it
        self._loops: dict[tuple[int, int], tuple[Any, asyncio.Semaphore]] = {}

    async def ask(
        self, method: str, path: str, read: Callable[[bytes], T], *, deadline: float | None = None, **content: Any
    ) -> T:
        """What `read` makes of the answer; a ValueError of it is a malformed answer, which is tried again.

        content: httpx's `content`, `json` or `headers`. ServiceError after the deadline, the last try or a refusal.
        """
        client, gate = self._tools()
        async with gate:
            problem = "no try was made"
            try:
                async with asyncio.timeout(deadline or self.retry.deadline):
                    seen: set[str] = set()
                    for number in range(self.retry.tries):
                        if number:
                            self.retries += 1
                            await asyncio.sleep(self.retry.pause(number - 1, self._rng))
                        url = await self._admitted(seen)
                        seen.add(url)
                        try:
                            return await self._tried(client, url, method, path, read, content)
                        except _Rejected as error:
                            raise self._gone(f"{url}{path}: {error}") from None
                        except _Failed as error:
                            problem = f"{url}{path}: {error}"
                    raise self._gone(f"{problem} (try {self.retry.tries} of {self.retry.tries})")
            except TimeoutError:
                where = problem if problem != "no try was made" else f"{', '.join(self.urls)}{path}: no answer"
                raise self._gone(f"{where} (gave up after {deadline or self.retry.deadline:g} s)") from None

    def _gone(self, message: str) -> ServiceError:
        self.failures += 1
        return ServiceError(message)

    async def _tried(
        self, client: Any, url: str, method: str, path: str, read: Callable[[bytes], T], content: dict[str, Any]
    ) -> T:
        import httpx

        circuit = self._circuits[url]
        try:
            answer = await client.request(method, url + path, **content)
            if answer.status_code in RETRIED:
                raise _Failed(f"{answer.status_code} {_reason(answer)}")
            if answer.status_code >= 400:
                circuit.succeeded()  # it works; this request does not
                raise _Rejected(f"{answer.status_code} {_reason(answer)}")
            result = read(answer.content)
        except (httpx.HTTPError, OSError, ValueError) as error:
            circuit.failed(time.monotonic())
            raise _Failed(f"{type(error).__name__}: {error}".rstrip(": ")) from error
        except _Failed:
            circuit.failed(time.monotonic())
            raise
        except asyncio.CancelledError:
            circuit.failed(time.monotonic())  # too slow for the deadline
            raise
        finally:
            circuit.abandoned()
        circuit.succeeded()
        return result

    async def _admitted(self, seen: Collection[str]) -> str:
        """The next address that may be asked, rather one that this request has not seen; waits while there is none."""
        while True:
            closed = [url for url in self.urls if self._circuits[url].closed]
            if closed:
                self._turn += 1
                fresh = [url for url in closed if url not in seen] or closed
                return fresh[self._turn % len(fresh)]
            now = time.monotonic()
            ready = [u for u in self.urls if self._circuits[u].open_until <= now and not self._circuits[u].probing]
            if ready:
                self._circuits[ready[0]].probing = True
                return ready[0]
            await asyncio.sleep(0.05)

    def _tools(self) -> tuple[Any, asyncio.Semaphore]:
        """Client and gate of the running loop: neither works in another."""
        key = os.getpid(), id(asyncio.get_running_loop())
        if key not in self._loops:
            httpx = library("asking a server", "httpx", "pip install 'flowrl-img[remote]'")
            timeout = httpx.Timeout(None, connect=CONNECT_SECONDS)  # the deadline is `asyncio.timeout`, over all tries
            limits = httpx.Limits(max_connections=CONNECTIONS)
            local = all(is_loopback(urlsplit(url).hostname or "") for url in self.urls)  # no proxy leads there
            client = httpx.AsyncClient(
                headers=self.headers, timeout=timeout, limits=limits, trust_env=not local,
                verify=any(url.startswith("https:") for url in self.urls),  # reading the certificates takes a second
            )  # fmt: skip
            self._loops[key] = client, asyncio.Semaphore(self.concurrency)
        return self._loops[key]


class _Failed(Exception):
    """This try failed; another may not."""


def run_together(jobs: Sequence[Awaitable[T]]) -> list[T | ServiceError]:
    """The results of the jobs in their order, run at once on the loop of this process; a failed one is its error."""

    async def gathered() -> list[T | ServiceError]:
        found = await asyncio.gather(*jobs, return_exceptions=True)
        for result in found:
            if isinstance(result, BaseException) and not isinstance(result, ServiceError):
                raise result
        return found  # type: ignore[return-value]

    return _submitted(gathered())


def _submitted(coroutine: Coroutine[Any, Any, T]) -> T:
    future = asyncio.run_coroutine_threadsafe(coroutine, _loop(os.getpid()))
    try:
        return future.result()
    except KeyboardInterrupt:
        future.cancel()
        raise


@lru_cache(maxsize=1)
def _loop(pid: int) -> asyncio.AbstractEventLoop:
    """The event loop of this process, in a thread of its own; a fork gets another."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name="flowrl-img requests", daemon=True).start()
    return loop


def _reason(answer: Any) -> str:
    """FastAPI's and OpenAI's error texts, else the beginning of the body."""
    try:
        body = answer.json()
        found = body.get("detail") or body["error"]["message"]
    except (ValueError, KeyError, TypeError, AttributeError):
        found = answer.text
    return str(found)[:300]
