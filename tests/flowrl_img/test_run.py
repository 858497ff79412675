import json
import os
import signal
import subprocess
import sys
import time

import pytest
import yaml

from flowrl_img import recipes
from flowrl_img.cli import main


def command(config, tmp_path) -> list[str]:
    """The tiny configuration as a recipe file for the command line."""
    file = tmp_path / "tiny.yaml"
    file.write_text(yaml.safe_dump(config.model_dump(mode="json", exclude={"name"})))
    return ["train", str(file)]


def code_of(arguments) -> int:
    with pytest.raises(SystemExit) as left:
        main(arguments)
    return left.value.code


def test_a_run_leaves_what_it_promises(tiny_config, tmp_path, capsys):
    assert code_of(command(tiny_config(), tmp_path)) == 0
    run = tmp_path / "run"
    names = {p.name for p in run.iterdir()}
    promised = {"config.yaml", "versions.json", "metrics.jsonl", "evaluations.jsonl", "before_after.png", "summary.txt"}
    assert promised | {"checkpoint-000004"} <= names
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row["update"] for row in rows] == [1, 2, 3, 4]
    last = (run / "summary.txt").read_text().splitlines()[-1]
    assert last.startswith("held-out reward: ")
    assert "->" in last and "95 %" in last
    assert last in capsys.readouterr().out
    assert "sampling" in (run / "summary.txt").read_text()


def test_a_run_draws_with_the_tail_and_the_solver_of_its_recipe(tiny_config, tmp_path):
    found = []
    for k, changes in enumerate(({}, {"tail": {"ratio": 0.7}})):
        config = tiny_config(
            rollout={"steps": 6, "window": {"steps": [0, 1]}} | changes,
            evaluation={"solver": {"name": "heun" if changes else "euler"}},
            run={"rollouts": 1, "folder": str(tmp_path / f"run{k}")},
        )
        assert code_of(command(config, tmp_path)) == 0
        before = json.loads((tmp_path / f"run{k}" / "evaluations.jsonl").read_text().splitlines()[0])
        first = json.loads((tmp_path / f"run{k}" / "metrics.jsonl").read_text().splitlines()[0])
        found.append((before["means"]["reward"], first["reward"]))
    assert found[0][0] != found[1][0]  # the pictures of another solver
    assert found[0][1] != found[1][1]  # the pictures of the tail


def test_the_last_update_is_evaluated_once(tiny_config, tmp_path, monkeypatch):
    from flowrl_img import run

    drawn = []

    def counted(*arguments, **options):
        drawn.append(1)
        return evaluate(*arguments, **options)

    evaluate = run.evaluate
    monkeypatch.setattr(run, "evaluate", counted)
    assert code_of(command(tiny_config(evaluation={"every": 2}), tmp_path)) == 0
    rows = [json.loads(line) for line in (tmp_path / "run" / "evaluations.jsonl").read_text().splitlines()]
    assert [row["label"] for row in rows] == ["before", "update 2", "update 4", "after"]
    assert {**rows[2], "label": "after"} == rows[3]
    assert len(drawn) == 3


def test_the_same_seed_gives_the_same_metrics_file_but_for_times(tiny_config, tmp_path):
    found = []
    for k in range(2):
        config = tiny_config(run={"folder": str(tmp_path / f"run{k}")})
        assert code_of(command(config, tmp_path)) == 0
        rows = [json.loads(line) for line in (tmp_path / f"run{k}" / "metrics.jsonl").read_text().splitlines()]
        found.append([{k: v for k, v in row.items() if k != "seconds"} for row in rows])
    assert found[0] == found[1]


def test_a_finished_run_is_scored_again_on_more_pictures(tiny_config, tmp_path, capsys):
    assert code_of(command(tiny_config(), tmp_path)) == 0
    assert code_of(["evaluate", str(tmp_path / "run"), "--pictures", "8"]) == 0
    assert "8 paired pictures" in capsys.readouterr().out
    [file] = (tmp_path / "run").glob("evaluation-*/table.json")
    facts = json.loads(file.read_text())
    assert facts["pictures"] == 8
    gain, low, high = facts["columns"]["reward"]["tuned"]["minus"]["base"]
    assert low <= gain <= high


