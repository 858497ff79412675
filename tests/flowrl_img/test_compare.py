import json
import os
import subprocess
import sys

import numpy as np
import pytest

from flowrl_img import compare as module
from flowrl_img.measure import Ask, evaluate_sources

SEVEN = [
    {"prompt": f"a photo of a {shape}", "tag": tag}
    for shape, tag in zip(["ring", "star", "heart", "cross", "circle", "square", "moon"], "aabbccc", strict=True)
]


@pytest.fixture
def seven(tmp_path):
    path = tmp_path / "seven.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in SEVEN))
    return str(path)


@pytest.fixture
def run(tiny_run, seven):
    """A run folder that is evaluated at two steps and batch 2, on a reward that sees every pixel."""
    return tiny_run(
        rewards=[{"name": "sample_rewards:brightness"}],
        prompts={"train": seven, "evaluation": seven, "balance": None},
        evaluation={"pictures": 7, "steps": 2, "batch": 2, "sheet": 2},
    )


def evaluated(run, out, *words, pictures=7, scales="0,1,1.6", **options):
    ask = Ask("pico", pictures, scales, out=out, **options)
    lines = list(evaluate_sources([str(run), *words], ask))
    return lines, json.loads((out / "table.json").read_text())


def test_every_strength_is_scored_on_the_same_pictures(run, tmp_path):
    lines, table = evaluated(run, tmp_path / "out")
    assert lines[0] == f"{run}: checkpoint-000004, 7 paired pictures"
    assert lines[2].startswith("held-out reward: ") and "(95 %, n = 7)" in lines[2]
    assert lines[-2].startswith("w=1.6: held-out reward ") and "minus base" in lines[-2] and "minus tuned" in lines[-2]
    assert lines[-1] == f"table: {tmp_path / 'out' / 'table.md'}"
    reward = table["columns"]["reward"]
    assert list(reward) == ["base", "tuned", "w=1.6"]
    assert table["prompts"] == 7 and list(reward["tuned"]["by_task"]) == ["a", "b", "c"]
    assert reward["base"]["minus"]["tuned"][0] == pytest.approx(-reward["tuned"]["minus"]["base"][0])
    means = [np.mean([v[0] for v in reward[label]["by_task"].values()]) for label in reward]
    assert [reward[label]["mean"][0] for label in reward] == pytest.approx(means, abs=1e-6)
    assert {"table.md", "table.json", "sheet.png", "scales.png", "settings.json", "scores-0.jsonl"} <= {
        p.name for p in (tmp_path / "out").iterdir()
    }


def test_zero_and_one_are_the_base_and_the_tuned_weights_of_the_run(run, tmp_path, tiny_trainer, seven):
    from flowrl_img.evaluate import evaluate
    from flowrl_img.parallel import Processes
    from flowrl_img.prompts import choose_evenly

    _, table = evaluated(run, tmp_path / "out")
    trainer = tiny_trainer(
        rewards=[{"name": "sample_rewards:brightness"}],
        prompts={"train": seven, "evaluation": seven, "balance": None},
    )
    samples = choose_evenly(trainer.prompts, 7, None)
    for weight_set, label in (("reference", "base"), ("current", "tuned")):
        with trainer.weights.use(weight_set):
            found = evaluate(
                trainer.model, trainer.prompts, samples, trainer.parts.reward, num_steps=2, guidance=1.0, batch=2,
                processes=Processes(),
            )  # fmt: skip
        assert table["columns"]["reward"][label]["mean"][0] == pytest.approx(found.mean(), abs=1e-6)


def assert_same(found, expected):
    """Equal tables, up to pixels that rounding moved by one grey level, each 3e-7 of a picture's mean."""
    if isinstance(expected, dict):
        assert list(found) == list(expected)
        for key in expected:
            assert_same(found[key], expected[key])
    elif isinstance(expected, list) and all(isinstance(x, float) for x in expected):
        assert found == pytest.approx(expected, abs=5e-6)
    else:
        assert found == expected


class Stop(Exception):
    pass


def counting(monkeypatch, stop_after=None):
    """The chunks drawn, as (sample ids); raises Stop after so many."""
    drawn, original = [], module.held_out_pictures

    def draw(blend, prompts, samples, **settings):
        if len(drawn) == stop_after:
            raise Stop
        drawn.append([s.id for s in samples])
        return original(blend, prompts, samples, **settings)

    monkeypatch.setattr(module, "held_out_pictures", draw)
    return drawn


def test_an_evaluation_killed_in_the_middle_goes_on_and_gives_the_same_table(run, tmp_path, monkeypatch):
    _, whole = evaluated(run, tmp_path / "whole")
    with monkeypatch.context() as patch:
        counting(patch, stop_after=5)
        with pytest.raises(Stop):
            evaluated(run, tmp_path / "cut")
    file = tmp_path / "cut" / "scores-0.jsonl"
    file.write_text(file.read_text()[:-30])  # the kill also cut a line
    with monkeypatch.context() as patch:
        drawn = counting(patch)
        _, resumed = evaluated(run, tmp_path / "cut")
    assert len(drawn) == 3 * 4 - 4  # four chunks of three strengths; four were whole
    assert_same(resumed, whole)
    again = counting(monkeypatch)
    assert evaluated(run, tmp_path / "cut")[1] == resumed
    assert again == []


