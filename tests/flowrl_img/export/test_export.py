"""What is exported does in stock diffusers, in a process of its own, what the run's weights do here."""

import json
import re
import shutil

import numpy as np
import pytest
import torch
import yaml
from safetensors import safe_open
from safetensors.torch import load_file, save_file

from flowrl_img.export.card import licence_of
from flowrl_img.export.merge import merge
from flowrl_img.export.run import Ask, export_run
from flowrl_img.export.verify import Expected, Job, VerificationError, expect, output, verify

LORA = "pytorch_lora_weights.safetensors"


def rewritten(source, target, tensors=None, facts=None):
    """A copy of a LoRA file with other tensors or facts; None keeps them, {} drops them."""
    with safe_open(source, framework="pt") as file:
        held = json.loads((file.metadata() or {}).get("lora_adapter_metadata", "{}"))
    facts = held if facts is None else facts
    metadata = {"lora_adapter_metadata": json.dumps(facts)} if facts else None
    save_file(load_file(source) if tensors is None else tensors, target, metadata=metadata)
    return target


def test_every_format_loads_in_a_clean_process_and_gives_the_same_picture(tiny_run, tiny_folder, monkeypatch):
    run = tiny_run(evaluation={"steps": 4, "guidance": 3.0})
    lines = list(export_run(run, Ask(formats=("lora", "comfyui", "merged"))))
    out = run / "export"
    assert {p.name for p in out.iterdir()} == {LORA, "comfyui", "transformer", "README.md", "curve.png"}
    merged = next(line for line in lines if line.startswith("merged: largest"))
    assert float(re.search(r"difference ([\d.e-]+),", merged)[1]) < 1e-5
    checks = {line.partition(":")[0]: line for line in lines if "loaded by stock diffusers" in line}
    assert list(checks) == ["lora", "comfyui", "merged"]
    assert "lora: 30 tensors" in checks["lora"] and "comfyui: 21 tensors" in checks["comfyui"]
    assert all(int(re.search(r"within (\d+) grey", line)[1]) <= 1 for line in checks.values())

    with safe_open(out / LORA, framework="pt") as file:
        facts = json.loads(file.metadata()["lora_adapter_metadata"])
    assert (facts["transformer.r"], facts["transformer.lora_alpha"]) == (4, 8)
    _check_card(out, tiny_folder, monkeypatch)


def _check_card(out, base, monkeypatch):
    """The front matter is YAML, the facts are there, and both blocks of code run and draw one picture."""
    card = (out / "README.md").read_text()
    head = yaml.safe_load(card.split("---")[1])
    assert head["library_name"] == "diffusers" and "lora" in head["tags"]
    for fact in (
        f"| base | {base} |",
        "LoRA, rank 4, alpha 8",
        "| method | flow_grpo |",
        "| reward | jpeg |",
        "(4 prompts)",
    ):
        assert fact in card
    assert "![reward over updates](curve.png)" in card and "comfyui/pico.safetensors" in card
    assert "loaded by stock diffusers" in card
    monkeypatch.chdir(out)
    pictures = []
    for block in re.findall(r"```python\n(.*?)```", card, flags=re.DOTALL):
        torch.manual_seed(3)
        room: dict = {}
        exec(block, room)
        pictures.append(np.asarray(room["picture"]).astype(int))
    assert np.abs(pictures[0] - pictures[1]).max() <= 1 and pictures[0].std() > 1


@pytest.fixture
def exported(tiny_run, tiny_trainer):
    """(run folder with an unverified export of every format, what to expect of it)."""
    run = tiny_run(evaluation={"steps": 2})
    list(export_run(run, Ask(formats=("lora", "comfyui", "merged"), verify=False)))
    trainer = tiny_trainer(evaluation={"steps": 2})
    return run / "export", expect(trainer.model, trainer.weights, "a photo of a ring", 2, 1.0)


