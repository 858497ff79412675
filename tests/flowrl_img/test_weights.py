import pytest
import torch

from flowrl_img.config import Config, EmaConfig, FollowConfig, LoraConfig, PartConfig, RolloutConfig, WeightsConfig
from flowrl_img.models.sd3 import SD3
from flowrl_img.needs import Needs
from flowrl_img.weights import WeightSets, sets_of

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
    weights.after_update(1)
    decay = 1 / 10
    for average, before, now in zip(weights.sets["ema"], start, current, strict=True):
        torch.testing.assert_close(average, decay * before + (1 - decay) * now)
    with weights.use("ema"):
        pass
    for parameter, now in zip(weights.trainable.values(), current, strict=True):
        assert torch.equal(parameter, now)


def test_ema_is_taken_every_so_many_updates(network):
    weights = shaken(network, WeightsConfig(lora=LORA.lora, ema=EmaConfig(every=4)))
    before = [t.clone() for t in weights.sets["ema"]]
    weights.after_update(3)
    assert all(torch.equal(a, b) for a, b in zip(weights.sets["ema"], before, strict=True))
    weights.after_update(4)
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


def test_parts_are_refused_for_an_adapter():
    with pytest.raises(ValueError, match="with LoRA, choose layers"):
        WeightsConfig(only=("context",))


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


# --- sets that follow ----------------------------------------------------------------------------------------------


def following(**changes) -> WeightsConfig:
    lora = {} if changes.get("kind") == "full" else {"lora": LORA.lora}
    return WeightsConfig(**lora, **changes)


def rule(after: str, **decay) -> FollowConfig:
    return FollowConfig(decay=PartConfig(**decay), after=after)


@pytest.mark.parametrize("kind", ["lora", "full"])
def test_old_and_trust_follow_their_own_schedules_and_the_average_its_own(network, kind):
    """One update with decay d: old = d old + (1 - d) new, exactly, and no set disturbs another."""
    config = following(
        kind=kind,
        old=rule("rollout", name="linear", rate=0.375, limit=0.9),
        trust=rule("update", name="linear", rate=0.1, limit=0.3),
    )
    weights = WeightSets(network, config, SD3.lora_targets, seed=0, keep=("old", "trust"))
    start = [p.detach().clone() for p in weights.trainable.values()]
    g = torch.Generator().manual_seed(1)

    def move() -> list[torch.Tensor]:
        with torch.no_grad():
            for parameter in weights.trainable.values():
                parameter.add_(0.05 * torch.randn(parameter.shape, generator=g))
        return [p.detach().clone() for p in weights.trainable.values()]

    first = move()
    weights.after_update(1)
    second = move()
    weights.after_update(2)
    assert all(torch.equal(a, b) for a, b in zip(weights.sets["old"], start, strict=True))
    trust = [0.1 * a + 0.9 * b for a, b in zip(first, second, strict=True)]  # d(0) = 0, d(1) = 0.1
    torch.testing.assert_close(weights.sets["trust"], trust, rtol=1e-6, atol=1e-7)
    weights.after_rollout(2)
    old = [0.75 * a + 0.25 * b for a, b in zip(start, second, strict=True)]  # d(2) = 0.75: updates made so far
    torch.testing.assert_close(weights.sets["old"], old, rtol=1e-6, atol=1e-7)
    ema = [2 / 11 * (0.1 * a + 0.9 * b) + 9 / 11 * c for a, b, c in zip(start, first, second, strict=True)]
    torch.testing.assert_close(weights.sets["ema"], ema, rtol=1e-6, atol=1e-7)
    assert all(torch.equal(p, q) for p, q in zip(weights.trainable.values(), second, strict=True))


def test_a_copied_old_policy_is_the_trained_weights_to_the_bit(network):
    weights = WeightSets(network, following(), SD3.lora_targets, seed=0, keep=("old",))
    with torch.no_grad():
        for parameter in weights.trainable.values():
            parameter.add_(0.1)
    weights.after_rollout(1)
    for held, parameter in zip(weights.sets["old"], weights.trainable.values(), strict=True):
        assert torch.equal(held, parameter)
        assert held.data_ptr() != parameter.data_ptr()


