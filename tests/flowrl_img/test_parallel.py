import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
import yaml
from safetensors.torch import load_file

from flowrl_img.config import Config
from flowrl_img.parallel import Processes

FEW = [
    {"prompt": "a photo of a red circle"}, {"prompt": "a photo of a ring"}, {"prompt": "a photo of a blue star"},
    {"prompt": "a photo of two hearts"},
]  # fmt: skip
ROOT = Path(__file__).parents[2]
SCRIPT = ROOT / "tests" / "support" / "two_processes.py"

# Three groups of four over two processes: one group is split whatever the way of dealing.
GROUPS = {"groups": 3, "group_size": 4}
RUNS = {
    "flow_grpo": {
        "objective": {"name": "flow_grpo", "clip_range": 1e-2, "kl_weight": 0.1},
        "run": {"updates_per_rollout": 2},
    },
    "tempflow_grpo": {
        "objective": {"name": "tempflow_grpo", "clip_range": 1e-2},
        "rollout": {**GROUPS, "kind": "anchor_fork", "groups": 2, "branches": 2, "steps": 3},
        # Two branches differ by few grey levels, so rounding that moves one shows in their advantage.
        "optimizer": {"lr": 2e-4},
        "run": {"updates_per_rollout": 2},
    },
    "nft": {
        "objective": {"name": "nft", "beta": 0.3, "kl_weight": 1e-2},
        "rollout": {**GROUPS, "policy": "old"},
        "weights": {"old": {"decay": {"name": "linear", "rate": 0.1}}},
        "run": {"updates_per_rollout": 2},
    },
    "awm": {
        "objective": {"name": "awm", "ratio": "old", "level": "sample", "clip_range": 0.1},
        "matching": {"times": {"name": "strata", "count": 2}},
        "run": {"updates_per_rollout": 2},
    },
    "dgpo": {
        "objective": {"name": "dgpo", "beta_dpo": 20.0, "clip_range": 1e-2},
        "weights": {"old": {"decay": {"name": "linear", "rate": 0.1}, "after": "update"}},
        "matching": {"times": {"name": "grid", "count": 2, "high": 3}, "share": "rollout"},
        "run": {"updates_per_rollout": 3, "micro_batch": 4},
    },
    "online_dpo": {
        "objective": {"name": "online_dpo"},
        "matching": {"times": {"name": "uniform", "count": 2}},
        "run": {"updates_per_rollout": 1},
    },
}


def launched(folders: dict[Path, Path], count: int) -> dict[str, dict]:
    """What runs of configuration files find, by the name of their folder."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc_per_node={count}"] if count > 1 else []
    pairs = [str(path) for pair in folders.items() for path in pair]
    path = os.pathsep.join([str(ROOT), str(SCRIPT.parent)])
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": path}
    command = [sys.executable, *launcher, str(SCRIPT), *pairs]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return {out.name: json.loads((out / "found.json").read_text()) for out in folders.values()}


@pytest.fixture(scope="module")
def found(tmp_path_factory, tiny_folder):
    """Results of every run on one and on two processes: {count: {name: found}}, and the folders."""
    folder = tmp_path_factory.mktemp("processes")
    prompts = folder / "few.jsonl"
    prompts.write_text("".join(json.dumps(row) + "\n" for row in FEW))
    files = {}
    for name, sections in RUNS.items():
        config = tiny(tiny_folder, prompts, folder, **sections)
        files[name] = folder / f"{name}.yaml"
        files[name].write_text(yaml.safe_dump(config.model_dump(mode="json")))
    results = {n: launched({file: folder / str(n) / name for name, file in files.items()}, n) for n in (1, 2)}
    return folder, results


def tiny(model: Path, prompts: Path, folder: Path, **sections) -> Config:
    base = {
        "model": {"path": str(model)},
        "weights": {"lora": {"rank": 4, "alpha": 8}},
        "prompts": {"train": str(prompts), "evaluation": str(prompts), "balance": None},
        "rollout": {**GROUPS, "steps": 4, "batch": 8},
        "optimizer": {"lr": 1e-3},
        "run": {"rollouts": 2, "micro_batch": 5, "folder": str(folder / "run")},
    }
    merged = {name: {**base.get(name, {}), **sections.get(name, {})} for name in {*base, *sections}}
    return Config.model_validate({**merged, "rewards": [{"name": "sample_rewards:brightness"}]})


@pytest.mark.parametrize("name", RUNS)
def test_two_processes_give_the_weights_and_metrics_of_one(found, name):
    folder, results = found
    a, b = (load_file(folder / n / name / "weights.safetensors") for n in ("1", "2"))
    for parameter in a:
        torch.testing.assert_close(b[parameter], a[parameter], rtol=0, atol=1e-5)
    one, two = results[1][name], results[2][name]
    for x, y in zip(one["metrics"], two["metrics"], strict=True):
        assert x.keys() == y.keys()
        for metric in x:
            # Rewards see 8-bit pixels, so a rounding difference of 1e-7 may move one by a grey level; advantages are
            # near 1 and cancel in the mean loss.
            assert y[metric] == pytest.approx(x[metric], rel=1e-3, abs=2e-4), metric
    assert two["held_out"] == pytest.approx(one["held_out"], abs=1e-5)
    assert len(two["held_out"]) == 7
    assert two["calls"] == one["calls"]


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


@pytest.mark.parametrize("count", [1, 2, 3, 5])
def test_dealt_shares_are_disjoint_complete_and_spread_every_group(count):
    parts = []
    for rank in range(count):
        process = Processes()
        process.rank, process.count = rank, count
        parts.append(process.deal(list(range(12))))
    assert sorted(k for part in parts for k in part) == list(range(12))
    groups = [{k // 6 for k in part} for part in parts]
    assert all(group == {0, 1} for group in groups)
