import json

import pytest
import torch
from safetensors.torch import save_file

from flowrl_img.adapters import adapter_layers, adapter_names, adapters_off, only_adapter
from flowrl_img.lora import LoraFile, Pair, pairs_of, read_lora
from flowrl_img.models.sd3 import SD3


def normal(*shape: int, seed: int = 0) -> torch.Tensor:
    return torch.randn(shape, generator=torch.Generator().manual_seed(seed))


def file_of(tmp_path, tensors, facts=None, name="lora.safetensors"):
    metadata = {"lora_adapter_metadata": json.dumps(facts)} if facts else None
    save_file(tensors, tmp_path / name, metadata=metadata)
    return tmp_path / name


def two(rank=4, prefix="transformer"):
    stem = f"{prefix}.transformer_blocks.0.attn.to_q"
    return {f"{stem}.lora_A.weight": normal(rank, 32), f"{stem}.lora_B.weight": normal(32, rank, seed=1)}


def test_a_file_of_a_run_comes_back_with_its_rank_and_alpha(tiny_run):
    run = tiny_run()
    found = read_lora(run / "checkpoint-000004" / "adapter" / "pytorch_lora_weights.safetensors")
    assert len(found.pairs) == 15
    assert {(p.alpha, p.scale, len(p.down)) for p in found.pairs.values()} == {(8.0, 2.0, 4)}


def test_ranks_and_alphas_can_differ_between_layers(tmp_path):
    facts = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.alpha_pattern": {"attn.to_q": 2}}
    [pair] = read_lora(file_of(tmp_path, two(), facts)).pairs.values()
    assert pair.scale == 0.5
    facts["transformer.rank_pattern"] = {"attn.to_q": 6}
    with pytest.raises(ValueError, match=r"attn.to_q has rank 4, the file's metadata says 6"):
        read_lora(file_of(tmp_path, two(), facts))


def test_without_metadata_alpha_is_the_rank(tmp_path):
    [pair] = read_lora(file_of(tmp_path, two())).pairs.values()
    assert pair.scale == 1.0


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (
            lambda t: {k.replace("transformer.", "model.", 1): v for k, v in t.items()},
            "is no LoRA weight of a denoiser",
        ),
        (lambda t: dict(list(t.items())[:1]), "come in pairs"),
        (
            lambda t: {k: v[:, :3].clone() if "lora_B" in k else v for k, v in t.items()},
            "lora_A has rank 4, lora_B has rank 3",
        ),
        (
            lambda t: {**t, "text_encoder.layers.0.q.lora_A.weight": normal(4, 8)},
            "text_encoder.layers.0.q.lora_A.weight",
        ),
    ],
)
def test_what_is_not_understood_is_refused_by_name(tmp_path, change, message):
    with pytest.raises(ValueError, match=message):
        read_lora(file_of(tmp_path, change(two())))


def test_a_rank_stabilised_adapter_has_the_scale_that_peft_gives_it(tmp_path):
    facts = {"transformer.r": 4, "transformer.lora_alpha": 8, "transformer.use_rslora": True}
    [pair] = read_lora(file_of(tmp_path, two(), facts)).pairs.values()
    assert pair.scale == 8 / 2


@pytest.mark.parametrize(
    ("facts", "message"),
    [
        ({"transformer.use_dora": True}, "is a DoRA"),
        ({"transformer.lora_alpha": None}, "alpha is None, which is no number"),
        ({"transformer.lora_alpha": float("nan")}, "a finite alpha, got 4 and nan"),
        ({"transformer.alpha_pattern": {"(": 2}}, "the pattern '\\('"),
    ],
)
def test_facts_that_no_adapter_can_have_are_refused(tmp_path, facts, message):
    with pytest.raises(ValueError, match=message):
        read_lora(file_of(tmp_path, two(), {"transformer.r": 4, **facts}))


def test_an_adapter_without_rank_is_refused(tmp_path):
    with pytest.raises(ValueError, match="needs a rank"):
        read_lora(file_of(tmp_path, two(rank=0)))


def test_a_file_that_is_no_safetensors_is_refused_and_never_unpickled(tmp_path):
    path = tmp_path / "lora.safetensors"
    torch.save(two(), path)
    with pytest.raises(ValueError, match="is not a safetensors file"):
        read_lora(path)


