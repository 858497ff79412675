"""The benchmark of the kernels: its formulas are those of the ops, its byte counts those of their arguments."""

import json
from pathlib import Path

import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

SCRIPTS = str(Path(__file__).parents[2] / "scripts")
DOCUMENTED = (Path(__file__).parents[2] / "docs" / "performance.md").read_text()
SHAPE = (2, 4, 8, 8)
ELEMENTS = 2 * 4 * 8 * 8


@pytest.fixture
def bench(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")
    monkeypatch.syspath_prepend(SCRIPTS)
    import bench_kernels

    return bench_kernels


class Traffic(TorchDispatchMode):
    """Bytes read and written by operations on latents, each op reading its arguments and writing its results once."""

    def __init__(self):
        super().__init__()
        self.bytes = 0

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):
        out = func(*args, **(kwargs or {}))
        shaped = "new_" in str(func) or "_like" in str(func)  # looks at a tensor's shape, not at its numbers
        read = [] if shaped else {id(x): x for x in args if isinstance(x, torch.Tensor)}.values()
        written = [x for x in (out if isinstance(out, tuple) else (out,)) if isinstance(x, torch.Tensor)]
        addresses = {x.untyped_storage().data_ptr() for x in read}
        if all(x.untyped_storage().data_ptr() not in addresses for x in written):  # a view moves nothing
            self.bytes += sum(x.numel() * x.element_size() for x in (*read, *written) if x.numel() >= ELEMENTS)
        return out


def traffic(runner):
    """Bytes per latent element of the forward pass and of the backward pass."""
    counts = []
    backward = runner.backward()
    for run in (runner.forward, backward):
        with Traffic() as meter:
            run()
        counts.append(meter.bytes / ELEMENTS)
    return counts


def test_counted_bytes_are_those_of_the_arguments_and_far_below_eager_code(bench):
    for name, case in bench.CASES.items():
        inputs = case.inputs(SHAPE, torch.device("cpu"))
        assert tuple(traffic(bench.Runner(case, case.fused, inputs))) == case.counted, name
        naive = traffic(bench.Runner(case, case.naive, inputs))
        counts = " | ".join(f"{forward:.0f} + {backward:.0f}" for forward, backward in (naive, case.counted))
        assert f"| {name} | {counts} |" in DOCUMENTED
        if name in ("transition", "nft", "awm"):
            assert sum(naive) > 5 * sum(case.counted), name


def test_all_forms_of_a_case_compute_the_same(bench):
    for name, case in bench.CASES.items():
        inputs = case.inputs(SHAPE, torch.device("cpu"))
        exact = case.fused({k: x.double() for k, x in inputs.items()})
        assert bench.error(case.fused(inputs), exact) < 2e-6, name
        assert bench.error(case.plain(inputs), exact) < 2e-6, name
        # Published forms subtract log-probs, and blend branches in the dtype of the network.
        assert bench.error(case.naive(inputs), exact) < 0.05, name


def test_it_prints_and_stores_a_row_for_each_op_pass_and_variant(bench, monkeypatch, tmp_path, capsys):
    monkeypatch.setitem(bench.SHAPES, "tiny", SHAPE[1:])
    monkeypatch.setattr(bench.Meter, "copy_bandwidth", lambda self: 1e9)
    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: False)
    bench.main(["--shapes", "tiny", "--batch", "2", "--json", str(tmp_path / "figures.json")])
    rows = json.loads((tmp_path / "figures.json").read_text())["rows"]
    found = {(row["op"], row["pass_"], row["variant"]) for row in rows}
    assert found == {(op, p, v) for op in bench.CASES for p in ("forward", "backward") for v in ("naive", "torch")}
    assert len(capsys.readouterr().out.splitlines()) == 2 + len(rows)
    for row in rows:
        assert row["ms"] > 0 and row["mib"] > 0
        assert (row["naive"] == 1) == (row["variant"] == "naive")
        assert row["gb_s"] == pytest.approx(row["copy"])
    off = {(row["op"], row["variant"]): row["error"] for row in rows if row["pass_"] == "forward"}
    assert off["transition", "torch"] < off["transition", "naive"]


def test_with_a_gpu_the_parity_tests_run_before_anything_is_timed(bench, monkeypatch):
    class Stopped(Exception):
        pass

    def run(command, check, cwd, env):
        assert command[-1].endswith("tests/kernels/triton_cases.py") and check
        assert (env["FLOWRL_KERNELS"], env["TRITON_INTERPRET"]) == ("triton", "0")
        raise Stopped

    monkeypatch.setattr(bench.torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(bench, "driver_obstacle", lambda: None)
    monkeypatch.setattr(bench.subprocess, "run", run)
    monkeypatch.setattr(bench, "meter_for", lambda device: pytest.fail("timed before the parity tests"))
    with pytest.raises(Stopped):
        bench.main([])
