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
    "FollowConfig",
    "HistoryConfig",
    "LoraConfig",
    "MatchingConfig",
    "ModelConfig",
    "OptimizerConfig",
    "PartConfig",
    "PromptsConfig",
    "RewardConfig",
    "RolloutConfig",
    "RunConfig",
    "TailConfig",
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
    dtype: Literal["fp32", "bf16", "fp16"] = Field("fp32", description="precision of the network's matrix products")
    attention: Literal["auto", "sdpa", "xformers"] = Field("auto", description="attention kernel; auto is sdpa")
    resolution: int = Field(64, gt=0, multiple_of=8, description="height and width in pixels")
    max_sequence_length: int = Field(1, ge=0, le=512, description="T5 tokens (zeros without T5)")
    gradient_checkpointing: bool = Field(False, description="less memory, one more forward per training point")


class LoraConfig(Section):
    rank: int = Field(32, gt=0, description="rank of each adapter")
    alpha: float = Field(64, gt=0, description="the adapter is scaled by alpha / rank")
    targets: tuple[str, ...] = Field((), description="module names; empty: those of the family")


class EmaConfig(Section):
    """The average that is evaluated and saved."""

    decay: float = Field(0.9, ge=0, lt=1, description="upper bound; early updates use (1 + s) / (10 + s)")
    every: int = Field(1, gt=0, description="optimizer updates between two averages")


class FollowConfig(Section):
    """How a set of weights follows the trained ones; kept only where the objective or the rollout reads it."""

    decay: PartConfig = Field(PartConfig(name="copy"), description="decay schedule plug-in and its fields")
    after: Literal["rollout", "update"] = Field("rollout", description="when it follows: after each rollout or update")


class WeightsConfig(Section):
    """What is trained, and the sets of weights beside it."""

    kind: Literal["lora", "full"] = Field("lora", description="adapters, or every weight with a frozen reference copy")
    lora: LoraConfig = LoraConfig()
    only: tuple[str, ...] = Field(
        (), description="full: train the weights whose name contains one of these; empty: all"
    )
    ema: EmaConfig | None = Field(EmaConfig(), description="null: evaluate and save the trained weights themselves")
    old: FollowConfig = Field(
        FollowConfig(), description="the old policy: by default, the weights that drew the rollout"
    )
    trust: FollowConfig = Field(
        FollowConfig(decay=PartConfig(name="linear", limit=0.3)), description="the centre of AWM's trust region"
    )

    @model_validator(mode="after")
    def _says_nothing_that_is_not_used(self) -> WeightsConfig:
        if self.kind == "full" and self.lora != LoraConfig():
            raise ValueError("kind = full has no adapter and does not use lora: leave it out, or set weights.kind=lora")
        if self.only and self.kind != "full":
            raise ValueError("only chooses among the weights of kind = full; with LoRA, choose layers by lora.targets")
        return self


class PromptsConfig(Section):
    """Prompt files: packaged names such as `pico/train_geneval`, or paths of .jsonl / .txt files."""

    train: str = Field("pico/train_geneval", description="prompts of the rollouts")
    evaluation: str = Field("pico/test_geneval", description="held-out prompts")
    balance: str | None = Field("tag", description="metadata key whose values are drawn equally often; null: uniform")
    shares: dict[str, Annotated[int, Field(ge=0)]] | None = Field(
        None, description="turns of each value of `balance` in a training round; null: one each; left out: none"
    )

    @model_validator(mode="after")
    def _shares_something(self) -> PromptsConfig:
        if self.shares is not None and (self.balance is None or not any(self.shares.values())):
            raise ValueError("shares needs a balance key, and at least one share above 0")
        return self


class RewardConfig(PartConfig):
    """A reward and how a run asks it. Its own options stand beside these keys."""

    weight: float = Field(1.0, description="factor in the aggregate; 0: scored and logged only")
    label: str = Field("", description="name of its column in logs; empty: the reward's name")
    transforms: tuple[str | PartConfig, ...] = Field(
        (), description="done to its values before the aggregate: affine, clip, then rank, log_tame"
    )
    on_failure: Literal["raise", "mask"] = Field("raise", description="a failed score stops the run, or is left out")
    failure_budget: float = Field(
        0.05, ge=0, le=1, description="mask: the run stops above this share of failures in the last 500 pictures"
    )
    batch_size: int | None = Field(None, gt=0, description="pictures it is given at once; null: all of a process")
    cache: int = Field(0, ge=0, description="scores remembered by picture, prompt and metadata; 0: none")

    def section(self) -> dict[str, Any]:
        """As the registry of rewards reads it: only what was set."""
        return {"name": self.name, **self.model_dump(exclude_unset=True)}


