"""Switching the adapters of a network off, or one of them on, without changing what trains.

peft's own switches also change requires_grad of the adapter weights, so the flags that its layers read are set here,
checked through its public properties, and put back on leaving, also after an exception and when nested.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from typing import Any

from torch import nn

__all__ = ["adapter_layers", "adapter_names", "adapters_off", "only_adapter"]

UNSUPPORTED = "the adapters could not be switched: this peft version is not supported"


def adapter_layers(network: nn.Module) -> list[Any]:
    """The layers of `network` that hold adapters; empty where it has none."""
    from peft.tuners.tuners_utils import BaseTunerLayer

    return [module for module in network.modules() if isinstance(module, BaseTunerLayer)]


def adapter_names(layers: Sequence[Any]) -> list[str]:
    """Names of all adapters in the layers, active or not, in the order of their first layer."""
    return list(dict.fromkeys(name for layer in layers for name in _held(layer)))


@contextmanager
def adapters_off(layers: Sequence[Any]) -> Iterator[None]:
    """The base network, to the last bit."""
    with _flags(layers, "_disable_adapters", True):
        if not all(layer.disable_adapters for layer in layers):
            raise RuntimeError(UNSUPPORTED)
        yield


@contextmanager
def only_adapter(layers: Sequence[Any], name: str) -> Iterator[None]:
    """The network with the adapter `name` alone. ValueError if no layer has it."""
    if name not in adapter_names(layers):
        raise ValueError(f"no adapter is called {name!r}; valid: {', '.join(adapter_names(layers)) or 'none'}")
    with _flags(layers, "_disable_adapters", False), _flags(layers, "_active_adapter", [name]):
        if any(layer.disable_adapters or layer.active_adapters != [name] for layer in layers):
            raise RuntimeError(UNSUPPORTED)
        yield


@contextmanager
def _flags(layers: Sequence[Any], flag: str, value: Any) -> Iterator[None]:
    before = [getattr(layer, flag) for layer in layers]
    for layer in layers:
        setattr(layer, flag, value)
    try:
        yield
    finally:
        for layer, was in zip(layers, before, strict=True):
            setattr(layer, flag, was)


def _held(layer: Any) -> list[str]:
    return [name for names in layer.adapter_layer_names for name in getattr(layer, names, {})]
