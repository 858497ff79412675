"""One training run from a configuration to a run folder: the rim, where files, clocks and processes are touched.

runs/<name>-<time>/
    config.yaml  versions.json  rewards.json  metrics.jsonl  evaluations.jsonl
    before_after.png  checkpoint-<update>/  summary.txt
"""

from __future__ import annotations

import json
import os
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import torch

from flowrl_img import plugins, recipes
from flowrl_img.attention import set_attention
from flowrl_img.checkpoint import MANIFEST, latest, load_checkpoint, save_checkpoint
from flowrl_img.config import Config
from flowrl_img.evaluate import Evaluation, evaluate, level
from flowrl_img.live import Live
from flowrl_img.mismatch import NonFiniteError, RolloutMismatchError
from flowrl_img.needs import Needs
from flowrl_img.parallel import Processes
from flowrl_img.parts import RunParts, assemble, read_inputs
from flowrl_img.prompts import choose_evenly, load_prompts, spread
from flowrl_img.report import before_after_sheet, summary, time_split
from flowrl_img.resources import asset
from flowrl_img.rewards import registry
from flowrl_img.rewards.score import InvalidScoreError
from flowrl_img.seeds import key
from flowrl_img.tracking import open_tracker
from flowrl_img.trainer import Trainer, Update
from flowrl_img.types import Sample
from flowrl_img.weights import WeightSets, check_layers, sets_of

__all__ = ["DTYPES", "accelerator", "check_inputs", "load_model", "load_weights", "model_source", "run_training"]

DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16, "fp16": torch.float16}
VERSIONS = ("flowrl-img", "torch", "diffusers", "transformers", "accelerate", "peft", "safetensors", "numpy", "pillow")
FAILED, INTERRUPTED = 1, 130


def model_source(path: str) -> str:
    """`pico` is the packaged model; a path must exist; anything else of the form owner/name is a hub id."""
    if path == "pico":
        return str(asset("pico/model_index.json").parent)
    folder = Path(path)
    if folder.is_dir():
        if not (folder / "model_index.json").is_file():
            raise FileNotFoundError(
                f"model.path: {path} holds no model_index.json: give the folder of a saved pipeline"
            )
        return path
    if path.startswith((".", "/", "~")) or path.count("/") != 1:
        raise FileNotFoundError(f"model.path: no folder {path!r}, and it is no hub id of the form owner/name")
    return path


def load_model(config: Config, device: torch.device) -> Any:
    """The generator with every parameter frozen. Full fine-tuning keeps its weights in float32."""
    family = plugins.resolve("models", config.model.family, where="model.family")
    dtype = DTYPES[config.model.dtype]
    model = family.load(
        model_source(config.model.path), dtype=dtype, device=device, resolution=config.model.resolution,
        weights_dtype=dtype if config.weights.kind == "lora" else torch.float32,
        max_sequence_length=config.model.max_sequence_length,
    )  # fmt: skip
    set_attention(model.network, config.model.attention)
    if config.model.gradient_checkpointing:
        model.network.enable_gradient_checkpointing()
    return model


def load_weights(config: Config, model: Any, needs: Needs) -> WeightSets:
    """The trainable weights on a loaded model, with the sets that the objective and the rollout read."""
    return WeightSets(
        model.network, config.weights, model.lora_targets, seed=key(config.run.seed, "adapter"),
        keep=sets_of(config, needs),
    )  # fmt: skip


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
    folder = _open_folder(config, parts, processes)
    return _Run(config, parts, processes, folder).train()


def accelerator() -> Any:
    """An accelerate.Accelerator where a launcher or a GPU asks for one; a plain CPU run needs none."""
    if int(os.environ.get("WORLD_SIZE", "1")) == 1 and not torch.cuda.is_available():
        return None
    from accelerate import Accelerator

    return Accelerator(cpu=not torch.cuda.is_available())


def _open_folder(config: Config, parts: RunParts, processes: Processes) -> Path:
    """Make the run folder and write what fixes the run; OSError says why it cannot be written."""
    name = f"{config.name}-{time.strftime('%Y%m%d-%H%M%S')}"
    folder = Path(config.run.folder) if config.run.folder else Path("runs") / name
    folder = Path(processes.gather(str(folder))[0])
    if not processes.is_main:
        return folder
    try:
        folder.mkdir(parents=True, exist_ok=True)
        if (folder / "metrics.jsonl").exists():
            _take_up(folder, config)
        (folder / "config.yaml").write_text(recipes.to_yaml(config))
        (folder / "versions.json").write_text(json.dumps(_versions(), indent=1))
        (folder / "rewards.json").write_text(json.dumps(_rewards(config, parts), indent=1))
        (folder / "metrics.jsonl").touch()
    except OSError as error:
        raise OSError(
            f"run.folder: cannot write to {folder}: {error.strerror}; free space or choose another folder"
        ) from error
    return folder


