"""The scoring service: what it refuses, what it isolates, who may use it."""

from __future__ import annotations

import pickle
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import services
import torch
from services import serving

from flowrl_img.rewards import registry, server, wire
from flowrl_img.rewards.addresses import TOKEN_VARIABLE, is_loopback
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.known_answers import KnownAnswerError
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.protocol import RewardBatch
from flowrl_img.rewards.score import Scorer

HEADERS = {"content-type": wire.CONTENT_TYPE}


def scorer(function: Any, name: str = "r") -> Scorer:
    return Scorer(registry.FunctionReward(function, name), failures=FailureBudget("mask", share=1.0))


def batch(count: int = 3) -> RewardBatch:
    images = torch.arange(count, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3).contiguous()
    return RewardBatch(images, ["p"] * count, [{}] * count, [f"s{k}" for k in range(count)])


def poisoned(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
    levels = images[:, 0, 0, 0].float().tolist()
    if 1.0 in levels:
        raise RuntimeError("CUDA error: device-side assert")
    return levels


@pytest.fixture
def client() -> Iterator[httpx.Client]:
    scorers = {"level": scorer(lambda i, p, m: i[:, 0, 0, 0].float().tolist()), "poisoned": scorer(poisoned)}
    with serving(scorers, max_bytes=10_000) as url, httpx.Client(base_url=url) as made:
        yield made


def ask(client: httpx.Client, body: bytes, name: str = "level", **headers: str) -> httpx.Response:
    return client.post(f"/v1/rewards/{name}/score", content=body, headers={**HEADERS, **headers})


def test_it_says_what_it_serves_and_scores_it(client: httpx.Client) -> None:
    assert client.get("/health").json() == {"status": "ok", "rewards": ["level", "poisoned"]}
    info = client.get("/v1/rewards/level").json()
    assert (info["reward"], info["needs"], info["scope"], info["known_answers"]) == ("r", [], "point", [])
    rows = ask(client, wire.pack_batch(batch())).json()["rows"]
    assert [(row["id"], row["value"]) for row in rows] == [("s0", 0.0), ("s1", 1.0), ("s2", 2.0)]


def test_a_pickle_is_refused_whatever_it_calls_itself(client: httpx.Client) -> None:
    body = pickle.dumps({"images": [b"x"]})
    for kind in ("application/octet-stream", "application/python-pickle", "application/json"):
        assert ask(client, body, **{"content-type": kind}).status_code == 415
    refused = ask(client, body)
    assert refused.status_code == 400 and "must begin with FRW1" in refused.json()["detail"]


@pytest.mark.parametrize(
    ("method", "path", "body", "status", "reason"),
    [
        ("POST", "/v1/rewards/nothing/score", b"", 404, "no reward 'nothing' is served here, but level, poisoned"),
        ("GET", "/v1/rewards/nothing", b"", 404, "no reward 'nothing'"),
        ("POST", "/v1/rewards/level/score", b"FRW1" + b"x" * 10_000, 413, "10,000 bytes"),
        ("POST", "/v1/rewards/level/score", b"FRW1\0\0\0\2{]", 400, "not JSON"),
        ("POST", "/v1/rewards/level/validate", b"{]", 400, "not JSON"),
        ("POST", "/v1/rewards/level/validate", b"[]", 400, "must hold prompts and metadata"),
        ("GET", "/docs", b"", 404, "Not Found"),
    ],
)
def test_wrong_requests_are_told_why(
    client: httpx.Client, method: str, path: str, body: bytes, status: int, reason: str
) -> None:
    answer = client.request(method, path, content=body, headers=HEADERS)
    assert answer.status_code == status and reason in answer.json()["detail"]


def test_a_picture_that_a_scorer_dies_of_fails_alone(client: httpx.Client) -> None:
    rows = ask(client, wire.pack_batch(batch()), "poisoned").json()["rows"]
    assert [row["value"] for row in rows] == [0.0, None, 2.0]
    assert rows[1]["error"] == "RuntimeError: CUDA error: device-side assert"
    alone = ask(client, wire.pack_batch(batch().rows([1])), "poisoned")
    assert alone.status_code == 500 and "device-side assert" in alone.json()["detail"]


def test_missing_metadata_is_the_clients_fault() -> None:
    with serving({"geneval": Scorer(registry.load("geneval"))}) as url:
        answer = httpx.post(f"{url}/v1/rewards/geneval/score", content=wire.pack_batch(batch()), headers=HEADERS)
    assert answer.status_code == 422 and "needs the metadata ['include', 'tag']" in answer.json()["detail"]


def test_health_is_answered_while_a_batch_is_scored_and_too_many_are_sent_away(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(server, "MAX_WAITING", 2)
    go = threading.Event()

    def wait(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        go.wait(10)
        return [1.0] * len(images)

    with serving({"slow": scorer(wait)}) as url:
        codes: list[int] = []

        def post() -> None:
            body = wire.pack_batch(batch())
            answer = httpx.post(f"{url}/v1/rewards/slow/score", content=body, headers=HEADERS, timeout=20)
            codes.append(answer.status_code)

        threads = [threading.Thread(target=post) for _ in range(2)]
        for thread in threads:
            thread.start()
        time.sleep(0.5)
        assert httpx.get(f"{url}/health", timeout=2).json()["status"] == "ok"
        assert httpx.get(f"{url}/v1/rewards/slow", timeout=2).status_code == 200
        post()
        assert codes == [503]
        go.set()
        for thread in threads:
            thread.join(10)
        assert codes == [503, 200, 200]


def test_many_waiting_requests_keep_neither_health_nor_another_reward_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    many = 48  # more than the threads of the server
    go, arrived = threading.Event(), []

    def wait(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        go.wait(120)
        return [1.0] * len(images)

    def quick(images: torch.Tensor, prompts: Sequence[str], metadata: Sequence[Any]) -> list[float]:
        return [2.0] * len(images)

    def unpack(body: bytes) -> RewardBatch:
        arrived.append(len(body))
        return wire.unpack_batch(body)

    monkeypatch.setattr(server, "unpack_batch", unpack)
    with serving({"slow": scorer(wait), "quick": scorer(quick)}) as url, ThreadPoolExecutor(many) as pool:

        def post(name: str, timeout: float = 150) -> int:
            address, body = f"{url}/v1/rewards/{name}/score", wire.pack_batch(batch())
            return httpx.post(address, content=body, headers=HEADERS, timeout=timeout, verify=False).status_code

        waiting = [pool.submit(post, "slow") for _ in range(many)]
        try:
            while len(arrived) < many:
                time.sleep(0.05)
            for path in ("/health", "/v1/rewards/slow", "/v1/rewards/quick"):
                assert httpx.get(f"{url}{path}", timeout=30, verify=False).status_code == 200
            assert post("quick", timeout=30) == 200
        finally:
            go.set()
        assert [one.result() for one in waiting] == [200] * many


def test_a_token_guards_every_address() -> None:
    with serving({"level": scorer(poisoned)}, token="secret") as url:
        for method, path in (("GET", "/health"), ("GET", "/v1/rewards/level"), ("POST", "/v1/rewards/level/score")):
            for given in ("", "Bearer", "Bearer wrong", "secret"):
                answer = httpx.request(method, url + path, headers={"authorization": given})
                assert answer.status_code == 401, (path, given)
            allowed = httpx.request(method, url + path, headers={"authorization": "Bearer secret"})
            assert allowed.status_code != 401


@pytest.mark.parametrize("host", ["0.0.0.0", "::", "192.168.1.5", "scorer.example"])
def test_without_a_token_nothing_is_served_off_loopback(host: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # reaching it would be another error
    with pytest.raises(ValueError, match=f"{host} can be reached from other machines.*{TOKEN_VARIABLE}"):
        server.serve({"level": scorer(poisoned)}, host, 8000, token=None)
    assert not is_loopback(host)


@pytest.mark.parametrize("host", ["127.0.0.1", "127.8.8.8", "::1", "localhost"])
def test_loopback_is_known(host: str) -> None:
    assert is_loopback(host)


def test_a_reward_that_contradicts_its_known_answers_is_not_served() -> None:
    class Upside(type(registry.load("jpeg"))):  # type: ignore[misc]
        def __call__(self, batch: RewardBatch) -> Any:
            output = super().__call__(batch)
            return type(output)(-output.values, output.valid)

    with pytest.raises(KnownAnswerError, match="jpeg"):
        server.serve({"jpeg": Scorer(Upside())}, "127.0.0.1", 8000, None)


@pytest.mark.parametrize("library", ["fastapi", "uvicorn"])
def test_a_missing_library_names_the_extra(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, library, None)
    with pytest.raises(
        WeightsError, match=rf"serving: {library} cannot be imported .*pip install 'flowrl-img\[serve\]'"
    ):
        server.serve({"level": scorer(lambda i, p, m: [1.0] * len(i))}, "127.0.0.1", services.free_port(), None)
