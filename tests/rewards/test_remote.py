"""A remote reward against services that misbehave: retried, masked or stopped, never 0, never mixed up."""

from __future__ import annotations

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import services
import torch
from services import INFO, answered, as_bytes, as_json, scripted, serving, slow

from flowrl_img.rewards import known_answers, registry
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.protocol import RewardBatch, RewardOutput
from flowrl_img.rewards.remote import Remote, RemoteError
from flowrl_img.rewards.score import InvalidScoreError, Scorer

FAST = {"deadline": 5.0, "tries": 4}
KNOWN = "sample_rewards:brightness"


def remote(url: str | tuple[str, ...], **options: Any) -> Remote:
    return Remote("level", url, **{**FAST, **options})


def batch(*levels: int, groups: list[str] | None = None) -> RewardBatch:
    images = torch.tensor(levels, dtype=torch.uint8)[:, None, None, None].expand(-1, 2, 2, 3).contiguous()
    return RewardBatch(images, [""] * len(levels), [{}] * len(levels), [f"s{k}" for k in range(len(levels))], groups)


def masked(reward: Remote, *levels: int) -> RewardOutput:
    return Scorer(reward, failures=FailureBudget("mask", share=1.0))(batch(*levels))


def error(status: int, text: str = "out of order") -> services.Reply:
    return as_json({"detail": text}, status)


@pytest.fixture(autouse=True)
def no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    """Pauses between tries shrink to a hundredth, so that tests are quick; their law has a test of its own."""
    from flowrl_img.rewards.transport import Retry

    own = Retry.pause
    monkeypatch.setattr(Retry, "pause", lambda self, number, rng: own(self, number, rng) / 100)


def test_levels_come_back_in_order_over_several_requests() -> None:
    with scripted(answered()) as server:
        reward = remote(server.url, batch=3)
        assert masked(reward, *range(10, 20)).values.tolist() == [float(level) for level in range(10, 20)]
        assert len(server.asked) == 4 and reward.transport.retries == reward.transport.failures == 0


def test_rows_in_another_order_are_joined_by_id() -> None:
    with scripted(answered(lambda rows: rows[::-1])) as server:
        assert masked(remote(server.url), 5, 6, 7).values.tolist() == [5.0, 6.0, 7.0]


HEALING = {
    "500 twice": [error(500), error(500)],
    "503": [error(503)],
    "429": [error(429)],
    "malformed JSON": [as_bytes(b'{"rows": [{"id":')],
    "no JSON": [as_bytes(b"<html>nginx</html>")],
    "half a reply": [as_bytes(b'{"rows": [', length=5000)],
    "an empty reply": [as_bytes(b"")],
    "a wrong count": [answered(lambda rows: rows[:-1])],
    "too many": [answered(lambda rows: [*rows, rows[0]])],
    "details that are no object": [answered(lambda rows: [{**row, "details": ["x"]} for row in rows])],
    "rows that are no objects": [answered(lambda rows: [1 for row in rows])],
    "endless nesting": [as_bytes(b"[" * 100_000)],
    "other ids": [answered(lambda rows: [{**row, "id": f"x{row['id']}"} for row in rows])],
}


@pytest.mark.parametrize("faults", HEALING.values(), ids=HEALING)
def test_a_passing_fault_is_retried_and_leaves_no_trace(faults: list[services.Reply]) -> None:
    with scripted(*faults, answered()) as server:
        reward = remote(server.url)
        assert masked(reward, 0, 9).values.tolist() == [0.0, 9.0]
        assert (reward.transport.retries, reward.transport.failures) == (len(faults), 0)


@pytest.mark.parametrize("faults", HEALING.values(), ids=HEALING)
def test_a_lasting_fault_is_invalid_with_address_and_reason_and_never_zero(faults: list[services.Reply]) -> None:
    with scripted(faults[0]) as server:
        reward = remote(server.url)
        out = masked(reward, 1, 2)
        assert not out.valid.any() and out.values.isnan().all()
        assert all(server.url in text and "(try 4 of 4)" in text for text in out.details["error"])
        assert server.scored == 4 and (reward.transport.retries, reward.transport.failures) == (3, 1)
        with pytest.raises(InvalidScoreError, match=server.url):
            Scorer(remote(server.url, tries=1))(batch(1, 2))