@pytest.mark.parametrize(
    ("name", "config"),
    [
        ("ema_traj_int1", {"ema": EmaConfig(decay=0.9, every=1)}),
        ("ema_traj_int8", {"ema": EmaConfig(decay=0.9, every=8)}),
        ("ema_ref_traj_dgpo", {"ema": None, "old": rule("update", name="linear", rate=0.001, limit=0.3)}),
    ],
)
def test_published_trajectories_of_averages_are_met(golden, name, config):
    case = golden("ema", name)
    layer = torch.nn.Linear(6, 1, bias=False)
    which = next(reversed(config))
    weights = WeightSets(layer, WeightsConfig(kind="full", **config), (), seed=0, keep={which} - {"ema"})
    parameter = weights.trainable["weight"]
    parameter.data = case["params"][:1].clone()
    weights.remember(which)
    seen = []
    for update, values in enumerate(case["params"][1:], 1):
        parameter.data = values[None].clone()
        weights.after_update(update)
        seen.append(weights.sets[which][0][0].clone())
    case.check("ema", torch.stack(seen))


def test_two_sets_share_a_batch_and_give_what_each_gives_alone(network):
    weights = WeightSets(network, following(), SD3.lora_targets, seed=0, keep=("old",))
    g = torch.Generator().manual_seed(1)
    for held in weights.sets["old"]:
        held.add_(0.05 * torch.randn(held.shape, generator=g))
    with weights.use("old"):
        old = velocity(network)
    with weights.use("reference"):
        reference = velocity(network)
    g = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(2, 4, 8, 8, generator=g),
        "encoder_hidden_states": torch.randn(2, 15, 32, generator=g),
        "pooled_projections": torch.randn(2, 32, generator=g),
        "timestep": torch.tensor([300.0, 900.0]),
    }
    twice = {name: torch.cat([x, x]) for name, x in inputs.items()}
    with torch.no_grad(), weights.beside_reference("old", 2):
        both = network(**twice).sample
    torch.testing.assert_close(both[:2], old, rtol=0, atol=1e-5)
    torch.testing.assert_close(both[2:], reference, rtol=0, atol=1e-5)
    assert (old - reference).abs().max() > 1e-3
    assert torch.equal(velocity(network), reference)  # a new adapter is the reference, and no hook is left


def test_two_sets_share_no_batch_in_a_full_run_or_under_gradients(network):
    weights = WeightSets(network, FULL, SD3.lora_targets, seed=0, keep=("old",))
    with torch.no_grad(), pytest.raises(ValueError, match="only with LoRA"), weights.beside_reference("old", 2):
        pass


def test_hooks_go_and_weights_come_back_after_an_exception_in_a_shared_batch(network):
    weights = WeightSets(network, following(), SD3.lora_targets, seed=0, keep=("old",))
    before = [p.detach().clone() for p in weights.trainable.values()]
    for held in weights.sets["old"]:
        held.add_(1.0)
    with pytest.raises(RuntimeError, match="inside"), torch.no_grad(), weights.beside_reference("old", 1):
        raise RuntimeError("inside")
    assert all(torch.equal(p, q) for p, q in zip(weights.trainable.values(), before, strict=True))
    assert not any(layer.lora_A["default"]._forward_hooks for layer in weights._layers)


@pytest.mark.parametrize(
    ("policy", "needs", "sets"),
    [
        ("current", Needs({"old"}), set()),
        ("old", Needs({"old"}), {"old"}),
        ("current", Needs({"old", "reference"}, points="matching"), {"old"}),
        ("ema", Needs({"trust", "reference"}, points="matching"), {"trust"}),
        ("old", Needs(points="matching"), {"old"}),
    ],
)
def test_a_set_is_kept_only_where_somebody_reads_it(policy, needs, sets):
    assert sets_of(Config(rollout=RolloutConfig(policy=policy)), needs) == sets
