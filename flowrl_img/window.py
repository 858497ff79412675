"""The configuration's window: which steps may be stochastic, its rule for every rollout, and what is wrong with it."""

from __future__ import annotations

from typing import TYPE_CHECKING

from flowrl_img.config import WindowConfig

if TYPE_CHECKING:
    from flowrl_img.samplers.windows import StepChoice

__all__ = ["candidates", "stochastic_range", "window_of", "window_problems", "window_size"]


def stochastic_range(window: WindowConfig, steps: int) -> tuple[int, int]:
    """[low, high) of the steps that may be stochastic; the last step is left out unless `high` names it."""
    return window.low, steps - 1 if window.high is None else window.high


def candidates(window: WindowConfig, steps: int) -> tuple[int, ...]:
    """Rising indices of the steps that may be stochastic in some rollout."""
    if window.steps is not None:
        return tuple(sorted(window.steps))
    low, high = stochastic_range(window, steps)
    if window.schedule == "fixed" and window.size is not None:
        high = low + window.size
    return tuple(range(low, high))


def window_size(window: WindowConfig, steps: int) -> int:
    """How many steps are stochastic in every rollout."""
    return window.size or len(candidates(window, steps))


def window_of(window: WindowConfig, steps: int) -> StepChoice:
    """The rule that names the stochastic steps of each rollout. ValueError for one that cannot be."""
    from flowrl_img.samplers import windows

    if window.steps is not None or window.size is None or window.schedule == "fixed":
        chosen = windows.ListedSteps(window.steps or candidates(window, steps))
        chosen.steps(steps, seed=0, iteration=0)
        return chosen
    size, span, every, stride = window.size, stochastic_range(window, steps), window.every, window.stride
    if window.schedule == "random":
        return windows.RandomWindow(size, span, every)
    if window.schedule == "progressive":
        return windows.ProgressiveWindow(size, span, every, stride)
    if window.schedule == "decay":
        return windows.DecayWindow(size, span, longest=every, shortest=window.shortest, stride=stride)
    return windows.ExponentialWindow(size, span, longest=every, rate=window.rate, knee=window.knee, stride=stride)


def window_problems(window: WindowConfig, steps: int) -> list[str]:
    """What does not fit into a path of `steps` steps, each with the values that would."""
    low, high = stochastic_range(window, steps)
    if window.steps is None:
        if high > steps:
            return [
                f"rollout.window.high = {high}: the rollout has {steps} steps; "
                f"use rollout.window.high = {steps} or below, or rollout.steps = {high} or more"
            ]
        if high <= low:
            return [
                f"rollout.window: no step lies in [{low}, {high}) of {steps} steps; "
                f"use rollout.window.low = {max(high - 1, 0)} or below, or rollout.steps = {low + 2} or more"
            ]
        if window.size is not None and window.size > high - low:
            return [
                f"rollout.window.size = {window.size}: only {high - low} steps lie in [{low}, {high}); "
                f"use {high - low} or fewer, or widen rollout.window.low and .high"
            ]
    try:
        window_of(window, steps)
    except ValueError as error:
        return [f"rollout.window: {error}"]
    return []
