"""Rewards by name: `load("jpeg", quality=90)`, `load("my_package:Sharpness")`, `load_mixture([{"name": "ocr"}])`.

A config section holds the reward's name and own options, and how a run asks it: the keys of `ASKING`.
"""

from __future__ import annotations

import dataclasses
import hashlib
import inspect
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, cast

from torch import Tensor

from flowrl_img import plugins
from flowrl_img.rewards.failures import FailureBudget
from flowrl_img.rewards.mixture import Mixture, Part, reporting
from flowrl_img.rewards.protocol import Fingerprinted, Metadata, Reward, RewardBatch, RewardOutput
from flowrl_img.rewards.score import Scorer

__all__ = [
    "ASKING", "FunctionReward", "build", "build_part", "builtins", "describe", "load", "load_mixture", "load_reported",
]  # fmt: skip

ASKING = ("weight", "label", "transforms", "on_failure", "failure_budget", "batch_size", "cache")


@dataclass(frozen=True)
class FunctionReward:
    """A plain function as a reward: `function(images, prompts, metadata, **options)`.

    images: uint8 [B, H, W, 3]. It returns B numbers (a sequence or a tensor [B]); None or NaN marks a failed row.
    """

    function: Callable[..., Tensor | Sequence[float | None]]
    name: str
    options: Mapping[str, Any] = field(default_factory=dict)
    needs: frozenset[str] = frozenset()

    @property
    def fingerprint(self) -> dict[str, str]:
        """SHA-256 of the function's source; none where it has no source."""
        try:
            source = inspect.getsource(self.function)
        except (OSError, TypeError):
            return {}
        return {"source.sha256": hashlib.sha256(source.encode()).hexdigest()}

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
        try:
            count, output = len(answer), RewardOutput.of(answer)
        except (TypeError, ValueError) as error:
            raise ValueError(
                f"reward '{self.name}' must return {len(batch)} numbers (a sequence or a tensor [{len(batch)}], None "
                f"for a failed row), got {type(answer).__name__}: {error}"
            ) from error
        if count != len(batch):
            raise ValueError(f"reward '{self.name}' returned {count} numbers for {len(batch)} pictures")
        return output


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


def build_part(section: Mapping[str, Any], where: str = "reward") -> Part:
    """A reward of a mixture: `{"name": ..., **options}` with any of the keys `ASKING`. ValueError as for `build`."""
    asking = {key: section[key] for key in ASKING if key in section}
    reward = build({key: value for key, value in section.items() if key not in ASKING}, where)
    return plugins.make(_part, {"reward": reward, **asking}, where)


def _part(
    reward: Any, weight: float = 1.0, label: str = "", transforms: Sequence[Mapping[str, Any] | str] = (),
    on_failure: str = "raise", failure_budget: float = 0.05, batch_size: int | None = None, cache: int = 0,
) -> Part:  # fmt: skip
    scorer = Scorer(reward, label, FailureBudget(on_failure, failure_budget), batch_size, cache)
    scorer = scorer if weight else reporting(scorer)
    sections = [{"name": entry} if isinstance(entry, str) else entry for entry in transforms]
    made = tuple(plugins.build("transforms", entry, f"transforms.{k}") for k, entry in enumerate(sections))
    return Part(scorer, weight, made)


def load_mixture(sections: Sequence[Mapping[str, Any]], aggregate: str = "sum") -> Mixture:
    """The rewards that a run trains on. ValueError says which section is wrong.

    Example: load_mixture([{"name": "geneval", "mode": "strict"}, {"name": "jpeg", "weight": 0.1}])
    """
    parts = tuple(build_part(section, f"rewards.{k}") for k, section in enumerate(sections))
    try:
        return Mixture(parts, aggregate)
    except ValueError as error:
        raise ValueError(f"rewards: {error}") from error


def load_reported(sections: Sequence[Mapping[str, Any]]) -> dict[str, Scorer]:
    """Rewards that are only reported, by label: no failure of theirs stops a run. ValueError as for `load_mixture`."""
    scorers: dict[str, Scorer] = {}
    for k, section in enumerate(sections):
        where = f"report_rewards.{k}"
        part = build_part(section, where)
        if part.weight != 1.0 or part.transforms:
            raise ValueError(f"{where}: weight and transforms have no meaning for a reward that is only reported")
        scorer = reporting(part.scorer)
        if scorer.scope != "point":
            raise ValueError(f"{where}: '{scorer.label}' compares pictures of a group, which measures no progress")
        if scorer.label in scorers:
            raise ValueError(f"{where}: two rewards are called {scorer.label!r}: give one of them another label")
        scorers[scorer.label] = scorer
    return scorers


def describe(section: Mapping[str, Any], reward: Reward) -> dict[str, Any]:
    """For a run's record: name, every option with its value, fingerprint. `load(name, **options)` gives it again."""
    options: dict[str, Any] = {}
    if isinstance(reward, FunctionReward):
        parameters = list(inspect.signature(reward.function).parameters.values())[3:]
        options = {p.name: p.default for p in parameters if p.default is not p.empty} | dict(reward.options)
    elif dataclasses.is_dataclass(reward):
        plain = dataclasses.asdict(reward)
        options = {field.name: plain[field.name] for field in dataclasses.fields(reward) if field.init}
    stated = dict(reward.fingerprint) if isinstance(reward, Fingerprinted) else {}
    return {"name": section["name"], "options": options, "fingerprint": stated}


def builtins() -> list[str]:
    """Names of the built-in rewards."""
    return plugins.available("rewards")