def test_an_attached_adapter_changes_outputs_as_the_run_does(tiny_run, tiny_trainer, tiny_folder):
    run, trainer = tiny_run(), tiny_trainer()  # the same random weights
    network = SD3.load(
        str(tiny_folder), dtype=torch.float32, weights_dtype=torch.float32, device=torch.device("cpu"), resolution=64,
        max_sequence_length=1,
    ).network  # fmt: skip
    read_lora(run / "checkpoint-000004" / "adapter" / "pytorch_lora_weights.safetensors").attach(network, "first")
    inputs = {
        "hidden_states": normal(1, 4, 8, 8), "encoder_hidden_states": normal(1, 15, 32),
        "pooled_projections": normal(1, 32), "timestep": torch.tensor([500.0]),
    }  # fmt: skip
    with torch.no_grad():
        assert torch.equal(network(**inputs).sample, trainer.model.network(**inputs).sample)
        with adapters_off(adapter_layers(network)), trainer.weights.use("reference"):
            assert torch.equal(network(**inputs).sample, trainer.model.network(**inputs).sample)
    assert not any(p.requires_grad for p in network.parameters())


def test_adapters_of_unequal_scale_are_attached_with_theirs(tiny_folder, tmp_path):
    from diffusers import SD3Transformer2DModel

    network = SD3Transformer2DModel.from_pretrained(tiny_folder, subfolder="transformer").eval()
    names = ["transformer_blocks.0.attn.to_q", "transformer_blocks.1.attn.to_q", "transformer_blocks.1.attn.to_k"]
    pairs = {
        n: Pair(normal(r, 32), normal(32, r), a) for n, r, a in zip(names, (4, 4, 2), (8.0, 2.0, 8.0), strict=True)
    }
    LoraFile(tmp_path, pairs).attach(network, "mixed")
    layers = dict(network.named_modules())
    assert [layers[n].scaling["mixed"] for n in names] == [2.0, 0.5, 4.0]
    assert all(torch.equal(layers[n].lora_A["mixed"].weight, pairs[n].down) for n in names)


def blueprint(folder):
    return SD3.blueprint(str(folder))


def test_a_blueprint_holds_shapes_and_no_weights(tiny_folder):
    network = blueprint(tiny_folder)
    assert {p.device.type for p in network.parameters()} == {"meta"}
    assert network.transformer_blocks[0].attn.to_q.in_features == 32


@pytest.mark.parametrize(
    ("name", "width", "message"),
    [
        (
            "transformer_blocks.0.attn.to_q",
            48,
            r"another base than tiny: .*to_q maps 32 to 32 there, 48 to 32 in the file",
        ),
        ("transformer_blocks.7.attn.to_q", 32, r"adapts 'transformer_blocks.7.attn.to_q', which tiny does not have"),
    ],
)
def test_an_adapter_of_another_base_is_refused_by_its_shapes(tiny_folder, tmp_path, name, width, message):
    stem = f"transformer.{name}"
    tensors = {f"{stem}.lora_A.weight": normal(4, width), f"{stem}.lora_B.weight": normal(32, 4)}
    with pytest.raises(ValueError, match=message):
        read_lora(file_of(tmp_path, tensors)).check_fits(blueprint(tiny_folder), "tiny")


def test_switches_of_adapters_nest_come_back_and_leave_what_trains(tiny_folder):
    from diffusers import SD3Transformer2DModel
    from tiny_pipelines import add_adapter

    network = SD3Transformer2DModel.from_pretrained(tiny_folder, subfolder="transformer")
    add_adapter(network, "a")
    add_adapter(network, "b")
    layers = adapter_layers(network)
    assert adapter_names(layers) == ["a", "b"]
    trained = {n: p.requires_grad for n, p in network.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), only_adapter(layers, "a"), adapters_off(layers):
        assert layers[0].disable_adapters
        with only_adapter(layers, "b"):
            assert layers[0].active_adapters == ["b"] and not layers[0].disable_adapters
        assert layers[0].disable_adapters
        raise RuntimeError("inside")
    assert layers[0].active_adapters == ["b"] and not layers[0].disable_adapters
    assert trained == {n: p.requires_grad for n, p in network.named_parameters()}
    with pytest.raises(ValueError, match="no adapter is called 'c'; valid: a, b"), only_adapter(layers, "c"):
        pass


def test_facts_of_another_network_in_the_file_are_not_read():
    facts = {"other.lora_alpha": 3, "other.r": 9}
    [pair] = pairs_of(two(), {"lora_adapter_metadata": json.dumps(facts)}).values()
    assert pair.scale == 1.0
