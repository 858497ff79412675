"""The run configuration: strict, frozen, one place for every default.

A recipe is a YAML file of these sections. Unknown keys are errors. Parts with a `name` (step rule, objective, rewards)
are plug-ins: their other keys are the fields of the object behind the name, checked by `flowrl_img.validation`. Sizes
that must divide or fit into each other are checked by `flowrl_img.plan`, which knows the number of processes.
"""

from __future__ import annotations

from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, model_validator

__all__ = [
    "AdvantageConfig",
    "Config",
    "EmaConfig",
    "EvaluationConfig",
    "LoraConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartConfig",
    "PromptsConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "WeightsConfig",
    "WindowConfig",
]


Beta = Annotated[float, Field(ge=0, lt=1)]


class Section(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True, validate_default=True, allow_inf_nan=False)


class PartConfig(BaseModel):
    """A plug-in by name; further keys are its fields."""

    model_config = ConfigDict(extra="allow", frozen=True, allow_inf_nan=False)
    name: str = Field(min_length=1)

    def section(self) -> dict[str, Any]:
        return {"name": self.name, **(self.model_extra or {})}


class ModelConfig(Section):
    """Where the generator comes from and in which precision its frozen network runs."""

    path: str = Field("pico", description="`pico` (embedded), a local folder or a hub id")
    family: str = Field("sd3", description="model family plug-in")
    dtype: Literal["fp32", "bf16", "fp16"] = "fp32"
    attention: Literal["auto", "sdpa", "xformers"] = "auto"
    resolution: int = Field(64, gt=0, multiple_of=8, description="height and width in pixels")
    max_sequence_length: int = Field(1, ge=0, le=512, description="T5 tokens (zeros without T5)")
    gradient_checkpointing: bool = False


class LoraConfig(Section):
    rank: int = Field(32, gt=0)
    alpha: float = Field(64, gt=0)
    targets: tuple[str, ...] = Field((), description="module names; empty: those of the family")


class EmaConfig(Section):
    decay: float = Field(0.9, ge=0, lt=1, description="upper bound; early updates use (1 + s) / (10 + s)")
    every: int = Field(1, gt=0, description="optimizer updates between two averages")


class WeightsConfig(Section):
    """What is trained, and the average of it that is evaluated."""

    kind: Literal["lora", "full"] = "lora"
    lora: LoraConfig = LoraConfig()
    ema: EmaConfig | None = EmaConfig()


class PromptsConfig(Section):
    """Prompt files: packaged names such as `pico/train_geneval`, or paths of .jsonl / .txt files."""

    train: str = "pico/train_geneval"
    evaluation: str = "pico/test_geneval"
    balance: str | None = Field("tag", description="metadata key whose values are drawn equally often; null: uniform")


class RewardConfig(PartConfig):
    weight: float = Field(1.0, description="factor in the weighted sum; 0: scored and logged only")

    def options(self) -> dict[str, Any]:
        """The fields of the reward itself."""
        return dict(self.model_extra or {})


class WindowConfig(Section):
    """Which steps are stochastic and trained."""

    size: int | None = Field(None, gt=0, description="steps in the window; null: all but the last")
    low: int = Field(0, ge=0, description="first step a window may hold")
    high: int | None = Field(None, description="end (exclusive) of the range; null: all but the last step")
    schedule: Literal["random", "progressive", "fixed"] = "random"
    every: int = Field(1, gt=0, description="rollouts a window stays where it is (progressive)")


class RolloutConfig(Section):
    """How the group samples are drawn."""

    groups: int = Field(8, gt=0, description="prompts per rollout, over all processes")
    group_size: int = Field(12, gt=1, description="images per prompt")
    steps: int = Field(10, gt=0)
    guidance: float = Field(1.0, ge=0, description="CFG scale; 1 runs the network once per step")
    step: PartConfig = PartConfig(name="flow_sde")
    window: WindowConfig = WindowConfig()
    batch: int = Field(32, gt=0, description="images sampled at once in each process")
    shared_noise: bool = Field(False, description="one initial noise for a whole group")


class AdvantageConfig(Section):
    scale: Literal["group", "global", "none"] = "group"
    eps: float = Field(1e-4, ge=0)
    clip: float = Field(5.0, gt=0)


class OptimizerConfig(Section):
    lr: float = Field(3e-4, gt=0)
    betas: tuple[Beta, Beta] = (0.9, 0.999)
    eps: float = Field(1e-8, gt=0)
    weight_decay: float = Field(1e-4, ge=0)
    grad_clip: float = Field(1.0, gt=0)
    warmup: int = Field(0, ge=0, description="updates of linear warm-up")


class EvaluationConfig(Section):
    """Held-out evaluation, with equal seeds before and after."""

    pictures: int = Field(192, gt=0, description="pictures, equally many per task")
    steps: int = Field(20, gt=0)
    guidance: float = Field(1.0, ge=0)
    every: int | None = Field(None, gt=0, description="updates between evaluations; null: before and after only")
    batch: int = Field(64, gt=0)
    sheet: int = Field(12, ge=0, description="fixed prompts on the before/after picture")


class RunConfig(Section):
    rollouts: int | None = Field(30, gt=0, description="rollouts in all; null: until `minutes`")
    minutes: float | None = Field(None, gt=0, description="stop training after this time")
    updates_per_rollout: int = Field(2, gt=0)
    micro_batch: int = Field(32, gt=0, description="(sample, step) points per forward of the trained network")
    seed: int = 0
    folder: str | None = Field(None, description="run folder; null: runs/<recipe>-<time>")
    save_every: int | None = Field(None, gt=0, description="updates between checkpoints; null: at the end")
    reward_policy: Literal["raise", "mask"] = "raise"
    threads: int | None = Field(None, gt=0, description="CPU threads; null: torch's default")
    resume: str | None = Field(None, description="run folder or checkpoint to go on from")
    tracker: Literal["none", "tensorboard", "wandb"] = "none"


class Config(Section):
    name: str = "pico"
    description: str = ""
    model: ModelConfig = ModelConfig()
    weights: WeightsConfig = WeightsConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: tuple[RewardConfig, ...] = (RewardConfig(name="geneval"),)
    report_rewards: tuple[RewardConfig, ...] = Field((), description="held-out rewards: reported, never trained on")
    rollout: RolloutConfig = RolloutConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: PartConfig = PartConfig(name="flow_grpo")
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _has_an_end(self) -> Config:
        if self.run.rollouts is None and self.run.minutes is None:
            raise ValueError("a run needs an end: set run.rollouts or run.minutes")
        return self
