"""The op against naive float64 formulas, in value and in every gradient, for all shapes, strides and dtypes."""

import pytest
import torch
from torch.utils.checkpoint import checkpoint

from flowrl_img.kernels.guidance_torch import guide
from flowrl_img.kernels.transition import CROSS, DOLD2, DREF2, E2, transition_moments

OP = torch.ops.flowrl_img.transition_moments.default
SHAPES = [(2, 4, 8, 8), (3, 7, 5), (2, 3, 2, 5, 3), (1, 1, 1, 1), (5, 129)]
GUIDANCE = 4.5


@pytest.fixture(autouse=True)
def _reference_body(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")


def inputs(shape, v_dtype=torch.float64, x_dtype=torch.float64, seed=0):
    stream = torch.Generator().manual_seed(seed)

    def draw(dtype):
        return torch.randn(shape, generator=stream, dtype=torch.float64).to(dtype)

    case = {name: draw(v_dtype) for name in ("v_cond", "v_uncond", "v_old", "v_ref")}
    case |= {name: draw(x_dtype) for name in ("x_t", "x_s")}
    case["A"] = 0.7 + 0.3 * torch.rand(shape[0], generator=stream, dtype=torch.float64)
    case["B"] = -0.05 - 0.3 * torch.rand(shape[0], generator=stream, dtype=torch.float64)
    return case


def run(case, guidance=GUIDANCE, **changes):
    a = case | changes
    return transition_moments(
        a["v_cond"], a["v_uncond"], guidance, a["x_t"], a["x_s"], a["A"], a["B"], v_old=a["v_old"], v_ref=a["v_ref"]
    )


def naive(case, guidance=GUIDANCE):
    """The definition, row by row and in float64."""
    wide = {k: None if x is None else x.double() for k, x in case.items()}
    rows = []
    for r in range(len(wide["v_cond"])):
        v, x_t, x_s = wide["v_cond"][r], wide["x_t"][r], wide["x_s"][r]
        if wide["v_uncond"] is not None:
            v = (1 - guidance) * wide["v_uncond"][r] + guidance * v
        A, B = wide["A"][r], wide["B"][r]
        columns = [((x_s - A * x_t - B * v) ** 2).mean(), *[torch.zeros((), dtype=torch.float64)] * 3]
        if wide["v_ref"] is not None:
            columns[DREF2] = ((v - wide["v_ref"][r]) ** 2).mean()
        if wide["v_old"] is not None:
            old = wide["v_old"][r]
            columns[DOLD2] = ((v - old) ** 2).mean()
            columns[CROSS] = ((v - old) * (x_s - A * x_t - B * old)).mean()
        rows.append(torch.stack(columns))
    return torch.stack(rows)


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("absent", [(), ("v_uncond",), ("v_old",), ("v_ref",), ("v_uncond", "v_old", "v_ref")])
def test_moments_equal_their_definition(shape, absent):
    case = inputs(shape) | dict.fromkeys(absent)
    moments = run(case)
    assert moments.dtype == torch.float64
    torch.testing.assert_close(moments, naive(case), rtol=1e-12, atol=1e-14)


# Inputs are exact in every dtype, so the tolerance is that of float32 arithmetic: 6e-8 per operation, times guidance.
@pytest.mark.parametrize("v_dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("x_dtype", [torch.float32, torch.bfloat16])
def test_low_precision_inputs_are_computed_in_float32(v_dtype, x_dtype):
    case = inputs((3, 4, 9, 7), v_dtype, x_dtype)
    moments = run(case)
    assert moments.dtype == torch.float32
    torch.testing.assert_close(moments.double(), naive(case), rtol=2e-6, atol=2e-6)


GRADIENT_TOLERANCE = {torch.float32: 2e-6, torch.bfloat16: 2**-8, torch.float16: 2**-11}  # half an ulp, relative


@pytest.mark.parametrize("dtype", GRADIENT_TOLERANCE)
@pytest.mark.parametrize("guided", [False, True])
def test_gradients_come_in_the_dtype_of_the_velocity_and_match_float64(dtype, guided):
    case = inputs((3, 4, 9, 7), dtype, torch.float32)
    if not guided:
        case["v_uncond"] = None
    weights = torch.randn(3, 4, generator=torch.Generator().manual_seed(1)) * 100  # keeps float16 out of its subnormals
    found, wide = {}, dict(case)
    for name in ("v_cond", "v_uncond") if guided else ("v_cond",):
        found[name] = case[name].clone().requires_grad_()
        wide[name] = case[name].double().requires_grad_()
    (run(case | found) * weights).sum().backward()
    (naive(wide) * weights).sum().backward()
    for name, leaf in found.items():
        expected = wide[name].grad
        assert leaf.grad.dtype == dtype
        error = (leaf.grad.double() - expected).abs()
        assert (error <= GRADIENT_TOLERANCE[dtype] * (expected.abs() + expected.abs().mean())).all()


@pytest.mark.parametrize("column", [E2, DREF2, DOLD2, CROSS])
@pytest.mark.parametrize("guided", [False, True])
def test_every_column_passes_gradcheck(column, guided):
    case = inputs((2, 3, 2, 2))
    leaves = [case["v_cond"].requires_grad_()] + ([case["v_uncond"].requires_grad_()] if guided else [])

    def f(v_cond, v_uncond=None):
        return run(case, v_cond=v_cond, v_uncond=v_uncond)[:, column]

    assert torch.autograd.gradcheck(f, leaves)


def test_a_detached_unconditional_branch_gets_no_gradient_and_changes_no_value():
    case = inputs((2, 3, 4, 4))
    cond, uncond = case["v_cond"].requires_grad_(), case["v_uncond"].requires_grad_()
    arguments = (GUIDANCE, case["x_t"], case["x_s"], case["A"], case["B"])
    full = transition_moments(cond, uncond, *arguments, v_old=case["v_old"])
    (expected,) = torch.autograd.grad(full.sum(), cond, retain_graph=True)
    detached = transition_moments(cond, uncond, *arguments, v_old=case["v_old"], detach_uncond=True)
    detached.sum().backward()
    assert torch.equal(full, detached)
    assert torch.equal(cond.grad, expected)
    assert uncond.grad is None


def test_only_the_unconditional_branch_may_be_trained():
    case = inputs((2, 3, 4, 4))
    case["v_uncond"].requires_grad_()
    run(case)[:, E2].sum().backward()
    wide = {k: x.detach().clone() for k, x in case.items()}
    wide["v_uncond"].requires_grad_()
    naive(wide)[:, E2].sum().backward()
    torch.testing.assert_close(case["v_uncond"].grad, wide["v_uncond"].grad, rtol=1e-12, atol=1e-15)


@pytest.mark.parametrize("shapes", [((2, 4, 8, 8), (2, 64, 4), (2, 4, 4, 4, 4))])
def test_reshaping_the_latent_changes_nothing(shapes):
    case = inputs(shapes[0], torch.float32, torch.float32)
    results = [run({k: x.reshape(shape) if x.ndim > 1 else x for k, x in case.items()}) for shape in shapes]
    assert torch.equal(results[0], results[1])
    assert torch.equal(results[0], results[2])


def test_strides_change_nothing():
    case = inputs((2, 6, 5, 4), torch.float32, torch.float32)
    strided = {k: x.permute(3, 1, 0, 2).contiguous().permute(2, 1, 3, 0) if x.ndim > 1 else x for k, x in case.items()}
    strided["x_t"] = torch.stack([case["x_t"], case["x_t"]], -1)[..., 0]
    strided["v_cond"].requires_grad_()
    case["v_cond"].requires_grad_()
    assert not strided["v_cond"].is_contiguous()
    moments, plain = run(strided), run(case)
    assert torch.equal(moments, plain)
    moments.sum().backward()
    plain.sum().backward()
    assert torch.equal(strided["v_cond"].grad, case["v_cond"].grad)


def test_a_broadcast_latent_counts_every_element():
    case = inputs((3, 4, 5))
    case["x_t"] = case["x_t"][:1].expand(3, 4, 5)
    torch.testing.assert_close(run(case), naive(case), rtol=1e-12, atol=1e-14)


def test_a_row_does_not_depend_on_the_rows_beside_it():
    case = inputs((4, 5, 33), torch.float32, torch.float32)
    alone = run({k: x[2:3] for k, x in case.items()})
    torch.testing.assert_close(run(case)[2:3], alone, rtol=1e-6, atol=0)


def test_equal_velocities_leave_exact_zeros():
    case = inputs((3, 4, 8, 8), torch.bfloat16, torch.float32)
    case["v_old"] = guide(case["v_cond"], case["v_uncond"], GUIDANCE)
    case["v_ref"] = case["v_old"].clone()
    moments = run(case)
    assert not moments[:, [DREF2, DOLD2, CROSS]].any()
    assert moments[:, E2].all()


def test_no_rows_give_no_moments():
    case = inputs((0, 4, 8))
    case["v_cond"].requires_grad_()
    moments = run(case)
    moments.sum().backward()
    assert moments.shape == (0, 4)
    assert case["v_cond"].grad.shape == (0, 4, 8)


def test_autocast_does_not_lower_the_precision():
    case = inputs((2, 4, 8, 8), torch.bfloat16, torch.float32)
    case["v_cond"].requires_grad_()
    plain = run(case)
    with torch.autocast("cpu", torch.bfloat16):
        assert torch.equal(run(case), plain)


def test_activation_checkpointing_changes_neither_value_nor_gradient():
    case = inputs((2, 4, 6, 6), torch.float32, torch.float32)
    gradients = []
    for wrap in (lambda f, *a: f(*a), lambda f, *a: checkpoint(f, *a, use_reentrant=False)):
        v = case["v_cond"].clone().requires_grad_()
        wrap(lambda v: run(case, v_cond=torch.tanh(v)), v).sum().backward()
        gradients.append(v.grad)
    assert torch.equal(*gradients)


def test_it_traces_whole_under_torch_compile_and_keeps_its_gradient():
    case = inputs((2, 4, 6, 6), torch.float32, torch.float32)
    gradients = []
    for compiled in (False, True):
        v, u = case["v_cond"].clone().requires_grad_(), case["v_uncond"].clone().requires_grad_()

        def loss(v, u):
            return (run(case, v_cond=torch.tanh(v), v_uncond=u) * torch.arange(1.0, 5.0)).sum()

        f = torch.compile(loss, fullgraph=True, backend="aot_eager") if compiled else loss
        f(v, u).backward()
        gradients.append((v.grad, u.grad))
    torch.testing.assert_close(gradients[0], gradients[1], rtol=1e-6, atol=1e-7)


@pytest.mark.parametrize("guided", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float64])
def test_the_registration_passes_opcheck(guided, dtype):
    case = inputs((2, 6, 5), dtype, torch.float64 if dtype == torch.float64 else torch.float32)
    A, B = (case[k].to(case["x_t"].dtype) for k in ("A", "B"))
    v = case["v_cond"].transpose(1, 2).contiguous().transpose(1, 2).requires_grad_()
    u = case["v_uncond"].requires_grad_() if guided else None
    torch.library.opcheck(
        OP, (v, u, 2.0, case["x_t"], case["x_s"], A, B, case["v_old"], case["v_ref"] if guided else None)
    )


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"x_s": torch.zeros(2, 3, 5)}, "x_s is"),
        ({"v_old": torch.zeros(1, 3, 4)}, "v_old is"),
        ({"v_ref": torch.zeros(2, 3, 4, device="meta")}, "v_ref is"),
        ({"A": torch.zeros(3)}, "A must be one number per row"),
        ({"B": torch.zeros(2, 1)}, "B must be one number per row"),
        ({"v_ref": torch.zeros(2, 3, 4, requires_grad=True)}, r"pass v_ref.detach\(\)"),
        ({"v_old": torch.zeros(2, 3, 4, requires_grad=True)}, r"pass v_old.detach\(\)"),
        ({"x_t": torch.zeros(2, 3, 4, requires_grad=True)}, r"pass x_t.detach\(\)"),
        ({"v_cond": torch.zeros(2)}, "latents must be"),
        ({"v_cond": torch.zeros(2, 0)}, "latents must be"),
    ],
)
def test_wrong_arguments_are_refused_with_the_fix(changes, message):
    with pytest.raises(ValueError, match=message):
        run(inputs((2, 3, 4)) | changes)
