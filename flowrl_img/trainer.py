"""The one loop: rollout, score, advantage, updates. It yields what happened; the caller logs, saves and shows.

Left out: everything an algorithm decides. An objective is a pure function of moments; this file gives it points and
applies its gradient. Gradients of an update are sums over its points divided by their number over all processes, so
micro-batches, accumulation and the number of processes change nothing but rounding.
"""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.advantages import combined_advantages
from flowrl_img.config import Config
from flowrl_img.guidance import branches, guided
from flowrl_img.kernels.transition import transition_moments
from flowrl_img.mismatch import NonFiniteError, check_first_update
from flowrl_img.parallel import Processes
from flowrl_img.prompts import draw_samples
from flowrl_img.rewards.alarm import Alarm
from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rollout import roll
from flowrl_img.scoring import Answer, ask, judge
from flowrl_img.types import Edges, Moments, Points, PromptSet, Rollout, Sample
from flowrl_img.weights import WeightSets

__all__ = ["Scored", "Trainer", "Update"]


@dataclass(frozen=True)
class Update:
    """One optimizer update. metrics: numbers over all processes. seconds: by phase, of this process."""

    update: int
    rollout: int
    metrics: dict[str, float]
    seconds: dict[str, float]


@dataclass(frozen=True)
class Scored:
    """A rollout with its advantages (all samples of this process, [B]) and the global reward statistics."""

    rollout: Rollout
    everything: tuple[Sample, ...]
    """the samples of all processes"""
    advantage: Tensor
    metrics: dict[str, float]


