"""HPSv3 and DeQA: scorers of packages that do not go with this environment, on stand-ins of their interfaces."""

from __future__ import annotations

import shutil
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import numpy as np
import pytest
import services
import tiny_models
import torch

from flowrl_img.rewards import known_answers, registry
from flowrl_img.rewards.deqa import DeQA
from flowrl_img.rewards.hpsv3 import HPSv3
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.protocol import RewardBatch
from flowrl_img.rewards.remote import Remote
from flowrl_img.rewards.score import Scorer


def batch(*levels: int) -> RewardBatch:
    images = torch.from_numpy(np.stack([np.full((16, 16, 3), level, np.uint8) for level in levels]))
    return RewardBatch(images, ["x"] * len(levels), [{}] * len(levels), [str(level) for level in levels])


def hpsv3(monkeypatch: pytest.MonkeyPatch, tmp_path: Path, **parts: Any) -> HPSv3:
    """On a package whose inferencer has the given attributes."""

    def init(self: Any, config_path: Any = None, checkpoint_path: Any = None, device: Any = None) -> None:
        self.model, self.made = torch.nn.Dropout(), (config_path, checkpoint_path, device)

    module: Any = ModuleType("hpsv3")
    module.HPSv3RewardInferencer = type("Inferencer", (), {"__init__": init, **parts})
    monkeypatch.setitem(sys.modules, "hpsv3", module)
    (tmp_path / "HPSv3.safetensors").write_bytes(b"weights")
    return HPSv3(checkpoint=str(tmp_path / "HPSv3.safetensors"), device="cpu")


def old(self: Any, image_paths: Any, prompts: Any) -> torch.Tensor:
    return torch.tensor([[len(text) + picture.width, 0.5] for picture, text in zip(image_paths, prompts, strict=True)])


def new(self: Any, prompts: Any, image_paths: Any) -> torch.Tensor:
    return old(self, image_paths, prompts)


@pytest.mark.parametrize("reward", [old, new])
def test_hpsv3_is_the_mean_whatever_the_order_of_arguments(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, reward: Any
) -> None:
    made = hpsv3(monkeypatch, tmp_path, reward=reward)
    out = Scorer(made)(batch(1, 2))
    assert out.values.tolist() == [17.0, 17.0] and out.details["sigma"] == [0.5, 0.5]
    assert not made._scorer.model.training and made._scorer.made[2] == "cpu"
    assert len(made.fingerprint["model.sha256"]) == 64


def test_a_version_of_hpsv3_that_is_not_known_is_refused(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    with pytest.raises(WeightsError, match=r"takes self, images, texts|takes images, texts"):
        hpsv3(monkeypatch, tmp_path, reward=lambda self, images, texts: None).validate(["x"], [{}])
    with pytest.raises(WeightsError, match="the package then drops the question"):
        hpsv3(monkeypatch, tmp_path, reward=old, use_special_tokens=False).validate(["x"], [{}])
    table = hpsv3(monkeypatch, tmp_path, reward=lambda self, image_paths, prompts: torch.zeros(2, 2, 2))
    with pytest.raises(ValueError, match=r"gave \[2, 2, 2\] instead of \[2, 2\]"):
        table(batch(1, 2))


def test_a_missing_package_says_how_to_serve_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "hpsv3", None)
    with pytest.raises(WeightsError, match=r"`flowrl-img rewards env hpsv3 envs/hpsv3` makes an environment"):
        HPSv3().validate(["x"], [{}])


def test_deqa_is_the_rating_over_five() -> None:
    reward = DeQA(**tiny_models.options("deqa"))
    assert Scorer(reward)(batch(0, 255)).values.tolist() == pytest.approx([0.2, 1.0])
    known_answers.check(reward)


def test_code_of_a_repository_runs_only_when_asked_for() -> None:
    with pytest.raises(WeightsError, match=r"runs code from its own repository.*trust_remote_code=true"):
        DeQA(model=tiny_models.deqa_folder()).validate(["x"], [{}])
    with pytest.raises(WeightsError, match="set revision to the commit of zhiyuanyou/DeQA-Score-Mix3"):
        DeQA(trust_remote_code=True).validate(["x"], [{}])


def test_a_model_that_does_not_rate_is_refused(tmp_path: Path) -> None:
    folder = Path(shutil.copytree(tiny_models.deqa_folder(), tmp_path / "mute"))
    code = folder / "modeling_small.py"
    code.write_text(code.read_text().replace("def score(", "def rate("))
    with pytest.raises(WeightsError, match="has no method `score`"):
        DeQA(model=str(folder), trust_remote_code=True, device="cpu").validate(["x"], [{}])
    (folder / "modeling_small.py").write_text("from transformers import gone_in_version_5\n")
    with pytest.raises(WeightsError, match=r"made for transformers 4\.36: `flowrl-img rewards env deqa"):
        DeQA(model=str(folder), trust_remote_code=True, device="cpu").validate(["x"], [{}])


@pytest.mark.parametrize("name", ["hpsv3", "deqa"])
def test_both_are_scored_over_the_wire(name: str) -> None:
    reward = registry.load(name, **tiny_models.options(name))
    with services.serving({name: Scorer(reward)}) as url:
        remote = Remote(name, url)
        remote.validate(["x"], [{}])
        known_answers.check(remote)
        there = Scorer(remote)(batch(10, 200)).values
    assert torch.equal(there, Scorer(reward)(batch(10, 200)).values)
