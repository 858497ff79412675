"""HPSv2 against open_clip itself, and against the published package where it is installed."""

from __future__ import annotations

import importlib.util
import json
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from flowrl_img.rewards import registry
from flowrl_img.rewards.hpsv2 import HPSv2
from flowrl_img.rewards.pretrained import WeightsError, read
from flowrl_img.rewards.score import score

PROMPTS = ["the red cube", "“curly” &amp; ＡＢ 😀", "A Blue  heart"]
LONG = "the red cube " * 40

needs_open_clip = pytest.mark.skipif(importlib.util.find_spec("open_clip") is None, reason="needs flowrl-img[openclip]")


@cache
def images() -> Tensor:
    levels = torch.randint(0, 256, (3, 3, 64, 90), generator=torch.Generator().manual_seed(0))
    return levels / 255


@cache
def reward(**options: Any) -> HPSv2:
    return HPSv2("v2.1", **tiny_models.hps_files(), **options)


def ask(made: HPSv2, prompts: list[str] = PROMPTS) -> Any:
    return score(made, images(), prompts, [{}] * 3, list("abc"))


@needs_open_clip
def test_the_score_is_the_cosine_of_open_clips_forward() -> None:
    import open_clip

    config = json.loads(Path(tiny_models.hps_files()["architecture"]).read_text())
    model = open_clip.CLIP(**config).eval()
    model.load_state_dict(read(Path(tiny_models.hps_files()["weights"]))["state_dict"])
    with torch.no_grad():
        seen, meant, _ = model(reward()._towers.pixels.floats(images()), open_clip.tokenize(PROMPTS))
    values = ask(reward()).values
    torch.testing.assert_close(values, (seen @ meant.T).diagonal(), rtol=0, atol=1e-6)
    assert (values - (seen @ meant.T).roll(1, 0).diagonal()).abs().min() > 1e-3


@needs_open_clip
def test_tokens_are_those_of_open_clip() -> None:
    import open_clip

    texts = [*PROMPTS, LONG, "", "the " * 75, "the " * 76]
    tokens = reward()._towers.tokens(texts)
    assert torch.equal(tokens, open_clip.get_tokenizer("ViT-H-14")(texts))
    assert tokens[3, -1] == tokens[5, -1] == tokens.max()  # the end stays last


@needs_open_clip
def test_long_prompts_are_counted_and_told_once() -> None:
    made = HPSv2("v2.0", **tiny_models.hps_files())
    with pytest.warns(UserWarning, match=r"'hpsv2' reads 77 tokens: 1 of 3 prompts"):
        out = ask(made, ["the " * 75, "the " * 76, "the"])
    assert out.details["truncated"] == [False, True, False]


@needs_open_clip
def test_the_antialias_knob_reaches_the_pictures_and_the_record() -> None:
    assert "antialias=True" in reward().fingerprint["preprocessing"] and reward().fingerprint["version"] == "v2.1"
    assert "antialias=False" in reward(antialias=False).fingerprint["preprocessing"]


def test_the_published_package_gives_the_same_scores() -> None:
    pytest.importorskip("hpsv2.src.open_clip", reason="needs flowrl-img[hpsv2]", exc_type=(ImportError, OSError))
    torch.testing.assert_close(ask(reward(backend="hpsv2")).values, ask(reward()).values, rtol=0, atol=1e-6)


@pytest.mark.parametrize(
    ("backend", "module", "fix"),
    [("open_clip", "open_clip", r"flowrl-img\[openclip\]"), ("hpsv2", "hpsv2.src.open_clip", r"flowrl-img\[hpsv2\]")],
)
def test_a_missing_package_names_what_to_install(
    monkeypatch: pytest.MonkeyPatch, backend: str, module: str, fix: str
) -> None:
    for name in list(sys.modules):
        if name == "open_clip" or name.startswith(("open_clip.", "hpsv2")):
            monkeypatch.delitem(sys.modules, name)
    monkeypatch.setitem(sys.modules, module, None)
    with pytest.raises(WeightsError, match=rf"hpsv2: {module} cannot be imported .*{fix}"):
        registry.load("hpsv2", version="v2.1", backend=backend).validate(["the"], [{}])


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({}, "missing key version"),
        ({"version": "2.1"}, r"one of \['v2\.0', 'v2\.1'\]"),
        ({"version": "v2.0", "backend": "clip"}, r"one of \['hpsv2', 'open_clip'\]"),
    ],
)
def test_the_version_must_be_said(options: dict[str, str], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        registry.load("hpsv2", **options)


@needs_open_clip
def test_a_checkpoint_of_another_kind_is_refused(tmp_path: Path) -> None:
    state = read(Path(tiny_models.hps_files()["weights"]))["state_dict"]
    files = {**tiny_models.hps_files(), "weights": str(tmp_path / "x.pt")}
    torch.save(state, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match="no 'state_dict'"):
        ask(HPSv2("v2.1", **files))
    torch.save({"state_dict": {k: v for k, v in state.items() if "ln_final" not in k}}, tmp_path / "x.pt")
    with pytest.raises(WeightsError, match=r"2 missing \(such as ln_final\.bias\)"):
        ask(HPSv2("v2.1", **files))
    quick = json.loads(Path(files["architecture"]).read_text()) | {"quick_gelu": True}
    (tmp_path / "quick.json").write_text(json.dumps(quick))
    with pytest.raises(WeightsError, match="runs QuickGELU"):
        ask(HPSv2("v2.1", **{**tiny_models.hps_files(), "architecture": str(tmp_path / "quick.json")}))
    with pytest.raises(WeightsError, match="no open_clip model"):
        HPSv2("v2.1", architecture="ViT-Z").validate(["the"], [{}])


@needs_open_clip
@pytest.mark.full
def test_the_default_architecture_is_the_published_one() -> None:
    config = HPSv2("v2.1")._towers._config
    assert config["embed_dim"] == 1024 and not config.get("quick_gelu", False)
    assert (config["vision_cfg"]["layers"], config["vision_cfg"]["width"], config["text_cfg"]["layers"]) == (
        32,
        1280,
        24,
    )
