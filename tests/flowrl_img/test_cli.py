import runpy
import sys
from pathlib import Path
from types import ModuleType

import pytest

from flowrl_img import cli, recipes

ROOT = Path(__file__).parents[2]


@pytest.fixture
def run(capsys):
    """Run the command line; gives (exit code, stdout, stderr)."""

    def call(*arguments: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as stop:
            cli.main(arguments)
        shown = capsys.readouterr()
        return stop.value.code or 0, shown.out, shown.err

    return call


@pytest.fixture
def trained(monkeypatch):
    """Configurations that reach the trainer, which is replaced; set `.effect` to make it do something."""
    module = ModuleType("flowrl_img.run")
    seen = []

    def run_training(config):
        seen.append(config)
        return module.effect()

    module.effect = lambda: 0
    module.run_training, module.check_inputs, module.seen = run_training, lambda config: (), seen
    monkeypatch.setitem(sys.modules, "flowrl_img.run", module)
    return module


def test_recipes_list_shows_every_recipe_with_its_description(run):
    code, out, _ = run("recipes", "list")
    assert code == 0
    assert [line.split()[0] for line in out.splitlines()] == recipes.names()
    assert all(len(line.split(maxsplit=1)[1]) > 20 for line in out.splitlines())


def test_recipes_show_prints_the_changed_configuration(run):
    code, out, _ = run("recipes", "show", "pico-ocr", "run.seed=7")
    assert code == 0
    assert "name: pico-ocr" in out and "seed: 7" in out


def test_train_runs_the_default_recipe_after_its_plan(run, trained):
    code, out, _ = run("train")
    assert code == 0
    assert trained.seen[0].name == "pico"
    sizes = trained.seen[0].rollout
    images = sizes.groups * sizes.group_size
    assert f"{sizes.groups} prompts x {sizes.group_size} pictures = {images} pictures" in out


def test_train_takes_a_recipe_changes_and_a_run_folder(run, trained, tmp_path):
    code, _, _ = run("train", "pico-ocr", "run.seed=3", "rollout.window.size=2", "--run-folder", str(tmp_path / "it's"))
    assert code == 0
    [config] = trained.seen
    assert (config.name, config.run.seed, config.rollout.window.size) == ("pico-ocr", 3, 2)
    assert config.run.folder == str(tmp_path / "it's")


def test_changes_alone_apply_to_the_default_recipe(run, trained):
    run("train", "run.seed=3")
    assert (trained.seen[0].name, trained.seen[0].run.seed) == ("pico", 3)


def test_a_dry_run_stops_after_the_plan(run, trained):
    code, out, _ = run("train", "--dry-run")
    assert code == 0 and "network, sampling" in out
    assert not trained.seen


def test_the_exit_code_is_that_of_the_run(run, trained):
    trained.effect = lambda: 130
    assert run("train")[0] == 130


@pytest.mark.parametrize(
    ("arguments", "expected"),
    [
        (["pcio"], "unknown recipe 'pcio'; did you mean 'pico'?"),
        (["pico", "rollout.grops=3"], "did you mean 'rollout.groups'?"),
        (["rollout.group_size=11", "run.updates_per_rollout=7"], "do not divide"),
        (["optimizer.lr=-1"], "optimizer.lr = -1: should be greater than 0"),
        (["rollout.step.noise=1"], "rollout.step: unknown key 'noise'; did you mean 'noise_level'?"),
        (["rollout.step.name=flow_sdee"], "rollout.step: no step is called 'flow_sdee'; did you mean 'flow_sde'?"),
        (["objective.clip_rnge=1"], "objective: unknown key 'clip_rnge'; did you mean 'clip_range'?"),
        (["objective.clip_range=-1"], "objective: clip_range must be positive"),
        (["model.family=sd4"], "model.family: no model is called 'sd4'; did you mean 'sd3'?"),
        (["rewards.0.name=genevl"], "rewards.0: no reward is called 'genevl'; did you mean 'geneval'?"),
        (["rewards.0.mod=strict"], "rewards.0: unknown key 'mod'; did you mean 'mode'?"),
        (["pico", "pico-ocr"], "one recipe at a time: 'pico-ocr'"),
    ],
)
def test_wrong_input_ends_with_a_message_and_code_2_before_any_training(run, trained, arguments, expected):
    code, _, err = run("train", *arguments)
    assert code == 2
    assert expected in err
    assert all(line.startswith("error: ") for line in err.splitlines())
    assert not trained.seen


def test_every_mistake_gets_its_own_error_line(run, trained):
    _, _, err = run("train", "rollout.group_size=11", "run.updates_per_rollout=7", "objective.x=1", "rewards.0.name=y")
    assert len(err.splitlines()) == 3


@pytest.mark.parametrize(
    "error", [ValueError("bad value"), FileNotFoundError("no such folder"), OSError("disk is full")]
)
def test_wrong_input_found_by_the_run_is_reported_alike(run, trained, error):
    def fail():
        raise error

    trained.effect = fail
    code, _, err = run("train")
    assert (code, err) == (2, f"error: {error}\n")


def test_a_fault_of_the_program_keeps_its_traceback(trained):
    def fail():
        raise RuntimeError("a bug")

    trained.effect = fail
    with pytest.raises(RuntimeError, match="a bug"):
        cli.main(["train"])


def test_tracebacks_of_wrong_input_can_be_asked_for(monkeypatch):
    monkeypatch.setenv("FLOWRL_TRACEBACK", "1")
    with pytest.raises(ValueError, match="unknown recipe"):
        cli.main(["train", "pcio"])


def test_ctrl_c_gives_exit_code_130(run, trained):
    def interrupt():
        raise KeyboardInterrupt

    trained.effect = interrupt
    assert run("train")[0] == 130


def test_the_plan_counts_the_processes_of_the_launcher_and_rank_0_prints_it(run, trained, monkeypatch):
    monkeypatch.setenv("WORLD_SIZE", "2")
    monkeypatch.setenv("RANK", "0")
    assert "48 pictures in each of 2" in run("train", "rollout.groups=8", "rollout.group_size=12")[1]
    monkeypatch.setenv("RANK", "1")
    assert run("train")[1] == ""
    assert len(trained.seen) == 2


def test_the_script_for_accelerate_launch_is_the_same_command(trained, monkeypatch):
    monkeypatch.setattr(sys, "argv", ["train.py", "pico-ocr", "run.seed=9"])
    with pytest.raises(SystemExit) as stop:
        runpy.run_path(str(ROOT / "scripts" / "train.py"), run_name="__main__")
    assert not stop.value.code
    assert (trained.seen[0].name, trained.seen[0].run.seed) == ("pico-ocr", 9)


def test_no_arguments_show_the_help(run):
    _, out, err = run()
    assert "train" in out + err