def test_resuming_continues_the_metrics(tiny_config, tmp_path):
    first = tiny_config(run={"rollouts": 1, "folder": str(tmp_path / "a")})
    assert code_of(command(first, tmp_path)) == 0
    second = tiny_config(run={"rollouts": 2, "folder": str(tmp_path / "b"), "resume": str(tmp_path / "a")})
    assert code_of(command(second, tmp_path)) == 0
    whole = tiny_config(run={"rollouts": 2, "folder": str(tmp_path / "c")})
    assert code_of(command(whole, tmp_path)) == 0

    def metrics(name):
        rows = [json.loads(line) for line in (tmp_path / name / "metrics.jsonl").read_text().splitlines()]
        return [{k: v for k, v in row.items() if k != "seconds"} for row in rows]

    assert metrics("a") + metrics("b") == metrics("c")


WRONG = [
    (["train", "picoo"], "did you mean 'pico'"),
    (["train", "pico", "rollout.group_sice=4"], "rollout.group_size"),
    (["train", "pico", "run.updates_per_rollout=2", "rollout.groups=7", "rollout.group_size=5"], "do not divide"),
    (["train", "pico", "optimizer.lr=-1e-4"], "optimizer.lr"),
    (["train", "pico", "model.path=./nowhere"], "no folder './nowhere'"),
    (["train", "pico", "prompts.train=./nowhere.jsonl"], "no prompt file"),
    (["train", "pico", "rewards=[{name: genevall}]"], "did you mean 'geneval'"),
]


@pytest.mark.parametrize(("arguments", "said"), WRONG, ids=[w[0][-1] for w in WRONG])
def test_wrong_input_is_one_clear_error_before_any_model(arguments, said, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code_of(arguments) == 2
    error = capsys.readouterr().err
    assert said in error
    assert error.startswith("error: ")
    assert "Traceback" not in error
    assert list(tmp_path.iterdir()) == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ("model.path=./nowhere", "model.path: no folder './nowhere'"),
        ("weights.lora.targets=[attn.to_q]", "kind = full has no adapter and does not use lora"),
        ("weights={kind: lora, lora: {targets: [attn.to_w]}}", "'attn.to_w' matches no linear layer"),
        ("weights={kind: full, only: [attn.to_w]}", "weights.only: 'attn.to_w' is part of no parameter's name"),
        ("prompts.evaluation=./nowhere.jsonl", "no prompt file"),
        ("prompts.train=plain.txt", "needs the metadata"),
        ("run.resume=./nowhere", "run.resume: no complete checkpoint in nowhere"),
    ],
)
@pytest.mark.parametrize("option", [[], ["--dry-run"]], ids=["run", "dry run"])
def test_files_are_checked_before_a_model_is_loaded_and_in_a_dry_run(
    change, said, option, capsys, tmp_path, monkeypatch
):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("a photo of a ring\n")
    monkeypatch.setattr("flowrl_img.run.load_model", lambda *_: pytest.fail("a model was loaded"))
    assert code_of(["train", "pico", change, *option]) == 2
    error = capsys.readouterr().err
    assert error.startswith("error: ")
    assert said in error
    assert [p.name for p in tmp_path.iterdir()] == ["plain.txt"]