@dataclass
class Trainer:
    """Ties model, weights, rewards and objective together. `run()` is a generator of `Update`s."""

    config: Config
    model: Any
    weights: WeightSets
    prompts: PromptSet
    reward: Mixture
    objective: Any
    step_rule: Any
    window: Any
    processes: Processes
    progress: Callable[[str, int, int], None] = lambda phase, done, total: None
    warn: Callable[[str], None] = lambda text: None
    alarm: Alarm = field(default_factory=Alarm)
    update: int = 0
    rollout: int = 0
    clock: dict[str, float] = field(default_factory=lambda: defaultdict(float))

    def __post_init__(self) -> None:
        self._scorers = ThreadPoolExecutor(1, "scoring") if self.config.run.overlap else None
        self._ahead: dict[int, tuple[Rollout, tuple[Sample, ...], Callable[[], Answer]]] = {}
        optimizer = self.config.optimizer
        self.parameters = list(self.weights.trainable.values())
        self.optimizer = torch.optim.AdamW(
            self.parameters,
            lr=optimizer.lr,
            betas=optimizer.betas,
            eps=optimizer.eps,
            weight_decay=optimizer.weight_decay,
        )

    def run(self) -> Iterator[Update]:
        """Until `run.rollouts` or `run.minutes`, whichever comes first; a started rollout is trained to its end."""
        run, began = self.config.run, time.monotonic()
        while run.rollouts is None or self.rollout < run.rollouts:
            if run.minutes is not None and self.processes.any(time.monotonic() - began >= 60 * run.minutes):
                return
            scored = self.collect(self.rollout)
            yield from self.train_on(scored)
            self.rollout += 1

    # -- rollout and scores

    def collect(self, rollout: int) -> Scored:
        """Draw, score and rank this process's share of one rollout.

        With `run.overlap` the next rollout is drawn, by the weights of now, while the scores of this one are computed.
        """
        drawn, everything, answer = self._ahead.pop(rollout) if rollout in self._ahead else self._started(rollout)
        last = self.config.run.rollouts
        if self._scorers is not None and (last is None or rollout + 1 < last):
            self._ahead[rollout + 1] = self._started(rollout + 1)
        with self._timed("scoring"):
            return self._rank(drawn, everything, answer())

    def _started(self, rollout: int) -> tuple[Rollout, tuple[Sample, ...], Callable[[], Answer]]:
        """A drawn rollout with all samples of all processes, and what gives (or waits for) its scores."""
        drawn, everything = self._drawn(rollout)
        asked = partial(ask, self.reward, drawn.leaves, self.prompts)
        return drawn, everything, asked if self._scorers is None else self._scorers.submit(asked).result

    def _drawn(self, rollout: int) -> tuple[Rollout, tuple[Sample, ...]]:
        config = self.config.rollout
        everything = draw_samples(
            self.prompts, config.groups, config.group_size, self.config.prompts.balance,
            seed=self.config.run.seed, rollout=rollout,
        )  # fmt: skip
        mine = self.processes.share(everything)
        steps = self.window.steps(config.steps, seed=self.config.run.seed, iteration=rollout)
        with self._timed("sampling"):
            self.weights.network.eval()
            drawn = roll(
                self.model, self.prompts, mine, num_steps=config.steps, guidance=config.guidance,
                step_rule=self.step_rule, stochastic=steps, seed=self.config.run.seed, batch=config.batch,
                shared_noise=config.shared_noise,
                progress=lambda n: self.progress("sampling", n, len(mine)),
            )  # fmt: skip
        return drawn, everything

    def _rank(self, drawn: Rollout, everything: tuple[Sample, ...], answer: Answer) -> Scored:
        judged = judge(answer, self.reward, everything, self.processes, self.alarm, self.warn)
        for part in self.reward.parts:
            self.clock[f"scoring/{part.scorer.label}"] = part.scorer.seconds
        config, combined = self.config.advantage, judged.combined
        advantage = combined_advantages(
            combined.terms, combined.weights, combined.valid, judged.groups, aggregate=combined.aggregate,
            scale=config.scale, eps=config.eps,
        )  # fmt: skip
        by_id = dict(zip([s.id for s in everything], advantage.clamp(-config.clip, config.clip).tolist(), strict=True))
        groups = torch.tensor([a != 0 for a in by_id.values()]).view(self.config.rollout.groups, -1)
        metrics = judged.metrics | {"flat_groups": float((~groups.any(1)).sum())}
        return Scored(drawn, everything, torch.tensor([by_id[s.id] for s in drawn.leaves.samples]), metrics)

    # -- updates

    def train_on(self, scored: Scored) -> Iterator[Update]:
        """`run.updates_per_rollout` updates, each on its own share of the samples and all their trained steps."""
        parts = self._partition(scored)
        edges = scored.rollout.edges
        if self._rescores:
            with self._timed("training"):
                edges = self._rescored(edges, scored, parts)
        for number, rows in enumerate(parts):
            with self._timed("training"):
                if self.update == 0:
                    spread = check_first_update(self, edges, scored, self._micro_batches(rows))
                self._zero_grad()
                metrics = self._accumulate(edges, scored, rows)
                metrics |= self._step()
            if self.update == 1:
                metrics |= spread
            on_policy = {"update_of_rollout": float(number)}
            yield Update(self.update, self.rollout, {**scored.metrics, **metrics, **on_policy}, dict(self.clock))

    @property
    def _rescores(self) -> bool:
        """In low precision outputs depend on batch shapes, so the old velocity is taken in the training layout."""
        return self.model.dtype != torch.float32

    def _partition(self, scored: Scored) -> list[Tensor]:
        """Edge rows of each update: samples are dealt to updates by a permutation of the global ids."""
        config, leaves = self.config, scored.rollout.leaves.samples
        total = config.rollout.groups * config.rollout.group_size
        order = seeds.permutation(total, config.run.seed, "updates", self.rollout)
        size = total // config.run.updates_per_rollout
        place = {index: position // size for position, index in enumerate(order)}
        group_row = {g: k for k, g in enumerate(dict.fromkeys(s.group for s in scored.everything))}
        part = torch.tensor([place[group_row[s.group] * config.rollout.group_size + s.image] for s in leaves])
        return [
            (part[scored.rollout.edges.leaf] == k).nonzero().flatten() for k in range(config.run.updates_per_rollout)
        ]

    def _micro_batches(self, rows: Tensor) -> list[Tensor]:
        return list(rows.split(self.config.run.micro_batch)) if len(rows) else []

    def points(self, edges: Edges, scored: Scored, rows: Tensor) -> Points:
        """The micro-batch of the given edge rows."""
        steps, leaf = edges.step[rows], edges.leaf[rows]
        return Points(
            x_t=edges.states[edges.at_t[rows]],
            x_s=edges.states[edges.at_s[rows]],
            v_old=edges.v_old[rows],
            sigma=scored.rollout.sigmas[steps],
            prompt=[scored.rollout.leaves.samples[k].prompt for k in leaf.tolist()],
            table=scored.rollout.table.rows(steps),
            advantage=scored.advantage[leaf],
        )

    def predict(self, points: Points) -> Moments:
        """Moments of the current velocity against everything the objective needs."""
        guidance = self.config.rollout.guidance
        texts = [self.prompts.texts[k] for k in points.prompt]
        v_ref = None
        if "reference" in self.objective.needs:
            with torch.no_grad(), self.weights.use("reference"):
                v_ref = guided(self.model, points.x_t, points.sigma, texts, guidance)
        v_cond, v_uncond = branches(self.model, points.x_t, points.sigma, texts, guidance)
        columns = transition_moments(
            v_cond, v_uncond, guidance, points.x_t, points.x_s, points.table.A, points.table.B,
            v_old=points.v_old, v_ref=v_ref, detach_uncond=self.objective.detach_uncond,
        )  # fmt: skip
        return Moments.of(columns, points.table)

    def _accumulate(self, edges: Edges, scored: Scored, rows: Tensor) -> dict[str, float]:
        total = self.processes.sum(float(len(rows)))
        sums: dict[str, Tensor] = defaultdict(lambda: torch.zeros((), dtype=torch.float64))
        largest = torch.zeros((), dtype=torch.float64)
        batches = self._micro_batches(rows)
        for k, batch in enumerate(batches):
            points = self.points(edges, scored, batch)
            moments = self.predict(points)
            if not moments.finite():
                self._refuse(scored, batch, edges)
            loss, metrics = self.objective(moments, points.advantage.to(moments.e2.device))
            (loss.sum() / total).backward()
            sums["loss"] += loss.detach().double().sum().cpu()
            for name, value in metrics.items():
                sums[name] += value.double().sum().cpu()
            largest = torch.maximum(largest, metrics["log_ratio"].double().expm1().abs().max().cpu())
            self.progress("training", k + 1, len(batches))
        names = sorted(self.processes.agree(list(sums)))
        means = {name: self.processes.sum(sums[name].item()) / total for name in names}
        return means | {"max_ratio_error": self.processes.max(largest.item())}

    def _refuse(self, scored: Scored, rows: Tensor, edges: Edges) -> None:
        sample = scored.rollout.leaves.samples[int(edges.leaf[rows[0]])]
        steps = sorted(set(edges.step[rows].tolist()))
        raise NonFiniteError(
            f"the network gave a non-finite velocity in {self.model.dtype} at steps {steps}, micro-batch of sample "
            f"{sample.id}: no weight was changed. Use model.dtype=bf16 or fp32, or a lower optimizer.lr"
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
            raise NonFiniteError("the gradient is not finite: no weight was changed; lower optimizer.lr or use fp32")
        lr = config.lr * min(1.0, (self.update + 1) / max(config.warmup, 1))
        for group in self.optimizer.param_groups:
            group["lr"] = lr
        before = [p.detach().clone() for p in self.parameters] if self.update == 0 else None
        self.optimizer.step()
        self.update += 1
        self.weights.update_ema(self.update)
        metrics = {"grad_norm": norm.item(), "lr": lr}
        if before is not None:
            moved = sum(float((p.detach() - q).square().sum()) for p, q in zip(self.parameters, before, strict=True))
            metrics["first_step_norm"] = moved**0.5
        return metrics

    @torch.no_grad()
    def _rescored(self, edges: Edges, scored: Scored, parts: Sequence[Tensor]) -> Edges:
        v_old = edges.v_old.clone()
        guidance = self.config.rollout.guidance
        for rows in parts:
            for batch in self._micro_batches(rows):
                points = self.points(edges, scored, batch)
                texts = [self.prompts.texts[k] for k in points.prompt]
                v_old[batch] = guided(self.model, points.x_t, points.sigma, texts, guidance)
        return edges.with_v_old(v_old)

    def _timed(self, phase: str) -> _Timer:
        return _Timer(self.clock, phase)


@dataclass
class _Timer:
    clock: dict[str, float]
    phase: str

    def __enter__(self) -> None:
        self.began = time.monotonic()

    def __exit__(self, *_: object) -> None:
        self.clock[self.phase] += time.monotonic() - self.began