class WindowConfig(Section):
    """Which steps are stochastic and trained: a list of them, or `size` neighbours that move within [low, high)."""

    steps: tuple[int, ...] | None = Field(
        None, min_length=1, description="exactly these steps, 0 the noisiest; null: as the other keys say"
    )
    size: int | None = Field(None, gt=0, description="steps in the window; null: the whole range")
    low: int = Field(0, ge=0, description="first step a window may hold")
    high: int | None = Field(None, description="end (exclusive) of the range; null: all but the last step")
    schedule: Literal["random", "progressive", "decay", "exp_decay", "fixed"] = Field(
        "random",
        description="how it moves; decay and exp_decay: progressive, longer at noisy steps; fixed: stays at low",
    )
    every: int = Field(1, gt=0, description="rollouts that a window stays where it is; with decay, exp_decay: at most")
    stride: int = Field(1, gt=0, description="progressive, decay, exp_decay: steps of one move")
    shortest: int = Field(1, gt=0, description="decay: rollouts that a window stays, at least")
    rate: float = Field(0.1, ge=0, description="exp_decay: stays shrink by exp(-rate) with every step after `knee`")
    knee: int = Field(13, ge=0, description="exp_decay: last start at which a window stays `every` rollouts")

    @model_validator(mode="after")
    def _says_nothing_that_is_not_used(self) -> WindowConfig:
        moves = {"every", "stride"}
        by_schedule = {"random": {"every"}, "progressive": moves, "fixed": set()}
        by_schedule |= {"decay": moves | {"shortest"}, "exp_decay": moves | {"rate", "knee"}}
        used = {"steps", "size", "low", "high", "schedule", *by_schedule[self.schedule]}
        who = f"schedule {self.schedule!r}"
        if self.size is None:
            used, who = {"steps", "low", "high"}, "a window of no size, which does not move,"
        if self.steps is not None:
            used, who = {"steps"}, "a list of steps"
        changed = (name for name, field in type(self).model_fields.items() if getattr(self, name) != field.default)
        if unused := sorted(set(changed) - used):
            raise ValueError(f"{who} does not use {', '.join(unused)}: leave it out")
        return self


class TailConfig(Section):
    """Few solver steps after the last stochastic step in place of the rest of the grid, as in MixGRPO-Flash.

    Where `rollout.tail` is left out, the grid is walked to its end.
    """

    ratio: float = Field(0.4, gt=0, le=1, description="share of the remaining steps that is taken")
    shift: float = Field(3.0, gt=0, description="time shift of the levels, best that of the model's own grid")
    solver: PartConfig = Field(PartConfig(name="dpm2_published"), description="solver plug-in, without noise")


class RolloutConfig(Section):
    """How the group samples are drawn."""

    kind: Literal["independent", "anchor_fork"] = Field(
        "independent", description="anchor_fork: each path forks at every stochastic step; each successor is a picture"
    )
    groups: int = Field(8, gt=0, description="prompts per rollout, over all processes")
    group_size: int = Field(12, gt=1, description="images per prompt; with anchor_fork: per prompt and step")
    branches: int = Field(6, gt=1, description="anchor_fork: successors of each state, the pictures that are compared")
    steps: int = Field(10, gt=0, description="denoising steps")
    guidance: float = Field(1.0, ge=0, description="CFG scale; 1 runs the network once per step")
    step: PartConfig = Field(PartConfig(name="flow_sde"), description="step rule plug-in and its fields")
    window: WindowConfig = WindowConfig()
    tail: TailConfig | None = Field(None, description="null: the grid is walked to its end")
    solver: PartConfig | None = Field(
        None, description="solver plug-in of objectives that train on clean samples, in place of `step` and `window`"
    )
    batch: int = Field(32, gt=0, description="images sampled at once in each process")
    shared_noise: bool = Field(
        False,
        description="one initial noise for a group; until the first draw, independent paths compute its members once",
    )
    policy: Literal["current", "old", "trust", "ema"] = Field("current", description="weights that draw the rollouts")
    policy_from: int = Field(0, ge=0, description="updates after which `policy` draws; the current weights until then")


class MatchingConfig(Section):
    """How clean samples are noised again, for objectives that train on them."""

    times: PartConfig = Field(PartConfig(name="grid"), description="time law plug-in and its fields")
    share: Literal["sample", "group", "rollout"] | None = Field(
        None, description="who gets the same times; null: each sample its own, or a group where the objective asks"
    )


