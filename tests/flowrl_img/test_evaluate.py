import numpy as np
import pytest
import torch

from flowrl_img.evaluate import Evaluation, evaluate, gain, level
from flowrl_img.parallel import Processes
from flowrl_img.prompts import choose_evenly
from flowrl_img.types import Sample


def made(values, prompts, tags) -> Evaluation:
    samples = tuple(Sample(p, str(p), k) for k, p in enumerate(prompts))
    return Evaluation(samples, tuple(tags), {"reward": np.array(values, float)}, torch.zeros(0))


def test_the_mean_is_over_tasks_and_leaves_invalid_pictures_out():
    found = made([1, 0, 1, float("nan"), 0.25], [0, 0, 1, 1, 2], ["a", "a", "a", "a", "b"])
    assert level(found).value == pytest.approx((2 / 3 + 0.25) / 2)
    assert found.by_tag() == {"a": pytest.approx(2 / 3), "b": 0.25}


def test_the_interval_covers_the_truth_as_often_as_it_says():
    rng = np.random.default_rng(0)
    covered = 0
    for trial in range(200):
        effects = rng.normal(0, 1, 40).repeat(3)
        values = 0.5 + effects + rng.normal(0, 0.5, 120)
        interval = level(made(values, np.arange(40).repeat(3).tolist(), ["a"] * 120), seed=trial)
        covered += interval.low <= 0.5 <= interval.high
    # 200 draws of a 95 % interval: 4 standard errors are 6 %; treating pictures as independent would cover about 75 %.
    assert 0.89 < covered / 200 < 0.99


def test_the_gain_is_paired():
    before = made([0.0, 1.0, 0.0, 1.0], [0, 1, 2, 3], ["a"] * 4)
    after = made([0.1, 1.1, 0.1, 1.1], [0, 1, 2, 3], ["a"] * 4)
    found = gain(before, after)
    assert found.value == pytest.approx(0.1)
    assert found.high - found.low < 1e-9


def test_unpaired_evaluations_are_refused():
    with pytest.raises(ValueError, match="same prompts and seeds"):
        gain(made([0.0], [0], ["a"]), made([0.0], [1], ["a"]))


@pytest.mark.parametrize("batch", [1, 3, 8])
def test_every_picture_is_scored_once_whatever_the_batch(tiny_trainer, batch):
    trainer = tiny_trainer()
    samples = choose_evenly(trainer.prompts, 7, None)
    found = evaluate(
        trainer.model, trainer.prompts, samples, trainer.parts.reward, num_steps=2, guidance=1.0, batch=batch,
        processes=Processes(), keep=2,
    )  # fmt: skip
    whole = evaluate(
        trainer.model,
        trainer.prompts,
        samples,
        trainer.parts.reward,
        num_steps=2,
        guidance=1.0,
        batch=7,
        processes=Processes(),
    )
    assert len(found.columns["reward"]) == 7
    np.testing.assert_allclose(found.columns["reward"], whole.columns["reward"], atol=1e-3)
    assert found.images.shape == (2, 3, 64, 64)


def test_an_invalid_picture_is_nan_and_not_zero(tiny_trainer):
    trainer = tiny_trainer(rewards=[{"name": "sample_rewards:broken_for_rings"}])
    samples = choose_evenly(trainer.prompts, 4, None)
    found = evaluate(
        trainer.model,
        trainer.prompts,
        samples,
        trainer.parts.reward,
        num_steps=2,
        guidance=1.0,
        batch=4,
        processes=Processes(),
    )
    rings = ["ring" in trainer.prompts.texts[s.prompt] for s in samples]
    assert np.isnan(found.columns["reward"]).tolist() == rings