def _take_up(folder: Path, config: Config) -> None:
    """Go on in a folder that holds the run of `run.resume`: rows after its checkpoint are trained again, so they go."""
    source = latest(Path(config.run.resume)) if config.run.resume else None
    if source is None or folder.resolve() not in source.resolve().parents:
        raise ValueError(f"run.folder: {folder} already holds a run; choose another folder")
    update = json.loads((source / MANIFEST).read_text())["update"]
    for name in ("metrics.jsonl", "evaluations.jsonl"):
        file = folder / name
        lines = file.read_text().splitlines(keepends=True) if file.exists() else []
        # A killed run may have left the beginning of a row.
        whole = [line for line in lines if line.endswith("\n") and json.loads(line)["update"] <= update]
        if whole != lines:
            file.write_text("".join(whole))


def _rewards(config: Config, parts: RunParts) -> dict[str, dict[str, Any]]:
    """By column, what each reward is made of: enough to score again as this run did."""
    record = {
        part.scorer.label: registry.describe(r.section(), part.scorer.reward)
        | {"weight": r.weight, "transforms": r.model_dump(mode="json")["transforms"]}
        for r, part in zip(config.rewards, parts.reward.parts, strict=True)
    }
    for r, (label, scorer) in zip(config.report_rewards, parts.report.items(), strict=True):
        record[f"report/{label}"] = registry.describe(r.section(), scorer.reward)
    return record


def _versions() -> dict[str, str]:
    found = {"python": sys.version.split()[0]}
    for name in VERSIONS:
        try:
            found[name] = version(name)
        except PackageNotFoundError:
            found[name] = "not installed as a package"
    return found


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
                self._release()

    def _release(self) -> None:
        """A folder in which nothing was trained or evaluated is free for the next try."""
        metrics = self.folder / "metrics.jsonl"
        if metrics.is_file() and not metrics.stat().st_size and not any(self.folder.glob("checkpoint-*")):
            metrics.unlink()

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
            self._evaluate(trainer, "before", "reference")
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
        with _disk(self.folder), (self.folder / name).open("a") as file:
            file.write(json.dumps(row) + "\n")
            self.tracker.log(name, row)

    def _evaluate(self, trainer: Trainer, label: str, weight_set: str) -> None:
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
        self.evaluations[label] = found
        trainer.clock["evaluation"] += time.monotonic() - began
        means = {column: found.mean(column) for column in found.columns}
        self._append(
            "evaluations.jsonl",
            {
                "label": label,
                "update": trainer.update,
                "means": means,
                "by_task": found.by_tag("reward"),
                "failed": found.failed,
            },
        )
        self.live.say(f"held-out {label}: reward {level(found).value:.4f} ({len(samples)} pictures)")

    def _save(self, trainer: Trainer) -> None:
        if self.processes.is_main:
            with _disk(self.folder):
                self.live.say(f"saved {save_checkpoint(self.folder, trainer)}")
        self.processes.wait()

    def _finish(self, trainer: Trainer, *, evaluated: bool) -> None:
        self._save(trainer)
        lines = []
        if evaluated:
            self._evaluate(trainer, "after", self._tuned(trainer))
            before, after = self.evaluations["before"], self.evaluations["after"]
            if self.processes.is_main:
                with _disk(self.folder):
                    before_after_sheet(self.folder / "before_after.png", self.parts.held_out, before, after)
                lines = summary(before, after)
        total = time.monotonic() - self.began
        phases = ("sampling", "scoring", "training", "evaluation")
        lines.insert(0, f"{trainer.update} updates in {total:.0f} s: {time_split(trainer.clock, total, phases)}")
        if self.processes.is_main:
            with _disk(self.folder):
                (self.folder / "summary.txt").write_text("\n".join(lines) + "\n")
        for line in lines:
            self.live.say(line)


def _spread_first(samples: Sequence[Sample], first: int) -> tuple[Sample, ...]:
    """The same samples with `first` of different tasks in front, so that the sheet shows every task."""
    front = spread(samples, first)
    chosen = {s.id for s in front}
    return (*front, *(s for s in samples if s.id not in chosen))


@contextmanager
def _disk(folder: Path) -> Iterator[None]:
    from safetensors import SafetensorError

    try:
        yield
    except (OSError, SafetensorError) as error:  # safetensors tells a full disk in an error of its own
        reason = getattr(error, "strerror", None) or error
        raise OSError(f"cannot write to {folder}: {reason}; what was written before is complete") from error
