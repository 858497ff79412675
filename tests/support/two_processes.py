"""Run under torchrun: three updates of a small run, then rank 0 writes the trained weights and metrics."""

import json
import sys
from pathlib import Path

import torch
import yaml
from accelerate import Accelerator
from safetensors.torch import save_file

from flowrl_img.config import Config
from flowrl_img.evaluate import evaluate
from flowrl_img.parallel import Processes
from flowrl_img.parts import assemble
from flowrl_img.prompts import choose_evenly
from flowrl_img.run import load_model, load_weights
from flowrl_img.trainer import Trainer


def main(config_file: str, out: str) -> None:
    torch.set_num_threads(1)
    config = Config.model_validate(yaml.safe_load(Path(config_file).read_text()))
    parts = assemble(config)
    processes = Processes(Accelerator(cpu=True))
    model = load_model(config, processes.device)
    weights = load_weights(config, model, parts.objective.needs)
    trainer = Trainer(config, parts, model, weights, processes)
    metrics = [u.metrics for u in trainer.run()]
    samples = choose_evenly(parts.held_out, 7, None)
    held_out = evaluate(
        model, parts.held_out, samples, parts.reward, num_steps=2, guidance=1.0, batch=2, processes=processes
    )
    if processes.is_main:
        folder = Path(out)
        folder.mkdir(parents=True, exist_ok=True)
        save_file({n: p.detach().contiguous() for n, p in weights.trainable.items()}, folder / "weights.safetensors")
        found = {"metrics": metrics, "held_out": held_out.columns["reward"].tolist()}
        (folder / "found.json").write_text(json.dumps(found))
    processes.wait()


if __name__ == "__main__":
    main(*sys.argv[1:])
