"""What a failed score does to a run: stop it at once, or leave the sample out as long as few fail.

A failure is never a number. Masking without a limit would train on the pictures that happen to be scorable while a
scorer is down, so masking has a budget. Left out: retries, which are the business of the reward that can repeat itself.
"""

from __future__ import annotations

from collections import deque
from dataclasses import dataclass, field

from flowrl_img.rewards.protocol import RewardOutput

__all__ = ["POLICIES", "WINDOW", "FailureBudget", "InvalidScoreError"]

POLICIES = ("raise", "mask")
WINDOW = 500  # samples over which failures are counted


class InvalidScoreError(RuntimeError):
    """Samples could not be scored, and more of them than the policy bears."""


@dataclass
class FailureBudget:
    """policy "raise" bears no failure, "mask" up to share * WINDOW among the last WINDOW samples asked.

    share in [0, 1]; 1 bears every failure, for a reward that is only reported. asked, failed: totals so far.
    """

    policy: str = "raise"
    share: float = 0.05
    asked: int = 0
    failed: int = 0
    _recent: deque[bool] = field(default_factory=lambda: deque(maxlen=WINDOW), repr=False)

    def __post_init__(self) -> None:
        if self.policy not in POLICIES:
            raise ValueError(f"policy must be one of {sorted(POLICIES)}, got {self.policy!r}")
        if not 0 <= self.share <= 1:
            raise ValueError(f"failure budget must lie in [0, 1], got {self.share}")

    def count(self, name: str, output: RewardOutput) -> None:
        """InvalidScoreError with the reasons when the failures of `output` are more than the budget."""
        self.asked += len(output.values)
        self.failed += int((~output.valid).sum())
        self._recent.extend((~output.valid).tolist())
        if self.policy == "raise" and not output.valid.all():
            raise InvalidScoreError(
                f"reward '{name}' could not score {int((~output.valid).sum())} of {len(output.values)} samples: "
                f"{_reasons(output)}; set on_failure to 'mask' to leave such samples out"
            )
        if sum(self._recent) > self.share * WINDOW:
            raise InvalidScoreError(
                f"reward '{name}' could not score {sum(self._recent)} of the last {len(self._recent)} samples, more "
                f"than its budget of {self.share * WINDOW:.0f} in {WINDOW}: {_reasons(output)}; "
                "repair the scorer and resume, or raise failure_budget"
            )


def _reasons(output: RewardOutput) -> dict[str, str]:
    errors = output.details.get("error", [None] * len(output.ids))
    invalid = (~output.valid).nonzero().flatten().tolist()
    return {output.ids[row]: errors[row] or "no reason given" for row in invalid[:4]}
