"""The one loop: rollout, score, advantage, updates. It yields what happened; the caller logs, saves and shows.

Left out: everything an algorithm decides. An objective is a pure function of moments; this file gives it points and
applies its gradient. Gradients of an update are sums over its points divided by their number over all processes, so
micro-batches, accumulation and the number of processes change nothing but rounding.
"""

from __future__ import annotations

import math
import time
from collections import defaultdict
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor

from flowrl_img.advantages import History
from flowrl_img.collect import Started, collect
from flowrl_img.config import Config
from flowrl_img.half import HalfBackward
from flowrl_img.matching import Matching
from flowrl_img.micro_batch import MicroBatch, Parts, Points, Predicted
from flowrl_img.mismatch import FirstUpdate, NonFiniteError
from flowrl_img.moments import unit_means
from flowrl_img.parallel import Processes
from flowrl_img.parts import RunParts
from flowrl_img.rewards.alarm import Alarm
from flowrl_img.transitions import Transitions
from flowrl_img.types import PromptSet, Scored
from flowrl_img.weights import WeightSets

__all__ = ["Trainer", "Update"]


@dataclass(frozen=True)
class Update:
    """One optimizer update. metrics: numbers over all processes. seconds: by phase, of this process."""

    update: int
    rollout: int
    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass
