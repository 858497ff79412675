"""Points on the paths of the rollout: x_t -> x_s as it was drawn, scored with the velocity of now.

A state is evaluated once however many successors it has. In low precision outputs depend on batch shapes, so the old
velocity is taken again in the training layout before the first update.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from flowrl_img.guidance import branches, guided
from flowrl_img.kernels.logprob import log_ratio
from flowrl_img.micro_batch import MicroBatch, Parts, Predicted
from flowrl_img.mismatch import FirstUpdate
from flowrl_img.moments import transition_of
from flowrl_img.types import Moments, Scored
from flowrl_img.velocities import other_velocities

__all__ = ["Transitions"]


class Transitions:
    """See `micro_batch.Points`. A row is an evaluated state, its points are the edges that leave it."""

    def __init__(self, trainer: Any, scored: Scored, parts: Parts) -> None:
        """parts: which update trains what."""
        rollout = scored.rollout
        assert rollout.edges is not None and rollout.table is not None
        self.trainer, self.rollout, self.edges, self.table = trainer, rollout, rollout.edges, rollout.table
        self.needs = trainer.objective.needs
        self.advantage = scored.advantage
        self.kept = scored.kept[self.edges.leaf]
        count = len(self.edges.v_old)
        edge = torch.arange(len(self.edges))
        self.first = torch.full((count,), len(self.edges)).scatter_reduce(0, self.edges.at_v, edge, "amin")
        used = torch.zeros(count, dtype=torch.bool).index_fill(0, self.edges.at_v[self.kept], True)
        self.part = torch.where(used, parts.of(rollout.leaves.samples)[self.edges.leaf[self.first]], -1)
        self.mean_std = float(self.table.std[list(rollout.trained)].mean())
        self.v_old = self.edges.v_old

    def rows(self, part: int) -> Tensor:
        """See `Points`."""
        return (self.part == part).nonzero().flatten()

    def count(self, rows: Tensor) -> int:
        """See `Points`."""
        return len(self._edges(rows))

    def micro_batches(self, part: int) -> list[MicroBatch]:
        """See `Points`."""
        rows = self.rows(part)
        return [MicroBatch(piece) for piece in rows.split(self.trainer.config.run.micro_batch)] if len(rows) else []

    def predict(self, batch: MicroBatch) -> Predicted:
        """See `Points`."""
        x_t, sigma, texts = self._inputs(batch.rows)
        rollout = self.trainer.config.rollout.guidance
        guidance = self.needs.trained_guidance(rollout)
        others = other_velocities(
            self.trainer.model, self.trainer.weights, set(self.needs.velocities) - {"old"}, x_t, sigma, texts,
            guidance=guidance, reference_guidance=self.needs.compared_guidance(rollout),
        )  # fmt: skip
        v = branches(self.trainer.model, x_t, sigma, texts, guidance)
        edges = self._edges(batch.rows)
        score = _Scorer(self, edges, batch.rows, x_t, guidance, others)
        advantage = self.advantage[self.edges.leaf[edges]]
        return Predicted(score(v, self.v_old), advantage, again=lambda: score(_detached(v), self.edges.v_old))

    def check(self, batch: MicroBatch, predicted: Predicted, metrics: dict[str, Tensor], seen: FirstUpdate) -> None:
        """See `Points`."""
        moments, edges = predicted.moments, self._edges(batch.rows)
        seen.note_ratio(self._log_ratio(moments, metrics))
        residual = moments.e2.detach() / moments.table.std.to(moments.e2) ** 2
        seen.note_residual(residual / self.edges.residual[edges].to(residual) - 1)
        if seen.low_precision and predicted.again is not None:
            drawn = predicted.again()
            seen.note_layout(self._log_ratio(drawn, self.trainer.objective(drawn, predicted.advantage)[1]))

    @staticmethod
    def _log_ratio(moments: Any, metrics: dict[str, Tensor]) -> Tensor:
        """The objective's own, or that of the density where it has none."""
        if "log_ratio" in metrics:
            return metrics["log_ratio"]
        return log_ratio(moments.dold2, moments.cross, moments.table.B, moments.table.std).detach()

    def place(self, batch: MicroBatch) -> str:
        """See `Points`."""
        edges = self._edges(batch.rows)
        sample = self.rollout.leaves.samples[int(self.edges.leaf[edges[0]])]
        return f"steps {sorted(set(self.edges.step[edges].tolist()))}, micro-batch of sample {sample.id}"

    @torch.no_grad()
    def rescore(self, parts: int) -> None:
        """Take the old velocity of all updates again, in the training layout."""
        fresh = self.v_old.clone()
        with self.trainer.weights.use(self.trainer.policy):
            for batch in (batch for part in range(parts) for batch in self.micro_batches(part)):
                fresh[batch.rows] = guided(
                    self.trainer.model, *self._inputs(batch.rows), self.trainer.config.rollout.guidance
                )
        self.v_old = fresh

    def _edges(self, rows: Tensor) -> Tensor:
        """The trained edges that leave the states `rows` (rising), in their order."""
        return (torch.isin(self.edges.at_v, rows) & self.kept).nonzero().flatten()

    def _inputs(self, rows: Tensor) -> tuple[Tensor, Tensor, list[str]]:
        """x_t [R, ...], sigma [R] and prompts of states."""
        first = self.first[rows]
        prompts, samples = self.trainer.parts.train, self.rollout.leaves.samples
        texts = [prompts.texts[samples[k].prompt] for k in self.edges.leaf[first].tolist()]
        return self.edges.states[self.edges.at_t[first]], self.rollout.sigmas[self.edges.step[first]], texts


@dataclass(frozen=True)
class _Scorer:
    """Moments of all edges of a micro-batch; states with one edge each need no copy of their velocities."""

    points: Transitions
    edges: Tensor
    rows: Tensor
    x_t: Tensor
    guidance: float
    others: dict[str, Tensor]

    def __call__(self, v: tuple[Tensor, Tensor | None], v_old: Tensor) -> Moments:
        """v: branches at the states `rows`; v_old: of all states."""
        stored = self.points.edges
        latents = {"x_t": self.x_t, "v": v[0], **self.others, "old": v_old[self.rows]}
        uncond = v[1]
        if len(self.edges) != len(self.rows):
            place = torch.searchsorted(self.rows, stored.at_v[self.edges])
            latents = {name: x[place] for name, x in latents.items()}
            uncond = None if uncond is None else uncond[place]
        x_t, cond = latents.pop("x_t"), latents.pop("v")
        return transition_of(
            self.points.needs, (cond, uncond), self.guidance, x_t, stored.states[stored.at_s[self.edges]],
            self.points.table.rows(stored.step[self.edges]), latents, self.points.mean_std,
        )  # fmt: skip


def _detached(v: tuple[Tensor, Tensor | None]) -> tuple[Tensor, Tensor | None]:
    return v[0].detach(), None if v[1] is None else v[1].detach()