@pytest.mark.parametrize("name", [name for name in recipes.names() if name.startswith("sd35-")])
def test_published_recipes_pass_a_dry_run_that_names_what_is_to_be_brought(name, capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr("flowrl_img.run.load_model", lambda *_: pytest.fail("a model was loaded"))
    files = recipes.load(name).prompts
    assert code_of(["train", name, "--dry-run"]) == 0
    told = capsys.readouterr().out
    assert "network, whole run" in told
    assert f"to bring before training: the prompt file {files.train}" in told


def test_what_is_to_be_brought_is_refused_where_it_is_needed_and_where_it_is_ones_own(capsys, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert code_of(["train", "sd35-nft-ocr", "prompts.train=./nowhere.txt", "--dry-run"]) == 2
    assert "no prompt file './nowhere.txt'" in capsys.readouterr().err
    assert code_of(["train", "sd35-nft-ocr"]) == 2
    assert "no prompt file 'ocr/train.txt'" in capsys.readouterr().err


def test_prompts_without_metadata_are_refused_for_geneval(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "plain.txt").write_text("a photo of a ring\n")
    assert code_of(["train", "pico", "prompts.train=plain.txt"]) == 2
    assert "plain.txt" in (error := capsys.readouterr().err)
    assert "include" in error


def test_files_that_are_no_text_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for name in ("picture.yaml", "picture.jsonl"):
        (tmp_path / name).write_bytes(b"\xff\xd8\xff\xe0")
    assert code_of(["train", "picture.yaml"]) == 2
    assert "error: picture.yaml is not UTF-8 text" in capsys.readouterr().err
    assert code_of(["train", "pico", "prompts.train=picture.jsonl"]) == 2
    assert "error: prompt file picture.jsonl is not UTF-8 text" in capsys.readouterr().err


def test_an_empty_prompt_file_and_a_broken_line_are_named(tmp_path, capsys, monkeypatch):
    monkeypatch.chdir(tmp_path)
    (tmp_path / "empty.jsonl").write_text("\n")
    assert code_of(["train", "pico", "prompts.train=empty.jsonl"]) == 2
    assert "holds no prompts" in capsys.readouterr().err
    (tmp_path / "broken.jsonl").write_text('{"prompt": "a"}\n{"prompt"\n')
    assert code_of(["train", "pico", "prompts.train=broken.jsonl"]) == 2
    assert "line 2" in capsys.readouterr().err


def test_a_run_folder_that_cannot_be_written_is_named(tiny_config, tmp_path, capsys):
    (tmp_path / "file").write_text("in the way")
    config = tiny_config(run={"folder": str(tmp_path / "file" / "run")})
    assert code_of(command(config, tmp_path)) == 2
    assert "cannot write to" in capsys.readouterr().err


def test_a_used_run_folder_is_not_overwritten(tiny_config, tmp_path, capsys):
    assert code_of(command(tiny_config(), tmp_path)) == 0
    before = (tmp_path / "run" / "metrics.jsonl").read_text()
    assert code_of(command(tiny_config(), tmp_path)) == 2
    assert "already holds a run" in capsys.readouterr().err
    assert (tmp_path / "run" / "metrics.jsonl").read_text() == before


def test_a_folder_in_which_nothing_was_trained_is_free_for_the_next_try(tiny_config, tmp_path, capsys, monkeypatch):
    stopped = []
    monkeypatch.setattr("flowrl_img.live.Live.close", lambda live: stopped.append(live.bar.stop()))
    with monkeypatch.context() as patch:
        patch.setattr("flowrl_img.run.load_model", lambda *_: (_ for _ in ()).throw(OSError("weights are missing")))
        assert code_of(command(tiny_config(), tmp_path)) == 2
    assert capsys.readouterr().err == "error: weights are missing\n"
    assert len(stopped) == 1  # a progress bar that is not stopped keeps the terminal's cursor
    assert code_of(command(tiny_config(run={"rollouts": 1}), tmp_path)) == 0


def test_resuming_in_the_same_folder_trains_again_what_came_after_the_checkpoint(tiny_config, tmp_path):
    run = tmp_path / "run"
    assert code_of(command(tiny_config(run={"rollouts": 2, "save_every": 2}), tmp_path)) == 0
    whole = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    with (run / "metrics.jsonl").open("a") as file:
        file.write('{"update": 5, "rew')
    resumed = tiny_config(run={"rollouts": 2, "resume": str(run / "checkpoint-000002")})
    assert code_of(command(resumed, tmp_path)) == 0
    rows = [json.loads(line) for line in (run / "metrics.jsonl").read_text().splitlines()]
    assert [row | {"seconds": 0} for row in rows] == [row | {"seconds": 0} for row in whole]


def test_resuming_in_the_same_folder_gives_the_held_out_curve_of_a_run_that_was_not_stopped(tiny_config, tmp_path):
    from flowrl_img.run_folder import rows_of

    run, settings = tmp_path / "run", {"rollouts": 2, "save_every": 2}
    assert code_of(command(tiny_config(run=settings, evaluation={"every": 2}), tmp_path)) == 0
    whole = rows_of(run, "evaluations.jsonl")
    assert [(row["label"], row["update"]) for row in whole][:2] == [("before", 0), ("update 2", 2)]
    # As if stopped between the checkpoint and the evaluation that was due there.
    (run / "evaluations.jsonl").write_text(json.dumps(whole[0]) + "\n")
    resumed = tiny_config(run=settings | {"resume": str(run / "checkpoint-000002")}, evaluation={"every": 2})
    assert code_of(command(resumed, tmp_path)) == 0
    assert rows_of(run, "evaluations.jsonl") == whole


def test_resuming_does_not_write_into_the_folder_of_another_run(tiny_config, tmp_path, capsys):
    for name in ("a", "b"):
        assert code_of(command(tiny_config(run={"rollouts": 1, "folder": str(tmp_path / name)}), tmp_path)) == 0
    before = (tmp_path / "b" / "metrics.jsonl").read_text()
    mixed = tiny_config(run={"rollouts": 2, "folder": str(tmp_path / "b"), "resume": str(tmp_path / "a")})
    assert code_of(command(mixed, tmp_path)) == 2
    assert "b already holds a run" in capsys.readouterr().err
    assert (tmp_path / "b" / "metrics.jsonl").read_text() == before


def test_a_full_disk_in_the_middle_says_so_and_keeps_what_was_written(tiny_config, tmp_path, capsys, monkeypatch):
    import resource

    from flowrl_img import run
    from flowrl_img.checkpoint import save_checkpoint

    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)

    def on_a_small_disk(*arguments):
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
        try:
            return save_checkpoint(*arguments)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))

    monkeypatch.setattr(run, "save_checkpoint", on_a_small_disk)
    assert code_of(command(tiny_config(), tmp_path)) == 2
    error = capsys.readouterr().err
    assert f"error: cannot write to {tmp_path / 'run'}: " in error
    assert "File too large" in error
    assert "Traceback" not in error
    assert len((tmp_path / "run" / "metrics.jsonl").read_text().splitlines()) == 4