def test_broken_files_are_each_found(exported, tiny_folder, tmp_path):
    out, expected = exported
    lora, comfyui = out / LORA, out / "comfyui" / "pico.safetensors"
    tensors, fused = load_file(lora), load_file(comfyui)
    with safe_open(lora, framework="pt") as file:
        facts = json.loads(file.metadata()["lora_adapter_metadata"])
    renamed = {name.replace("transformer.", "model.", 1): t for name, t in tensors.items()}
    fewer = {name: t for name, t in fused.items() if not name.endswith(".alpha")}
    other = {name.replace("x_block_attn_proj", "x_block_attn_out"): t for name, t in fused.items()}
    zeros = {name: torch.zeros_like(t) for name, t in tensors.items()}
    shutil.copytree(out / "transformer", tmp_path / "merged" / "transformer")
    weights = tmp_path / "merged" / "transformer" / "diffusion_pytorch_model.safetensors"
    state = load_file(weights)
    state["proj_out.weight"] *= 1.001
    save_file(state, weights, metadata={"format": "pt"})
    jobs = [
        Job("good", "lora", lora),
        Job("wrong prefix", "lora", rewritten(lora, tmp_path / "a.safetensors", renamed)),
        Job("missing alpha", "lora", rewritten(lora, tmp_path / "b.safetensors", facts={})),
        Job("rank mismatch", "lora", rewritten(lora, tmp_path / "c.safetensors", facts={**facts, "transformer.r": 8})),
        Job("no change", "lora", rewritten(lora, tmp_path / "d.safetensors", zeros)),
        Job("comfyui without alpha", "comfyui_sd3", rewritten(comfyui, tmp_path / "e.safetensors", fewer)),
        Job("comfyui with another name", "comfyui_sd3", rewritten(comfyui, tmp_path / "f.safetensors", other)),
        Job("good comfyui", "comfyui_sd3", comfyui),
        Job("changed weight", "network", tmp_path / "merged"),
    ]
    found = {check.name: check.problem for check in verify(str(tiny_folder), jobs, expected, torch.device("cpu"))}
    assert found["good"] is None and found["good comfyui"] is None
    assert "0 of 30 tensors were recognised" in found["wrong prefix"]
    assert "its output differs by" in found["missing alpha"] and "scale, rank or names" in found["missing alpha"]
    assert "stock diffusers cannot load it" in found["rank mismatch"] or "differs by" in found["rank mismatch"]
    assert found["no change"] == "it loads but changes nothing"
    assert "its output differs by" in found["comfyui without alpha"]
    assert "15 of 21 tensors were recognised" in found["comfyui with another name"]
    assert "its output differs by" in found["changed weight"]


def test_an_untrained_adapter_cannot_be_verified_and_nothing_is_left_under_the_final_name(tiny_run, tiny_trainer):
    from flowrl_img.checkpoint import save_checkpoint

    run = tiny_run()
    untrained = tiny_trainer(random_lora=False)
    untrained.update = 5
    save_checkpoint(run, untrained)
    with pytest.raises(VerificationError, match="too little to tell from rounding"):
        list(export_run(run, Ask()))
    assert not (run / "export").exists() and (run / ".export.part" / LORA).exists()


def test_the_weights_that_are_asked_for_are_exported(tiny_run):
    run = tiny_run()
    state_file = run / "checkpoint-000004" / "state.safetensors"
    state = load_file(state_file)
    save_file({k: 2 * t if k.startswith("current.") else t for k, t in state.items()}, state_file)
    found = {}
    for name in ("ema", "current", None):
        list(export_run(run, Ask(out=run / str(name), weights=name, verify=False)))
        found[name] = load_file(run / str(name) / LORA)
    for key, tensor in found["ema"].items():
        assert torch.equal(found["current"][key], 2 * tensor) and torch.equal(found[None][key], tensor)
    assert "not verified" in (run / "ema" / "README.md").read_text()


def test_an_export_replaces_another_only_when_asked(tiny_run):
    run = tiny_run()
    list(export_run(run, Ask(verify=False)))
    (run / "export" / "stray").touch()
    with pytest.raises(FileExistsError, match="--overwrite"):
        list(export_run(run, Ask(verify=False)))
    list(export_run(run, Ask(verify=False, overwrite=True)))
    assert not (run / "export" / "stray").exists()


def test_an_export_replaces_nothing_but_an_export(tiny_run, tmp_path, monkeypatch):
    from flowrl_img.export import run as module

    run = tiny_run()
    (tmp_path / "file").write_text("mine")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "README.md").write_text("mine")
    monkeypatch.setattr(module, "load_model", lambda *_: pytest.fail("a model was loaded"))
    for out in (run, run.parent, tmp_path / "mine", tmp_path / "file"):
        with pytest.raises(FileExistsError, match="holds no earlier export, so it is not replaced"):
            list(export_run(run, Ask(out=out, verify=False, overwrite=True)))
    assert (run / "config.yaml").exists() and (tmp_path / "file").read_text() == "mine"


def test_any_name_of_a_run_names_a_file_of_comfyui(tiny_run):
    run = tiny_run()
    config = run / "config.yaml"
    config.write_text(config.read_text().replace("name: pico", "name: exp/a b", 1))
    list(export_run(run, Ask(formats=("comfyui",), verify=False)))
    assert (run / "export" / "comfyui" / "exp-a-b.safetensors").exists()


