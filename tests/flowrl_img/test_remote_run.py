"""A run whose reward is served by another process: outages, death, and the command that serves."""

import json
import threading
import time

import httpx
import pytest
from services import Process, free_port

from flowrl_img.cli import main
from flowrl_img.run import run_training

REWARD = "sample_rewards:brightness"


@pytest.fixture
def server():
    """server(**env): `rewards serve` on a port of its own; every one is killed in the end."""
    made = []

    def start(*words, port=None, **options):
        made.append(Process(*(words or (REWARD,)), port=port or free_port(), **options))
        return made[-1]

    yield start
    for process in made:
        process.kill()


def remote(port, **options):
    url = f"http://127.0.0.1:{port}"
    return {"name": "remote", "reward": REWARD, "url": url, "label": "bright", "batch": 3, **options}


def metrics(run):
    return [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]


def test_a_run_goes_on_after_its_server_was_gone_for_three_seconds(tiny_config, tmp_path, server):
    first = server().wait_until_up()
    run = tmp_path / "run"
    config = tiny_config(rewards=[remote(first.port)], run={"rollouts": 6, "updates_per_rollout": 1})
    gone = []

    def outage():
        while not (run / "metrics.jsonl").exists() or not metrics(run):
            time.sleep(0.02)
        first.kill()
        began = time.monotonic()
        time.sleep(3)
        server(port=first.port).wait_until_up()
        gone.append(time.monotonic() - began)

    thread = threading.Thread(target=outage)
    thread.start()
    assert run_training(config) == 0
    thread.join()
    assert gone[0] >= 3 and len(metrics(run)) == 6
    assert all(row["invalid"] == 0 and row["reward"] > 0 for row in metrics(run))
    stated = json.loads((run / "rewards.json").read_text())["bright"]["fingerprint"]
    assert stated["reward"] == REWARD and len(stated["source.sha256"]) == 64


@pytest.mark.parametrize("options", [{}, {"on_failure": "mask", "failure_budget": 0.01}], ids=["raise", "mask"])
def test_a_server_that_dies_for_good_stops_the_run_with_its_address(tiny_config, tmp_path, server, capsys, options):
    process = server().wait_until_up()
    run = tmp_path / "run"
    config = tiny_config(
        rewards=[remote(process.port, deadline=1.0, **options)], run={"rollouts": 50, "updates_per_rollout": 1}
    )

    def death():
        while not (run / "metrics.jsonl").exists() or not metrics(run):
            time.sleep(0.02)
        process.kill()

    threading.Thread(target=death).start()
    assert run_training(config) == 1
    said = capsys.readouterr().out
    assert "error: reward 'bright' could not score" in said and f"http://127.0.0.1:{process.port}" in said
    assert 0 < len(metrics(run)) < 50 and (run / "summary.txt").exists()
    assert all(row["reward"] > 0 for row in metrics(run))


def test_a_run_does_not_start_without_its_server(tiny_config, tmp_path):
    began = time.monotonic()
    with pytest.raises(ValueError, match=r"http://127\.0\.0\.1:\d+.*flowrl-img rewards serve"):
        run_training(tiny_config(rewards=[remote(free_port())]))
    assert time.monotonic() - began < 10 and not (tmp_path / "run").exists()


def test_rewards_are_served_with_their_options_and_only_with_the_token(server):
    process = server("jpeg", "quality=50", "label=small", "jpeg", host="0.0.0.0", FLOWRL_REWARD_TOKEN="s3cret")
    process.wait_until_up()
    url = f"http://127.0.0.1:{process.port}"
    assert httpx.get(f"{url}/health").status_code == 401
    allowed = {"authorization": "Bearer s3cret"}
    assert httpx.get(f"{url}/health", headers=allowed).json()["rewards"] == ["small", "jpeg"]


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["quality=5", "jpeg"], "'quality=5' stands before any reward"),
        (["jpeg", "jpeg"], "two rewards would be served under one name: jpeg, jpeg"),
        (["jpg"], "did you mean 'jpeg'"),
        (["jpeg", "--host", "0.0.0.0"], "set a secret in the environment variable FLOWRL_REWARD_TOKEN"),
    ],
)
def test_wrong_words_are_one_clear_error(words, message, capsys, monkeypatch):
    monkeypatch.delenv("FLOWRL_REWARD_TOKEN", raising=False)
    with pytest.raises(SystemExit) as stop:
        main(["rewards", "serve", *words])
    assert stop.value.code == 2 and message in capsys.readouterr().err
