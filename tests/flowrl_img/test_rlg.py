import copy

import pytest
import torch
from tiny_pipelines import add_adapter, denoiser, flux, picture, sd3, sdxl

from flowrl_img.adapters import adapter_layers, adapters_off, only_adapter
from flowrl_img.rlg import _position, rlg

LEVEL = 1 / 255


@pytest.fixture(scope="module")
def made(tiny_folder):
    """name -> (pipeline with the adapters `a` (active) and `b`, arguments of a call), built once."""
    found = {"sd3": sd3(tiny_folder), "flux": flux(), "sdxl": sdxl()}
    for pipeline, _ in found.values():
        add_adapter(denoiser(pipeline), "b", seed=1)
        add_adapter(denoiser(pipeline), "a", seed=0)
        denoiser(pipeline).set_adapter("a")
    return found


@pytest.fixture(params=["sd3", "flux", "sdxl"])
def stock(made, request):
    return made[request.param]


def off(network):
    return adapters_off(adapter_layers(network))


def counted(pipeline, call, num_steps=4):
    """(picture, forwards of the network)."""
    calls = []
    hook = next(iter(denoiser(pipeline).children())).register_forward_hook(lambda *_: calls.append(1))
    try:
        return picture(pipeline, call, num_steps), len(calls)
    finally:
        hook.remove()


def test_zero_and_one_are_the_base_and_the_tuned_pipeline_to_the_bit_at_one_forward(stock):
    pipeline, call = stock
    with off(denoiser(pipeline)):
        base, forwards = counted(pipeline, call)
    tuned = picture(pipeline, call)
    assert (base - tuned).abs().max() > LEVEL
    with rlg(pipeline, 0):
        found, count = counted(pipeline, call)
    assert torch.equal(found, base) and count == forwards
    with rlg(pipeline, scale=1.0):
        found, count = counted(pipeline, call)
    assert torch.equal(found, tuned) and count == forwards
    with rlg(pipeline, scale=1.6):
        found, count = counted(pipeline, call)
    assert count == 2 * forwards
    assert (found - tuned).abs().max() > LEVEL and (found - base).abs().max() > LEVEL


@pytest.mark.parametrize("scale", [0.5, 1.6])
def test_one_network_draws_what_two_networks_draw(stock, scale):
    pipeline, call = stock
    network = denoiser(pipeline)
    untuned = copy.deepcopy(network)
    untuned.delete_adapters(["a", "b"])
    with rlg(pipeline, scale):
        one = picture(pipeline, call)
    with rlg(pipeline, scale, base=untuned):
        two = picture(pipeline, call)
    torch.testing.assert_close(one, two, rtol=0, atol=1e-5)


def test_the_block_evaluates_the_blend_of_the_networks_own_outputs(stock):
    pipeline, call = stock
    network, off_and_on = denoiser(pipeline), []
    for args, kwargs, found in calls_inside(pipeline, call, 1.6):
        with torch.no_grad():
            tuned = network(*args, **kwargs)[0]
            with off(network):
                base = network(*args, **kwargs)[0]
        torch.testing.assert_close(found, base + 1.6 * (tuned - base), rtol=0, atol=1e-5)
        off_and_on.append((base - tuned).abs().max() > 0)
    assert off_and_on == [True, True]


def calls_inside(pipeline, call, scale):
    """(args, kwargs, what the pipeline got) of every denoiser call of two steps inside `rlg`."""
    network, seen = denoiser(pipeline), []
    with rlg(pipeline, scale):
        blending = network.forward

        def spy(*args, **kwargs):
            out = blending(*args, **kwargs)
            seen.append((args, kwargs, out[0].clone()))
            return out

        network.forward = spy
        picture(pipeline, call, num_steps=2)
        network.forward = blending
    return seen


def test_a_switch_is_placed_by_the_steps_of_the_call(stock):
    pipeline, call = stock
    network, sides = denoiser(pipeline), []
    layer = adapter_layers(network)[0]
    hook = layer.register_forward_hook(lambda module, *_: sides.append("base" if module.disable_adapters else "tuned"))
    with rlg(pipeline, "1:0@0.6"):
        picture(pipeline, call, num_steps=5)
        picture(pipeline, call, num_steps=10)
    hook.remove()
    assert sides == (["tuned"] * 3 + ["base"] * 2) + (["tuned"] * 6 + ["base"] * 4)


def test_several_adapters_act_each_with_its_own_scale(stock):
    pipeline, call = stock
    network = denoiser(pipeline)
    with rlg(pipeline, {"a": 1.0, "b": 0.0}):
        assert torch.equal(picture(pipeline, call), picture_of("a", pipeline, call))
    with rlg(pipeline, {"b": 1}):
        assert torch.equal(picture(pipeline, call), picture_of("b", pipeline, call))
    for args, kwargs, found in calls_inside(pipeline, call, {"a": 0.5, "b": 1.5}):
        with torch.no_grad():
            with off(network):
                base = network(*args, **kwargs)[0]
            with only_adapter(adapter_layers(network), "a"):
                a = network(*args, **kwargs)[0]
            with only_adapter(adapter_layers(network), "b"):
                b = network(*args, **kwargs)[0]
        torch.testing.assert_close(found, base + 0.5 * (a - base) + 1.5 * (b - base), rtol=0, atol=1e-5)


def picture_of(name, pipeline, call):
    with only_adapter(adapter_layers(denoiser(pipeline)), name):
        return picture(pipeline, call)


