"""Triton bodies: run in the interpreter everywhere, compiled for real targets without a GPU, run on one if present."""

import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

CASES = Path(__file__).with_name("triton_cases.py")


def run_cases(**environment):
    """Run triton_cases.py in a fresh process: TRITON_INTERPRET is read when a kernel is defined."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", str(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_interpreted_kernels_match_the_reference():
    run_cases(FLOWRL_KERNELS="triton", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_match_the_reference():
    run_cases(FLOWRL_KERNELS="triton", TRITON_INTERPRET="0")


TYPES = {
    **dict.fromkeys(("v_cond", "v_uncond", "to_cond", "to_uncond"), "*bf16"),
    **dict.fromkeys(("x_t", "x_s", "A", "B", "v_old", "v_ref", "partial", "moments", "grad"), "*fp32"),
    **dict.fromkeys(("D", "chunks"), "i32"),
    "guidance": "fp32",
}
BARE = dict.fromkeys(("v_uncond", "v_old", "v_ref", "to_uncond"))


@pytest.mark.parametrize("capability", [80, 90, 100])
@pytest.mark.parametrize("absent", [{}, BARE], ids=["all_inputs", "no_optional_inputs"])
def test_kernels_compile_ahead_of_time_for_every_target(capability, absent, tmp_path, monkeypatch):
    """Without contraction (ratio 1 needs PyTorch's rounding) and without atomics (sums must not depend on timing)."""
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flowrl_img.kernels import transition_triton as fused

    sizes = {"CHUNK": fused.CHUNK, "BLOCK": fused.BLOCK}
    for kernel in (fused.partial_moments_kernel, fused.sum_chunks_kernel, fused.gradient_kernel):
        constants = {k: v for k, v in (sizes | absent).items() if k in kernel.arg_names}
        signature = {k: "constexpr" if k in constants else TYPES[k] for k in kernel.arg_names}
        target = GPUTarget("cuda", capability, 32)
        source = ASTSource(kernel, signature, constexprs=constants)
        compiled = triton.compile(source, target=target, options=fused.OPTIONS)
        assert f".target sm_{capability}" in compiled.asm["ptx"]
        assert len(compiled.asm["cubin"]) > 0
        assert "fma" not in compiled.asm["ptx"]
        assert "atom" not in compiled.asm["ptx"]
