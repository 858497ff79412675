"""Time, bandwidth, memory and error of the fused ops, beside eager code written as published trainers write it.

    python scripts/bench_kernels.py [--full] [--ops step,blend] [--shapes flux-1024] [--json FILE]

With a GPU: the parity tests first, then every shape at a batch that moves 1 GB a call, caches flushed between calls,
torch.compile at one shape, and small batches with and without CUDA graphs. Without: a small shape on the CPU.

ms: median of a call. GB/s: the bytes that the fused op must move (COUNTED) over that time, for every variant alike, so
that it compares times; copy: its part of the bandwidth of a plain copy. MiB: peak memory beyond the inputs, results
included. x naive: naive time over this time. error: largest deviation from float64, relative to the largest value.
Left out: the network, which takes hundreds of times longer than any of this.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from kernel_formulas import CASES, Case, Inputs  # type: ignore[import-not-found]  # beside this script
from torch import Tensor

from flowrl_img.kernels.backend import driver_obstacle

ROOT = Path(__file__).parents[1]
SHAPES = {
    "sd3-512": (16, 64, 64),
    "sd3-1024": (16, 128, 128),
    "flux-1024": (4096, 64),
    "video": (16, 21, 60, 104),
}
COMPILED_AT = "sd3-1024"  # compiling takes seconds for every shape, and changes little between them
GRAPHED_AT, SMALL_BATCHES = "flux-1024", (1, 4, 16)
TARGET_BYTES = 1e9
MIB = 2**20


@dataclass(frozen=True)
class Row:
    """One line of the table; error and MiB are None where they are not measured."""

    op: str
    shape: str
    batch: int
    pass_: str
    variant: str
    ms: float
    gb_s: float
    copy: float
    mib: float | None
    naive: float
    error: float | None

    def __str__(self) -> str:
        mib = "" if self.mib is None else f"{self.mib:.1f}"
        error = "" if self.error is None else f"{self.error:.0e}"
        return (
            f"{self.op:<10} {self.shape:<10} {self.batch:>5} {self.pass_:<9} {self.variant:<9} {self.ms:>9.3f} "
            f"{self.gb_s:>8.1f} {self.copy:>6.0%} {mib:>8} {self.naive:>7.2f} {error:>7}"
        )


HEADER = (
    f"{'op':<10} {'shape':<10} {'batch':>5} {'pass':<9} {'variant':<9} {'ms':>9} {'GB/s':>8} {'copy':>6} {'MiB':>8} "
    f"{'x naive':>7} {'error':>7}"
)


@dataclass(frozen=True)
class Meter:
    """Measures calls on one device."""

    device: torch.device
    flush: Tensor | None
    """Larger than the last-level cache, overwritten between calls. None on the CPU, whose small cases stay in cache."""

    def seconds(self, f: Callable[[], Any], budget: float = 0.2) -> float:
        """Median time of f, of 5 to 30 calls as fits the budget."""
        f()
        first = self._once(f)
        calls = min(30, max(5, int(budget / max(first, 1e-6))))
        return statistics.median(self._once(f) for _ in range(calls))

    def _once(self, f: Callable[[], Any]) -> float:
        if self.flush is None:
            began = time.perf_counter()
            f()
            return time.perf_counter() - began
        self.flush.zero_()
        start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
        start.record()
        f()
        end.record()
        torch.cuda.synchronize(self.device)
        return start.elapsed_time(end) / 1e3

    def peak(self, f: Callable[[], Any]) -> int:
        """Bytes allocated at the worst moment of f, beyond what was there."""
        if self.flush is not None:
            torch.cuda.reset_peak_memory_stats(self.device)
            before = torch.cuda.memory_allocated(self.device)
            f()
            return torch.cuda.max_memory_allocated(self.device) - before
        os.environ.setdefault("KINETO_LOG_LEVEL", "99")  # read at its first use; else it reports itself on stderr
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True) as profile:
            f()
        level = highest = 0
        for event in profile.profiler.kineto_results.events():
            if event.name() == "[memory]":
                level += event.nbytes()
                highest = max(highest, level)
        return highest

    def copy_bandwidth(self) -> float:
        """Bytes a second, read plus written, of a plain copy."""
        source = torch.empty(int(TARGET_BYTES / 8) if self.flush is not None else 2**24, device=self.device)
        target = torch.empty_like(source)
        return 2 * source.nbytes / self.seconds(lambda: target.copy_(source))


def meter_for(device: torch.device) -> Meter:
    return Meter(device, torch.empty(2**28, dtype=torch.uint8, device=device) if device.type == "cuda" else None)


def error(found: tuple[Tensor, ...], exact: tuple[Tensor, ...]) -> float:
    """Largest deviation, relative to the largest value of its own tensor."""
    pairs = zip(found, exact)
    return max(float((x.double() - y).abs().max() / y.abs().max().clamp(min=1e-300)) for x, y in pairs)


class Runner:
    """One variant of a case on given inputs: its forward and its backward pass as calls without arguments."""

    def __init__(self, case: Case, f: Callable[[Inputs], tuple[Tensor, ...]], inputs: Inputs) -> None:
        self.f = f
        self.leaves = {name: inputs[name].detach().clone().requires_grad_() for name in case.trained}
        self.inputs = inputs | self.leaves

    def forward(self) -> tuple[Tensor, ...]:
        return self.f(self.inputs)

    def backward(self) -> Callable[[], tuple[Tensor, ...]]:
        """The backward pass of a forward pass that is done once, here."""
        outputs = tuple(x for x in self.forward() if x.requires_grad)
        ones = tuple(torch.ones_like(x) for x in outputs)
        leaves = tuple(self.leaves.values())
        return lambda: torch.autograd.grad(outputs, leaves, ones, retain_graph=True)

    def both(self) -> Any:
        return self.backward()()


def use(body: str) -> None:
    os.environ["FLOWRL_KERNELS"] = body


def variants(case: Case, fused: bool, compiled: bool) -> dict[str, tuple[str, Callable[[Inputs], tuple[Tensor, ...]]]]:
    """By name: which body the ops run, and what to call."""
    found = {"naive": ("torch", case.naive), "torch": ("torch", case.fused)}
    if compiled:
        torch._functorch.config.donated_buffer = False  # the backward pass is timed many times over one graph
        found["compiled"] = ("torch", torch.compile(case.plain, dynamic=False))
    if fused:
        found["triton"] = ("triton", case.fused)
    return found


def measure(case: Case, name: str, shape: str, batch: int, meter: Meter, copy: float, compiled: bool) -> list[Row]:
    """Rows of one op at one shape: each variant, forward and backward."""
    inputs = case.inputs((batch, *SHAPES[shape]), meter.device)
    use("torch")
    oracle = Runner(case, case.fused, {k: x.double() for k, x in inputs.items()})
    exact, exact_gradients = [tuple(x.detach() for x in results) for results in (oracle.forward(), oracle.both())]
    del oracle
    elements = batch * torch.Size(SHAPES[shape]).numel()
    naive: dict[str, float] = {}
    rows = []
    for variant, (body, f) in variants(case, meter.flush is not None, compiled).items():
        use(body)
        runner = Runner(case, f, inputs)
        for pass_, call, truth, counted in (
            ("forward", runner.forward, exact, case.counted[0]),
            ("backward", runner.backward(), exact_gradients, case.counted[1]),
        ):
            seconds = meter.seconds(call)
            naive.setdefault(pass_, seconds)
            rate = counted * elements / seconds
            peak, off = meter.peak(call) / MIB, error(tuple(x.detach() for x in call()), truth)
            ratio = naive[pass_] / seconds
            rows.append(
                Row(name, shape, batch, pass_, variant, 1e3 * seconds, rate / 1e9, rate / copy, peak, ratio, off)
            )
            print(rows[-1], flush=True)
    return rows


def graphed(f: Callable[[], Any]) -> Callable[[], Any]:
    """f recorded once as a CUDA graph; a call replays it."""
    side = torch.cuda.Stream()
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        for _ in range(3):
            f()
    torch.cuda.current_stream().wait_stream(side)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        f()
    return graph.replay


def measure_small(case: Case, name: str, meter: Meter, copy: float) -> list[Row]:
    """Forward and backward together at small batches, where launches cost more than traffic."""
    rows = []
    for batch in SMALL_BATCHES:
        inputs = case.inputs((batch, *SHAPES[GRAPHED_AT]), meter.device)
        use("triton")
        naive, fused = Runner(case, case.naive, inputs).both, Runner(case, case.fused, inputs).both
        base = None
        for variant, call in (("naive", naive), ("triton", fused), ("graph", graphed(fused))):
            seconds = meter.seconds(call)
            base = base or seconds
            rate = sum(case.counted) * batch * torch.Size(SHAPES[GRAPHED_AT]).numel() / seconds
            figures = (1e3 * seconds, rate / 1e9, rate / copy, None, base / seconds, None)
            rows.append(Row(name, GRAPHED_AT, batch, "both", variant, *figures))
            print(rows[-1], flush=True)
    return rows


def parity() -> None:
    """Triton against the reference on this machine's GPU, before any of it is timed."""
    cases = str(ROOT / "tests" / "kernels" / "triton_cases.py")
    environment = os.environ | {"FLOWRL_KERNELS": "triton", "TRITON_INTERPRET": "0"}
    command = [sys.executable, "-m", "pytest", "-q", "--durations=0", cases]
    subprocess.run(command, check=True, cwd=ROOT, env=environment)