def test_a_checkpoint_that_is_cut_off_is_told_as_such(tiny_run):
    run = tiny_run()
    (run / "checkpoint-000004" / "state.safetensors").write_bytes(b"x" * 20)
    with pytest.raises(ValueError, match=r"state\.safetensors is damaged"):
        list(export_run(run, Ask(verify=False)))


def trained(tiny_trainer, **sections) -> tuple:
    trainer = tiny_trainer(**sections)
    return trainer, expect(trainer.model, trainer.weights, "a photo of a ring", 2, 1.0)


def test_merging_in_float32_is_exact_to_rounding_and_a_cast_is_measured(tiny_trainer, tmp_path):
    trainer, expected = trained(tiny_trainer)
    found = merge(trainer.weights.network, tmp_path / "a", expected, torch.float32)
    assert found.largest < 1e-5 and found.cast == 0 and "in float32)" in str(found)
    trainer, expected = trained(tiny_trainer)
    cast = merge(trainer.weights.network, tmp_path / "b", expected, torch.bfloat16)
    assert cast.largest < 1e-5 and 0 < cast.cast < 0.5 and "the cast moves outputs by" in str(cast)
    state = load_file(tmp_path / "b" / "transformer" / "diffusion_pytorch_model.safetensors")
    assert {t.dtype for t in state.values()} == {torch.bfloat16}
    exact = load_file(tmp_path / "a" / "transformer" / "diffusion_pytorch_model.safetensors")
    # Cast once: bfloat16 of the float32 sum, not of its parts.
    assert all(torch.equal(exact[name].bfloat16(), tensor) for name, tensor in state.items())


def test_a_precision_that_loses_the_tuning_is_refused(tiny_trainer, tmp_path):
    trainer = tiny_trainer(random_lora=False)
    with torch.no_grad():
        for name, parameter in trainer.weights.trainable.items():
            if "lora_B" in name:
                parameter.add_(1e-4 * torch.randn(parameter.shape, generator=torch.Generator().manual_seed(0)))
    expected = expect(trainer.model, trainer.weights, "a photo of a ring", 2, 1.0)
    with pytest.raises(VerificationError, match="too coarse for this tuning, choose --dtype fp32 or the LoRA"):
        merge(trainer.weights.network, tmp_path, expected, torch.bfloat16)


def test_a_merge_that_changes_outputs_is_refused(tiny_trainer, tmp_path):
    trainer, expected = trained(tiny_trainer)
    moved = Expected(expected.inputs, expected.base, expected.tuned + 1e-4, expected.picture, expected.call)
    with pytest.raises(VerificationError, match="more than rounding"):
        merge(trainer.weights.network, tmp_path, moved, torch.float32)


def test_full_fine_tuning_is_exported_as_whole_weights(tiny_run, tiny_trainer):
    from diffusers import SD3Transformer2DModel

    sections = {"weights": {"kind": "full", "ema": None}}
    run = tiny_run(**sections)
    list(export_run(run, Ask(verify=False)))
    _, expected = trained(tiny_trainer, **sections)
    network = SD3Transformer2DModel.from_pretrained(run / "export", subfolder="transformer").eval()
    assert torch.equal(output(network, expected.inputs), expected.tuned)


def test_the_fixed_input_is_that_of_the_network_in_a_stock_pipeline(tiny_trainer):
    trainer, expected = trained(tiny_trainer)
    assert set(expected.inputs) == {"hidden_states", "timestep", "encoder_hidden_states", "pooled_projections"}
    assert expected.effect > 10 * expected.limit
    with torch.no_grad():
        v = trainer.model.velocity(
            expected.inputs["hidden_states"], torch.tensor([0.6]).double(), trainer.model.encode(["a photo of a ring"])
        )
    assert torch.equal(v, expected.tuned)


def test_the_licence_of_the_base_is_what_its_own_card_states(tmp_path):
    assert licence_of("pico") == "apache-2.0"
    card = tmp_path / "README.md"
    assert licence_of(str(tmp_path)) == "unknown"
    for text, expected in [
        ("---\nlicense: mit\ntags: [x]\n---\n# Base\n", "mit"),
        ("---\nlicense: other\nlicense_name: some-community\n---\n", "some-community"),
        ("# a card without a head\n", "unknown"),
        ("---\n: [\n---\n", "unknown"),
    ]:
        card.write_text(text)
        assert licence_of(str(tmp_path)) == expected
