"""Points on clean samples: x_t = (1 - t) x0 + t eps, with times and noise drawn anew for every sample or group.

Times and noise are keyed by the identity of their sample or group, so nothing is stored but x0 and no process needs to
send them to another. Objectives that score whole groups get them whole: a group's pictures are dealt over all
processes, and every process passes the same groups in the same order.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from flowrl_img import seeds
from flowrl_img.geometry import group_rows
from flowrl_img.guidance import guided
from flowrl_img.kernels.step import renoise
from flowrl_img.micro_batch import MicroBatch, Parts, Predicted
from flowrl_img.mismatch import FirstUpdate
from flowrl_img.moments import matching_of
from flowrl_img.types import Scored
from flowrl_img.velocities import other_velocities

__all__ = ["Matching"]

TIME_SEED, NOISE_SEED = "times", "renoise"  # namespaces of the keys


class Matching:
    """See `micro_batch.Points`. Row b T + j is sample b at its j-th time; every row is a point."""

    def __init__(self, trainer: Any, scored: Scored, parts: Parts) -> None:
        """parts: which update trains what."""
        self.trainer, self.rollout, self.parts = trainer, scored.rollout, parts
        self.needs = trainer.objective.needs
        self.samples = scored.rollout.leaves.samples
        self.advantage = scored.advantage
        self.part = torch.where(scored.kept, parts.of(self.samples), -1)
        law, sigmas = trainer.parts.times, scored.rollout.sigmas
        drawn = [law.draw(sigmas, seeds.key(trainer.config.run.seed, TIME_SEED, self._owner(s))) for s in self.samples]
        self.num_times = law.num_times(len(sigmas) - 1)
        self.times = torch.stack(drawn) if drawn else torch.zeros(0, self.num_times, dtype=torch.float64)
        self.groups = {group: k for k, group in enumerate(scored.kept_groups)}

    def _owner(self, sample: Any) -> str:
        """Whose times a sample has."""
        share = self.trainer.config.matching.share or ("group" if self.needs.shared_noise else "sample")
        return {"sample": sample.id, "group": sample.group, "rollout": f"rollout {self.trainer.rollout}"}[share]

    def rows(self, part: int) -> Tensor:
        """See `Points`."""
        leaves = (self.part == part).nonzero().flatten()
        return (leaves.unsqueeze(1) * self.num_times + torch.arange(self.num_times)).flatten()

    def count(self, rows: Tensor) -> int:
        """See `Points`."""
        return len(rows)

    def micro_batches(self, part: int) -> list[MicroBatch]:
        """See `Points`."""
        rows, size = self.rows(part), self.trainer.config.run.micro_batch
        if self.needs.unit == "group":
            return self._of_groups(rows, part)
        if self.needs.unit == "sample":
            samples = max(1, size // self.num_times)
            pieces = rows.split(samples * self.num_times) if len(rows) else ()
            return [MicroBatch(piece, len(piece) // self.num_times) for piece in pieces]
        return [MicroBatch(piece) for piece in rows.split(size)] if len(rows) else []

    def _of_groups(self, rows: Tensor, part: int) -> list[MicroBatch]:
        """Whole groups at one time each, the same on every process; this process's rows of them, possibly none."""
        config, processes = self.trainer.config, self.trainer.processes
        fit = max(1, config.run.micro_batch // group_rows(config.rollout.group_size, processes.count, self.needs))
        groups = torch.tensor([k for group, k in self.groups.items() if self.parts.of_lot[group] == part])
        group = self._group(rows // self.num_times)
        batches = []
        for j in range(self.num_times):
            for chunk in groups.split(fit) if len(groups) else ():
                mine = (rows % self.num_times == j) & torch.isin(group, chunk)
                batches.append(MicroBatch(rows[mine], len(chunk), chunk))
        return batches

    def _group(self, leaf: Tensor) -> Tensor:
        """The number of each leaf's group, [R]."""
        return torch.tensor([self.groups[self.samples[b].group] for b in leaf.tolist()], dtype=torch.int64)

    def predict(self, batch: MicroBatch) -> Predicted:
        """See `Points`."""
        leaf, j = batch.rows // self.num_times, batch.rows % self.num_times
        trainer, t = self.trainer, self.times[leaf, j]
        x0 = self.rollout.leaves.latents[leaf.to(self.rollout.leaves.latents.device)]
        eps = seeds.normal([self._noise_key(b, k) for b, k in zip(leaf.tolist(), j.tolist())], x0.shape[1:], x0.device)
        texts = [trainer.parts.train.texts[self.samples[b].prompt] for b in leaf.tolist()]
        x_t = renoise(x0, eps, t)
        rollout = trainer.config.rollout.guidance
        guidance = self.needs.trained_guidance(rollout)
        others = other_velocities(
            trainer.model, trainer.weights, self.needs.velocities, x_t, t, texts, guidance=guidance,
            reference_guidance=self.needs.compared_guidance(rollout),
        )  # fmt: skip
        v = guided(trainer.model, x_t, t, texts, guidance)
        return Predicted(matching_of(self.needs, v, x0, eps, t, others), self.advantage[leaf], self._unit(leaf, batch))

    def _noise_key(self, leaf: int, j: int) -> int:
        sample = self.samples[leaf]
        owner = sample.group if self.needs.shared_noise else sample.id
        return seeds.key(self.trainer.config.run.seed, NOISE_SEED, owner, j)

    def _unit(self, leaf: Tensor, batch: MicroBatch) -> Tensor | None:
        """Each row's unit, [R] in [0, batch.units)."""
        if batch.groups is not None:
            return torch.searchsorted(batch.groups, self._group(leaf))
        return leaf.unique(return_inverse=True)[1] if self.needs.unit == "sample" else None

    def check(self, batch: MicroBatch, predicted: Predicted, metrics: dict[str, Tensor], seen: FirstUpdate) -> None:
        """See `Points`."""
        moments = predicted.moments
        if "log_ratio" in metrics:  # in low precision the old velocity comes from a batch of another shape
            (seen.note_layout if seen.low_precision else seen.note_ratio)(metrics["log_ratio"])
        for distance in (moments.dold2, moments.dtrust2):
            seen.note_distance(distance.detach() / moments.e2.detach().clamp(min=1e-12))

    def place(self, batch: MicroBatch) -> str:
        """See `Points`."""
        leaf, j = batch.rows // self.num_times, batch.rows % self.num_times
        times = sorted({round(float(t), 3) for t in self.times[leaf, j]})
        return f"times {times}, micro-batch of sample {self.samples[int(leaf[0])].id}"
