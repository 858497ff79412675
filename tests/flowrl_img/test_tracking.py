"""Metrics leave the run by a tracker, in the main process alone; a missing package stops a run before its model."""

from __future__ import annotations

import importlib.util
import sys
from importlib.machinery import ModuleSpec
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

from flowrl_img import recipes, run
from flowrl_img.config import Config, RunConfig
from flowrl_img.tracking import Tracker, check_tracker, open_tracker
from flowrl_img.validation import validate


class Fake:
    """Keeps what an accelerate tracker would send."""

    def __init__(self) -> None:
        self.rows: list[tuple[int, dict[str, float]]] = []
        self.closed = False

    def log(self, values: dict[str, float], step: int) -> None:
        self.rows.append((step, values))

    def finish(self) -> None:
        self.closed = True


def config(tracker: str) -> Config:
    return Config(run=RunConfig.model_validate({"tracker": tracker}))


def test_numbers_are_logged_by_file_and_update_and_nothing_else_is() -> None:
    fake = Fake()
    tracker = Tracker(fake)
    tracker.log("metrics.jsonl", {"update": 3, "rollout": 1, "reward": 0.5, "seconds": {"sampling": 2.0}, "note": "x"})
    tracker.log(
        "evaluations.jsonl",
        {"label": "before", "update": 0, "means": {"reward": 0.25, "lost": None}, "by_task": {"colors": 0.5}},
    )
    assert fake.rows == [
        (3, {"train/rollout": 1.0, "train/reward": 0.5, "train/seconds/sampling": 2.0}),
        (0, {"held_out/means/reward": 0.25, "held_out/by_task/colors": 0.5}),
    ]
    tracker.close()
    assert fake.closed


def test_without_a_tracker_nothing_happens(tmp_path: Path) -> None:
    tracker = open_tracker(config("none"), tmp_path)
    tracker.log("metrics.jsonl", {"update": 1, "reward": 0.5})
    tracker.close()
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize("name", ["tensorboard", "wandb"])
def test_a_missing_package_is_named_before_any_model_is_loaded(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    found = importlib.util.find_spec
    monkeypatch.setattr(
        importlib.util, "find_spec", lambda package, *a: None if package == name else found(package, *a)
    )
    message = f"run.tracker = '{name}': the package is missing; pip install {name}"
    with pytest.raises(ValueError, match=message):
        check_tracker(name)
    with pytest.raises(ValueError, match=message):
        open_tracker(config(name), tmp_path)
    with pytest.raises(ValueError, match=message):
        validate(recipes.load("pico", [f"run.tracker={name}"]))


def test_tensorboard_gets_a_real_event_file_in_the_run_folder(tmp_path: Path) -> None:
    pytest.importorskip("tensorboard")
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    tracker = open_tracker(config("tensorboard"), tmp_path)
    for update, reward in ((1, 0.25), (2, 0.5)):
        tracker.log("metrics.jsonl", {"update": update, "reward": reward})
    tracker.log("evaluations.jsonl", {"update": 2, "means": {"reward": 0.75}})
    tracker.close()
    assert [path.name.startswith("events.out.tfevents") for path in tmp_path.iterdir()] == [True]
    events = EventAccumulator(str(tmp_path)).Reload()
    assert [(e.step, e.value) for e in events.Scalars("train/reward")] == [(1, 0.25), (2, 0.5)]
    assert [(e.step, e.value) for e in events.Scalars("held_out/means/reward")] == [(2, 0.75)]


def test_a_run_logs_every_update_and_both_evaluations(
    tiny_config: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    fake = Fake()
    monkeypatch.setattr(run, "open_tracker", lambda config, folder, enabled: Tracker(fake if enabled else None))
    assert run.run_training(tiny_config(run={"rollouts": 1})) == 0
    rewards = [(step, name) for step, values in fake.rows for name in values if name.endswith("/reward")]
    assert rewards == [
        (0, "held_out/means/reward"), (1, "train/reward"), (2, "train/reward"), (2, "held_out/means/reward")
    ]  # fmt: skip
    assert fake.closed


@pytest.fixture
def fake_wandb(monkeypatch: pytest.MonkeyPatch) -> Any:
    """The two names of wandb that a run touches."""
    module: Any = ModuleType("wandb")
    module.__spec__ = ModuleSpec("wandb", None)
    module.Error, module.run, module.asked = type("Error", (Exception,), {}), Fake(), {}

    def init(**asked: Any) -> Fake:
        module.asked = asked
        return module.run

    module.init = init
    monkeypatch.setitem(sys.modules, "wandb", module)
    return module


def test_only_the_main_process_opens_a_tracker(fake_wandb: Any, tmp_path: Path) -> None:
    assert open_tracker(config("wandb"), tmp_path, enabled=False).target is None
    assert fake_wandb.asked == {}


def test_wandb_gets_the_folder_the_configuration_and_the_metrics(fake_wandb: Any, tmp_path: Path) -> None:
    tracker = open_tracker(config("wandb"), tmp_path / "pico-1")
    tracker.log("metrics.jsonl", {"update": 1, "reward": 0.5})
    tracker.close()
    asked = fake_wandb.asked
    assert (asked["project"], asked["name"], asked["dir"]) == ("flowrl-img", "pico-1", str(tmp_path / "pico-1"))
    assert asked["config"]["run"]["tracker"] == "wandb"
    assert fake_wandb.run.rows == [(1, {"train/reward": 0.5})] and fake_wandb.run.closed


def test_a_tracker_that_cannot_start_says_how_to_go_on(fake_wandb: Any, tmp_path: Path) -> None:
    def init(**asked: Any) -> None:
        raise fake_wandb.Error("api_key not configured (no-tty)")

    fake_wandb.init = init
    with pytest.raises(ValueError, match=r"api_key not configured .* set WANDB_MODE=offline, or set run.tracker=none"):
        open_tracker(config("wandb"), tmp_path)
