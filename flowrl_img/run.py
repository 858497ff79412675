"""One training run from a configuration to a run folder: the rim, where files, clocks and processes are touched."""

from __future__ import annotations

import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from flowrl_img import plugins, recipes
from flowrl_img.checkpoint import latest, load_checkpoint, save_checkpoint
from flowrl_img.config import Config
from flowrl_img.evaluate import Evaluation, evaluate, level
from flowrl_img.live import Live
from flowrl_img.loading import accelerator, load_model, load_weights, model_source
from flowrl_img.mismatch import NonFiniteError, RolloutMismatchError
from flowrl_img.parallel import Processes
from flowrl_img.parts import RunParts, assemble, read_inputs
from flowrl_img.prompts import choose_evenly, load_prompts, spread
from flowrl_img.report import before_after_sheet, summary, time_split
from flowrl_img.rewards.score import InvalidScoreError
from flowrl_img.run_folder import append, open_folder, release, rows_of, writing
from flowrl_img.tracking import open_tracker
from flowrl_img.trainer import Trainer, Update
from flowrl_img.types import Sample
from flowrl_img.weights import WeightSets, check_layers

__all__ = ["check_inputs", "run_training"]

FAILED, INTERRUPTED = 1, 130


def check_inputs(config: Config) -> tuple[str, ...]:
    """The files that the configuration names, and the layers: ValueError or OSError. No weights are loaded.

    Returns the prompt files that a packaged recipe leaves its user to bring and that are not there yet: they are no
    mistake of the configuration, and what depends on them is not checked.
    """
    missing = _to_bring(config)
    if missing:
        for file in {config.prompts.train, config.prompts.evaluation} - {*missing}:
            load_prompts(file)
    else:
        read_inputs(config)
    _check_paths(config)
    return missing


def _to_bring(config: Config) -> tuple[str, ...]:
    """Absent prompt files that the packaged recipe of this name has itself, in place of an override."""
    if config.name not in recipes.names():
        return ()
    own = recipes.read(recipes.find(config.name)).get("prompts", {})
    chosen = {key: getattr(config.prompts, key) for key in ("train", "evaluation")}
    return tuple(
        file for key, file in chosen.items() if file == own.get(key) and Path(file).suffix and not Path(file).is_file()
    )


def _check_paths(config: Config) -> None:
    source = model_source(config.model.path)
    targets, only = config.weights.lora.targets, config.weights.only
    blueprint = getattr(plugins.resolve("models", config.model.family, where="model.family"), "blueprint", None)
    if blueprint is not None and (targets or only):
        check_layers(blueprint(source), targets if config.weights.kind == "lora" else (), only)
    if config.run.resume:
        try:
            latest(Path(config.run.resume))
        except FileNotFoundError as error:
            raise FileNotFoundError(f"run.resume: {error}") from error


def run_training(config: Config) -> int:
    """Train as configured; returns the exit code: 0, 1 after a failure that stopped training, 130 after Ctrl-C.

    Wrong input raises ValueError or OSError before a model is loaded.
    """
    if config.run.threads:
        torch.set_num_threads(config.run.threads)
    parts = assemble(config)
    _check_paths(config)
    processes = Processes(accelerator())
    folder = open_folder(config, parts, processes)
    return _Run(config, parts, processes, folder).train()


