import pytest
import torch

from flowrl_img.config import EmaConfig, LoraConfig, WeightsConfig
from flowrl_img.models.sd3 import SD3
from flowrl_img.weights import WeightSets

LORA = WeightsConfig(lora=LoraConfig(rank=4, alpha=8))
FULL = WeightsConfig(kind="full")
PART = WeightsConfig(kind="full", only=("add_", "context"))


@pytest.fixture
def network(tiny_folder):
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel.from_pretrained(tiny_folder, subfolder="transformer").requires_grad_(False).eval()


def velocity(network) -> torch.Tensor:
    g = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=g),
        "encoder_hidden_states": torch.randn(2, 15, 32, generator=g),
        "pooled_projections": torch.randn(2, 32, generator=g),
    }
    with torch.no_grad():
        return network(timestep=torch.tensor([300.0, 900.0]), **inputs).sample


def shaken(network, config) -> WeightSets:
    weights = WeightSets(network, config, SD3.lora_targets, seed=0)
    g = torch.Generator().manual_seed(1)
    with torch.no_grad():
        for parameter in weights.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
    return weights


@pytest.mark.parametrize("config", [LORA, FULL, PART], ids=["lora", "full", "part"])
def test_a_new_adapter_changes_nothing(network, config):
    base = velocity(network)
    WeightSets(network, config, SD3.lora_targets, seed=0)
    assert torch.equal(velocity(network), base)


@pytest.mark.parametrize("config", [LORA, FULL, PART], ids=["lora", "full", "part"])
def test_the_reference_is_the_untouched_base_to_the_last_bit(network, config):
    base = velocity(network)
    weights = shaken(network, config)
    tuned = velocity(network)
    assert not torch.equal(tuned, base)
    with weights.use("reference"):
        assert torch.equal(velocity(network), base)
    assert torch.equal(velocity(network), tuned)


@pytest.mark.parametrize("config", [LORA, FULL, PART], ids=["lora", "full", "part"])
def test_sets_come_back_after_an_exception_and_when_nested(network, config):
    weights = shaken(network, config)
    tuned = velocity(network)
    flags = {name: p.requires_grad for name, p in network.named_parameters()}
    with pytest.raises(RuntimeError, match="inside"), weights.use("reference"), weights.use("ema"):
        with weights.use("reference"):
            velocity(network)
        raise RuntimeError("inside")
    assert torch.equal(velocity(network), tuned)
    assert flags == {name: p.requires_grad for name, p in network.named_parameters()}


def test_ema_follows_its_formula_and_never_aliases_the_trained_weights(network):
    weights = shaken(network, WeightsConfig(lora=LORA.lora, ema=EmaConfig(decay=0.9)))
    start = [t.clone() for t in weights.sets["ema"]]
    current = [p.detach().clone() for p in weights.trainable.values()]
    weights.update_ema(1)
    decay = 2 / 11
    for average, before, now in zip(weights.sets["ema"], start, current, strict=True):
        torch.testing.assert_close(average, decay * before + (1 - decay) * now)
    with weights.use("ema"):
        pass
    for parameter, now in zip(weights.trainable.values(), current, strict=True):
        assert torch.equal(parameter, now)


def test_ema_is_taken_every_so_many_updates(network):
    weights = shaken(network, WeightsConfig(lora=LORA.lora, ema=EmaConfig(every=4)))
    before = [t.clone() for t in weights.sets["ema"]]
    weights.update_ema(3)
    assert all(torch.equal(a, b) for a, b in zip(weights.sets["ema"], before, strict=True))
    weights.update_ema(4)
    assert not all(torch.equal(a, b) for a, b in zip(weights.sets["ema"], before, strict=True))


def test_trained_weights_are_float32_on_a_bf16_base(network):
    weights = WeightSets(network.to(torch.bfloat16), LORA, SD3.lora_targets, seed=0)
    assert {p.dtype for p in weights.trainable.values()} == {torch.float32}
    assert weights.touched_layers == 15  # 8 projections in each of 2 layers; the last has no to_add_out


def test_a_target_that_matches_nothing_is_refused_with_the_nearest(network):
    config = WeightsConfig(lora=LoraConfig(rank=4, targets=("attn.to_qq",)))
    with pytest.raises(ValueError, match=r"'attn.to_qq' matches no linear layer; did you mean 'attn.to_q'"):
        WeightSets(network, config, SD3.lora_targets, seed=0)


def test_only_the_named_weights_are_trained(network):
    weights = WeightSets(network, PART, SD3.lora_targets, seed=0)
    assert weights.trainable
    assert all("add_" in name or "context" in name for name in weights.trainable)
    free = {name for name, p in network.named_parameters() if p.requires_grad}
    assert free == set(weights.trainable)


def test_a_part_of_no_name_is_refused_with_the_nearest(network):
    with pytest.raises(ValueError, match="'contxt' is part of no parameter's name; did you mean"):
        WeightSets(network, WeightsConfig(kind="full", only=("contxt",)), SD3.lora_targets, seed=0)


def test_an_unknown_set_is_refused(network):
    weights = WeightSets(network, LORA, SD3.lora_targets, seed=0)
    with pytest.raises(ValueError, match="no weight set 'emma'; did you mean 'ema'"), weights.use("emma"):
        pass


def test_the_start_of_an_adapter_depends_on_its_seed_alone(tiny_folder):
    from diffusers import SD3Transformer2DModel

    starts = []
    for noise in (1, 2):
        torch.manual_seed(noise)
        net = SD3Transformer2DModel.from_pretrained(tiny_folder, subfolder="transformer").requires_grad_(False)
        before = torch.random.get_rng_state()
        starts.append([p.clone() for p in WeightSets(net, LORA, SD3.lora_targets, seed=3).trainable.values()])
        assert torch.equal(torch.random.get_rng_state(), before)
    assert all(torch.equal(a, b) for a, b in zip(*starts, strict=True))