def parse(arguments: list[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--ops", default=",".join(CASES), help="comma-separated, of: " + ", ".join(CASES))
    parser.add_argument("--shapes", help="comma-separated, of: " + ", ".join(SHAPES))
    parser.add_argument("--full", action="store_true", help="every shape on the CPU too")
    parser.add_argument("--batch", type=int, help="rows, instead of 1 GB a call (GPU) or 1 row (CPU)")
    parser.add_argument("--compile", action=argparse.BooleanOptionalAction, help="default: with a GPU alone")
    parser.add_argument("--parity", action=argparse.BooleanOptionalAction, default=True, help="tests first, with a GPU")
    parser.add_argument("--json", type=Path, help="also write the figures here")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> None:
    options = parse(arguments)
    gpu = torch.cuda.is_available() and driver_obstacle() is None
    device = torch.device("cuda" if gpu else "cpu")
    if gpu and options.parity:
        parity()
    meter = meter_for(device)
    copy = meter.copy_bandwidth()
    machine = torch.cuda.get_device_name(device) if gpu else f"CPU, {torch.get_num_threads()} threads"
    print(f"{machine}, torch {torch.__version__}, copy {copy / 1e9:.1f} GB/s\n{HEADER}", flush=True)
    default = list(SHAPES) if gpu or options.full else ["sd3-512"]
    rows: list[Row] = []
    for shape in options.shapes.split(",") if options.shapes else default:
        compiled = options.compile if options.compile is not None else gpu and shape == COMPILED_AT
        for name in options.ops.split(","):
            case = CASES[name]
            bytes_a_row = case.counted[0] * torch.Size(SHAPES[shape]).numel()
            batch = options.batch or (-int(-TARGET_BYTES // bytes_a_row) if gpu else 1)
            rows += measure(case, name, shape, batch, meter, copy, compiled)
            if gpu and shape == GRAPHED_AT:
                rows += measure_small(case, name, meter, copy)
    if options.json:
        facts = {"machine": machine, "torch": torch.__version__, "copy_gb_s": copy / 1e9}
        options.json.write_text(json.dumps(facts | {"rows": [asdict(row) for row in rows]}, indent=1))


if __name__ == "__main__":
    main()
