"""The environment of one scorer: what it is made of, and that a failure is told."""

import subprocess
import sys
from pathlib import Path

import pytest

from flowrl_img import reward_env
from flowrl_img.cli import main

ROOT = Path(__file__).parents[2]


def test_it_holds_what_serving_needs_what_the_scorer_needs_and_the_package_without_its_dependencies(tmp_path):
    make, needs, own = reward_env.commands(tmp_path / "env", "hpsv2", ["numpy<2"])
    assert make == [sys.executable, "-m", "venv", str(tmp_path / "env")]
    assert needs[0].startswith(str(tmp_path / "env")) and {"fastapi", "uvicorn", "torch"} <= set(needs)
    assert "open_clip_torch>=2.30" in needs and needs[-1] == "numpy<2" and "diffusers" not in needs
    assert own[-2:] == ["--no-deps", str(ROOT)]


def test_what_it_holds_is_what_serving_imports():
    """A service without the packages of training: nothing else is imported on its way."""
    code = """
import sys
import flowrl_img.cli
from flowrl_img import reward_commands, reward_env
from flowrl_img.rewards import server
server.serve = lambda scorers, *rest: server.create_app(scorers)
reward_commands.serve(["jpeg", "quality=70"], "127.0.0.1", 8000, print)
print(*sorted({name.split(".")[0] for name in sys.modules}))
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, cwd=ROOT, check=True)
    loaded = set(done.stdout.split("\n", 1)[1].split())
    of_training = {
        "diffusers",
        "transformers",
        "accelerate",
        "peft",
        "safetensors",
        "scipy",
        "rapidfuzz",
        "psutil",
        "rich",
    }
    assert not loaded & (of_training - {"rich"})  # typer brings rich


def test_a_folder_in_use_and_an_unknown_reward_are_refused(tmp_path, capsys):
    (tmp_path / "x").touch()
    for words, message in ((["jpeg", tmp_path], "is not empty"), (["jpg", tmp_path / "e"], "did you mean 'jpeg'")):
        with pytest.raises(SystemExit) as stop:
            main(["rewards", "env", *map(str, words)])
        assert stop.value.code == 2 and message in capsys.readouterr().err


def test_a_command_that_fails_is_told_and_ends_it(tmp_path, capsys, monkeypatch):
    after = tmp_path / "after"
    steps = [[sys.executable, "-c", "raise SystemExit(3)"], ["touch", str(after)]]
    monkeypatch.setattr(reward_env, "commands", lambda *arguments: steps)
    with pytest.raises(SystemExit) as stop:
        main(["rewards", "env", "jpeg", str(tmp_path / "env")])
    assert stop.value.code == 2 and "this command failed: " in capsys.readouterr().err
    assert not after.exists()
