import copy

import pytest
import torch
from gaussian_target import slope_of

from flowrl_img.adapters import adapter_layers, adapters_off
from flowrl_img.blend import Blend, Side, blended, nominal_kl
from flowrl_img.guidance import guided
from flowrl_img.rollout import generate
from flowrl_img.samplers.loop import sample
from flowrl_img.samplers.steps.ode import ODE
from flowrl_img.scales import Constant, Ramp, Switch

TEXTS = ["a photo of a ring", "a photo of two hearts"]


def never():
    raise AssertionError("a side of no weight was evaluated")


def sides_of(trainer, name="current"):
    weights = trainer.weights
    return Side(trainer.model, lambda: weights.use("reference")), Side(trainer.model, lambda: weights.use(name))


def state(seed=0):
    x = torch.randn(2, 4, 8, 8, generator=torch.Generator().manual_seed(seed))
    return x, torch.tensor([0.8, 0.3], dtype=torch.float64)


@pytest.mark.parametrize("name", ["rlg_cfg4.5", "rlg_nocfg", "rlg_nocfg_packed_f32"])
def test_the_blend_is_that_of_published_code(golden, name):
    case = golden("rlg", name)

    def side(which):
        return lambda: (case[f"v_cond_{which}"], case.tensors.get(f"v_uncond_{which}"))

    found = [blended([w], side("base"), [side("tuned")], case.scalars["guidance_scale"]) for w in case.scalars["w"]]
    case.check("v", torch.stack(found))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_weights_zero_and_one_evaluate_one_side_and_are_it_to_the_bit(dtype):
    c, u = torch.randn(2, 3, 4, 5, generator=torch.Generator().manual_seed(0)).to(dtype)
    expected = blended([], lambda: (c, u), [], 4.5)
    assert torch.equal(blended([0.0], lambda: (c, u), [never], 4.5), expected)
    assert torch.equal(blended([1.0], never, [lambda: (c, u)], 4.5), expected)
    assert torch.equal(blended([0.0, 1.0, 0.0], never, [never, lambda: (c, u), never], 4.5), expected)


@pytest.mark.parametrize("guidance", [1.0, 4.0])
def test_a_network_with_its_adapters_off_and_on_is_bit_equal_at_the_ends(tiny_trainer, guidance):
    trainer = tiny_trainer()
    base, tuned = sides_of(trainer)
    x, sigma = state()
    for weight, name in ((0.0, "reference"), (1.0, "current")):
        calls = trainer.model.calls
        v = Blend(base, (tuned,), (Constant(weight),)).velocity(x, sigma, TEXTS, guidance, 0, 4)
        assert trainer.model.calls - calls == len(x) * (1 if guidance == 1 else 2)  # one forward
        with trainer.weights.use(name):
            assert torch.equal(v, guided(trainer.model, x, sigma, TEXTS, guidance))


@pytest.mark.parametrize("guidance", [1.0, 4.0])
@pytest.mark.parametrize("weight", [-0.5, 0.5, 1.6, 3.0])
def test_one_network_gives_what_two_networks_give(tiny_trainer, guidance, weight):
    trainer = tiny_trainer()
    base, tuned = sides_of(trainer)
    x, sigma = state()
    one = Blend(base, (tuned,), (Constant(weight),)).velocity(x, sigma, TEXTS, guidance, 0, 4)
    other = copy.deepcopy(trainer.model.network)
    two = copy.deepcopy(trainer.model.network)
    with adapters_off(adapter_layers(two)):
        apart = Blend(
            Side(trainer.model.with_network(two)), (Side(trainer.model.with_network(other)),), (Constant(weight),)
        ).velocity(x, sigma, TEXTS, guidance, 0, 4)
    torch.testing.assert_close(one, apart, rtol=0, atol=1e-6)