@pytest.mark.parametrize("status", [400, 401, 403, 404, 413, 415, 422])
def test_a_request_that_can_never_succeed_is_not_repeated(status: int) -> None:
    with scripted(error(status, "no such thing"), answered()) as server:
        out = masked(remote(server.url), 1, 2)
        assert not out.valid.any() and f"{status} no such thing" in out.details["error"][0]
        assert server.scored == 1


@pytest.mark.parametrize("value", [float("nan"), None, "0.5", True, 10**400, 1e300], ids=lambda value: str(value)[:5])
def test_a_row_that_is_no_number_is_invalid_alone(value: Any) -> None:
    def spoil(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
        return [rows[0], {**rows[1], "value": value}]

    with scripted(answered(spoil)) as server:
        out = masked(remote(server.url), 7, 8)
        assert out.valid.tolist() == [True, False] and out.values[0] == 7.0 and server.scored == 1


def test_a_slow_server_is_given_up_at_the_deadline() -> None:
    with scripted(slow(30, answered())) as server:
        began = time.monotonic()
        out = masked(remote(server.url, deadline=0.5), 1)
        assert time.monotonic() - began < 2.0
        assert "gave up after 0.5 s" in out.details["error"][0] and server.url in out.details["error"][0]


def test_a_server_that_drips_its_answer_is_given_up_at_the_deadline() -> None:
    def drip(handler: Any, body: bytes) -> None:
        handler.send_response(200)
        handler.send_header("Content-Length", "1000")
        handler.end_headers()
        for _ in range(100):
            handler.wfile.write(b" ")
            handler.wfile.flush()
            time.sleep(0.1)

    with scripted(drip) as server:
        began = time.monotonic()
        assert not masked(remote(server.url, deadline=0.6), 1).valid.any()
        assert time.monotonic() - began < 2.0


def test_one_failed_request_does_not_touch_the_others() -> None:
    def by_level(handler: Any, body: bytes) -> None:
        level = services.rows_of(body)[0]["value"]
        (error(400) if level == 3 else answered())(handler, body)

    with scripted(by_level) as server:
        out = masked(remote(server.url, batch=1), 1, 2, 3, 4)
        assert out.valid.tolist() == [True, True, False, True] and out.values[3] == 4.0


def test_a_dead_server_is_told_at_the_start_within_seconds_with_its_address() -> None:
    url = f"http://127.0.0.1:{services.free_port()}"
    began = time.monotonic()
    with pytest.raises(RemoteError, match=rf"{url}/v1/rewards/level.*flowrl-img rewards serve level"):
        remote(url).validate(["a"], [{}])
    assert time.monotonic() - began < 10


def test_a_server_that_hangs_at_the_start_is_told_within_ten_seconds(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("flowrl_img.rewards.remote.START_SECONDS", 0.5)
    with scripted(answered()) as server:
        monkeypatch.setattr(services, "as_json", lambda info: slow(30, as_bytes(b"")))
        with pytest.raises(RemoteError, match=r"gave up after 0\.5 s"):
            remote(server.url).validate(["a"], [{}])


@pytest.mark.parametrize(
    "info", [{"status": "ok"}, [1], {**INFO, "fingerprint": [1]}, {**INFO, "needs": None}], ids=str
)
def test_another_service_at_the_address_is_told_from_a_server_of_rewards(info: Any) -> None:
    refused = pytest.raises(RemoteError, match=r"http://.*no server of rewards.*flowrl-img rewards serve level")
    with scripted(answered(), info=info) as server, refused:
        remote(server.url).validate(["a"], [{}])


@pytest.mark.parametrize("secret", ["sécret", "two\nlines"])
def test_a_secret_that_no_header_can_hold_is_refused_and_not_shown(
    monkeypatch: pytest.MonkeyPatch, secret: str
) -> None:
    monkeypatch.setenv("FLOWRL_REWARD_TOKEN", secret)
    with scripted(answered()) as server:
        with pytest.raises(ValueError, match="variable FLOWRL_REWARD_TOKEN must hold printable ASCII") as told:
            remote(server.url).validate(["a"], [{}])
        assert secret not in str(told.value) and server.asked == []


def test_the_newline_of_a_file_is_no_part_of_a_secret(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "secret\n")
    with serving({"level": level_scorer()}, token="secret") as url:
        Remote("level", url).validate(["a"], [{}])


def test_an_outage_of_three_seconds_is_survived() -> None:
    port = services.free_port()
    with ThreadPoolExecutor() as pool:
        scoring = pool.submit(masked, Remote("level", f"http://127.0.0.1:{port}", deadline=30.0, tries=600), 1, 2)
        time.sleep(3)
        with serving({"level": level_scorer()}, port=port):
            assert scoring.result(timeout=20).values.tolist() == [1.0, 2.0]


def level_scorer() -> Scorer:
    def level(images: torch.Tensor, prompts: Any, metadata: Any) -> list[float]:
        return images[:, 0, 0, 0].float().tolist()

    return Scorer(registry.FunctionReward(level, "level"), failures=FailureBudget("mask", share=1.0))


def test_another_server_takes_over() -> None:
    dead = f"http://127.0.0.1:{services.free_port()}"
    with scripted(error(500)) as sick, scripted(answered()) as well:
        reward = remote((dead, sick.url, well.url), batch=1)
        reward.validate(["a"], [{}])  # one that answers is enough
        assert masked(reward, *range(1, 31)).values.tolist() == [float(k) for k in range(1, 31)]
        assert well.scored == 30 and sick.scored <= 10  # left alone once its circuit is open


def test_servers_of_other_weights_under_one_name_are_refused() -> None:
    with scripted(answered()) as one, scripted(answered(), info={**INFO, "fingerprint": {"v": "2"}}) as two:
        with pytest.raises(RemoteError, match="serve other weights or versions"):
            remote((one.url, two.url)).validate(["a"], [{}])
        assert remote(one.url).fingerprint == {"urls": one.url, "reward": "level", "v": "1"}


def test_the_known_answers_of_the_served_reward_are_asked_over_the_whole_way() -> None:
    with serving({"jpeg": Scorer(registry.load("jpeg"))}) as url:
        known_answers.check(Remote("jpeg", url))
        assert "libjpeg" in Remote("jpeg", url).fingerprint["encoder"]
    from flowrl_img.rewards.wire import pack_known_answers

    stated = {**INFO, "known_answers": pack_known_answers(registry.load("jpeg").known_answers())}
    constant = answered(lambda rows: [{**row, "value": 1.0} for row in rows])
    wrong = pytest.raises(known_answers.KnownAnswerError, match="reward 'remote' fails its known answers")
    with scripted(constant, info=stated) as server, wrong:
        known_answers.check(remote(server.url))


def test_prompts_are_checked_by_the_server_before_a_run() -> None:
    with serving({"geneval": Scorer(registry.load("geneval")), "ocr": Scorer(registry.load("ocr"))}) as url:
        with pytest.raises(ValueError, match=r"line 2: .*\['include', 'tag'\]"):
            Remote("geneval", url).validate(["a", "b"], [{"tag": "x", "include": []}, {}])
        with pytest.raises(RemoteError, match=r"422 line 1: no text to look for in 'a sign'"):
            Remote("ocr", url).validate(["a sign"], [{}])
        Remote("ocr", url).validate(['"AB"'], [{}])
        with pytest.raises(RemoteError, match="404 no reward 'clip' is served here, but geneval, ocr"):
            Remote("clip", url).validate(["a"], [{}])


def test_a_groupwise_reward_is_sent_group_by_group() -> None:
    with serving({"contest": Scorer(registry.load("sample_rewards:Contest"))}) as url:
        reward = Remote("contest", url, scope="group", batch=1)
        out = Scorer(reward)(batch(1, 9, 3, 4, 2, groups=["p", "q", "p", "q", "p"]))
        assert out.values.tolist() == pytest.approx([0.0, 0.5, 2 / 3, 0.0, 1 / 3])
        assert out.details["mates"] == [3, 2, 3, 2, 3]
        with pytest.raises(RemoteError, match="with scope 'group': set scope to that"):
            Remote("contest", url).validate(["a"], [{}])


def test_many_clients_at_once_lose_and_mix_up_nothing() -> None:
    """8 clients, 2,000 requests, a real application; every picture's score is its own."""
    with serving({"level": level_scorer()}) as url:

        def client(number: int) -> int:
            reward, wrong = Remote("level", url, batch=1, concurrency=8, encoding="raw"), 0
            for part in range(5):
                levels = [(number * 31 + part * 50 + k) % 256 for k in range(50)]
                wrong += Scorer(reward)(batch(*levels)).values.tolist() != [float(level) for level in levels]
            return wrong

        with ThreadPoolExecutor(8) as pool:
            assert sum(pool.map(client, range(8))) == 0


def test_a_client_used_from_several_event_loops_and_threads_still_works() -> None:
    import asyncio

    with scripted(answered()) as server:
        reward = remote(server.url, concurrency=1, batch=1)
        for _ in range(2):
            assert masked(reward, 1, 2, 3).values.tolist() == [1.0, 2.0, 3.0]

        async def inside() -> RewardOutput:
            return await asyncio.to_thread(masked, reward, 4, 5)

        assert asyncio.run(inside()).values.tolist() == [4.0, 5.0]


def test_without_the_token_nothing_is_answered(monkeypatch: pytest.MonkeyPatch) -> None:
    with serving({"level": level_scorer()}, token="secret") as url:
        with pytest.raises(RemoteError, match="401 a token is needed"):
            Remote("level", url).validate(["a"], [{}])
        monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "guess")
        with pytest.raises(RemoteError, match="401"):
            Remote("level", url).validate(["a"], [{}])
        monkeypatch.setenv("FLOWRL_REWARD_TOKEN", "secret")
        reward = Remote("level", url)
        reward.validate(["a"], [{}])
        assert masked(reward, 3).values.tolist() == [3.0]


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"url": "localhost:80"}, "must be http://host:port"),
        ({"url": "http://a:84170"}, "must be http://host:port"),
        ({"url": "http://a:b"}, "must be http://host:port"),
        ({"url": "http://[::1"}, "must be http://host:port"),
        ({"url": ()}, "must name a server"),
        ({"url": "http://a", "encoding": "pickle"}, "png, raw, got 'pickle'"),
        ({"url": "http://a", "batch": 0}, "at least 1"),
        ({"url": "http://a", "deadline": 0}, "deadline above 0 s"),
        ({"url": "http://a", "tries": 0}, "a try"),
    ],
)
def test_wrong_options_are_refused_without_a_request(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load("remote", reward="level", **options)


def test_nothing_is_asked_of_a_server_before_prompts_are_loaded() -> None:
    with scripted(answered()) as server:
        reward = registry.load("remote", reward="level", url=server.url)
        Scorer(reward)
        assert json.dumps(registry.describe({"name": "remote"}, reward)["options"]) and server.asked == []


def test_pauses_grow_vary_and_are_bounded(monkeypatch: pytest.MonkeyPatch) -> None:
    import random

    monkeypatch.undo()
    from flowrl_img.rewards.transport import Retry

    rng = random.Random(0)
    for number, middle in ((0, 0.25), (1, 0.5), (4, 4.0), (9, 8.0)):
        pauses = [Retry().pause(number, rng) for _ in range(200)]
        assert 0.5 * middle <= min(pauses) < 0.6 * middle and 1.4 * middle < max(pauses) <= 1.5 * middle


def test_a_circuit_opens_probes_and_closes() -> None:
    from flowrl_img.rewards.transport import Circuit

    circuit = Circuit(threshold=3, cool_off=1.0, longest=5.0)
    for now in (0.0, 1.0):
        circuit.failed(now)
    assert circuit.closed
    circuit.succeeded()
    opened: list[float] = []
    for now in (10.0, 11.0, 12.0, 20.0, 30.0, 40.0, 50.0):
        circuit.failed(now)
        opened.append(circuit.open_until - now)
    assert not circuit.closed and opened[2:] == [1.0, 2.0, 4.0, 5.0, 5.0]
    circuit.succeeded()
    assert circuit.closed