class HistoryConfig(Section):
    """Running statistics per prompt, for `baseline: history`."""

    size: int = Field(32, gt=0, description="rewards of a prompt that are kept")
    min_count: int = Field(16, gt=0, description="until a prompt has so many, those of the rollout stand in")

    @model_validator(mode="after")
    def _comes_to_be_used(self) -> HistoryConfig:
        if self.min_count > self.size:
            raise ValueError(
                f"min_count = {self.min_count} is never reached: {self.size} rewards of a prompt are kept; use "
                f"size = {self.min_count} or more, or min_count = {self.size} or fewer"
            )
        return self


class AdvantageConfig(Section):
    baseline: Literal["group", "leave_one_out", "history", "none"] = Field(
        "group", description="what a reward is compared with"
    )
    scale: Literal["group", "global", "none", "sign"] = Field(
        "group", description="spread that a group's rewards are divided by; sign: +1 or -1 in place of a spread"
    )
    eps: float = Field(1e-4, ge=0, description="added to the spread")
    history: HistoryConfig = HistoryConfig()
    clip: float = Field(5.0, gt=0, description="advantages are cut at this absolute value")


class OptimizerConfig(Section):
    lr: float = Field(3e-4, gt=0, description="learning rate of AdamW")
    betas: tuple[Beta, Beta] = Field((0.9, 0.999), description="decay of the gradient's two moments")
    eps: float = Field(1e-8, gt=0, description="added to the root of the second moment")
    weight_decay: float = Field(1e-4, ge=0, description="decoupled weight decay")
    grad_clip: float = Field(1.0, gt=0, description="largest norm of the gradient")
    warmup: int = Field(0, ge=0, description="updates of linear warm-up")


class EvaluationConfig(Section):
    """Held-out evaluation, with equal seeds before and after."""

    pictures: int = Field(192, gt=0, description="pictures, equally many per task")
    steps: int = Field(20, gt=0, description="denoising steps")
    solver: PartConfig = Field(PartConfig(name="euler"), description="solver plug-in and its fields")
    guidance: float = Field(1.0, ge=0, description="CFG scale")
    every: int | None = Field(None, gt=0, description="updates between evaluations; null: before and after only")
    batch: int = Field(64, gt=0, description="pictures sampled at once in each process")
    sheet: int = Field(12, ge=0, description="fixed prompts on the before/after picture")


class RunConfig(Section):
    rollouts: int | None = Field(30, gt=0, description="rollouts in all; null: until `minutes`")
    minutes: float | None = Field(None, gt=0, description="stop training after this time")
    updates_per_rollout: int = Field(2, gt=0, description="optimizer updates; equal shares of the rollout's pictures")
    micro_batch: int = Field(32, gt=0, description="(sample, step) points per forward of the trained network")
    seed: int = Field(0, description="with prompt, sample and step it fixes every random number")
    folder: str | None = Field(None, description="run folder; null: runs/<recipe>-<time>")
    save_every: int | None = Field(
        None, gt=0, description="updates between checkpoints, each taken at the end of its rollout; null: at the end"
    )
    overlap: bool = Field(
        False, description="draw the next rollout while this one is scored; it is then one rollout off-policy"
    )
    threads: int | None = Field(None, gt=0, description="CPU threads; null: torch's default")
    resume: str | None = Field(
        None, description="run folder or checkpoint to go on from; a rollout that was interrupted is drawn anew"
    )
    tracker: Literal["none", "tensorboard", "wandb"] = Field(
        "none", description="where metrics go besides metrics.jsonl"
    )


class Config(Section):
    name: str = Field("pico", description="name of the run; a recipe file's own name where it is not given")
    description: str = Field("", description="one line for `flowrl-img recipes list`")
    model: ModelConfig = ModelConfig()
    weights: WeightsConfig = WeightsConfig()
    prompts: PromptsConfig = PromptsConfig()
    rewards: tuple[RewardConfig, ...] = Field((RewardConfig(name="geneval"),), description="what is trained on")
    aggregate: Literal["sum", "advantage_sum", "gdpo", "geometric"] = Field(
        "sum", description="weighted sum or geometric mean of values; or of each reward's own advantages"
    )
    report_rewards: tuple[RewardConfig, ...] = Field((), description="held-out rewards: reported, never trained on")
    rollout: RolloutConfig = RolloutConfig()
    matching: MatchingConfig = MatchingConfig()
    advantage: AdvantageConfig = AdvantageConfig()
    objective: PartConfig = Field(PartConfig(name="flow_grpo"), description="objective plug-in and its fields")
    optimizer: OptimizerConfig = OptimizerConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    run: RunConfig = RunConfig()

    @model_validator(mode="after")
    def _has_an_end(self) -> Config:
        if self.run.rollouts is None and self.run.minutes is None:
            raise ValueError("a run needs an end: set run.rollouts or run.minutes")
        return self
