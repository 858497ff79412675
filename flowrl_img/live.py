"""What a run shows on the terminal: phases with progress and time left, and a line per update."""

from __future__ import annotations

import time
from typing import Any

from flowrl_img.config import Config

__all__ = ["Live"]

# What else a line says, where the objective measures it.
SHOWN = {
    "max_ratio_error": "max|ratio-1| {:.1e}",
    "clipped": "clipped {:4.0%}",
    "matching_error": "error {:.4f}",
    "kl": "kl {:.2e}",
}


class Live:
    """A rich progress bar on a terminal, plain lines elsewhere; silent where `enabled` is false."""

    def __init__(self, config: Config, *, enabled: bool) -> None:
        from rich.console import Console
        from rich.progress import BarColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

        self.enabled, self.run = enabled, config.run
        self.console = Console(highlight=False, soft_wrap=True)
        self.began: float | None = None
        columns = (TextColumn("{task.description:<28}"), BarColumn(30), TextColumn("{task.percentage:>3.0f} %"),
                   TimeElapsedColumn(), TextColumn("left"), TimeRemainingColumn())  # fmt: skip
        self.bar = Progress(
            *columns, console=self.console, transient=True, disable=not (enabled and self.console.is_terminal)
        )
        self.whole = self.bar.add_task("run", total=100.0)
        self.inner = self.bar.add_task("", total=1, visible=False)
        self._phase = ""
        self.bar.start()

    def say(self, line: str) -> None:
        if self.enabled:
            self.console.print(line, markup=False)

    def phase(self, name: str, advance: int, total: int) -> None:
        """Progress inside a phase: "training" reports how far it is, the others how much was added."""
        if name != self._phase:
            self._phase = name
            self.bar.update(self.inner, description=name, completed=0, total=total, visible=True)
        if name == "training":
            self.bar.update(self.inner, completed=advance, total=total)
        else:
            self.bar.advance(self.inner, advance)

    def update(self, update: Any) -> None:
        """One line for an optimizer update, and the whole run's bar."""
        self.began = self.began or time.monotonic()
        metrics = update.metrics
        parts = [
            f"update {update.update:4d}",
            f"rollout {update.rollout:4d}",
            f"reward {metrics['reward']:.4f}",
            f"loss {metrics['loss']:+.3e}",
            f"grad {metrics['grad_norm']:.2e}",
        ]
        parts += [text.format(metrics[name]) for name, text in SHOWN.items() if name in metrics]
        self.say("  ".join(parts))
        self.bar.update(self.whole, completed=self._done(update))

    def _done(self, update: Any) -> float:
        """Percent of the run: by rollouts or by minutes, whichever is further."""
        shares = []
        if self.run.rollouts:
            shares.append((update.rollout + 1) / self.run.rollouts)
        if self.run.minutes and self.began:
            shares.append((time.monotonic() - self.began) / (60 * self.run.minutes))
        return 100 * min(1.0, max(shares, default=0.0))

    def close(self) -> None:
        self.bar.stop()
