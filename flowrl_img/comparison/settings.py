"""What a comparison runs: algorithms with their recipes and trials, rewards, seeds, and one budget for all.

The cost of an evaluation of the network is 1 forward and 2 backward, so a run of any algorithm is as many whole
rollouts as fit into the budget, known before it starts. Left out: wall-clock time, which is reported and bounds
nothing.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import Field, TypeAdapter

from flowrl_img import recipes
from flowrl_img.config import Config, Section
from flowrl_img.validation import validate

__all__ = ["Cell", "Settings", "cost_of_rollout", "load_settings"]

MAX_TRIALS = 4


class AlgorithmConfig(Section):
    """A recipe, what is changed in it, and the settings that are tried on the tuning split, each a list of changes.

    tuning: what is changed in trials alone, such as the size of a rollout, for which their budget is too small.
    """

    recipe: str
    changes: tuple[str, ...] = ()
    tuning: tuple[str, ...] = ()
    trials: tuple[tuple[str, ...], ...] = Field(((),), min_length=1, max_length=MAX_TRIALS)


class RewardCells(Section):
    """Changes that set prompts and rewards, and who is compared on them with which seeds. {split}: test or tune."""

    changes: tuple[str, ...]
    seeds: tuple[int, ...]
    algorithms: tuple[str, ...] | None = Field(None, description="null: all")
    targets: tuple[float, ...] = Field((), description="held-out rewards whose cost is reported")


class Settings(Section):
    """One comparison. Costs are network evaluations, a forward pass being 1 and a backward pass 2."""

    budget: int = Field(gt=0, description="cost of one run")
    tuning_budget: int = Field(gt=0, description="cost of one trial")
    points: int = Field(8, gt=0, description="held-out evaluations along a run")
    pictures: int = Field(192, gt=0, description="pictures of each of these")
    tuning_pictures: int = Field(360, gt=0, description="pictures that a trial is judged by")
    final_pictures: int = Field(600, gt=0, description="paired pictures of base and tuned weights after a run")
    reference: str = Field("flow_grpo", description="the algorithm that the others are measured against")
    judge: str = Field("assets:judges/held_out", description="CLIP encoder: packaged, a folder, or a hub id")
    threads: int = Field(2, gt=0)
    common: tuple[str, ...] = ()
    algorithms: dict[str, AlgorithmConfig]
    rewards: dict[str, RewardCells]

    def cells(self) -> list[Cell]:
        """Every run, first the first seed of each algorithm on each reward."""
        found = [
            (place, Cell(reward, name, seed))
            for reward, what in self.rewards.items()
            for name in what.algorithms or tuple(self.algorithms)
            for place, seed in enumerate(what.seeds)
        ]
        return [cell for _, cell in sorted(found, key=lambda pair: pair[0])]


@dataclass(frozen=True)
class Cell:
    """One run. trial: number of a tuning trial; None: the comparison itself. Example: Cell("geneval", "nft", 1)."""

    reward: str
    algorithm: str
    seed: int
    trial: int | None = None

    @property
    def id(self) -> str:
        kind = f"seed{self.seed}" if self.trial is None else f"trial{self.trial}"
        return f"{self.reward}/{self.algorithm}/{kind}"

    def config(self, settings: Settings, changes: tuple[str, ...], folder: Path) -> Config:
        """The configuration of this run, as long as its budget allows. ValueError if not even one rollout fits."""
        tuning = self.trial is not None
        what, algorithm = settings.rewards[self.reward], settings.algorithms[self.algorithm]
        split = "tune" if tuning else "test"
        clip = f"{{name: clipscore, model: '{settings.judge}', processor: '{settings.judge}'}}"
        words = [
            *settings.common, *(change.format(split=split) for change in what.changes), *algorithm.changes,
            *(algorithm.tuning if tuning else ()), *changes,
            f"report_rewards=[{clip}]", f"run.seed={self.seed}", f"run.folder='{folder}'", "run.minutes=null",
            "run.resume=null", f"run.threads={settings.threads}",
            f"evaluation.pictures={settings.tuning_pictures if tuning else settings.pictures}",
        ]  # fmt: skip
        shortest = recipes.load(algorithm.recipe, [*words, "run.rollouts=1"])
        cost, budget = cost_of_rollout(shortest), settings.tuning_budget if tuning else settings.budget
        rollouts = budget // cost
        if rollouts < 1:
            raise ValueError(f"{self.id}: one rollout costs {cost:,}, the budget is {budget:,}; raise the budget")
        every = max(1, rollouts * shortest.run.updates_per_rollout // (1 if tuning else settings.points))
        length = [f"run.rollouts={rollouts}", f"evaluation.every={every}", f"name={self.algorithm}"]
        return recipes.load(algorithm.recipe, [*words, *length])


def cost_of_rollout(config: Config) -> int:
    """Cost of a rollout and its updates: every evaluation 1, and 2 more where it has a gradient."""
    plan = validate(config)
    return plan.rollout_evaluations + 2 * plan.training_evaluations


def load_settings(path: Path) -> Settings:
    """Read and check a settings file; ValueError names unknown rewards, algorithms and what no recipe accepts."""
    data: Any = recipes.read(path)
    settings = TypeAdapter(Settings).validate_python(data)
    unknown = {
        name for what in settings.rewards.values() for name in what.algorithms or () if name not in settings.algorithms
    }
    if settings.reference not in settings.algorithms:
        unknown.add(settings.reference)
    if unknown:
        raise ValueError(f"{path}: no algorithm is called {', '.join(sorted(unknown))}; give each a recipe")
    return settings
