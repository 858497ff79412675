import json
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl_img.parallel import Processes

SCRIPT = Path(__file__).parents[1] / "support" / "two_processes.py"


def launched(config_file: Path, out: Path, count: int, env) -> dict:
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    command = [sys.executable, *launcher, str(SCRIPT), str(config_file), str(out)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads((out / "found.json").read_text())


@pytest.fixture
def env(monkeypatch):
    import os

    # A script has its own folder first on the path; this checkout comes before an installed copy.
    paths = os.pathsep.join([str(SCRIPT.parent), str(SCRIPT.parents[2])])
    return {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": paths}


def test_two_processes_give_the_answer_of_one(tiny_config, tmp_path, env):
    config = tiny_config(
        rewards=[{"name": "sample_rewards:brightness"}],
        rollout={"groups": 3, "group_size": 4, "guidance": 1.0},
        run={"rollouts": 2, "updates_per_rollout": 2, "micro_batch": 5},
        optimizer={"lr": 1e-3},
    )
    file = tmp_path / "config.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json")))
    one, two = launched(file, tmp_path / "one", 1, env), launched(file, tmp_path / "two", 2, env)
    a, b = load_file(tmp_path / "one" / "weights.safetensors"), load_file(tmp_path / "two" / "weights.safetensors")
    for name in a:
        torch.testing.assert_close(b[name], a[name], rtol=0, atol=1e-5)
    for x, y in zip(one["metrics"], two["metrics"], strict=True):
        assert x.keys() == y.keys()
        for name in x:
            # Rewards see 8-bit pixels, so a rounding difference of 1e-7 may move one by a grey level; advantages are
            # near 1 and cancel in the mean loss.
            assert y[name] == pytest.approx(x[name], rel=1e-3, abs=2e-4), name
    assert len(two["held_out"]) == 7
    assert two["held_out"] == pytest.approx(one["held_out"], abs=1e-5)


def test_one_process_shares_everything_with_itself():
    alone = Processes()
    assert alone.share([1, 2, 3]) == [1, 2, 3]
    assert alone.gather({"a": 1}) == [{"a": 1}]
    assert alone.sum(2.0) == alone.max(2.0) == 2.0


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_shares_are_disjoint_and_complete(count):
    parts = []
    for rank in range(count):
        process = Processes()
        process.rank, process.count = rank, count
        parts += process.share(list(range(7)))
    assert parts == list(range(7))
