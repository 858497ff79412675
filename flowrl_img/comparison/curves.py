"""Held-out reward along runs, and what it costs to reach a reward."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from flowrl_img.run_folder import rows_of

__all__ = ["Curve", "cost_to", "curve_of", "fewer", "mean_curve"]

DRAWS = 2000


@dataclass(frozen=True)
class Curve:
    """Held-out reward along a run, each [P]: cost so far in network evaluations, seconds of training, reward."""

    cost: Sequence[float]
    seconds: Sequence[float]
    reward: Sequence[float]

    def cost_to(self, target: float) -> float | None:
        """Cost at which the curve, straight between its points, first reaches `target`; None if it does not."""
        previous = None
        for cost, reward in zip(self.cost, self.reward, strict=True):
            if reward >= target:
                if previous is None or reward == previous[1]:
                    return cost
                share = (target - previous[1]) / (reward - previous[1])
                return previous[0] + share * (cost - previous[0])
            previous = (cost, reward)
        return None


def curve_of(run: Path, cost_per_rollout: int, updates_per_rollout: int) -> Curve:
    """From the run's evaluations.jsonl and metrics.jsonl. Seconds leave held-out evaluation out.

    Along a run few pictures are drawn, at its ends many: its points are their gains over the base on the same pictures,
    added to the base on many, and its last is measured on many.
    """
    clock = {0: 0.0} | {
        row["update"]: sum(s for phase, s in row["seconds"].items() if phase != "evaluation")
        for row in rows_of(run, "metrics.jsonl")
    }
    points = {row["update"]: row["means"]["reward"] for row in rows_of(run, "evaluations.jsonl")}
    updates, measured = sorted(points), json.loads((run / "measured.json").read_text())
    base, final = (measured[label]["reward"][0] for label in ("before", "after"))
    rewards = [base + points[update] - points[updates[0]] for update in updates]
    return Curve(
        [update / updates_per_rollout * cost_per_rollout for update in updates], [clock[update] for update in updates],
        [*rewards[:-1], final],
    )  # fmt: skip


def mean_curve(curves: Sequence[Curve]) -> Curve:
    """Point by point. The runs of an algorithm have their points at the same costs; ValueError otherwise."""
    if any(list(curve.cost) != list(curves[0].cost) for curve in curves):
        raise ValueError("the runs of one algorithm were evaluated at different costs; run them with the same settings")
    seconds, reward = (np.mean([getattr(c, field) for c in curves], 0).tolist() for field in ("seconds", "reward"))
    return Curve(curves[0].cost, seconds, reward)


def cost_to(curves: Sequence[Curve], target: float) -> list[float] | None:
    """[cost, low, high] at which the mean of runs reaches `target`; None if it does not, or without runs.

    low, high: 95 % of the costs of runs drawn again with replacement, infinite where it is not reached; NaN of one run.
    """
    if not curves or (found := mean_curve(curves).cost_to(target)) is None:
        return None
    again = [_cost(draw, target) for draw in _drawn_again(curves, stream=0)]
    return _with_interval(found, again, len(curves) > 1)


def fewer(reference: Sequence[Curve], curves: Sequence[Curve]) -> list[float] | None:
    """How many times fewer evaluations than the reference to its mean final reward: [ratio, low, high].

    low, high as in `cost_to`, the runs of both drawn again. 0: not reached. None without runs of both.
    """
    if not reference or not curves:
        return None
    pairs = zip(_drawn_again(reference, stream=1), _drawn_again(curves, stream=0), strict=True)
    again = [_ratio(theirs, ours) for theirs, ours in pairs]
    return _with_interval(_ratio(reference, curves), again, min(len(reference), len(curves)) > 1)


def _ratio(reference: Sequence[Curve], curves: Sequence[Curve]) -> float:
    target = mean_curve(reference).reward[-1]
    theirs, ours = _cost(reference, target), _cost(curves, target)
    # A reference that ends where it began is reached by everybody before the first step.
    return 1.0 if theirs == ours else theirs / ours if ours else float("inf")


def _cost(curves: Sequence[Curve], target: float) -> float:
    found = mean_curve(curves).cost_to(target)
    return float("inf") if found is None else found


def _drawn_again(curves: Sequence[Curve], *, stream: int) -> list[list[Curve]]:
    rows = np.random.default_rng(stream).integers(len(curves), size=(DRAWS, len(curves)))
    return [[curves[k] for k in row] for row in rows]


def _with_interval(value: float, again: Sequence[float], several: bool) -> list[float]:
    low, high = np.percentile(again, (2.5, 97.5), method="nearest").tolist() if several else (float("nan"),) * 2
    return [value, low, high]
