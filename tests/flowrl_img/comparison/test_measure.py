"""Measures of a finished run, on the tiny model."""

import json

import pytest
import torch
import yaml


def judge(pictures: torch.Tensor) -> torch.Tensor:
    return torch.nn.functional.normalize(pictures.flatten(1) - 0.5, dim=1)


@pytest.fixture
def run(tiny_trainer, tmp_path):
    """A run folder of two rollouts with its configuration."""
    from flowrl_img.checkpoint import save_checkpoint

    trainer = tiny_trainer(random_lora=False, rewards=[{"name": "sample_rewards:brightness"}], optimizer={"lr": 3e-3})
    list(trainer.run())
    folder = tmp_path / "finished"
    save_checkpoint(folder, trainer)
    (folder / "config.yaml").write_text(yaml.safe_dump(trainer.config.model_dump(mode="json")))
    return folder


def test_base_and_tuned_weights_are_told_apart_and_the_base_has_no_kl(run):
    from flowrl_img.comparison.measure import kl_to_base, measure_run, tuned_and_base
    from flowrl_img.config import Config

    found = measure_run(run, pictures=6, judge=judge, prompts=2, per_prompt=3, kl_pictures=4)
    json.dumps(found)
    assert found["gain"]["reward"][0] == pytest.approx(
        found["after"]["reward"][0] - found["before"]["reward"][0], abs=2e-6
    )
    assert found["gain"]["reward"][0] != 0
    assert found["kl"] > 0
    assert found["diversity"]["before"] != found["diversity"]["after"]
    assert all(0 < d < 2 for d in found["diversity"].values())
    config = Config.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    parts, model, weights = tuned_and_base(config, run)
    with torch.no_grad():
        for parameter in weights.trainable.values():
            if parameter.ndim == 2:
                parameter.zero_()
    samples = [
        s for s in __import__("flowrl_img.prompts", fromlist=["choose_evenly"]).choose_evenly(parts.held_out, 2, None)
    ]
    assert kl_to_base(model, weights, parts.held_out, samples, batch=2) == 0


def test_pictures_of_a_prompt_that_are_equal_have_no_diversity(run):
    from flowrl_img.comparison.measure import diversity, tuned_and_base
    from flowrl_img.config import Config
    from flowrl_img.types import Sample

    config = Config.model_validate(yaml.safe_load((run / "config.yaml").read_text()))
    parts, model, _ = tuned_and_base(config, run)
    same = [[Sample(0, "g", 0)] * 3]
    assert diversity(parts, model, same, judge) == pytest.approx(0, abs=1e-6)
    different = [[Sample(0, "g", k) for k in range(3)]]
    assert diversity(parts, model, different, judge) > 1e-4


def test_the_base_is_measured_once_for_runs_that_agree_in_it(run, monkeypatch):
    from flowrl_img.comparison import measure
    from flowrl_img.config import Config

    seen, evaluated = [], measure._evaluated
    monkeypatch.setattr(measure, "_evaluated", lambda *args: seen.append(1) or evaluated(*args))
    bases, sizes = {}, {"pictures": 6, "judge": judge, "prompts": 2, "per_prompt": 3, "kl_pictures": 4}
    first = measure.measure_run(run, bases=bases, **sizes)
    assert measure.measure_run(run, bases=bases, **sizes) == first == measure.measure_run(run, **sizes)
    assert len(seen) == 2 + 1 + 2

    data = yaml.safe_load((run / "config.yaml").read_text())
    key = measure.base_key(Config.model_validate(data))
    data["optimizer"]["lr"], data["run"]["seed"] = 1e-5, 7
    assert measure.base_key(Config.model_validate(data)) == key
    data["evaluation"]["steps"] += 1
    assert measure.base_key(Config.model_validate(data)) != key