def test_blending_before_classifier_free_guidance_equals_blending_after_it(tiny_trainer):
    trainer = tiny_trainer()
    base, tuned = sides_of(trainer)
    x, sigma = state()
    after = Blend(base, (tuned,), (Constant(1.6),)).velocity(x, sigma, TEXTS, 4.0, 0, 4)
    (c0, u0), (c1, u1) = (side.branches(x, sigma, TEXTS, 4.0) for side in (base, tuned))
    before = (
        blended([1.6], lambda: (c0, None), [lambda: (c1, None)]),
        blended([1.6], lambda: (u0, None), [lambda: (u1, None)]),
    )
    torch.testing.assert_close(before[1] + 4.0 * (before[0] - before[1]), after, rtol=0, atol=1e-5)
    wide = [torch.randn(2, 3, generator=torch.Generator().manual_seed(k), dtype=torch.float64) for k in range(4)]
    c0, u0, c1, u1 = wide
    after = blended([1.6], lambda: (c0, u0), [lambda: (c1, u1)], 4.0)
    cond, uncond = c0 + 1.6 * (c1 - c0), u0 + 1.6 * (u1 - u0)
    torch.testing.assert_close(uncond + 4.0 * (cond - uncond), after, rtol=0, atol=1e-13)


@pytest.mark.parametrize("weights", [[0.5, 1.5], [1.0, 1.0], [0.0, 2.0], [1.0, -0.5, 0.25]])
def test_several_tuned_sides_add_their_changes(weights):
    stream = torch.Generator().manual_seed(0)
    base, *tuned = torch.randn(1 + len(weights), 2, 3, 4, generator=stream, dtype=torch.float64)
    expected = base + sum(w * (v - base) for w, v in zip(weights, tuned, strict=True))
    found = blended(weights, lambda: (base, None), [lambda v=v: (v, None) for v in tuned])
    torch.testing.assert_close(found, expected, rtol=0, atol=1e-13)


def test_a_blend_needs_one_scale_for_each_tuned_side():
    with pytest.raises(ValueError, match="1 sides, 2 scales"):
        Blend(Side(None), (Side(None),), (Constant(1), Constant(2)))


@pytest.mark.parametrize(("at", "num_steps"), [(3, 7), (0.6, 5)])
def test_tuned_early_and_base_late_is_two_walks_end_to_end(tiny_trainer, at, num_steps):
    trainer = tiny_trainer()
    base, tuned = sides_of(trainer)
    pictures = generate(
        Blend(base, (tuned,), (Switch(1, 0, at),)), TEXTS, [5, 6], num_steps=num_steps, guidance=1.0, batch=2
    )
    from flowrl_img import seeds

    model, sigmas, x = trainer.model, trainer.model.sigmas(num_steps), seeds.normal([5, 6], (4, 8, 8))
    for part, side in ((slice(0, 4), "current"), (slice(3, None), "reference")):
        with trainer.weights.use(side):
            x = sample(
                lambda x_t, i, sigma: guided(model, x_t, torch.full((2,), sigma, dtype=torch.float64), TEXTS, 1.0),
                x, sigmas[part], ODE(), (), lambda i: None,
            ).x0  # fmt: skip
    # The solver writes Euler's step by the clean prediction: the same up to rounding.
    torch.testing.assert_close(pictures, model.decode(x), rtol=0, atol=1e-5)


def test_a_ramp_changes_the_weight_from_step_to_step(tiny_trainer):
    trainer = tiny_trainer()
    base, tuned = sides_of(trainer)
    seen = []

    def scale(step, num_steps):
        seen.append((step, num_steps))
        return Ramp(2, 0)(step, num_steps)

    generate(Blend(base, (tuned,), (scale,)), TEXTS, [5, 6], num_steps=4, guidance=1.0, batch=1)
    assert seen == [(0, 4), (1, 4), (2, 4), (3, 4)] * 2


def test_mixing_weights_is_not_blending_outputs(tiny_trainer):
    """The adapter's change of a layer has `norm` times the Frobenius norm of the layer's weight."""
    trainer = tiny_trainer(weights={"lora": {"rank": 4, "alpha": 4}})
    layers, (x, sigma) = adapter_layers(trainer.model.network), state()

    def gap(norm: float) -> tuple[float, float]:
        for layer in layers:
            a, b = layer.lora_A["default"].weight, layer.lora_B["default"].weight
            b.data *= norm * layer.weight.norm() / (b @ a).norm()
        with adapters_off(layers):
            base = guided(trainer.model, x, sigma, TEXTS, 1.0)
        tuned = guided(trainer.model, x, sigma, TEXTS, 1.0)
        for layer in layers:
            layer.scaling["default"] = 2.0
        mixed = guided(trainer.model, x, sigma, TEXTS, 1.0)
        for layer in layers:
            layer.scaling["default"] = 1.0
        change = 2 * (tuned - base)
        departure = (mixed - (base + change)).norm()
        return float(departure / change.norm()), float(departure)

    with torch.no_grad():
        assert gap(0.3)[0] > 0.1
        (relative, absolute), (_, half), (_, quarter) = gap(0.02), gap(0.01), gap(0.005)
    assert relative < 0.05
    # Second order: half the adapter, a quarter of the gap, up to the next order and rounding.
    assert absolute / half == pytest.approx(4, rel=0.15)
    assert half / quarter == pytest.approx(4, rel=0.15)


