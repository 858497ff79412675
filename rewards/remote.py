"""A reward that another process computes: `flowrl-img rewards serve` on this machine or another one.

Its scorer may need other packages, another GPU, or be shared by several runs. Answers are joined by id. Whatever goes
wrong on the way is tried again within a deadline, then the pictures concerned are invalid: never 0.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property, partial
from typing import Any, ClassVar
from urllib.parse import quote

import torch

from flowrl_img.rewards.addresses import TOKEN_VARIABLE, checked_urls, secret_of
from flowrl_img.rewards.known_answers import KnownAnswer
from flowrl_img.rewards.protocol import Metadata, RewardBatch, RewardOutput, groups_of, require_keys
from flowrl_img.rewards.score import gather_rows
from flowrl_img.rewards.transport import Retry, ServiceError, Transport, run_together
from flowrl_img.rewards.wire import CONTENT_TYPE, ENCODINGS, WireError, answer_of, known_answers_of, pack_batch

__all__ = ["Remote", "RemoteError"]

START_SECONDS = 8.0  # for each question at the start of a run


class RemoteError(ValueError):
    """No server can be asked at the start of a run, or it serves something else."""


@dataclass(frozen=True)
class Remote:
    """reward: its name on the server. url: http://host:port of a server, or several that serve the same weights.

    scope: of the served reward. batch: pictures a request. concurrency: requests at once. deadline: seconds for one
    request with all its tries, of which there are at most `tries`. encoding: "png" (small) or "raw" (fast on one
    machine). The secret of a server is read from the environment variable FLOWRL_REWARD_TOKEN.
    """

    reward: str
    url: str | tuple[str, ...]
    scope: str = "point"
    batch: int = 16
    concurrency: int = 4
    deadline: float = 120.0
    tries: int = 8
    encoding: str = "png"

    name: ClassVar[str] = "remote"
    needs: ClassVar[frozenset[str]] = frozenset()  # the server says
    requirements: ClassVar[tuple[str, ...]] = ("httpx>=0.27",)

    def __post_init__(self) -> None:
        checked_urls(self.name, self.url)
        if self.encoding not in ENCODINGS:
            raise ValueError(f"remote encoding must be one of {', '.join(ENCODINGS)}, got {self.encoding!r}")
        if self.batch < 1 or self.concurrency < 1:
            raise ValueError(
                f"remote batch and concurrency must be at least 1, got {self.batch} and {self.concurrency}"
            )
        Retry(self.deadline, self.tries)

    @property
    def urls(self) -> tuple[str, ...]:
        """The addresses, without a slash at their end."""
        return checked_urls(self.name, self.url)

    @cached_property
    def transport(self) -> Transport:
        """Its counters `retries` and `failures` tell how reliable the service was."""
        return Transport(self.urls, self._headers, Retry(self.deadline, self.tries), self.concurrency)

    @property
    def _headers(self) -> dict[str, str]:
        token = secret_of(TOKEN_VARIABLE)
        return {"authorization": f"Bearer {token}"} if token else {}

    @property
    def _path(self) -> str:
        return f"/v1/rewards/{quote(self.reward, safe='')}"

    @cached_property
    def _info(self) -> dict[str, Any]:
        """What the servers say of themselves. RemoteError when none answers, or when they disagree."""
        each = [Transport((url,), self._headers, Retry(START_SECONDS, tries=3)) for url in self.urls]
        found = run_together([one.ask("GET", self._path, _described) for one in each])
        answers = {url: info for url, info in zip(self.urls, found, strict=True) if isinstance(info, dict)}
        if not answers:
            reasons = "; ".join(str(error) for error in found)
            raise RemoteError(
                f"remote reward {self.reward!r}: {reasons}. Start it: flowrl-img rewards serve {self.reward}"
            )
        first, info = next(iter(answers.items()))
        for url, other in answers.items():
            if other["fingerprint"] != info["fingerprint"]:
                raise RemoteError(f"{first} and {url} serve other weights or versions under the name {self.reward!r}")
        if info["scope"] != self.scope:
            raise RemoteError(f"{first} serves {self.reward!r} with scope {info['scope']!r}: set scope to that")
        return info

    @property
    def fingerprint(self) -> dict[str, str]:
        """What the server states, and where it is."""
        return {"urls": ", ".join(self.urls), "reward": self.reward, **self._info["fingerprint"]}

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """Ask the server. RemoteError within seconds when there is none; ValueError names a line it cannot score."""
        require_keys(f"remote {self.reward}", frozenset(self._info["needs"]), metadata)
        asked = {"prompts": list(prompts), "metadata": [dict(row) for row in metadata]}
        job = self.transport.ask("POST", f"{self._path}/validate", json.loads, deadline=START_SECONDS, json=asked)
        [found] = run_together([job])
        if isinstance(found, ServiceError):
            raise RemoteError(str(found)) from found

    def known_answers(self) -> Sequence[KnownAnswer]:
        """Those of the served reward, asked over the whole way."""
        try:
            return known_answers_of(self._info["known_answers"])
        except WireError as error:
            raise RemoteError(f"{', '.join(self.urls)}: {error}") from error

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; rows of a request that failed for good are invalid, with address and reason."""
        chunks = list(self._chunks(batch))
        bodies = [pack_batch(batch.rows(rows), self.encoding) for rows in chunks]
        jobs = [self._asked(body, [batch.ids[row] for row in rows]) for body, rows in zip(bodies, chunks, strict=True)]
        answers = run_together(jobs)
        parts = [
            (rows, _failed(str(found), len(rows)) if isinstance(found, ServiceError) else found)
            for rows, found in zip(chunks, answers, strict=True)
        ]
        return gather_rows(parts, batch.ids)

    def _asked(self, body: bytes, ids: Sequence[str]) -> Any:
        headers = {"content-type": CONTENT_TYPE}
        read = partial(answer_of, ids=ids)
        return self.transport.ask("POST", f"{self._path}/score", read, content=body, headers=headers)

    def _chunks(self, batch: RewardBatch) -> list[list[int]]:
        """Rows of each request: `batch` of them, or a group."""
        if self.scope != "point":
            return list(groups_of(batch, self.reward).values())
        return [list(range(k, min(k + self.batch, len(batch)))) for k in range(0, len(batch), self.batch)]


def _described(content: bytes) -> dict[str, Any]:
    """What a server says of a reward; WireError for the answer of another service."""
    kinds = {"fingerprint": dict, "scope": str, "needs": list, "known_answers": list}
    try:
        info = json.loads(content)
    except (ValueError, RecursionError) as error:
        raise WireError(f"the answer is no JSON: {error}") from error
    if not isinstance(info, dict) or not all(isinstance(info.get(key), kind) for key, kind in kinds.items()):
        raise WireError(f"what answers is no server of rewards of flowrl-img: {content[:100]!r}")
    return info


def _failed(reason: str, count: int) -> RewardOutput:
    return RewardOutput(
        torch.full((count,), torch.nan), torch.zeros(count, dtype=torch.bool), {"error": [reason] * count}
    )
