"""What every fused op must do: equal its definition, in value and gradient, whatever the layout, dtype and wrapping."""

import pytest
import torch
from kernel_cases import CASES, COVER, DTYPES, POINT, PRODUCT, SHAPES, WANTED, assert_near, pairwise, strided, wide
from torch.utils.checkpoint import checkpoint

F32, F64, BF16 = torch.float32, torch.float64, torch.bfloat16
# Of each registered op and gradient one, and an op with arguments left out.
SOME = ["transition", "transition_unguided", "matching", "blend", "sde_step", "renoise"]

every_case = pytest.mark.parametrize("case", CASES.values(), ids=CASES)
some_cases = pytest.mark.parametrize("case", [CASES[name] for name in SOME], ids=SOME)


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


@every_case
@pytest.mark.parametrize("shape", SHAPES)
def test_values_equal_their_definition(case, shape):
    inputs = case.inputs(shape)
    out = case.call(inputs)
    assert out.dtype == F64
    assert_near(out, case.naive(inputs), F64)


def assert_low_precision(name, shape, v_dtype, x_dtype, wanted):
    case = CASES[name]
    inputs = case.inputs(shape, v_dtype, x_dtype)
    out, gradients = case.differentiate(case.call, inputs, wanted)
    exact, expected = case.differentiate(case.naive, wide(inputs), wanted)
    assert out.dtype == (x_dtype if case.op[1] == "_step" else F32)
    assert_near(out, exact, out.dtype)
    assert gradients.keys() == expected.keys()
    for name, gradient in gradients.items():
        assert gradient.dtype == inputs[name].dtype
        # What arrives is rounded to the dtype of the output, what leaves to the input's: the coarser counts, both add.
        coarser = max(gradient.dtype, out.dtype, key=lambda dtype: torch.finfo(dtype).eps)
        steady = case.steady(wide(inputs))
        assert_near(gradient * steady, expected[name] * steady, coarser, ulps=1 if out.dtype == F32 else 2)


@pytest.mark.parametrize(POINT, COVER)
def test_low_precision_inputs_are_computed_in_float32_and_rounded_once(name, shape, v_dtype, x_dtype, wanted):
    assert_low_precision(name, shape, v_dtype, x_dtype, wanted)


@pytest.mark.full
@pytest.mark.parametrize(POINT, PRODUCT)
def test_every_mix_of_dtypes_and_shapes_is_computed_in_float32(name, shape, v_dtype, x_dtype, wanted):
    assert_low_precision(name, shape, v_dtype, x_dtype, wanted)


def test_the_cover_holds_every_pair_and_is_a_small_part_of_the_product():
    factors = (list(CASES), SHAPES, DTYPES, DTYPES, WANTED)
    met = {(i, row[i], j, row[j]) for row in COVER for i in range(5) for j in range(i)}
    assert met == {(i, a, j, b) for i in range(5) for j in range(i) for a in factors[i] for b in factors[j]}
    assert len(CASES) * len(SHAPES) <= len(COVER) < len(PRODUCT) / 10
    assert pairwise("ab", "cd", "ef") == pairwise("ab", "cd", "ef")


@every_case
def test_every_gradient_passes_gradcheck(case):
    inputs = case.inputs((2, 3, 2, 2))
    leaves = [inputs[name].requires_grad_() for name in case.trained]
    assert torch.autograd.gradcheck(lambda *xs: case.call(inputs | dict(zip(case.trained, xs))), leaves)


@every_case
def test_each_trained_input_may_be_trained_alone(case):
    inputs = case.inputs((2, 3, 2, 2))
    _, together = case.differentiate(case.call, inputs)
    for name in case.trained:
        alone = type(case)(case.call, case.naive, (name,), (), (), case.op)
        _, found = alone.differentiate(case.call, inputs)
        assert found.keys() == {name}
        torch.testing.assert_close(found[name], together[name], rtol=0, atol=0)


@every_case
def test_strides_change_nothing(case):
    inputs = case.inputs((2, 6, 5, 4), F32, F32)
    plain, gradients = case.differentiate(case.call, inputs)
    turned = {name: strided(x) for name, x in inputs.items()}
    assert not turned[case.trained[0]].is_contiguous()
    out, again = case.differentiate(case.call, turned)
    assert torch.equal(out, plain)
    assert all(torch.equal(again[name], gradients[name]) for name in gradients)


@every_case
def test_a_row_does_not_depend_on_the_rows_beside_it(case):
    inputs = case.inputs((4, 5, 33), F32, F32)
    alone = case.call({name: x[2:3] for name, x in inputs.items()})
    torch.testing.assert_close(case.call(inputs)[2:3], alone, rtol=1e-6, atol=1e-7)  # other vector widths of the sum


@every_case
def test_no_rows_give_no_results_and_empty_gradients(case):
    out, gradients = case.differentiate(case.call, case.inputs((0, 4, 8), F32, F32))
    assert len(out) == 0
    assert all(gradient.shape == (0, 4, 8) for gradient in gradients.values())


@some_cases
def test_autocast_does_not_lower_the_precision(case):
    inputs = case.inputs((2, 4, 8, 8), BF16, F32)
    plain = case.call(inputs)
    with torch.autocast("cpu", BF16):
        assert torch.equal(case.call(inputs), plain)


@some_cases
@pytest.mark.parametrize("how", ["checkpoint", "compile"])
def test_checkpointing_and_compilation_change_neither_value_nor_gradient(case, how):
    inputs = case.inputs((2, 4, 6, 6), F32, F32)

    def f(a):
        return case.call(a | {name: torch.tanh(a[name]) for name in case.trained})

    wrapped = {
        "checkpoint": lambda a: checkpoint(f, a, use_reentrant=False),
        "compile": torch.compile(f, fullgraph=True, backend="aot_eager"),
    }[how]
    out, gradients = case.differentiate(f, inputs)
    again, found = case.differentiate(wrapped, inputs)
    torch.testing.assert_close(again, out, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(found, gradients, rtol=1e-6, atol=1e-6)


@some_cases
@pytest.mark.parametrize("dtype", [F32, BF16, F64])
def test_the_registration_passes_opcheck(case, dtype, monkeypatch):
    inputs = case.inputs((2, 6, 5), dtype, F64 if dtype == F64 else F32)
    for name in case.trained:
        inputs[name] = strided(inputs[name]).requires_grad_()
    module, name = case.op
    original, calls = getattr(module, name), []
    monkeypatch.setattr(module, name, lambda *a: (calls.append(a), original(*a))[1])
    case.call(inputs)
    torch.library.opcheck(original, calls[0])


@every_case
def test_what_gets_no_gradient_may_not_ask_for_one(case):
    for name in (*case.constant, *case.scalars):
        inputs = case.inputs((2, 3, 4))
        inputs[name].requires_grad_()
        with pytest.raises(ValueError, match=r"pass .*\.detach\(\)"):
            case.call(inputs)
        with torch.no_grad():
            case.call(inputs)


@every_case
def test_latents_and_scalars_must_fit(case):
    inputs = case.inputs((2, 3, 4))
    first, *others = (*case.trained, *case.constant)
    for name in others:
        with pytest.raises(ValueError, match="they must agree"):
            case.call(inputs | {name: inputs[name][:, :2]})
    for name in case.scalars:
        with pytest.raises(ValueError, match="one number per row"):
            case.call(inputs | {name: inputs[name][:1]})
    with pytest.raises(ValueError, match=r"latents must be \[rows"):
        case.call({name: inputs[name].flatten() for name in (first, *others)} | {k: inputs[k] for k in case.scalars})
