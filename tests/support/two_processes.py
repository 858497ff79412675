"""Run under torchrun or alone: small runs, one after the other; rank 0 writes their trained weights and metrics.

Arguments: pairs of a configuration file and a folder for what was found.
"""

import json
import sys
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import save_file

from flowrl_img.config import Config
from flowrl_img.evaluate import evaluate
from flowrl_img.loading import load_model, load_weights
from flowrl_img.parallel import Processes
from flowrl_img.parts import assemble
from flowrl_img.prompts import choose_evenly
from flowrl_img.trainer import Trainer


def run(config_file: str, out: str, processes: Processes) -> None:
    config = Config.model_validate(yaml.safe_load(Path(config_file).read_text()))
    parts = assemble(config)
    model = load_model(config, processes.device)
    weights = load_weights(config, model, parts.objective.needs)
    shift_followers(weights)
    trainer = Trainer(config, parts, model, weights, processes)
    metrics = [u.metrics for u in trainer.run()]
    calls = processes.sum(float(model.calls))
    samples = choose_evenly(parts.held_out, 7, None)
    held_out = evaluate(
        model, parts.held_out, samples, parts.reward, num_steps=2, guidance=1.0, batch=2, processes=processes
    )
    if processes.is_main:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: p.detach().contiguous() for n, p in weights.trainable.items()}, folder / "weights.safetensors")
        found = {"metrics": metrics, "held_out": held_out.columns["reward"].tolist(), "calls": calls}
        (folder / "found.json").write_text(json.dumps(found))
    processes.wait()


def shift_followers(weights) -> None:
    """A new adapter equals its reference; a moved one makes every term of an objective act from the first update."""
    generator = torch.Generator().manual_seed(0)
    with torch.no_grad():
        for parameter in weights.trainable.values():
            parameter.add_(0.05 * torch.randn(parameter.shape, generator=generator))
    for name in weights.decays:
        weights.remember(name)


if __name__ == "__main__":
    torch.set_num_threads(1)
    shared = Processes(Accelerator(cpu=True))
    for config_file, out in zip(sys.argv[1::2], sys.argv[2::2], strict=True):
        run(config_file, out, shared)
