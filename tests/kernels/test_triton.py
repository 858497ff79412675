"""Triton bodies: run in the interpreter everywhere, compiled for real targets without a GPU, run on one if present."""

import importlib
import os
import re
import subprocess
import sys
from pathlib import Path

import pytest
import torch

pytest.importorskip("triton")

HERE = Path(__file__).parent
CASES = str(HERE / "triton_cases.py")


def run_cases(*options, **environment):
    """Run the cases in a fresh process: TRITON_INTERPRET is read when a kernel is defined."""
    command = [sys.executable, "-m", "pytest", "-q", "-p", "no:cacheprovider", "--import-mode=importlib", *options]
    done = subprocess.run([*command, CASES], capture_output=True, text=True, env=os.environ | environment)
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]


def test_interpreted_kernels_match_the_reference():
    run_cases(FLOWRL_KERNELS="triton", TRITON_INTERPRET="1")


@pytest.mark.full
def test_interpreted_kernels_match_the_reference_for_every_shape_and_dtype():
    run_cases("-m", "full", FLOWRL_KERNELS="triton", TRITON_INTERPRET="1")


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a GPU")
def test_compiled_kernels_match_the_reference():
    run_cases("-m", "full or not full", FLOWRL_KERNELS="triton", TRITON_INTERPRET="0")


VELOCITIES = ("v_cond", "v_uncond", "base_cond", "base_uncond", "v", "v_old", "v_ref", "v_ema", "y")
STATES = ("x_t", "x_s", "x0", "end", "x", "z")
OUTPUTS = ("to_cond", "to_uncond", "to_v", "to_first", "to_second", "out")
PER_ROW = ("A", "B", "a", "b", "c", "slope", "grad", "first", "second", "partial", "means")
TYPES = {
    **dict.fromkeys((*STATES, *PER_ROW), "*fp32"),
    **dict.fromkeys(("D", "chunks"), "i32"),
    **dict.fromkeys(("guidance", "weight", "beta"), "fp32"),
}
KERNELS = {
    "transition_triton.partial_moments_kernel": ("v_uncond", "v_old", "v_ref"),
    "transition_triton.gradient_kernel": ("v_uncond", "v_old", "v_ref", "to_uncond"),
    "matching_moments_triton.partial_matching_kernel": ("slope", "v_old", "v_ref", "v_ema", "beta"),
    "matching_moments_triton.matching_gradient_kernel": ("slope", "v_old", "v_ref", "v_ema", "beta"),
    "guidance_triton.guidance_kernel": ("v_uncond", "base_cond", "base_uncond", "weight"),
    "step_triton.step_kernel": ("z", "c", "partial"),
    "scale_triton.scale_kernel": ("second", "to_second"),
    "launch_triton.sum_chunks_kernel": (),
}
"""By module and name: the arguments that may be absent."""


def compiled(name, capability, absent, low="bf16"):
    """The kernel compiled for a target without a GPU, told what a launch with whole blocks tells: 16 divides it all.

    low: dtype of velocities and results.
    """
    import triton
    from triton.backends.compiler import GPUTarget
    from triton.compiler import ASTSource

    from flowrl_img.kernels import launch_triton as launch

    module, _, attribute = name.partition(".")
    kernel = getattr(importlib.import_module(f"flowrl_img.kernels.{module}"), attribute)
    constants = {"CHUNK": launch.CHUNK, "BLOCK": launch.BLOCK, **dict.fromkeys(absent)}
    constants = {k: v for k, v in constants.items() if k in kernel.arg_names}
    types = TYPES | dict.fromkeys((*VELOCITIES, *OUTPUTS), f"*{low}")
    signature = {k: "constexpr" if k in constants else types[k] for k in kernel.arg_names}
    whole = [i for i, k in enumerate(kernel.arg_names) if signature[k][0] == "*" or k == "D"]
    source = ASTSource(kernel, signature, constants, {(i,): [["tt.divisibility", 16]] for i in whole})
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=launch.OPTIONS), signature


@pytest.fixture
def compiler(tmp_path, monkeypatch):
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setenv("TRITON_INTERPRET", "0")


def spilled(ptx, capability, folder):
    """Bytes of registers spilled to memory, as the wheel's own ptxas counts them."""
    from triton import knobs

    tool = knobs.nvidia.ptxas_blackwell if capability >= 100 else knobs.nvidia.ptxas
    (folder / "kernel.ptx").write_text(ptx)
    target = re.search(r"\.target (sm_\w+)", ptx)[1]
    command = [tool.path, "-v", f"--gpu-name={target}", str(folder / "kernel.ptx"), "-o", str(folder / "kernel.cubin")]
    report = subprocess.run(command, capture_output=True, text=True, check=True).stderr
    counts = re.findall(r"(\d+) bytes spill", report)
    assert counts, report
    return sum(map(int, counts))


@pytest.mark.parametrize(
    ("capability", "low"), [(80, "bf16"), (90, "bf16"), (100, "bf16"), (80, "fp16"), (90, "fp32"), (100, "fp32")]
)
@pytest.mark.parametrize("name", KERNELS)
def test_kernels_compile_ahead_of_time_for_every_target(name, capability, low, compiler, tmp_path):
    """Without contraction (ratio 1 needs PyTorch's rounding), atomics (sums must not depend on timing) or spills.

    Each latent is read once, in loads of 16 bytes, and nothing is read but latents and scalars.
    """
    result, signature = compiled(name, capability, (), low)
    ptx = result.asm["ptx"]
    assert f".target sm_{capability}" in ptx
    assert len(result.asm["cubin"]) > 0
    assert not re.search(r"\bfma\.|\batom\.|\bred\.", ptx)
    assert spilled(ptx, capability, tmp_path) == 0
    latents = [k for k in (*VELOCITIES, *STATES) if k in signature]
    if name.startswith("launch"):
        return  # chunks are few and their number is not a multiple of anything
    blocks = re.findall(r"= tt.load .* : tensor<", result.asm["ttir"])
    assert len(blocks) == len(latents)
    stores = re.findall(r"tt.store .* : tensor<", result.asm["ttir"])
    assert len(stores) == sum(k in signature for k in OUTPUTS)
    loads = re.findall(r"ld\.global[.\w:]*?((?:\.v\d)?)\.b(\d+)", ptx)
    wide = [int(vector[2:] or 1) * int(bits) for vector, bits in loads if vector]
    assert set(wide) == {128}
    # Eight elements a thread: one load of 16 bytes at 16 bits each, two at 32. All others are scalars of a row.
    assert len(wide) == sum(2 if k in STATES or low == "fp32" else 1 for k in latents)
    assert len(loads) - len(wide) <= sum(11 if k == "grad" else k in PER_ROW for k in signature)


@pytest.mark.parametrize("name", [name for name, absent in KERNELS.items() if absent])
def test_kernels_compile_without_their_optional_inputs(name, compiler):
    result, signature = compiled(name, 90, KERNELS[name])
    assert len(result.asm["cubin"]) > 0
    blocks = re.findall(r"= tt.load .* : tensor<", result.asm["ttir"])
    assert len(blocks) == sum(signature.get(k, "constexpr") != "constexpr" for k in (*VELOCITIES, *STATES))
