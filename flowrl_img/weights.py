"""Weight sets of one network: the trained one, sets that follow it, and the frozen reference. One owner switches them.

`current` is trained. `ema` is its average, for evaluation and export. `old` is the policy that an objective compares
with (and that may draw the rollouts), `trust` the centre of a trust region; they follow by decay schedules of their
own. A set other than the current one is a list of tensors beside the trainable parameters; `use` exchanges the storage
of the two and gives it back on leaving, also after an exception and when nested. Nothing is copied, so the trained
weights come back bit for bit, and which weights train never changes. The reference of a LoRA run is the base network
with its adapter layers off; of a full run, a frozen copy.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torch import Tensor, nn

from flowrl_img.adapters import adapter_layers, adapters_off
from flowrl_img.config import Config, WeightsConfig
from flowrl_img.decays import Decay, Warmup
from flowrl_img.needs import Needs
from flowrl_img.plugins import build, nearest

__all__ = ["ADAPTER", "WeightSets", "check_layers", "decay_of", "sets_of"]

ADAPTER = "default"
FOLLOWERS = ("old", "trust")


def sets_of(config: Config, needs: Needs) -> frozenset[str]:
    """The following sets that a run has to keep: those whose velocity is read, and the one that draws the rollouts.

    At transitions the old velocity is the rollout's own, and no set is needed for it.
    """
    read = set(needs.velocities) - (set() if needs.matching else {"old"})
    return frozenset((read | {config.rollout.policy}) & set(FOLLOWERS))


def decay_of(config: WeightsConfig, name: str) -> Decay:
    """The schedule by which the set "old" or "trust" follows. ValueError for one that does not exist."""
    decay: Decay = build("decays", getattr(config, name).decay.section(), f"weights.{name}.decay")
    return decay


def check_layers(network: nn.Module, targets: Collection[str], only: Collection[str]) -> None:
    """ValueError for a LoRA target or a part in `only` that matches nothing. The network may be on the meta device."""
    linear = [name for name, module in network.named_modules() if isinstance(module, nn.Linear)]
    for target in targets:
        if not any(name == target or name.endswith(f".{target}") for name in linear):
            suffixes = {".".join(name.split(".")[-2:]) for name in linear} | {name.split(".")[-1] for name in linear}
            suffixes -= {s for s in suffixes if s.isdigit()}
            raise ValueError(f"weights.lora.targets: {target!r} matches no linear layer; {nearest(target, suffixes)}")
    names = [name for name, _ in network.named_parameters()]
    for part in only:
        if not any(part in name for name in names):
            words = {word for name in names for word in name.split(".") if not word.isdigit()}
            raise ValueError(f"weights.only: {part!r} is part of no parameter's name; {nearest(part, words)}")


class WeightSets:
    """`trainable` maps parameter names to float32 parameters; `sets` holds the tensors of the other sets."""

    def __init__(
        self, network: nn.Module, config: WeightsConfig, default_targets: tuple[str, ...], *, seed: int,
        keep: Collection[str] = (),
    ) -> None:  # fmt: skip
        """Adds the adapter (or frees weights) in place. ValueError if a target or a part in `only` matches nothing.

        keep: which of "old" and "trust" this run needs; each starts as a copy of the weights.
        """
        self.network = network
        self.config = config
        self._layers: list[Any] = []
        targets = config.lora.targets or default_targets
        check_layers(network, targets if config.kind == "lora" else (), config.only)
        with torch.random.fork_rng(devices=[]):
            torch.manual_seed(seed)
            if config.kind == "lora":
                self._add_lora(targets)
            else:
                self._free(config.only)
        self.trainable = {name: p for name, p in network.named_parameters() if p.requires_grad}
        for parameter in self.trainable.values():
            # bf16 weights ignore updates smaller than 1/256 of themselves.
            parameter.data = parameter.data.float()
        self.sets: dict[str, list[Tensor]] = {}
        if config.kind == "full":
            self.remember("reference")
        if config.ema is not None:
            self.remember("ema")
        self.decays: dict[str, Decay] = {}
        for name in sorted(keep):
            self.decays[name] = decay_of(config, name)
            self.remember(name)

    def _free(self, only: tuple[str, ...]) -> None:
        for name, parameter in self.network.named_parameters():
            parameter.requires_grad_(not only or any(part in name for part in only))

    def _add_lora(self, targets: tuple[str, ...]) -> None:
        from peft import LoraConfig

        network: Any = self.network
        network.add_adapter(
            LoraConfig(
                r=self.config.lora.rank, lora_alpha=self.config.lora.alpha, target_modules=list(targets),
                init_lora_weights="gaussian",
            ),
            adapter_name=ADAPTER,
        )  # fmt: skip
        self._layers = adapter_layers(network)

    @property
    def touched_layers(self) -> int:
        """LoRA layers, or trainable tensors in a full run."""
        return len(self._layers) if self.config.kind == "lora" else len(self.trainable)

    @property
    def num_trainable(self) -> int:
        return sum(p.numel() for p in self.trainable.values())

    def remember(self, name: str) -> None:
        """Make (or overwrite) the set `name` as a copy of the current weights."""
        self.sets[name] = [p.detach().clone() for p in self.trainable.values()]

    @torch.no_grad()
    def average(self, name: str, decay: float) -> None:
        """set <- decay * set + (1 - decay) * current."""
        torch._foreach_lerp_(self.sets[name], [p.data for p in self.trainable.values()], 1 - decay)

    def after_update(self, update: int) -> None:
        """After optimizer update number `update` (from 1). Schedules count the updates before it: s = update - 1."""
        ema = self.config.ema
        if ema is not None and update % ema.every == 0:
            self.average("ema", Warmup(ema.decay)(update - 1))
        self._follow("update", update - 1)

    def after_rollout(self, updates: int) -> None:
        """After the last update of a rollout. Schedules count all updates so far: s = `updates`."""
        self._follow("rollout", updates)

    def _follow(self, moment: str, s: int) -> None:
        for name, decay in self.decays.items():
            if getattr(self.config, name).after == moment:
                self.average(name, decay(s))

    @contextmanager
    def use(self, name: str) -> Iterator[None]:
        """Run with another set: "current", "ema", "reference", or any remembered one."""
        if name == "current":
            yield
        elif name == "reference" and self.config.kind == "lora":
            with adapters_off(self._layers):
                yield
        elif name in self.sets:
            self._exchange(name)
            try:
                yield
            finally:
                self._exchange(name)
        else:
            known = {"current", "reference", *self.sets}
            raise ValueError(f"no weight set {name!r}; {nearest(name, known)}")

    @contextmanager
    def beside_reference(self, name: str, rows: int) -> Iterator[None]:
        """Run with the set `name` on the first `rows` rows of every batch and with the reference on all others.

        One pass then serves two sets. For LoRA, without gradient: ValueError in a full run, whose sets share no
        weights.
        """
        if self.config.kind != "lora" or torch.is_grad_enabled():
            raise ValueError("two sets share a batch only with LoRA and without gradient")

        def without_rest(module: nn.Module, inputs: Any, output: Tensor) -> Tensor:
            output[rows:] = 0  # the low-rank path of the reference adds nothing
            return output

        hooks = [layer.lora_A[ADAPTER].register_forward_hook(without_rest) for layer in self._layers]
        try:
            with self.use(name):
                yield
        finally:
            for hook in hooks:
                hook.remove()

    def _exchange(self, name: str) -> None:
        held = self.sets[name]
        for index, parameter in enumerate(self.trainable.values()):
            parameter.data, held[index] = held[index], parameter.data