class _Run:
    """State of one run between its phases."""

    def __init__(self, config: Config, parts: RunParts, processes: Processes, folder: Path) -> None:
        self.config, self.parts, self.processes, self.folder = config, parts, processes, folder
        self.live = Live(config, enabled=processes.is_main)
        self.tracker = open_tracker(config, folder, enabled=processes.is_main)
        self.began = time.monotonic()
        self.evaluations: dict[str, Evaluation] = {}

    def train(self) -> int:
        """All phases; whatever stops training, the run folder stays usable."""
        try:
            return self._train()
        finally:
            self.tracker.close()
            self.live.close()  # gives the terminal its cursor back
            if self.processes.is_main:
                release(self.folder)

    def _train(self) -> int:
        code, trainer = 0, None
        try:
            model = load_model(self.config, self.processes.device)
            weights = load_weights(self.config, model, self.parts.objective.needs)
            self.live.say(
                f"{self.folder}: {weights.num_trainable:,} trainable parameters in {weights.touched_layers} layers, "
                f"network {sum(p.numel() for p in model.network.parameters()):,}"
            )
            trainer = self._trainer(model, weights)
            if self.config.run.resume:
                load_checkpoint(Path(self.config.run.resume), trainer)
            self._evaluate(trainer, "before", "reference", update=0)
            self._updates(trainer)
        except KeyboardInterrupt:
            self.live.say("interrupted: keeping what was trained so far")
            code = INTERRUPTED
        except (NonFiniteError, RolloutMismatchError, InvalidScoreError) as error:
            self.live.say(f"error: {error}")
            code = FAILED
        if trainer is not None:
            self._finish(trainer, evaluated=code == 0)
        return code

    def _trainer(self, model: Any, weights: WeightSets) -> Trainer:
        return Trainer(
            self.config, self.parts, model, weights, self.processes, progress=self.live.phase, warn=self.live.say
        )

    def _updates(self, trainer: Trainer) -> None:
        every, save_every = self.config.evaluation.every, self.config.run.save_every
        due = False
        if self._left_unevaluated(trainer.update):
            self._evaluate(trainer, f"update {trainer.update}", self._tuned(trainer))
        for update in trainer.run():
            self._log(update)
            self.live.update(update)
            due = due or bool(save_every and update.update % save_every == 0)
            # Inside a rollout there is nothing to go on from: its pictures are not kept.
            if due and trainer.rollout > update.rollout:
                self._save(trainer)
                due = False
            if every and update.update % every == 0:
                self._evaluate(trainer, f"update {update.update}", self._tuned(trainer))

    def _left_unevaluated(self, update: int) -> bool:
        """Whether the run was stopped between the checkpoint of `update` and the evaluation that was due there."""
        every = self.config.evaluation.every
        if not (every and update and update % every == 0):
            return False
        known = {row["update"] for row in rows_of(self.folder, "evaluations.jsonl")}
        return self.processes.gather(update not in known)[0]

    @staticmethod
    def _tuned(trainer: Trainer) -> str:
        return "ema" if "ema" in trainer.weights.sets else "current"

    def _log(self, update: Update) -> None:
        row = {
            "update": update.update,
            "rollout": update.rollout,
            **update.metrics,
            "seconds": {k: round(v, 3) for k, v in update.seconds.items()},
        }
        self._append("metrics.jsonl", row)

    def _append(self, name: str, row: dict[str, Any]) -> None:
        if not self.processes.is_main:
            return
        with writing(self.folder):
            append(self.folder, name, row)
            self.tracker.log(name, row)

    def _evaluate(self, trainer: Trainer, label: str, weight_set: str, update: int | None = None) -> None:
        """Evaluate one of the weight sets; update: which one's row it is, if not that of the trainer."""
        config = self.config.evaluation
        samples = choose_evenly(self.parts.held_out, config.pictures, self.config.prompts.balance)
        samples = _spread_first(samples, config.sheet)
        mine = len(self.processes.share(samples))
        began = time.monotonic()
        with trainer.weights.use(weight_set):
            found = evaluate(
                trainer.model, self.parts.held_out, samples, self.parts.reward, num_steps=config.steps,
                guidance=config.guidance, batch=config.batch, solver=self.parts.evaluation_solver,
                processes=self.processes, keep=config.sheet,
                report=self.parts.report, progress=lambda n: self.live.phase(f"evaluating {label}", n, mine),
            )  # fmt: skip
        trainer.clock["evaluation"] += time.monotonic() - began
        self._record(label, trainer.update if update is None else update, found)

    def _record(self, label: str, update: int, found: Evaluation) -> None:
        self.evaluations[label] = found
        row = {
            "label": label,
            "update": update,
            "means": {column: found.mean(column) for column in found.columns},
            "by_task": found.by_tag("reward"),
            "failed": found.failed,
        }
        # A run that goes on in its own folder draws the base again, for the sheet: its row is there.
        if label != "before" or all(r["label"] != label for r in rows_of(self.folder, "evaluations.jsonl")):
            self._append("evaluations.jsonl", row)
        self.live.say(f"held-out {label}: reward {level(found).value:.4f} ({len(found.samples)} pictures)")

    def _save(self, trainer: Trainer) -> None:
        if self.processes.is_main:
            with writing(self.folder):
                self.live.say(f"saved {save_checkpoint(self.folder, trainer)}")
        self.processes.wait()

    def _finish(self, trainer: Trainer, *, evaluated: bool) -> None:
        self._save(trainer)
        lines = []
        if evaluated:
            # The last update may just have been evaluated in its turn.
            if (same := self.evaluations.get(f"update {trainer.update}")) is not None:
                self._record("after", trainer.update, same)
            else:
                self._evaluate(trainer, "after", self._tuned(trainer))
            before, after = self.evaluations["before"], self.evaluations["after"]
            if self.processes.is_main:
                with writing(self.folder):
                    before_after_sheet(self.folder / "before_after.png", self.parts.held_out, before, after)
                lines = summary(before, after)
        total = time.monotonic() - self.began
        phases = ("sampling", "scoring", "training", "evaluation")
        lines.insert(0, f"{trainer.update} updates in {total:.0f} s: {time_split(trainer.clock, total, phases)}")
        if self.processes.is_main:
            with writing(self.folder):
                (self.folder / "summary.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            self.live.say(line)


def _spread_first(samples: Sequence[Sample], first: int) -> tuple[Sample, ...]:
    """The same samples with `first` of different tasks in front, so that the sheet shows every task."""
    front = spread(samples, first)
    chosen = {s.id for s in front}
    return (*front, *(s for s in samples if s.id not in chosen))