@pytest.mark.parametrize(("dtype", "divided"), [(torch.float32, 1), (torch.bfloat16, 1000), (torch.int64, 1)])
def test_a_timestep_is_found_in_the_grid_in_any_dtype_and_scaling(dtype, divided):
    grid = torch.linspace(999, 19, 50).round()
    for k, t in enumerate(grid):
        value = t.expand(2).to(dtype) / divided if divided > 1 else t.expand(2).to(dtype)
        place, count = _position(value, grid, 1000)
        assert count == 50 and abs(place - k) <= (dtype == torch.bfloat16 and grid.to(dtype)[place] == t.to(dtype))


def test_the_pipeline_is_as_before_after_the_block_and_after_an_error_in_it(stock):
    pipeline, call = stock
    network = denoiser(pipeline)
    before = picture(pipeline, call)
    trained = [name for name, p in network.named_parameters() if p.requires_grad]
    with pytest.raises(RuntimeError, match="inside"), rlg(pipeline, 1.6) as same:
        assert same is pipeline
        picture(pipeline, call)
        raise RuntimeError("inside")
    assert "forward" not in vars(network)
    assert trained == [name for name, p in network.named_parameters() if p.requires_grad]
    assert torch.equal(picture(pipeline, call), before)


def test_a_forward_that_offloading_installed_is_kept(made):
    pipeline, call = made["sd3"]
    network = denoiser(pipeline)
    calls, original = [], network.forward

    def hooked(*args, **kwargs):
        calls.append(1)
        return original(*args, **kwargs)

    network.forward = hooked
    try:
        with rlg(pipeline, 1.6):
            picture(pipeline, call, num_steps=2)
        assert network.forward is hooked and len(calls) == 4
    finally:
        del network.forward


def test_low_precision_pipelines_get_their_own_dtype_back_and_the_blend_is_taken_in_float32(made):
    pipeline = made["sd3"][0]
    network = copy.deepcopy(denoiser(pipeline)).to(torch.bfloat16)
    pipeline = type(pipeline)(**{**pipeline.components, "transformer": network})
    stream = torch.Generator().manual_seed(0)
    inputs = {
        "hidden_states": torch.randn(1, 4, 8, 8, generator=stream).bfloat16(),
        "encoder_hidden_states": torch.randn(1, 15, 32, generator=stream).bfloat16(),
        "pooled_projections": torch.randn(1, 32, generator=stream).bfloat16(), "timestep": torch.tensor([500.0]),
    }  # fmt: skip
    with torch.no_grad(), rlg(pipeline, 3.0):
        found = network(**inputs).sample
        as_tuple = network(**inputs, return_dict=False)[0]
    with torch.no_grad(), off(network):
        base = network(**inputs).sample
    with torch.no_grad():
        tuned = network(**inputs).sample
    expected = base.float() + 3.0 * (tuned.float() - base.float())
    assert torch.equal(found, expected.bfloat16()) and torch.equal(found, as_tuple)


def test_what_cannot_be_blended_is_refused_with_what_to_do(made, tiny_folder):
    pipeline = made["sd3"][0]
    plain = sd3(tiny_folder)[0]
    cases = [
        (lambda: rlg(plain, 1.6), "has no adapter: call pipeline.load_lora_weights"),
        (lambda: rlg(pipeline, "strong"), "'strong' is no scale: write a number"),
        (lambda: rlg(pipeline, {"c": 1.0}), "no adapter is called c; valid: b, a"),
        (lambda: rlg(pipeline, {}), "valid: b, a"),
        (lambda: rlg(object(), 1.6), "has none of transformer, transformer_2, unet"),
    ]
    for block, message in cases:
        with pytest.raises(ValueError, match=message), block():
            pass
    with rlg(pipeline, 1.6), pytest.raises(ValueError, match="already inside rlg"), rlg(pipeline, 1.6):
        pass
    with pytest.raises(ValueError, match="base is the pipeline's own network"), rlg(plain, 1.6, base=plain.transformer):
        pass
    add_adapter(plain.transformer, "a")
    plain.disable_lora()
    with pytest.raises(ValueError, match=r"both sides are the base: pipeline\.enable_lora"), rlg(plain, 1.6):
        pass
    with rlg(plain, {"a": 1.6}):  # a name switches it on
        pass
    plain.enable_lora()
    plain.fuse_lora()
    with pytest.raises(ValueError, match="unfuse_lora"), rlg(plain, 1.6):
        pass


def test_a_cache_of_diffusers_is_refused(made, monkeypatch):
    pipeline = made["flux"][0]
    monkeypatch.setattr(type(pipeline.transformer), "is_cache_enabled", True, raising=False)
    with pytest.raises(ValueError, match="disable_cache"), rlg(pipeline, 1.6):
        pass


def test_a_timestep_that_the_scheduler_does_not_list_is_refused_for_schedules_alone(made):
    pipeline, call = made["flux"]
    network = pipeline.transformer
    seen = []
    hook = network.register_forward_pre_hook(lambda _, args, kwargs: seen.append(kwargs), with_kwargs=True)
    picture(pipeline, call, num_steps=2)
    hook.remove()
    moved = {**seen[0], "timestep": seen[0]["timestep"] * 0.87}
    with torch.no_grad(), rlg(pipeline, "1:0@1"), pytest.raises(ValueError, match="constant scale"):
        network(**moved)
    with torch.no_grad(), rlg(pipeline, 1.6):
        network(**moved)
