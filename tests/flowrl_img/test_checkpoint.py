import json

import pytest
import torch

from flowrl_img.checkpoint import latest, load_checkpoint, save_checkpoint


def rows(updates) -> list:
    return [(u.update, u.rollout, u.metrics) for u in updates]


RUNS = {
    "lora": {"weights": {"kind": "lora"}},
    "full": {"weights": {"kind": "full"}},
    "old, trust and histories": {
        "objective": {"name": "awm", "clip_range": 0.1, "ratio": "old"},
        "weights": {"old": {"decay": {"name": "linear", "rate": 0.1}}},
        "advantage": {"baseline": "history", "history": {"min_count": 4}},
        "rollout": {"policy": "old"},
    },
}


@pytest.mark.parametrize("run", RUNS)
def test_stopping_and_resuming_equals_going_on(tiny_trainer, tmp_path, run):
    options = {"optimizer": {"lr": 1e-4, "warmup": 6}, **RUNS[run]}
    straight = tiny_trainer(random_lora=False, run={"rollouts": 4}, **options)
    whole = rows(straight.run())
    half = tiny_trainer(random_lora=False, run={"rollouts": 2}, **options)
    begun = rows(half.run())
    save_checkpoint(tmp_path, half)
    resumed = tiny_trainer(random_lora=False, run={"rollouts": 4}, **options)
    load_checkpoint(tmp_path, resumed)
    assert begun + rows(resumed.run()) == whole
    for a, b in zip(resumed.parameters, straight.parameters, strict=True):
        assert torch.equal(a, b)
    assert resumed.histories == straight.histories
    for label, tensors in straight.weights.sets.items():
        assert all(torch.equal(a, b) for a, b in zip(resumed.weights.sets[label], tensors, strict=True))


def test_the_adapter_loads_in_the_stock_pipeline_and_acts_as_in_training(tiny_trainer, tiny_folder, tmp_path):
    from diffusers import StableDiffusion3Pipeline

    trainer = tiny_trainer(weights={"ema": None})
    folder = save_checkpoint(tmp_path, trainer)
    stock = StableDiffusion3Pipeline.from_pretrained(tiny_folder, text_encoder_3=None, tokenizer_3=None)
    base = {"hidden_states": torch.randn(1, 4, 8, 8), "timestep": torch.tensor([500.0])}
    text = {"encoder_hidden_states": torch.randn(1, 15, 32), "pooled_projections": torch.randn(1, 32)}
    with torch.no_grad():
        plain = stock.transformer(**base, **text).sample
        stock.load_lora_weights(folder / "adapter")
        loaded = stock.transformer(**base, **text).sample
        trained = trainer.model.network(**base, **text).sample
    assert not torch.allclose(plain, loaded)
    torch.testing.assert_close(loaded, trained, rtol=0, atol=1e-6)


def test_the_latest_complete_checkpoint_is_found_among_strays(tiny_trainer, tmp_path):
    trainer = tiny_trainer()
    for update in (9, 10):
        trainer.update = update
        save_checkpoint(tmp_path, trainer)
    (tmp_path / "checkpoint-000100").mkdir()
    (tmp_path / ".checkpoint-000200.part").mkdir()
    (tmp_path / "stray.safetensors").touch()
    assert latest(tmp_path).name == "checkpoint-000010"
    with pytest.raises(FileNotFoundError, match="no complete checkpoint"):
        latest(tmp_path / "checkpoint-000100")


def test_a_checkpoint_of_another_run_is_refused(tiny_trainer, tmp_path):
    save_checkpoint(tmp_path, tiny_trainer())
    other = tiny_trainer(weights={"lora": {"rank": 4, "alpha": 8, "targets": ("attn.to_q",)}})
    with pytest.raises(ValueError, match="does not fit this run"):
        load_checkpoint(tmp_path, other)


def test_a_checkpoint_with_a_missing_tensor_is_refused(tiny_trainer, tmp_path):
    folder = save_checkpoint(tmp_path, tiny_trainer())
    manifest = json.loads((folder / "manifest.json").read_text())
    manifest["tensors"].append("current.one.more")
    (folder / "manifest.json").write_text(json.dumps(manifest))
    with pytest.raises(ValueError, match=r"1 tensors missing \['current.one.more'\]"):
        load_checkpoint(tmp_path, tiny_trainer())


def test_a_damaged_checkpoint_is_refused(tiny_trainer, tmp_path):
    folder = save_checkpoint(tmp_path, tiny_trainer())
    file = folder / "state.safetensors"
    file.write_bytes(file.read_bytes()[:1000])
    with pytest.raises(ValueError, match=r"state.safetensors is damaged"):
        load_checkpoint(tmp_path, tiny_trainer())


def test_saving_leaves_the_trained_weights_alone(tiny_trainer, tmp_path):
    trainer = tiny_trainer()
    before = [p.detach().clone() for p in trainer.parameters]
    save_checkpoint(tmp_path, trainer)
    assert all(torch.equal(p, q) for p, q in zip(trainer.parameters, before, strict=True))