def test_a_checkpoint_is_taken_at_the_end_of_its_rollout(tiny_config, tmp_path):
    assert code_of(command(tiny_config(run={"rollouts": 2, "save_every": 3}), tmp_path)) == 0
    assert [p.name for p in (tmp_path / "run").glob("checkpoint-*")] == ["checkpoint-000004"]
    manifest = json.loads((tmp_path / "run" / "checkpoint-000004" / "manifest.json").read_text())
    assert (manifest["update"], manifest["rollout"]) == (4, 2)


def test_ctrl_c_leaves_a_usable_run_folder_and_code_130(tiny_config, tmp_path):
    config = tiny_config(run={"rollouts": 10_000})
    arguments = command(config, tmp_path)
    env = {**os.environ, "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        [sys.executable, "-m", "flowrl_img", *arguments], env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
        # A shell's background job ignores SIGINT and hands that down.
        preexec_fn=lambda: signal.signal(signal.SIGINT, signal.default_int_handler),
    )  # fmt: skip
    metrics = tmp_path / "run" / "metrics.jsonl"
    deadline = time.monotonic() + 240
    while time.monotonic() < deadline and not (metrics.exists() and metrics.read_text().count("\n") >= 3):
        time.sleep(0.2)
    process.send_signal(signal.SIGINT)
    output, _ = process.communicate(timeout=120)
    assert process.returncode == 130, output.decode()[-2000:]
    assert b"Traceback" not in output
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    (checkpoint,) = (tmp_path / "run").glob("checkpoint-*")
    manifest = json.loads((checkpoint / "manifest.json").read_text())
    assert manifest["update"] == rows[-1]["update"]
