"""Kept transitions of a sampling loop as edges: what is shared is stored once, and rows are in the order of their
samples.

Left out: which steps are kept, and what is trained.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from flowrl_img.samplers.fork import Forked
from flowrl_img.samplers.loop import Trajectory
from flowrl_img.samplers.steps.table import StepTable
from flowrl_img.types import Edges

__all__ = ["forked_edges", "join", "walk_edges"]


def walk_edges(walk: Trajectory, table: StepTable, first_leaf: int, rows: int) -> Edges:
    """Edges of one chunk, step-major. A state that two kept steps share is stored once."""
    states: list[Tensor] = []
    at_t, at_s, residuals = [], [], []
    for step, kept in sorted(walk.kept.items()):
        if not states or states[-1] is not kept.x_t:
            states.append(kept.x_t)
        states.append(kept.x_s)
        at_t.append(len(states) - 2)
        at_s.append(len(states) - 1)
        residuals.append(kept.e2 / float(table.std[step]) ** 2)
    lane = torch.arange(rows)

    def spread(places: list[int]) -> Tensor:
        return torch.cat([place * rows + lane for place in places])

    return Edges(
        states=torch.cat(states),
        at_t=spread(at_t),
        at_s=spread(at_s),
        at_v=torch.arange(rows * len(walk.kept)),
        leaf=(first_leaf + lane).repeat(len(walk.kept)),
        step=torch.tensor(sorted(walk.kept)).repeat_interleave(rows),
        v_old=torch.cat([walk.kept[step].v for step in sorted(walk.kept)]),
        residual=torch.cat(residuals),
    )


def forked_edges(found: Forked, table: StepTable, first_leaf: int) -> Edges:
    """Edges of one chunk, step-major; x_t and its velocity once for all successors of a state."""
    steps = sorted(found.anchors)
    trunks, branches = found.anchors[steps[0]].x_s.shape[:2]
    states: list[Tensor] = []
    at_t, at_s, at_v, leaf, residuals = [], [], [], [], []
    own = torch.arange(trunks).repeat_interleave(branches)
    lane = torch.arange(trunks * branches)
    count = 0
    for k, step in enumerate(steps):
        anchor = found.anchors[step]
        successors = anchor.x_s.flatten(0, 1)
        states += [anchor.x_t, successors]
        at_t.append(count + own)
        at_s.append(count + trunks + lane)
        at_v.append(k * trunks + own)
        leaf.append(first_leaf + (own * len(steps) + k) * branches + lane % branches)
        count += trunks * (1 + branches)
        residuals.append(anchor.e2.flatten() / float(table.std[step]) ** 2)
    return Edges(
        states=torch.cat(states),
        at_t=torch.cat(at_t),
        at_s=torch.cat(at_s),
        at_v=torch.cat(at_v),
        leaf=torch.cat(leaf),
        step=torch.tensor(steps).repeat_interleave(len(lane)),
        v_old=torch.cat([found.anchors[step].v for step in steps]),
        residual=torch.cat(residuals),
    )


def join(parts: Sequence[Edges]) -> Edges:
    """One process's edges, sorted by (sample, step), and the velocities in the order of their first edge."""
    states = torch.tensor([0, *[len(p.states) for p in parts]]).cumsum(0)
    evaluated = torch.tensor([0, *[len(p.v_old) for p in parts]]).cumsum(0)
    leaf, step = torch.cat([p.leaf for p in parts]), torch.cat([p.step for p in parts])
    order = torch.argsort(leaf * (int(step.max()) + 1) + step)
    at_v = torch.cat([p.at_v + o for p, o in zip(parts, evaluated, strict=False)])[order]
    first = torch.full((int(evaluated[-1]),), len(at_v)).scatter_reduce(0, at_v, torch.arange(len(at_v)), "amin")
    rank = torch.argsort(first)
    place = torch.empty_like(rank)
    place[rank] = torch.arange(len(rank))
    v_old, residual = torch.cat([p.v_old for p in parts]), torch.cat([p.residual for p in parts])
    return Edges(
        states=torch.cat([p.states for p in parts]),
        at_t=torch.cat([p.at_t + o for p, o in zip(parts, states, strict=False)])[order],
        at_s=torch.cat([p.at_s + o for p, o in zip(parts, states, strict=False)])[order],
        at_v=place[at_v],
        leaf=leaf[order],
        step=step[order],
        v_old=v_old[rank.to(v_old.device)],
        residual=residual[order.to(residual.device)],
    )
