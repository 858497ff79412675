"""What an objective asks of the loop: which points, which other velocities, and what a micro-batch may not split.

Light on purpose: the plan of a run reads it without loading torch.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass

__all__ = ["Needs"]

VELOCITIES = ("old", "trust", "reference")
CHOICES = {
    "points": ("transitions", "matching"),
    "unit": ("row", "sample", "group"),
}
ROLLOUTS = ("independent", "anchor_fork")


@dataclass(frozen=True)
class Needs:
    """Example: `Needs({"old", "reference"}, points="matching")` for DiffusionNFT with a penalty to the reference."""

    velocities: Collection[str] = ()
    """Weight sets whose velocity is read besides the current one: "old", "trust", "reference". At transitions "old" is
    the velocity that the rollout stored, and costs nothing."""
    points: str = "transitions"
    """"transitions": x_t -> x_s as the rollout drew them; "matching": x_t = (1 - t) x0 + t eps, drawn anew."""
    unit: str = "row"
    """What is scored together: a "row" alone, the rows of one "sample" at all its times, or those of one "group" at one
    time. For more than a row the objective has a `unit_score`, and gets the mean over the unit (over all processes)."""
    rollouts: Collection[str] = ROLLOUTS
    """kinds of rollout that make sense"""
    shared_noise: bool = False
    """matching: the pictures of a group share times and noise"""
    guided: bool = True
    """train the guided velocity of the rollout, or the conditional branch alone"""
    reference_guidance: float = 1.0
    """where `guided` is off: guidance of the reference, so that the trained branch learns what guidance does"""
    detach_uncond: bool = False
    """where `guided` is on: no gradient into the unconditional branch"""
    smallest_clip: float = 1.0
    """smallest clip range of a ratio: before the first update every ratio has to be 1 within a tenth of it"""
    branch_width: float | None = None
    """matching: beta of DiffusionNFT's two branches around the old velocity"""
    best_and_worst: tuple[int, int] | None = None
    """train on so many of the best and of the worst of each group that has spread; None: on every picture"""

    def __post_init__(self) -> None:
        object.__setattr__(self, "velocities", frozenset(self.velocities))
        for name, allowed in CHOICES.items():
            if getattr(self, name) not in allowed:
                raise ValueError(f"{name} must be one of {', '.join(allowed)}, got {getattr(self, name)!r}")
        for name, known in (("velocities", VELOCITIES), ("rollouts", ROLLOUTS)):
            if unknown := set(getattr(self, name)) - set(known):
                raise ValueError(f"{name} must be among {', '.join(known)}, got {', '.join(sorted(unknown))}")

    @property
    def matching(self) -> bool:
        return self.points == "matching"

    def trained_guidance(self, guidance: float) -> float:
        """Guidance of the velocity that is trained, in a rollout of `guidance`."""
        return guidance if self.guided else 1.0

    def compared_guidance(self, guidance: float) -> float:
        """Guidance of the reference's velocity."""
        return guidance if self.guided else self.reference_guidance

    def trained_of(self, group_size: int) -> int:
        """Pictures of a group that are trained on."""
        return group_size if self.best_and_worst is None else min(sum(self.best_and_worst), group_size)
