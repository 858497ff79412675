"""Which body runs: by device and FLOWRL_KERNELS, never by accident, and never at the price of an import."""

import logging
import os
import subprocess
import sys
from dataclasses import dataclass

import pytest
import torch

from flowrl_img.kernels import backend
from flowrl_img.kernels.backend import use_triton
from flowrl_img.kernels.transition import transition_moments

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
F32 = torch.float32


@pytest.fixture(autouse=True)
def _fresh(monkeypatch):
    monkeypatch.delenv("FLOWRL_KERNELS", raising=False)
    monkeypatch.delenv("TRITON_INTERPRET", raising=False)
    monkeypatch.delenv("TRITON_DEFAULT_BACKEND", raising=False)
    _forget()
    yield
    _forget()


def _forget():
    backend.driver_obstacle.cache_clear()
    backend._log_once.cache_clear()


@dataclass(frozen=True)
class FakeBackend:
    """Stands for an entry of triton.backends.backends; `active` may be an exception to raise."""

    active: bool | Exception

    @property
    def driver(self):
        return self

    def is_active(self):
        if isinstance(self.active, Exception):
            raise self.active
        return self.active

    def __call__(self):
        return self


@pytest.fixture
def backends(monkeypatch):
    """backends(nvidia=True, amd=False) pretends that the machine has these; returns the drivers set active."""

    def pretend(**active):
        pytest.importorskip("triton")
        import triton.backends
        from triton.runtime import driver

        chosen = []
        monkeypatch.setattr(triton.backends, "backends", {k: FakeBackend(v) for k, v in active.items()})
        monkeypatch.setattr(driver, "set_active", chosen.append)
        return chosen

    return pretend


def test_an_unknown_choice_is_refused_with_the_known_ones(monkeypatch):
    monkeypatch.setenv("FLOWRL_KERNELS", "cuda")
    with pytest.raises(ValueError, match="auto, torch, triton"):
        transition_moments(*[torch.zeros(1, 2)], None, 1.0, torch.zeros(1, 2), torch.zeros(1, 2), *[torch.zeros(1)] * 2)


def test_cpu_tensors_run_the_reference_and_the_reason_is_logged_once(caplog):
    with caplog.at_level(logging.INFO, logger=backend.__name__):
        assert not use_triton(CPU, F32)
        assert not use_triton(CPU, F32)
    assert len(caplog.records) == 1
    assert "on cpu" in caplog.text


def test_the_reference_can_be_demanded(monkeypatch, backends):
    backends(nvidia=True)
    monkeypatch.setenv("FLOWRL_KERNELS", "torch")
    assert not use_triton(CUDA, F32)


@pytest.mark.parametrize(
    ("active", "expected"),
    [
        ({}, False),
        ({"nvidia": False, "amd": False}, False),
        ({"nvidia": True, "amd": False}, True),
        ({"nvidia": True, "amd": True}, True),
        ({"nvidia": True, "amd": OSError("no such device")}, True),
    ],
)
def test_one_usable_driver_is_enough_and_several_are_no_fault(backends, active, expected):
    backends(**active)
    assert use_triton(CUDA, F32) is expected


def test_of_several_drivers_the_one_pytorch_was_built_for_is_chosen(backends):
    chosen = backends(amd=True, nvidia=True)
    assert use_triton(CUDA, F32)
    assert len(chosen) == 1
    assert chosen[0] is backend_of("amd" if torch.version.hip else "nvidia")


def backend_of(name):
    import triton.backends

    return triton.backends.backends[name]


def test_a_driver_that_raises_leaves_the_reference_and_says_so_once(backends, caplog):
    backends(nvidia=OSError("libcuda is broken"))
    with caplog.at_level(logging.INFO, logger=backend.__name__):
        assert not use_triton(CUDA, F32)
        assert not use_triton(CUDA, F32)
    assert len(caplog.records) == 1
    assert "libcuda is broken" in caplog.text


def test_absent_triton_leaves_the_reference_and_says_so(monkeypatch, caplog):
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    with caplog.at_level(logging.INFO, logger=backend.__name__):
        assert not use_triton(CUDA, F32)
    assert "Triton cannot be imported" in caplog.text


def test_demanding_the_interpreter_of_an_absent_triton_is_an_error(monkeypatch):
    monkeypatch.setitem(sys.modules, "triton.backends", None)
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    with pytest.raises(RuntimeError, match="Triton cannot be imported"):
        use_triton(CPU, F32)


def test_demanding_triton_without_a_driver_is_an_error(monkeypatch, backends):
    backends(nvidia=False)
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="no Triton driver is usable"):
        use_triton(CUDA, F32)
    with pytest.raises(RuntimeError, match="TRITON_INTERPRET=1"):
        use_triton(CPU, F32)


def test_the_interpreter_serves_the_cpu_only_when_triton_is_demanded(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    assert not use_triton(CPU, F32)
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    assert use_triton(CPU, F32)


def test_float64_always_runs_the_reference(monkeypatch, backends):
    backends(nvidia=True)
    assert not use_triton(CUDA, torch.float64)
    monkeypatch.setenv("FLOWRL_KERNELS", "triton")
    with pytest.raises(RuntimeError, match="float64"):
        use_triton(CUDA, torch.float64)


def test_the_op_imports_and_runs_where_triton_does_not_exist():
    program = (
        "import sys; sys.modules['triton'] = None\n"
        "import torch; from flowrl_img.kernels.transition import transition_moments as f\n"
        "one = torch.ones(1, 2)\n"
        "print(f(one, None, 1.0, one, 4 * one, torch.ones(1), torch.ones(1)).tolist())\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, env=dict(os.environ))
    assert done.returncode == 0, done.stderr
    assert done.stdout.strip() == "[[4.0, 0.0, 0.0, 0.0]]"
