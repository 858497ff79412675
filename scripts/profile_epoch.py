"""Where the time of one rollout and its updates goes: `python scripts/profile_epoch.py [RECIPE] [key=value ...]`.

Network forward and backward, text encoder, VAE and rewards are timed from outside; what is left is this package's own.
Prints one JSON object. On a GPU every timed call waits for the device, so the sum is exact and the run a little slower.
"""

from __future__ import annotations

import json
import sys
import time
from collections import defaultdict
from collections.abc import Callable
from typing import Any

import torch

CLOCK: dict[str, float] = defaultdict(float)
INSIDE: list[str] = []


def timed(phase: str, function: Callable[..., Any]) -> Callable[..., Any]:
    """`function` with its time added to `phase`, unless another timed call is around it."""

    def wrapped(*args: Any, **kwargs: Any) -> Any:
        if INSIDE:
            return function(*args, **kwargs)
        INSIDE.append(phase)
        began = now()
        try:
            return function(*args, **kwargs)
        finally:
            CLOCK[phase] += now() - began
            INSIDE.pop()

    return wrapped


def now() -> float:
    """Seconds, after everything that was asked of the GPU."""
    if torch.cuda.is_available():
        torch.cuda.synchronize()
    return time.perf_counter()


def main(words: list[str]) -> None:
    from flowrl_img import collect, recipes
    from flowrl_img.loading import load_model, load_weights
    from flowrl_img.parallel import Processes
    from flowrl_img.parts import assemble
    from flowrl_img.trainer import Trainer

    recipe = words.pop(0) if words and "=" not in words[0] else "pico"
    config = recipes.load(recipe, [*words, "run.rollouts=2", "run.minutes=null"])
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    parts = assemble(config)
    model = load_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    trainer = Trainer(config, parts, model, load_weights(config, model, parts.objective.needs), Processes())
    updates = trainer.run()
    for _ in range(config.run.updates_per_rollout):  # the first rollout warms up
        next(updates)
    for phase, name in (("network", "velocity"), ("text encoder", "encode"), ("autoencoder", "decode")):
        setattr(model, name, timed(phase, getattr(model, name)))
    collect.ask = timed("rewards", collect.ask)  # type: ignore[attr-defined]
    torch.Tensor.backward = timed("network", torch.Tensor.backward)  # type: ignore[method-assign]
    began = now()
    for _ in updates:
        pass
    total = now() - began
    shares = {phase: round(seconds / total, 4) for phase, seconds in CLOCK.items()}
    found = {"recipe": recipe, "seconds": round(total, 2), **shares, "own": round(1 - sum(CLOCK.values()) / total, 4)}
    print(json.dumps(found))


if __name__ == "__main__":
    main(sys.argv[1:])
