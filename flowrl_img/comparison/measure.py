"""What is measured of a finished run besides its own files: base against tuned on paired pictures, diversity, KL."""

from __future__ import annotations

import json
from collections.abc import MutableMapping, Sequence
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flowrl_img import recipes, seeds
from flowrl_img.blend import Blend, Side
from flowrl_img.checkpoint import latest, load_adapter_tensors
from flowrl_img.config import Config
from flowrl_img.evaluate import EVAL_SEED, Evaluation, evaluate, gain, held_out_pictures, level
from flowrl_img.guidance import guided
from flowrl_img.kernels.logprob import kl
from flowrl_img.kernels.step import ode_step
from flowrl_img.loading import load_model, load_weights
from flowrl_img.needs import Needs
from flowrl_img.parallel import Processes
from flowrl_img.parts import RunParts, assemble
from flowrl_img.prompts import choose_evenly
from flowrl_img.rollout import root_keys
from flowrl_img.run_folder import rows_of
from flowrl_img.samplers.steps.flow_sde import FlowSDE
from flowrl_img.samplers.steps.ode import ODE
from flowrl_img.types import PromptSet, Sample
from flowrl_img.weights import WeightSets

__all__ = ["base_key", "diversity", "kl_to_base", "last_evaluation", "measure_run", "tuned_and_base"]

KL_STEPS, KL_NOISE = 10, 0.7


Base = tuple[Evaluation, float]
"""Evaluation and diversity of the untuned weights."""


def measure_run(
    run: Path, *, pictures: int, judge: Any, prompts: int = 24, per_prompt: int = 8, kl_pictures: int = 48,
    bases: MutableMapping[str, Base] | None = None,
) -> dict[str, Any]:  # fmt: skip
    """Of the latest checkpoint of `run`: {before, after, gain} by column, {diversity: {before, after}}, kl.

    Values of columns are [mean, low, high] over tasks. judge: embeds pictures, float [B, 3, H, W] -> unit rows.
    bases: what is known of untuned weights, by what they depend on; this run's is looked up there, or put there.
    """
    config = recipes.load(str(run / "config.yaml"))
    parts, model, weights = tuned_and_base(config, run)
    few = choose_evenly(parts.held_out, prompts, config.prompts.balance)
    groups = [[Sample(s.prompt, s.group, image) for image in range(per_prompt)] for s in few]
    samples = choose_evenly(parts.held_out, pictures, config.prompts.balance)

    def of(weight_set: str) -> Base:
        with weights.use(weight_set):
            return _evaluated(config, parts, model, samples), diversity(parts, model, groups, judge)

    bases, base = {} if bases is None else bases, f"{base_key(config)} {pictures} {prompts} {per_prompt}"
    if base not in bases:
        bases[base] = of("reference")
    (before, spread_before), (after, spread_after) = bases[base], of("current")
    columns = [c for c in before.columns if c in after.columns]
    near = choose_evenly(parts.held_out, kl_pictures, config.prompts.balance)
    return {
        "before": {c: _triple(level(before, c)) for c in columns},
        "after": {c: _triple(level(after, c)) for c in columns},
        "gain": {c: _triple(gain(before, after, c)) for c in columns},
        "diversity": {"before": spread_before, "after": spread_after},
        "kl": kl_to_base(model, weights, parts.held_out, near, batch=config.evaluation.batch),
        "pictures": len(samples),
    }


def base_key(config: Config) -> str:
    """What a held-out evaluation of the untuned weights depends on; runs that agree in it have the same base."""
    sections = config.model_dump(mode="json", include={"model", "prompts", "rewards", "report_rewards", "evaluation"})
    for section, field in (("prompts", "train"), ("prompts", "shares"), ("evaluation", "every"),
                           ("evaluation", "pictures"), ("evaluation", "sheet")):  # fmt: skip
        sections[section].pop(field, None)
    return json.dumps(sections, sort_keys=True)


def last_evaluation(run: Path) -> dict[str, Any]:
    """{before, after} of a run's own first and last held-out evaluation, [mean] by column: enough to choose a trial."""
    rows = rows_of(run, "evaluations.jsonl")
    return {
        label: {column: [value] for column, value in row["means"].items()}
        for label, row in (("before", rows[0]), ("after", rows[-1]))
    }


def tuned_and_base(config: Config, run: Path) -> tuple[RunParts, Any, WeightSets]:
    """Parts and model of a run with its tuned weights as the current ones and its base as the reference."""
    parts = assemble(config)
    model = load_model(config, torch.device("cuda" if torch.cuda.is_available() else "cpu"))
    weights = load_weights(config, model, Needs())
    load_adapter_tensors(latest(run), weights, "ema" if "ema" in weights.sets else "current")
    model.network.eval()
    return parts, model, weights


def _evaluated(config: Config, parts: RunParts, model: Any, samples: Sequence[Sample]) -> Evaluation:
    held_out = config.evaluation
    return evaluate(
        model, parts.held_out, samples, parts.reward, num_steps=held_out.steps, guidance=held_out.guidance,
        batch=held_out.batch, solver=parts.evaluation_solver, processes=Processes(), report=parts.report,
    )  # fmt: skip


def _triple(interval: Any) -> list[float]:
    return [round(float(x), 6) for x in (interval.value, interval.low, interval.high)]


def diversity(parts: RunParts, model: Any, groups: Sequence[Sequence[Sample]], judge: Any) -> float:
    """Mean over groups of the mean distance 1 - cos of two pictures of a prompt, in the judge's embedding."""
    held_out = parts.config.evaluation
    distances = []
    for group in groups:
        pictures = held_out_pictures(
            Blend(Side(model)), parts.held_out, group, num_steps=held_out.steps, guidance=held_out.guidance,
            solver=parts.evaluation_solver,
        )  # fmt: skip
        rows: Tensor = judge(pictures)
        count = len(rows)
        distances.append(1 - (float((rows @ rows.T).sum()) - count) / (count * (count - 1)))
    return sum(distances) / len(distances)


@torch.no_grad()
def kl_to_base(model: Any, weights: WeightSets, prompts: PromptSet, samples: Sequence[Sample], *, batch: int) -> float:
    """KL from base to tuned along the tuned model's own path, in nats per latent element, summed over its steps.

    Each step is that of Flow-SDE (10 steps, noise level 0.7, the last left out) at states of the tuned model's ODE.
    """
    sigmas = model.sigmas(KL_STEPS)
    table, calm = FlowSDE(KL_NOISE).coefficients(sigmas), ODE().coefficients(sigmas)
    total = 0.0
    for start in range(0, len(samples), batch):
        chunk = samples[start : start + batch]
        texts = [prompts.texts[s.prompt] for s in chunk]
        x = seeds.normal(root_keys(chunk, EVAL_SEED), model.latent_shape, model.device)
        for i in range(KL_STEPS - 1):
            index = torch.full((len(chunk),), i)
            v = guided(model, x, sigmas[index], texts, 1.0)
            with weights.use("reference"):
                base = guided(model, x, sigmas[index], texts, 1.0)
            row = table.rows(index)
            total += float(kl((v - base).flatten(1).square().mean(1), row.B, row.std).sum())
            x = ode_step(x, v, calm.rows(index).A, calm.rows(index).B)
    return total / len(samples)
