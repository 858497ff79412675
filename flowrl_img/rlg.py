"""Reinforcement learning guidance for any stock diffusers pipeline.

    pipeline.load_lora_weights("my-run/export")
    with rlg(pipeline, scale=1.6):
        picture = pipeline("a photo of a ring").images[0]

The denoiser's `forward` is replaced inside the block: it evaluates the network with and without its adapters and
returns the blend in the network's dtype, so classifier-free guidance, embedded guidance and the scheduler see nothing
new. Adapters of text encoders stay as they are: both sides get the same conditioning.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn

from flowrl_img.adapters import adapter_layers, adapter_names, adapters_off, only_adapter
from flowrl_img.blend import Branches, blended
from flowrl_img.scales import Constant, Scale, as_scale

__all__ = ["rlg"]

DENOISERS = ("transformer", "transformer_2", "unet")
NEAR = 1e-3  # relative distance at which a timestep counts as one of the scheduler's

Weights = Callable[[], AbstractContextManager[Any]]


@contextmanager
def rlg(
    pipeline: Any, scale: float | str | Scale | Mapping[str, float | str | Scale], *, base: nn.Module | None = None
) -> Iterator[Any]:
    """Inside the block every call of `pipeline` samples v_base + scale (v_tuned - v_base). Yields the pipeline.

    scale: a number, a schedule over steps (see `flowrl_img.scales`), or one of these for each adapter by name, which
    then act on their own: v_base + sum_k w_k (v_k - v_base). Without names the tuned side is the network with the
    adapters that are active now. base: a second network of the same architecture; without it, the base is the network
    with its adapters off, and no second set of weights is held.

    0 and 1 cost one forward per step and give the base's and the tuned network's output to the bit; others cost two,
    and one more for each further adapter. Raises ValueError where there is no adapter and no base, where weights are
    fused, where a cache of diffusers is on (it would mix the sides), and inside another `rlg` of the same pipeline.
    """
    sides = {name: as_scale(one) for name, one in scale.items()} if isinstance(scale, Mapping) else as_scale(scale)
    with ExitStack() as stack:
        for network in _denoisers(pipeline, base):
            stack.enter_context(_patched(network, _Blended(pipeline, network, base, sides)))
        yield pipeline


def _denoisers(pipeline: Any, base: nn.Module | None) -> list[nn.Module]:
    """The networks to blend: with `base` the one denoiser, otherwise those with adapters."""
    found = {name: getattr(pipeline, name, None) for name in DENOISERS}
    networks = {name: network for name, network in found.items() if isinstance(network, nn.Module)}
    if not networks:
        raise ValueError(f"{type(pipeline).__name__} has none of {', '.join(DENOISERS)}: there is nothing to blend")
    if any(network is base for network in networks.values()):
        raise ValueError("base is the pipeline's own network: give another one, or leave it out to switch adapters off")
    if base is not None and len(networks) > 1:
        raise ValueError(f"base belongs to a pipeline with one denoiser, this one has {', '.join(networks)}")
    chosen = [network for network in networks.values() if base is not None or adapter_layers(network)]
    if not chosen:
        raise ValueError(
            f"the {' and '.join(networks)} of this pipeline has no adapter: "
            "call pipeline.load_lora_weights(...) first, or give the untuned network as base="
        )
    return chosen


class _Blended:
    """The forward of one denoiser inside `rlg`."""

    def __init__(
        self, pipeline: Any, network: nn.Module, base: nn.Module | None, sides: Scale | dict[str, Scale]
    ) -> None:
        self.pipeline, self.base, self.original = pipeline, base, network.forward
        layers = adapter_layers(network)
        _check(network, layers)
        self.off: Weights = lambda: adapters_off(layers)
        self.tuned: list[Weights]
        if isinstance(sides, dict):
            unknown = sorted(sides.keys() - set(adapter_names(layers)))
            if unknown or not sides:
                known = ", ".join(adapter_names(layers)) or "none"
                raise ValueError(f"no adapter is called {', '.join(unknown) or '...'}; valid: {known}")
            self.tuned = [lambda name=name: only_adapter(layers, name) for name in sides]  # type: ignore[misc]
            self.scales = list(sides.values())
        else:
            if base is None and all(layer.disable_adapters or not layer.active_adapters for layer in layers):
                raise ValueError("the adapters are switched off, so both sides are the base: pipeline.enable_lora()")
            self.tuned, self.scales = [nullcontext], [sides]

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        step, num_steps = self._place(args, kwargs)
        outputs: list[Any] = []

        def evaluate(weights: Weights, forward: Callable[..., Any]) -> Branches:
            with weights():
                outputs.append(forward(*args, **kwargs))
            return outputs[-1][0], None

        v = blended(
            [scale(step, num_steps) for scale in self.scales],
            lambda: evaluate(nullcontext, self.base) if self.base is not None else evaluate(self.off, self.original),
            [lambda weights=weights: evaluate(weights, self.original) for weights in self.tuned],  # type: ignore[misc]
        )
        return _with_sample(outputs[-1], v.to(outputs[-1][0].dtype))

    def _place(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[int, int]:
        """(step, number of steps) of this call, from its timestep; constant scales do not ask for it."""
        if all(isinstance(scale, Constant) for scale in self.scales):
            return 0, 1
        timestep = kwargs["timestep"] if "timestep" in kwargs else args[1]
        scheduler = self.pipeline.scheduler
        return _position(torch.as_tensor(timestep), scheduler.timesteps, scheduler.config.num_train_timesteps)


def _position(timestep: Tensor, grid: Tensor, num_train_timesteps: int) -> tuple[int, int]:
    """Where `timestep` stands in the scheduler's grid. Pipelines pass it as it is, or divided by num_train_timesteps,
    in the network's dtype: the grid is rounded in the same way before it is compared."""
    value = timestep.flatten()[0]
    rounded = grid.to(value) if value.is_floating_point() else grid.to(value.device)
    distances = torch.stack([(rounded - value).abs(), (rounded / num_train_timesteps - value).abs()]).float()
    nearest = int(distances.min(0).values.argmin())
    if distances[:, nearest].min() > NEAR * max(abs(float(value)), NEAR):
        raise ValueError(
            f"the denoiser is at timestep {float(value):g}, which the scheduler does not list: "
            "this pipeline works with a constant scale only"
        )
    return nearest, len(grid)


def _check(network: Any, layers: Sequence[Any]) -> None:
    if isinstance(network.forward, _Blended):
        raise ValueError("this pipeline is already inside rlg(...): give all scales to one call")
    if any(layer.merged for layer in layers):
        raise ValueError(
            "the adapters are fused into the weights, so the base is gone: call pipeline.unfuse_lora() first"
        )
    if getattr(network, "is_cache_enabled", False):
        raise ValueError("a cache would mix base and tuned outputs: call disable_cache() on the denoiser first")


@contextmanager
def _patched(network: nn.Module, forward: _Blended) -> Iterator[None]:
    own = "forward" in vars(network)  # accelerate's offloading puts one there
    network.forward = forward
    try:
        yield
    finally:
        if own:
            network.forward = forward.original
        else:
            del network.forward


def _with_sample(output: Any, sample: Tensor) -> Any:
    """`output`, a tuple or one of diffusers' output records, with another first element."""
    if isinstance(output, tuple):
        return (sample, *output[1:])
    output[next(iter(output))] = sample
    return output
