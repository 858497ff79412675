"""Rewards by name: `load("jpeg", quality=90)`, `load("my_package.rewards:Sharpness")`, `load_mixture({"ocr": 1.0})`."""

from __future__ import annotations

import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from flowrl_img import plugins
from flowrl_img.rewards.mixture import Mixture
from flowrl_img.rewards.protocol import Metadata, Reward, RewardBatch, RewardOutput

__all__ = ["FunctionReward", "build", "builtins", "load", "load_mixture"]


@dataclass(frozen=True)
class FunctionReward:
    """A plain function as a reward: `function(images, prompts, metadata, **options)`.

    images: uint8 [B, H, W, 3]. It returns B numbers (a sequence or a tensor [B]); None or NaN marks a failed row.
    """

    function: Callable[..., Tensor | Sequence[float | None]]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()

    def validate(self, prompts: Sequence[str], metadata: Sequence[Metadata]) -> None:
        """A plain function asks nothing of its prompts."""

    def __call__(self, batch: RewardBatch) -> RewardOutput:
        """values: float32 [B]; ValueError when the function does not give one number per row."""
        answer = self.function(batch.images, batch.prompts, batch.metadata, **self.options)
        if isinstance(answer, Tensor):
            if answer.shape != (len(batch),):
                raise ValueError(
                    f"reward '{self.name}' must return one number per pair: [{len(batch)}], got {list(answer.shape)}"
                )
            answer = cast("list[float | None]", answer.detach().float().tolist())
        if len(answer) != len(batch):
            raise ValueError(f"reward '{self.name}' returned {len(answer)} numbers for {len(batch)} pictures")
        return RewardOutput.of(answer)


def load(name: str, **options: Any) -> Reward:
    """The reward called `name`, a built-in, an entry point of `flowrl_img.rewards` or a path `package.module:Object`.

    The object may be a class (called with the options), a ready reward, or a plain function
    `f(images, prompts, metadata, **options)`. ValueError for an unknown name or option, with the nearest valid one.
    """
    return build({"name": name, **options})


def build(section: Mapping[str, Any], where: str = "reward") -> Reward:
    """`load` of a config section `{"name": ..., **options}`. where: its place in the config, for messages."""
    options = dict(section)
    name = options.pop("name")
    found = plugins.resolve("rewards", name, where)
    if inspect.isclass(found) or hasattr(found, "needs"):
        return cast("Reward", plugins.make(found, options, where))
    if not callable(found):
        raise ValueError(f"{where}: {name!r} must be a class, a reward or a function, got {type(found).__name__}")
    return FunctionReward(found, name, plugins.check_options(found, options, where, skip=3))


def load_mixture(weights: Mapping[str, float], options: Mapping[str, Mapping[str, Any]] | None = None) -> Mixture:
    """The weighted sum of the named rewards. options: the options of each, by the same name.

    Example: load_mixture({"geneval": 1.0, "jpeg": 0.1}, {"geneval": {"mode": "strict"}})
    """
    options = options or {}
    stray = sorted(options.keys() - weights.keys())
    if stray:
        raise ValueError(f"options for rewards that have no weight: {stray}; valid: {list(weights)}")
    parts = {name: build({"name": name, **options.get(name, {})}, f"reward {name!r}") for name in weights}
    return Mixture(weights, parts)


def builtins() -> list[str]:
    """Names of the built-in rewards."""
    return plugins.available("rewards")
