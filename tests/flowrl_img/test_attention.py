import importlib.util
import sys
from types import ModuleType

import pytest
import torch

from flowrl_img.attention import set_attention, xformers_problem

absent = pytest.mark.skipif(importlib.util.find_spec("xformers") is not None, reason="xformers is installed")


class Processor:
    _attention_backend = None


class PlainProcessor:
    pass


class XFormersProcessor:
    pass


class Network:
    """What `set_attention` sees of a diffusers model."""

    def __init__(self, *processors: object) -> None:
        self.attn_processors = {f"block.{k}": p for k, p in enumerate(processors)}
        self.backends: list[str] = []

    def set_attention_backend(self, backend: str) -> None:
        self.backends.append(backend)

    def enable_xformers_memory_efficient_attention(self) -> None:
        known = {k: XFormersProcessor() for k, p in self.attn_processors.items() if isinstance(p, PlainProcessor)}
        self.attn_processors |= known


@pytest.fixture
def xformers_works(monkeypatch):
    monkeypatch.setattr("flowrl_img.attention.xformers_problem", lambda: None)


def tiny_sd3():
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=4, patch_size=1, in_channels=4, out_channels=4, num_layers=1, attention_head_dim=8,
        num_attention_heads=2, joint_attention_dim=8, caption_projection_dim=16, pooled_projection_dim=8,
        pos_embed_max_size=4,
    )  # fmt: skip


@pytest.mark.parametrize("attention", ["auto", "sdpa"])
def test_a_real_network_runs_on_sdpa(attention, monkeypatch):
    network = tiny_sd3()
    assert set_attention(network, attention) == "sdpa"
    calls = []
    real = torch.nn.functional.scaled_dot_product_attention
    monkeypatch.setattr(
        torch.nn.functional, "scaled_dot_product_attention", lambda *a, **k: calls.append(1) or real(*a, **k)
    )
    with torch.no_grad():
        network(torch.zeros(1, 4, 4, 4), torch.zeros(1, 2, 8), torch.zeros(1, 8), torch.zeros(1))
    assert len(calls) == 1


@pytest.mark.parametrize(("attention", "backend"), [("auto", "native"), ("sdpa", "native"), ("xformers", "xformers")])
def test_networks_that_know_backends_get_the_backend(attention, backend, xformers_works):
    network = Network(Processor())
    set_attention(network, attention)
    assert network.backends == [backend]


def test_networks_that_know_no_backend_get_xformers_processors(xformers_works):
    network = Network(PlainProcessor(), PlainProcessor())
    assert set_attention(network, "xformers") == "xformers"
    assert all(isinstance(p, XFormersProcessor) for p in network.attn_processors.values())
    assert network.backends == []


def test_a_layer_that_did_not_switch_is_an_error(xformers_works):
    with pytest.raises(ValueError, match="only 1 of 2 attention layers of Network"):
        set_attention(Network(PlainProcessor(), object()), "xformers")


@absent
def test_absent_xformers_names_the_extra_and_the_torch_to_match():
    with pytest.raises(ValueError) as caught:
        set_attention(tiny_sd3(), "xformers")
    assert "flowrl-img[xformers]" in str(caught.value)
    assert f"torch {torch.__version__}" in str(caught.value)


@absent
def test_xformers_built_for_another_torch_is_told_apart(monkeypatch, tmp_path):
    (tmp_path / "xformers").mkdir()
    (tmp_path / "xformers" / "__init__.py").write_text("")
    (tmp_path / "xformers" / "ops.py").write_text("raise ImportError('undefined symbol')")
    monkeypatch.syspath_prepend(tmp_path)
    problem = xformers_problem()
    for name in [n for n in sys.modules if n.split(".")[0] == "xformers"]:
        monkeypatch.delitem(sys.modules, name)
    assert problem is not None
    assert "does not load with torch" in problem and "undefined symbol" in problem and "flowrl-img[xformers]" in problem


@absent
@pytest.mark.skipif(torch.cuda.is_available(), reason="needs a machine without CUDA")
def test_xformers_without_a_device_points_to_sdpa(monkeypatch):
    package, ops = ModuleType("xformers"), ModuleType("xformers.ops")
    package.__spec__ = importlib.util.spec_from_loader("xformers", None)
    package.ops = ops
    monkeypatch.setitem(sys.modules, "xformers", package)
    monkeypatch.setitem(sys.modules, "xformers.ops", ops)
    assert "set model.attention = sdpa" in (xformers_problem() or "")


def test_another_word_lists_the_choices():
    with pytest.raises(ValueError, match="choose auto, sdpa or xformers"):
        set_attention(Network(), "flash")