class Trainer:
    """Ties model, weights, rewards and objective together. `run()` is a generator of `Update`s."""

    config: Config
    parts: RunParts
    model: Any
    weights: WeightSets
    processes: Processes
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    warn: Callable[[str], None] = lambda text: None
    alarm: Alarm = field(default_factory=Alarm)
    update: int = 0
    rollout: int = 0
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self.parts.check_grid(self.model.sigmas(self.config.rollout.steps))
        self.scorers = ThreadPoolExecutor(1, "scoring") if self.config.run.overlap else None
        self.ahead: dict[int, Started] = {}
        optimizer, advantage = self.config.optimizer, self.config.advantage
        self.parameters = list(self.weights.trainable.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )
        half = self.model.dtype == torch.float16
        elements = math.prod(self.model.latent_shape)
        self.half = HalfBackward(self.weights.network, self.parameters, elements) if half else None
        self.histories: dict[str, History] = {}
        if advantage.baseline == "history":
            counted = [label for label, weight in self.parts.reward.weights.items() if weight]
            names = [""] if self.config.aggregate in ("sum", "geometric") else counted
            self.histories = {name: History(advantage.history.size, advantage.history.min_count) for name in names}

    @property
    def objective(self) -> Any:
        return self.parts.objective

    @property
    def prompts(self) -> PromptSet:
        return self.parts.train

    @property
    def policy(self) -> str:
        """The weight set that draws the next rollout."""
        config = self.config.rollout
        return config.policy if self.update >= config.policy_from else "current"

    def run(self) -> Iterator[Update]:
        """Until `run.rollouts` or `run.minutes`, whichever comes first; a started rollout is trained to its end."""
        run, began = self.config.run, time.monotonic()
        while run.rollouts is None or self.rollout < run.rollouts:
            if run.minutes is not None and self.processes.any(time.monotonic() - began >= 60 * run.minutes):
                return
            yield from self.train_on(self.collect(self.rollout))

    def collect(self, rollout: int) -> Scored:
        """Draw, score and rank this process's share of one rollout.

        With `run.overlap` the next rollout is drawn, by the weights of now, while the scores of this one are computed.
        """
        return collect(self, rollout)

    def points(self, scored: Scored) -> Points:
        """The points of a rollout, dealt to its updates by a permutation of ids that all processes agree on."""
        run, unit = self.config.run, self.objective.needs.unit
        parts = Parts.deal(scored.everything, unit, run.updates_per_rollout, run.seed, "updates", self.rollout)
        return (Matching if self.objective.needs.matching else Transitions)(self, scored, parts)

    def train_on(self, scored: Scored) -> Iterator[Update]:
        """`run.updates_per_rollout` updates, each on its own share of the samples and all their trained steps."""
        points, rollout, updates = self.points(scored), self.rollout, self.config.run.updates_per_rollout
        if self.low_precision and isinstance(points, Transitions):
            with self.timed("training"):
                points.rescore(updates)
        for number in range(updates):
            with self.timed("training"):
                self._zero_grad()
                metrics = self.accumulate(points, number)
                metrics |= self._step()
                if number == updates - 1:
                    self.weights.after_rollout(self.update)
                    self.rollout += 1
            metrics = {**scored.metrics, **metrics, "update_of_rollout": float(number)}
            yield Update(self.update, rollout, metrics, dict(self.clock))

    @property
    def low_precision(self) -> bool:
        """Whether outputs depend on batch shapes by more than rounding of float32."""
        return self.model.dtype != torch.float32

    def accumulate(self, points: Points, number: int) -> dict[str, float]:
        """The gradient of update `number` of the rollout, of this process; returns means over all processes."""
        total = max(self.processes.sum(float(points.count(points.rows(number)))), 1.0)
        first = FirstUpdate(self.objective.needs.smallest_clip, self.low_precision) if self.update == 0 else None
        # Sums stay on the device: every number that is read makes the host wait for it.
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64, device=self.model.device))
        sums["loss"].zero_()  # a sum of nothing where no picture of the update is trained on
        largest = torch.zeros((), dtype=torch.float64, device=self.model.device)
        batches = points.micro_batches(number)
        failure = ""
        for k, batch in enumerate(batches):
            predicted = self._predicted(points, batch)
            if predicted is None:
                continue
            if not predicted.moments.finite():
                # Not raised here: the other processes would wait for this one's share of the sums below.
                failure = failure or f"in {self.model.dtype} at {points.place(batch)}"
                continue
            loss, metrics = self.objective(predicted.moments, predicted.advantage.to(predicted.moments.e2.device))
            if first is not None:
                points.check(batch, predicted, metrics, first)
            self._backward(loss.sum(), total)
            sums["loss"] += loss.detach().double().sum()
            for name, value in metrics.items():
                sums[name] += value.double().sum()
            if "log_ratio" in metrics:
                largest = torch.maximum(largest, metrics["log_ratio"].double().expm1().abs().max())
            self.progress("training", k + 1, len(batches))
        self._stop_at(failure)
        names = sorted(self.processes.agree(list(sums)))
        means = {name: self.processes.sum(sums[name].item()) / total for name in names}
        if "log_ratio" in names:
            means["max_ratio_error"] = self.processes.max(largest.item())
        return means | (first.verdict(self.processes) if first is not None else {})

    def _backward(self, loss: Tensor, total: float) -> None:
        """Add the gradient of loss / total to that of the weights."""
        if self.half is None:
            (loss / total).backward()
        else:
            self.half(loss, total)

    def _predicted(self, points: Points, batch: MicroBatch) -> Predicted | None:
        """The moments of a micro-batch, with the means of its units; None where this process has no row of it."""
        predicted = points.predict(batch) if len(batch.rows) else None
        if not batch.units:
            return predicted
        score, unit = torch.zeros(0, device=self.processes.device), torch.zeros(0, dtype=torch.int64)
        if predicted is not None:
            assert predicted.unit is not None
            score, unit = self.objective.unit_score(predicted.moments, predicted.advantage), predicted.unit
        shared = self.processes.sum_tensor if batch.groups is not None else lambda x: x
        means = unit_means(score, unit, batch.units, shared)
        if predicted is None:
            return None
        return Predicted(predicted.moments.with_unit_mean(means), predicted.advantage, unit)

    def _stop_at(self, failure: str) -> None:
        """Raise on every process when one of them had a non-finite velocity."""
        failures = [place for place in self.processes.gather(failure) if place]
        if failures:
            raise NonFiniteError(
                f"the network gave a non-finite velocity {failures[0]}: no weight was changed. "
                "Use model.dtype=bf16 or fp32, or a lower optimizer.lr"
            )

    def _zero_grad(self) -> None:
        for parameter in self.parameters:
            parameter.grad = None

    def _step(self) -> dict[str, float]:
        config = self.config.optimizer
        for parameter in self.parameters:
            if parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
        self.processes.sum_gradients(self.parameters)
        norm = torch.nn.utils.clip_grad_norm_(self.parameters, config.grad_clip)
        if not norm.isfinite():
            raise NonFiniteError(
                "the gradient is not finite: no weight was changed. "
                "Use model.dtype=bf16 or fp32, or a lower optimizer.lr"
            )
        lr = config.lr * min(1.0, (self.update + 1) / max(config.warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        before = [p.detach().clone() for p in self.parameters] if self.update == 0 else None
        self.optimizer.step()
        self.update += 1
        self.weights.after_update(self.update)
        metrics = {"grad_norm": norm.item(), "lr": lr}
        if before is not None:
            moved = sum(float((p.detach() - q).square().sum()) for p, q in zip(self.parameters, before, strict=True))
            metrics["first_step_norm"] = moved**0.5
        return metrics

    def timed(self, phase: str) -> _Timer:
        """Add the time inside the block to `clock[phase]`."""
        return _Timer(self.clock, phase)


@dataclass
class _Timer:
    clock: dict[str, float]
    phase: str

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.clock[self.phase] += time.monotonic() - self.began
