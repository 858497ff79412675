"""Proof that an export does elsewhere what the run's weights do here.

What to expect comes from the checkpoint's own tensors on this package's sampler: the network's output on one fixed
input and one picture, in float32. A clean process then loads each exported file with stock diffusers (`stock.py`) and
the two are compared. A file that loads without effect is the commonest failure of all, so tensors are counted too.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.blend import Blend, Side
from flowrl_img.rollout import generate
from flowrl_img.weights import WeightSets

__all__ = ["Check", "Expected", "Job", "VerificationError", "expect", "output", "verify"]

SEED, SIGMA = 7, 0.6
MOST_STEPS = 8
ROUNDING, SHARE = 5e-6, 0.01  # of the largest output; of the largest change that tuning made
CHILD = Path(__file__).with_name("stock.py")


class VerificationError(RuntimeError):
    """An exported file does not do what the run's weights do."""


@dataclass(frozen=True)
class Expected:
    """inputs: keyword tensors of one call of the network; base, tuned: its outputs; picture: uint8 [H, W, 3]."""

    inputs: dict[str, Tensor]
    base: Tensor
    tuned: Tensor
    picture: Tensor
    call: dict[str, Any]
    """arguments of the stock pipeline for that picture"""

    @property
    def effect(self) -> float:
        """The largest change of the output that tuning made."""
        return float((self.tuned - self.base).abs().max())

    @property
    def limit(self) -> float:
        """The largest difference that counts as rounding."""
        return max(ROUNDING * float(self.tuned.abs().max()), min(1e-5, SHARE * self.effect))


@dataclass(frozen=True)
class Job:
    """One exported file. kind: "lora", "comfyui_sd3" or "network"; path: the file, or the folder of transformer/."""

    name: str
    kind: str
    path: Path
    tuned: Tensor | None = None
    """what its network should give, where that is not the tuned output itself: weights cast to a lower precision"""


@dataclass(frozen=True)
class Check:
    """What the clean process found for one job; `problem` is None where it passed."""

    name: str
    tensors: int
    difference: float
    levels: int
    problem: str | None

    def __str__(self) -> str:
        if self.problem:
            return f"{self.name}: {self.problem}"
        return (
            f"{self.name}: {self.tensors} tensors loaded by stock diffusers, largest output difference "
            f"{self.difference:.1e}, picture within {self.levels} grey level{'' if self.levels == 1 else 's'}"
        )


@torch.no_grad()
def expect(model: Any, weights: WeightSets, prompt: str, num_steps: int, guidance: float) -> Expected:
    """From a model in float32 whose current weights are the tuned ones."""
    inputs: dict[str, Tensor] = {}

    def keep(module: Any, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
        inputs.update({k: v.detach().cpu().contiguous() for k, v in kwargs.items() if isinstance(v, Tensor)})

    x_t = seeds.normal([SEED], model.latent_shape, model.device)
    sigma = torch.tensor([SIGMA], dtype=torch.float64, device=x_t.device)
    hook = model.network.register_forward_pre_hook(keep, with_kwargs=True)
    try:
        model.velocity(x_t, sigma, model.encode([prompt]))
    finally:
        hook.remove()
    with weights.use("reference"):
        base = output(model.network, inputs)
    steps = min(num_steps, MOST_STEPS)
    image = generate(Blend(Side(model)), [prompt], [SEED], num_steps=steps, guidance=guidance, batch=1)[0]
    picture = (image * 255).round().byte().permute(1, 2, 0)
    call = {"prompt": prompt, **model.stock_call(steps, guidance)}
    return Expected(inputs, base, output(model.network, inputs), picture, call)


@torch.no_grad()
def output(network: Any, inputs: dict[str, Tensor]) -> Tensor:
    """What a network gives for the fixed input, float32 on the CPU."""
    moved = {name: tensor.to(network.device) for name, tensor in inputs.items()}
    v: Tensor = network(**moved, return_dict=False)[0]
    return v.float().cpu()


def verify(base: str, jobs: Sequence[Job], expected: Expected, device: torch.device) -> list[Check]:
    """One check for each job, all made in one clean process. base: the folder or hub id of the base pipeline.

    VerificationError where the tuning is too small to be told from rounding, or where the process itself fails.
    """
    from safetensors.torch import load_file, save_file

    if expected.effect < 10 * ROUNDING * float(expected.tuned.abs().max()):
        raise VerificationError(
            f"the tuning changes the output by {expected.effect:.1e} only, too little to tell from rounding"
        )
    with tempfile.TemporaryDirectory() as room:
        folder = Path(room)
        save_file(expected.inputs, folder / "inputs.safetensors")
        task = {
            "base": str(Path(base).resolve()) if Path(base).exists() else base, "device": device.type, "seed": SEED,
            "inputs": str(folder / "inputs.safetensors"), "call": expected.call, "results": room,
            "jobs": [{"name": job.name, "kind": job.kind, "path": str(job.path.resolve())} for job in jobs],
        }  # fmt: skip
        (folder / "task.json").write_text(json.dumps(task))
        _run_child(folder)
        rows = json.loads((folder / "results.json").read_text())
        return [
            _judged(
                job,
                rows[job.name],
                expected,
                {} if "error" in rows[job.name] else load_file(folder / f"{job.name}.safetensors"),
            )
            for job in jobs
        ]


def _run_child(folder: Path) -> None:
    """-P and the temporary folder keep this checkout and the current folder off the child's path."""
    environment = {k: v for k, v in os.environ.items() if k not in ("RANK", "WORLD_SIZE", "LOCAL_RANK")}
    command = [sys.executable, "-P", str(CHILD), str(folder / "task.json")]
    done = subprocess.run(command, cwd=folder, env=environment, capture_output=True, text=True)
    if done.returncode:
        raise VerificationError(f"the process that loads the export failed: {done.stderr.strip()[-2000:]}")


def _judged(job: Job, row: dict[str, Any], expected: Expected, found: dict[str, Tensor]) -> Check:
    if "error" in row:
        return Check(job.name, 0, float("nan"), -1, f"stock diffusers cannot load it: {row['error']}")
    own = expected if job.tuned is None else replace(expected, tuned=job.tuned)
    difference = float((found["v"] - own.tuned).abs().max())
    levels = int((found["picture"].int() - own.picture.int()).abs().max())
    check = Check(job.name, row["matched"], difference, levels, None)
    return replace(check, problem=_problem(job, row, own, float((found["v"] - own.base).abs().max()), check))


def _problem(job: Job, row: dict[str, Any], expected: Expected, change: float, check: Check) -> str | None:
    if row["matched"] != row["written"]:
        return f"{row['matched']} of {row['written']} tensors were recognised; names or prefix are wrong"
    if change == 0:
        return "it loads but changes nothing"
    if check.difference > expected.limit:
        return (
            f"its output differs by {check.difference:.1e} (limit {expected.limit:.1e}; tuning changed "
            f"{expected.effect:.1e}): scale, rank or names are wrong"
        )
    if job.tuned is None and check.levels > 1:  # weights cast to another precision draw another picture
        return f"its picture differs by {check.levels} grey levels"
    return None