def test_seven_prompts_on_two_processes_at_batch_two_equal_one_process(run, tmp_path):
    _, one = evaluated(run, tmp_path / "one")
    command = [
        sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc_per_node=2", "-m", "flowrl_img",
        "evaluate", str(run), "--pictures", "7", "--scales", "0,1,1.6", "--threads", "1", "--out",
        str(tmp_path / "two"),
    ]  # fmt: skip
    root = os.getcwd()
    support = os.path.join(root, "tests", "support")
    env = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join([root, support])}
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    two = json.loads((tmp_path / "two" / "table.json").read_text())
    assert_same(two, one)
    assert done.stdout.count("paired pictures") == 1  # the first process prints
    rows = [len((tmp_path / "two" / f"scores-{rank}.jsonl").read_text().splitlines()) for rank in (0, 1)]
    assert sum(rows) == 3 * 7 and min(rows) > 0


def test_more_strengths_and_pictures_are_added_to_what_is_there(run, tmp_path, monkeypatch):
    evaluated(run, tmp_path / "out", scales="0,1")
    drawn = counting(monkeypatch)
    evaluated(run, tmp_path / "out", scales="0,1,2")
    assert len(drawn) == 4
    _, table = evaluated(run, tmp_path / "out", pictures=14)
    assert table["pictures"] == 14 and table["diversity"]["tuned"]["mean"][0] > 0


def test_other_settings_need_another_folder_or_a_restart(run, tmp_path):
    evaluated(run, tmp_path / "out", scales="1")
    with pytest.raises(ValueError, match=r"holds an evaluation with other settings \(evaluation; "):
        evaluated(run, tmp_path / "out", "evaluation.steps=3", scales="1")
    evaluated(run, tmp_path / "out", "evaluation.steps=3", scales="1", restart=True)


@pytest.mark.parametrize("problem", [ValueError, OSError])
def test_what_stops_the_first_process_is_told_to_all(problem):
    from flowrl_img.parallel import Processes

    class Both(Processes):
        def gather(self, value):
            told.append(value)
            return [value, {}]

    def stop():
        raise problem("no room")

    told = []
    with pytest.raises(ValueError, match="no room"):
        module._agreed(stop, Both())
    assert told == [{"problem": "no room"}]


def test_retrained_weights_are_not_mixed_with_old_rows(run, tiny_run, tmp_path, seven):
    evaluated(run, tmp_path / "out", scales="1")
    adapter = run / "checkpoint-000004" / "adapter" / "pytorch_lora_weights.safetensors"
    data = bytearray(adapter.read_bytes())
    data[-1] ^= 1
    adapter.write_bytes(data)
    with pytest.raises(ValueError, match="fingerprints"):
        evaluated(run, tmp_path / "out", scales="1")


def test_diversity_is_measured_inside_prompts_and_paired(run, tmp_path):
    _, table = evaluated(run, tmp_path / "out", pictures=14)
    found = table["diversity"]
    assert found["tuned"]["minus"]["base"][0] == pytest.approx(
        found["tuned"]["mean"][0] - found["base"]["mean"][0], abs=2e-6
    )
    low, high = found["tuned"]["mean"][1:]
    assert 0 < low < found["tuned"]["mean"][0] < high < 1


def test_held_out_rewards_are_reported_beside_the_one_that_was_trained_on(run, tmp_path):
    _, table = evaluated(run, tmp_path / "out", rewards=("jpeg",))
    assert {"reward", "report/jpeg"} <= set(table["columns"])
    text = (tmp_path / "out" / "table.md").read_text()
    assert "## reward" in text and "## report/jpeg" in text and "sample_rewards:brightness\n" not in text


def test_a_failed_score_is_counted_and_left_out(tiny_run, seven, tmp_path):
    run = tiny_run(
        rewards=[{"name": "sample_rewards:broken_for_rings"}],
        prompts={"train": seven, "evaluation": seven, "balance": None},
        evaluation={"steps": 2, "batch": 4, "sheet": 0},
    )
    _, table = evaluated(run, tmp_path / "out", scales="1")
    row = table["columns"]["reward"]["tuned"]
    assert row["invalid"] == 1 and row["mean"][0] is not None
    assert "| invalid |" in (tmp_path / "out" / "table.md").read_text()


def test_plain_text_prompts_and_rewards_that_need_no_metadata_go_together(run, tmp_path):
    plain = tmp_path / "plain.txt"
    plain.write_text("a photo of a ring\n\na photo of two hearts\n")
    _, table = evaluated(
        run,
        tmp_path / "out",
        "rewards=[{name: jpeg}]",
        "prompts.balance=null",
        pictures=5,
        prompts=str(plain),
        scales="1",
    )
    assert table["pictures"] == 5 and table["prompts"] == 2


def test_a_lora_file_alone_is_evaluated_on_the_base_that_is_named(run, tmp_path, tiny_folder, seven):
    adapter = run / "checkpoint-000004" / "adapter" / "pytorch_lora_weights.safetensors"
    words = [
        f"model.path={tiny_folder}", f"prompts.evaluation={seven}", "prompts.balance=null", "prompts.shares=null",
        "rewards=[{name: 'sample_rewards:brightness'}]", "evaluation.batch=2", "evaluation.sheet=0",
        "evaluation.steps=2",
    ]  # fmt: skip
    _, alone = evaluated(adapter, tmp_path / "alone", *words)
    _, table = evaluated(run, tmp_path / "run")
    assert_same(alone["columns"], table["columns"])


def test_two_tuned_models_act_together(run, tiny_run, tmp_path):
    adapter = run / "checkpoint-000004" / "adapter"
    _, table = evaluated(run, tmp_path / "out", str(adapter), scales="0,1/0,0/1,0.5/0.5")
    columns = table["columns"]["reward"]
    assert columns["w=1/0"]["mean"] == columns["w=0/1"]["mean"]  # the same weights twice
    assert columns["w=0.5"]["mean"][0] == pytest.approx(columns["w=1/0"]["mean"][0], abs=1e-4)
