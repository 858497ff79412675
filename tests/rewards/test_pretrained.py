"""Finding, reading and loading weights."""

from __future__ import annotations

import hashlib
import shutil
from pathlib import Path

import pytest
import tiny_models
import torch
from safetensors.torch import load_file, save_file
from torch import nn

from flowrl_img.rewards import registry
from flowrl_img.rewards.pretrained import WEIGHTS, WeightsError, fingerprint, load_strict, locate, locate_file, read

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def offline(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The hub's cache, empty, and no network."""
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    return tmp_path / "hub"


def cached(cache: Path, files: dict[str, bytes]) -> Path:
    """A repository owner/model as the hub's client leaves it: blobs named by their hash, links in a snapshot."""
    root = cache / "models--owner--model"
    snapshot = root / "snapshots" / COMMIT
    for folder in (root / "blobs", root / "refs", snapshot):
        folder.mkdir(parents=True)
    (root / "refs" / "main").write_text(COMMIT)
    for name, content in files.items():
        blob = root / "blobs" / hashlib.sha256(content).hexdigest()
        blob.write_bytes(content)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_folder_gives_the_first_of_its_files(tmp_path: Path) -> None:
    (tmp_path / "config.json").touch()
    (tmp_path / "pytorch_model.bin").touch()
    found = locate("r.model", str(tmp_path), [("config.json",), WEIGHTS])
    assert [path.name for path in found] == ["config.json", "pytorch_model.bin"]
    (tmp_path / "model.safetensors").touch()
    assert locate("r.model", str(tmp_path), [WEIGHTS]) == [tmp_path / "model.safetensors"]
    with pytest.raises(WeightsError, match=r"r\.model: .* holds no vocab\.json or merges\.txt"):
        locate("r.model", str(tmp_path), [("vocab.json", "merges.txt")])


def test_packaged_weights_are_named_by_their_place_in_the_package() -> None:
    found = locate("r.model", "assets:pico/text_encoder", [("config.json",), WEIGHTS])
    assert [path.name for path in found] == ["config.json", "model.safetensors"]
    assert locate_file("r.head", "assets:pico/model_index.json").is_file()
    with pytest.raises(WeightsError, match=r"r\.model: no packaged file 'pico/none'"):
        locate("r.model", "assets:pico/none", [("config.json",)])


def test_a_hub_id_is_found_in_the_cache_without_a_network(offline: Path) -> None:
    snapshot = cached(offline, {"config.json": b"{}", "pytorch_model.bin": b"weights", "head.pth": b"head"})
    found = locate("r.model", "owner/model", [("config.json",), WEIGHTS])
    assert found == [snapshot / "config.json", snapshot / "pytorch_model.bin"]
    assert locate_file("r.head", "owner/model/head.pth") == snapshot / "head.pth"


def test_missing_weights_say_what_to_do(offline: Path) -> None:
    with pytest.raises(WeightsError, match=r"hf download owner/model .* set r\.model to FOLDER"):
        locate("r.model", "owner/model", [("config.json",)])
    with pytest.raises(
        WeightsError, match=r"no head\.pth of owner/model on this machine.* set r\.head to FOLDER/head\.pth"
    ):
        locate_file("r.head", "owner/model/head.pth")
    with pytest.raises(WeightsError, match=r"r\.model: no folder /nowhere"):
        locate("r.model", "/nowhere", [("config.json",)])
    with pytest.raises(WeightsError, match=r"r\.head: no file /nowhere\.pt"):
        locate_file("r.head", "/nowhere.pt")


@pytest.mark.parametrize("name", ["pickscore", "clipscore", "imagereward"])
def test_a_reward_without_its_weights_is_built_and_stops_when_prompts_are_loaded(offline: Path, name: str) -> None:
    reward = registry.load(name)
    with pytest.raises(WeightsError, match=rf"{name}\.\w+: no .*hf download"):
        reward.validate(["a ring"], [{}])


def test_reading_a_checkpoint_runs_no_code(tmp_path: Path) -> None:
    torch.save({"state_dict": {"w": torch.ones(2)}, "epoch": 3}, tmp_path / "plain.pt")
    assert read(tmp_path / "plain.pt")["state_dict"]["w"].tolist() == [1, 1]
    torch.save({"w": torch.ones(2), "maker": Path("x")}, tmp_path / "foreign.pt")
    with pytest.raises(WeightsError, match="holds more than tensors"):
        read(tmp_path / "foreign.pt")
    torch.save([torch.ones(2)], tmp_path / "list.pt")
    with pytest.raises(WeightsError, match="holds a list"):
        read(tmp_path / "list.pt")


def test_a_damaged_checkpoint_is_told_as_such(tmp_path: Path) -> None:
    torch.save({"w": torch.ones(2)}, tmp_path / "whole.pt")
    whole = (tmp_path / "whole.pt").read_bytes()
    for name, content in (("cut.pt", whole[: len(whole) // 2]), ("empty.pt", b""), ("cut.safetensors", b"x" * 12)):
        (tmp_path / name).write_bytes(content)
        with pytest.raises(WeightsError, match=f"{name} is damaged or incomplete"):
            read(tmp_path / name)


def test_weights_that_do_not_fit_are_counted() -> None:
    layer = nn.Linear(2, 3)
    with pytest.raises(
        WeightsError, match=r"keys 1 missing \(such as bias\), 2 unexpected \(such as a\), 1 of another"
    ):
        load_strict(layer, {"weight": torch.ones(3, 5), "a": torch.ones(1), "b": torch.ones(1)}, "head")
    load_strict(layer, {"weight": torch.ones(3, 2).half(), "bias": torch.ones(3).bfloat16()}, "head")
    assert layer.weight.dtype == layer.bias.dtype == torch.float32 and layer.weight.sum() == 6


def test_a_model_whose_checkpoint_lacks_a_weight_is_refused(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.clip_folder(), tmp_path / "clip")
    weights = load_file(folder / "model.safetensors")
    weights["stray.weight"] = weights.pop("text_projection.weight")
    save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
    known = registry.load("pickscore", **tiny_models.pair(str(folder)))
    with pytest.raises(WeightsError, match=r"1 missing \(such as text_proj.* 1 unexpected \(such as stray\.weight\)"):
        known.differentiable(torch.rand(1, 3, 8, 8), ["a ring"])  # type: ignore[attr-defined]


def test_a_checkpoint_without_safetensors_scores_the_same(tmp_path: Path) -> None:
    folder = shutil.copytree(tiny_models.clip_folder(), tmp_path / "clip")
    torch.save(load_file(folder / "model.safetensors"), folder / "pytorch_model.bin")
    (folder / "model.safetensors").unlink()
    images = torch.rand(2, 3, 16, 16, generator=torch.Generator().manual_seed(0))
    known, same = (registry.load("pickscore", **tiny_models.pair(str(f))) for f in (tiny_models.clip_folder(), folder))
    asked = images, ["a red ring", "the"]
    assert torch.equal(known.differentiable(*asked), same.differentiable(*asked))  # type: ignore[attr-defined]


def test_a_fingerprint_holds_revision_hash_and_versions(offline: Path, tmp_path: Path) -> None:
    snapshot = cached(offline, {"model.safetensors": b"weights"})
    (tmp_path / "head.pth").write_bytes(b"head")
    marks = fingerprint({"model": snapshot / "model.safetensors", "head": tmp_path / "head.pth"}, version="v2.1")
    assert marks["model.sha256"] == hashlib.sha256(b"weights").hexdigest()
    assert marks["head.sha256"] == hashlib.sha256(b"head").hexdigest()
    assert marks["model.revision"] == COMMIT and "head.revision" not in marks
    assert marks["version"] == "v2.1" and f"torch {torch.__version__.split('+')[0]}" in marks["libraries"]


@pytest.mark.parametrize("name", ["aesthetic", "clipscore", "hpsv2", "imagereward", "pickscore"])
def test_every_network_states_its_weights_and_preprocessing(name: str) -> None:
    marks = registry.load(name, **tiny_models.options(name)).fingerprint  # type: ignore[attr-defined]
    assert len(marks["model.sha256"]) == 64 and "Pixels(size=" in marks["preprocessing"]
