"""The commands that look at rewards and try them."""

import json
import os
import re
import subprocess
import sys
from pathlib import Path

import numpy as np
import pytest
from PIL import Image

from flowrl_img import cli

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """Run the command line; gives (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(["rewards", *map(str, arguments)])
        shown = capsys.readouterr()
        return stop.value.code or 0, shown.out, shown.err

    return call


@pytest.fixture
def pictures(tmp_path) -> Path:
    """b.png: noise of 64 x 64, a.jpg: grey of 32 x 64, and a file that is no picture."""
    folder = tmp_path / "pictures"
    folder.mkdir()
    Image.fromarray(np.random.default_rng(0).integers(0, 256, (64, 64, 3), np.uint8)).save(folder / "b.png")
    Image.fromarray(np.full((64, 32, 3), 128, np.uint8)).save(folder / "a.jpg")
    (folder / "notes.txt").write_text("x")
    return folder


def prompts(folder: Path, *rows: dict) -> Path:
    path = folder.parent / "prompts.jsonl"
    path.write_text("".join(json.dumps({"prompt": "a ring", **row}) + "\n" for row in rows))
    return path


def test_list_shows_every_built_in_with_what_it_is(run):
    code, out, _ = run("list")
    lines = {line.split()[0]: line[16:] for line in out.splitlines()}
    assert code == 0 and {"geneval", "jpeg", "ocr", "pickscore"} <= lines.keys()
    assert all(len(text) > 10 for text in lines.values())


def test_info_tells_options_needs_and_offers(run):
    code, out, _ = run("info", "geneval", "mode=strict")
    assert code == 0 and "needs metadata: include, tag" in out and "known answers at start-up: yes" in out
    assert re.search(r"mode +'strict'", out) and "thresholds" in out and "Thresholds(score=0.3" in out
    _, out, _ = run("info", "hpsv2")
    assert re.search(r"version +\(required\)", out) and "gradients to the picture: yes" in out
    _, out, _ = run("info", "sample_rewards:brightness")
    assert "sample_rewards" in out and "scope: point" in out


def test_score_prints_and_writes_a_line_for_each_picture(run, pictures, tmp_path):
    out_file = tmp_path / "scores.jsonl"
    file = prompts(pictures, {})
    code, out, _ = run("score", "jpeg", pictures, "mode=incompressibility", "--prompts", file, "--out", out_file)
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()[:2]] == ["a.jpg", "b.png"]
    rows = [json.loads(line) for line in out_file.read_text().splitlines()]
    assert [row["file"] for row in rows] == ["a.jpg", "b.png"]
    assert rows[1]["score"] > 5 > rows[0]["score"] > 0 and rows[0]["kilobytes"] == pytest.approx(rows[0]["score"])
    assert "2 of 2 scored" in out


def test_a_picture_is_turned_as_its_exif_data_say(tmp_path):
    from flowrl_img.pictures import load_pictures

    turned = Image.new("RGB", (20, 10))
    exif = turned.getexif()
    exif[0x0112] = 6  # a quarter turn
    turned.save(tmp_path / "a.jpg", exif=exif)
    (tmp_path / "p.txt").write_text("a ring\n")
    [batch] = load_pictures(tmp_path, str(tmp_path / "p.txt"))
    assert batch.images.shape == (1, 20, 10, 3)


def test_a_place_for_the_scores_that_cannot_be_written_is_told_before_anything_is_scored(run, pictures, monkeypatch):
    from flowrl_img.rewards.jpeg import Jpeg

    monkeypatch.setattr(Jpeg, "__call__", lambda *_: pytest.fail("scored"))
    file = prompts(pictures, {})
    code, _, error = run("score", "jpeg", pictures, "--prompts", file, "--out", pictures / "a.jpg" / "scores.jsonl")
    assert code == 2 and "give another folder with --out" in error


def test_pictures_are_joined_with_prompts_by_name(run, pictures, tmp_path):
    rows = [{"file": "b.png", "ocr_target": "X"}, {"file": "a.jpg", "ocr_target": "YZ"}, {"file": "c.png"}]
    code, out, _ = run("score", "sample_rewards:broken_for_rings", pictures, "--prompts", prompts(pictures, *rows))
    assert code == 0 and "a.jpg  invalid: no reason given" in out and "0 of 2 scored" in out
    rows[0]["prompt"] = "a star"
    _, out, _ = run("score", "sample_rewards:broken_for_rings", pictures, "--prompts", prompts(pictures, *rows))
    assert "a.jpg  invalid" in out and "b.png  invalid" not in out


@pytest.mark.parametrize(
    ("rows", "message"),
    [
        ([{}, {}, {}], "holds 3 prompts for 2 pictures"),
        ([{"file": "a.jpg"}], "names no prompt for b.png"),
    ],
)
def test_pictures_without_a_prompt_are_an_error(run, pictures, rows, message):
    code, _, error = run("score", "jpeg", pictures, "--prompts", prompts(pictures, *rows))
    assert code == 2 and message in error


def test_wrong_input_is_one_clear_error(run, pictures, tmp_path):
    file = prompts(pictures, {})
    for arguments, message in (
        (["score", "jpg", pictures, "--prompts", file], "did you mean 'jpeg'"),
        (["score", "jpeg", tmp_path / "nowhere", "--prompts", file], "no folder"),
        (["score", "jpeg", tmp_path, "--prompts", file], "holds no picture"),
        (["score", "jpeg", pictures], "--prompts FILE"),
        (["score", "jpeg", pictures, "qualty=3", "--prompts", file], "did you mean 'quality'"),
        (["score", "geneval", pictures, "--prompts", file], "needs the metadata"),
        (["check", "jpeg", "--images", pictures], "give --images and --prompts together"),
        (["check", "jpeg", "--images", pictures, "--prompts", file], "two pictures or more, all of one size"),
    ):
        code, _, error = run(*arguments)
        assert code == 2 and message in error and "Traceback" not in error, arguments


def test_check_passes_a_sound_reward_and_fails_a_constant_one(run):
    code, out, _ = run("check", "jpeg")
    assert code == 0 and "+ scores follow a permutation" in out and "time per picture" in out
    code, out, _ = run("check", "sample_rewards:constant")
    assert code == 1 and "! range" in out and "0.35 to 0.35" in out


def test_check_takes_pictures_of_ones_own(run, pictures):
    (pictures / "a.jpg").unlink()
    Image.new("RGB", (64, 64)).save(pictures / "c.png")
    code, out, _ = run("check", "jpeg", "--images", pictures, "--prompts", prompts(pictures, {}))
    assert code == 0 and "2 of 2 valid" in out


def test_a_new_reward_installs_as_an_entry_point_and_passes_its_test(run, tmp_path):
    folder = tmp_path / "blur_less"
    code, out, _ = run("new", folder)
    assert code == 0 and "pip install -e" in out
    assert {path.name for path in folder.iterdir()} == {"pyproject.toml", "blur_less.py", "test_blur_less.py"}
    assert "class BlurLess:" in (folder / "blur_less.py").read_text()
    site = tmp_path / "site"
    pip = [sys.executable, "-m", "pip", "install", "--no-deps", "--no-build-isolation", "-q", "--target", site, folder]
    subprocess.run([str(word) for word in pip], check=True, capture_output=True)
    env = {**os.environ, "PYTHONPATH": f"{ROOT}:{site}", "PYTHONDONTWRITEBYTECODE": "1"}
    code = f"""
import pytest
from flowrl_img import plugins
from flowrl_img.rewards import registry
assert "blur_less" in [point.name for point in plugins.metadata.entry_points(group="flowrl_img.rewards")]
print(registry.load("blur_less", gain=2.0))
raise SystemExit(pytest.main(["-q", "-p", "no:cacheprovider", {str(folder / "test_blur_less.py")!r}]))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, env=env, cwd=tmp_path)
    assert done.returncode == 0, done.stdout + done.stderr
    assert "BlurLess(gain=2.0)" in done.stdout and "1 passed" in done.stdout


def test_a_new_reward_overwrites_nothing_and_needs_a_module_name(run, tmp_path):
    code, _, error = run("new", tmp_path)
    assert code == 2 and ("exists already" in error or "cannot name a Python module" in error)
    code, _, error = run("new", tmp_path / "My-Reward")
    assert code == 2 and "'My-Reward' cannot name a Python module" in error