BASE, TUNED = (0.0, 1.0), (1.0, 0.5)  # mean, standard deviation


def gaussian(mean: float, std: float):
    """The exact velocity of N(mean, std^2) along x_t = (1 - t) x0 + t eps."""
    return lambda x, t: slope_of(t, std) * (x - (1 - t) * mean) - mean


def geometric_mix(base, tuned, weight: float) -> tuple[float, float]:
    """Mean and standard deviation of p_base^(1 - w) p_tuned^w."""
    precisions = [(1 - weight) / base[1] ** 2, weight / tuned[1] ** 2]
    precision = sum(precisions)
    return (precisions[0] * base[0] + precisions[1] * tuned[0]) / precision, precision**-0.5


def walked(base, tuned, weight: float, num_steps: int = 2000) -> tuple[float, float]:
    """Mean and standard deviation that the blended sampler reaches: it is affine in its start, so two starts tell."""
    v_base, v_tuned = gaussian(*base), gaussian(*tuned)

    def velocity(x, i, t):
        return blended([weight], lambda: (v_base(x, t), None), [lambda: (v_tuned(x, t), None)])

    sigmas = torch.linspace(1, 0, num_steps + 1, dtype=torch.float64)
    ends = sample(velocity, torch.tensor([[0.0], [1.0]], dtype=torch.float64), sigmas, ODE(), (), lambda i: None).x0
    return ends[0].item(), (ends[1] - ends[0]).item()


@pytest.mark.parametrize("weight", [0.5, 1.6, 3.0])
def test_the_blend_is_the_geometric_mix_of_two_gaussians_of_equal_spread(weight):
    base, tuned = (0.0, 0.7), (1.0, 0.7)
    # Euler's error at 2000 steps is 1e-3.
    assert walked(base, tuned, weight) == pytest.approx(geometric_mix(base, tuned, weight), abs=3e-3)


@pytest.mark.parametrize("weight", [0.5, 1.6, 3.0])
def test_the_score_of_clean_pictures_is_that_of_the_geometric_mix_exactly(weight):
    x, t = torch.linspace(-2, 2, 9, dtype=torch.float64)[:, None], 1e-6
    v = blended([weight], lambda: (gaussian(*BASE)(x, t), None), [lambda: (gaussian(*TUNED)(x, t), None)])
    score = -(x + (1 - t) * v) / t
    mean, std = geometric_mix(BASE, TUNED, weight)
    torch.testing.assert_close(score, -(x - mean) / std**2, rtol=0, atol=1e-4)  # of order t, cancellation 1e-10 / t


def test_the_blended_process_is_not_the_geometric_mix_of_two_gaussians_of_unequal_spread():
    mean, std = walked(BASE, TUNED, 2.0)
    assert std == pytest.approx(BASE[1] ** (1 - 2) * TUNED[1] ** 2, abs=2e-3)  # 0.25: spreads mix geometrically
    assert geometric_mix(BASE, TUNED, 2.0)[1] == pytest.approx(0.378, abs=1e-3)
    assert mean - geometric_mix(BASE, TUNED, 2.0)[0] > 0.1  # it overshoots: the scale is a heuristic here


def test_the_nominal_kl_weight_is_divided_by_the_scale():
    assert nominal_kl(0.04, Constant(1.6)) == "scale 1.6: nominal KL weight 0.04 / 1.6 = 0.025"
    assert nominal_kl(0.0, Constant(1.6)) is None
    assert nominal_kl(0.04, Constant(0.0)) is None
    assert nominal_kl(0.04, Constant(1.0)) is None
    assert nominal_kl(0.04, Switch(1, 0, 3)) is None
