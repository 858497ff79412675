"""Rewards by name."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from importlib import metadata
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import torch

from flowrl_img.rewards import jpeg, registry
from flowrl_img.rewards.score import score


def brightness(images: torch.Tensor, prompts: list[str], metadata: list[Any], gain: float = 1.0) -> list[float]:
    return [gain * image.float().mean().item() for image in images]


@pytest.fixture
def plugin_module() -> Iterator[str]:
    module = ModuleType("my_rewards")
    module.brightness, module.ready, module.number = brightness, jpeg.Jpeg(quality=50), 3  # type: ignore[attr-defined]
    sys.modules["my_rewards"] = module
    yield "my_rewards"
    del sys.modules["my_rewards"]


def test_the_built_in_rewards_are_found_by_their_files() -> None:
    networks = {"aesthetic", "clipscore", "deqa", "hpsv2", "hpsv3", "imagereward", "pickscore"}
    judges = {"editscore", "preference", "unifiedreward", "yesno"}
    assert set(registry.builtins()) == networks | judges | {"geneval", "jpeg", "ocr", "remote"}


def test_a_class_is_built_with_its_options() -> None:
    assert registry.load("jpeg", quality=80) == jpeg.Jpeg(quality=80)
    assert registry.load("flowrl_img.rewards.jpeg:Jpeg", mode="incompressibility").mode == "incompressibility"


def test_a_plain_function_by_path_is_a_reward(plugin_module: str) -> None:
    reward = registry.load(f"{plugin_module}:brightness", gain=2.0)
    out = score(reward, torch.ones(2, 3, 4, 4), ["", ""], [{}, {}], ["a", "b"])
    assert out.values.tolist() == [510.0, 510.0]


@pytest.mark.parametrize("answer", [1.0, None, ["a", "b"], np.ones((2, 1, 1))], ids=str)
def test_a_function_that_gives_no_numbers_is_told_what_to_return(answer: Any) -> None:
    reward = registry.FunctionReward(lambda images, prompts, metadata: answer, "mine")
    with pytest.raises(ValueError, match="reward 'mine' must return 2 numbers"):
        score(reward, torch.ones(2, 3, 4, 4), ["", ""], [{}, {}], ["a", "b"])


def test_a_ready_reward_by_path_is_itself(plugin_module: str) -> None:
    assert registry.load(f"{plugin_module}:ready") == jpeg.Jpeg(quality=50)
    with pytest.raises(ValueError, match="already built"):
        registry.load(f"{plugin_module}:ready", quality=4)


def test_an_entry_point_comes_before_the_built_in(monkeypatch: pytest.MonkeyPatch) -> None:
    point = metadata.EntryPoint("jpeg", "flowrl_img.rewards.ocr:Ocr", "flowrl_img.rewards")
    monkeypatch.setattr(metadata, "entry_points", lambda group: [point] if group == "flowrl_img.rewards" else [])
    assert registry.load("jpeg").name == "ocr"


@pytest.mark.parametrize(
    ("name", "options", "message"),
    [
        ("jpg", {}, r"no reward is called 'jpg'; did you mean 'jpeg'\? valid: aesthetic, .*jpeg, ocr"),
        ("score", {}, r"flowrl_img\.rewards\.score exports no reward"),
        ("nowhere.at.all:Reward", {}, "no module 'nowhere'"),
        ("flowrl_img.rewards.jpeg:Jpg", {}, r"has no 'Jpg'; did you mean 'Jpeg'\?"),
        ("my_rewards:number", {}, "must be a class, a reward or a function, got int"),
        ("jpeg", {"qualty": 5}, r"unknown key 'qualty'; did you mean 'quality'\? valid: mode, quality"),
        ("my_rewards:brightness", {"again": 5}, r"unknown key 'again'; did you mean 'gain'\? valid: gain"),
        ("jpeg", {"quality": "high"}, "reward.quality = 'high': should be a valid integer"),
        ("my_rewards:brightness", {"gain": "much"}, "reward.gain = 'much': should be a valid number"),
        ("geneval", {"thresholds": {"scor": 1}}, "reward.thresholds: unknown key 'scor'; did you mean 'score'"),
        ("geneval", {"thresholds": 0.5}, "should be a mapping with the keys score, counting"),
        ("jpeg", {"mode": "size"}, "compressibility"),
        ("ocr", {"mode": "part"}, "substring"),
        ("geneval", {"mode": "exact"}, "strict"),
        ("geneval", {"compat": "geneval"}, "flow_grpo"),
    ],
)
def test_a_wrong_name_or_option_is_an_error_with_the_fix(
    plugin_module: str, name: str, options: dict[str, Any], message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load(name, **options)


def test_a_mixture_is_loaded_from_sections() -> None:
    sections = [{"name": "jpeg", "weight": 0.5, "quality": 70, "batch_size": 3}, {"name": "geneval", "label": "scene"}]
    mixture = registry.load_mixture(sections, "geometric")
    assert mixture.weights == {"jpeg": 0.5, "scene": 1.0} and mixture.aggregate == "geometric"
    assert mixture.parts[0].scorer.reward == jpeg.Jpeg(quality=70) and mixture.parts[0].scorer.batch_size == 3


@pytest.mark.parametrize(
    ("section", "message"),
    [
        ({"name": "jpeg", "weigth": 1}, r"rewards\.0: unknown key 'weigth'"),
        ({"name": "jpeg", "weight": "much"}, r"rewards\.0\.weight = 'much': should be a valid number"),
        ({"name": "jpeg", "on_failure": "zero"}, r"rewards\.0: policy must be one of \['mask', 'raise'\]"),
        ({"name": "jpeg", "failure_budget": 2}, r"rewards\.0: failure budget must lie in \[0, 1\], got 2"),
        ({"name": "jpeg", "transforms": [{"name": "clip", "lo": 1}]}, r"unknown key 'lo'; did you mean 'low'"),
        ({"name": "jpeg", "cache": -1}, "cache must be 0 or the number of scores"),
    ],
)
def test_a_wrong_section_is_named(section: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load_mixture([section])


def test_rewards_that_are_only_reported_stop_nothing_and_take_no_weight() -> None:
    [scorer] = registry.load_reported([{"name": "jpeg", "label": "size"}]).values()
    assert scorer.label == "size" and scorer.failures.share == 1.0
    with pytest.raises(ValueError, match=r"report_rewards\.0: weight and transforms have no meaning"):
        registry.load_reported([{"name": "jpeg", "weight": 0.5}])
    with pytest.raises(ValueError, match="two rewards are called 'jpeg'"):
        registry.load_reported([{"name": "jpeg"}, {"name": "jpeg"}])
