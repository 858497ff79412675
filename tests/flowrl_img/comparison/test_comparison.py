"""The comparison of algorithms: budgets, the resumable journal, and the arithmetic of its report."""

import json
import math

import pytest
import yaml

from flowrl_img import recipes
from flowrl_img.comparison.curves import Curve, cost_to, curve_of, fewer, mean_curve
from flowrl_img.comparison.journal import Journal
from flowrl_img.comparison.measure import last_evaluation
from flowrl_img.comparison.report import interval, results, table, write_report
from flowrl_img.comparison.settings import Cell, cost_of_rollout, load_settings
from flowrl_img.config import Config
from flowrl_img.resources import assets

SETTINGS = assets() / "benchmarks" / "algorithms.yaml"
SMALL = {
    "budget": 20_000,
    "tuning_budget": 8_000,
    "points": 4,
    "reference": "flow_grpo",
    "algorithms": {
        "flow_grpo": {"recipe": "pico", "trials": [[], ["optimizer.lr=1e-3"]]},
        "nft": {"recipe": "pico-nft", "trials": [[], ["objective.beta=0.1"]]},
    },
    "rewards": {
        "geneval": {
            "changes": ["prompts={{train: pico/train_geneval, evaluation: pico/{split}_geneval, balance: tag}}"],
            "seeds": [0, 1],
            "targets": [0.5, 0.9],
        },
        "ocr": {"changes": ["rewards=[{{name: ocr}}]"], "seeds": [0], "algorithms": ["nft"]},
    },
}


@pytest.fixture
def journal(tmp_path):
    file = tmp_path / "settings.yaml"
    file.write_text(yaml.safe_dump(SMALL))
    return Journal(tmp_path / "journal", load_settings(file))


# --- what is run ---------------------------------------------------------------------------------------------------


def test_the_packaged_settings_are_valid_and_give_every_algorithm_as_many_trials():
    settings = load_settings(SETTINGS)
    assert {len(a.trials) for a in settings.algorithms.values()} == {4}
    assert {"flow_grpo", "tempflow", "nft", "awm", "dgpo"} <= set(settings.algorithms)
    cells = settings.cells()
    assert sum(c.reward == "geneval" for c in cells) == 3 * len(settings.algorithms)
    assert [c.algorithm for c in cells if c.reward == "ocr"] == ["flow_grpo", "tempflow", "nft", "awm", "dgpo"]
    assert [c.seed for c in cells][: len(settings.algorithms)] == [0] * len(settings.algorithms)


@pytest.mark.parametrize("name", load_settings(SETTINGS).algorithms)
def test_every_packaged_cell_and_trial_fits_the_budget_and_differs_by_what_it_should(name, tmp_path):
    settings = load_settings(SETTINGS)
    journal = Journal(tmp_path, settings)
    for cell in (Cell("geneval", name, 1), Cell("ocr", name, 0), Cell("geneval", name, 100, 3)):
        config = journal.config(cell)
        cost = cost_of_rollout(config)
        budget = settings.budget if cell.trial is None else settings.tuning_budget
        assert 0 < budget - config.run.rollouts * cost < cost
        assert config.run.seed == cell.seed
        assert config.run.minutes is None
        assert config.prompts.train == f"pico/train_{cell.reward}"
        split = "test" if cell.trial is None else "tune"
        assert config.prompts.evaluation == f"pico/{split}_{cell.reward}"
        assert [r.name for r in config.rewards] == [cell.reward]
        assert config.report_rewards[0].section()["model"] == "assets:judges/held_out"


def test_a_backward_pass_counts_twice():
    small = ["rollout.groups=2", "rollout.group_size=4", "rollout.steps=10", "run.updates_per_rollout=1"]
    flow = recipes.load("pico", [*small, "rollout.window={size: 3}"])
    assert cost_of_rollout(flow) == 2 + 8 * 9 + 3 * 8 * 3  # the first step once for each of two groups
    nft = recipes.load("pico-nft", [*small, "matching.times={name: grid, count: 2}"])
    assert cost_of_rollout(nft) == 8 * 10 + (1 + 3) * 8 * 2


def test_a_budget_below_one_rollout_is_refused(journal):
    small = journal.settings.model_copy(update={"budget": 10})
    with pytest.raises(ValueError, match=r"geneval/nft/seed0: one rollout costs .* raise the budget"):
        Journal(journal.folder, small).config(Cell("geneval", "nft", 0))


def test_an_algorithm_without_a_recipe_is_named(tmp_path):
    wrong = {**SMALL, "reference": "flow", "rewards": {"ocr": {"changes": [], "seeds": [0], "algorithms": ["nfft"]}}}
    (tmp_path / "s.yaml").write_text(yaml.safe_dump(wrong))
    with pytest.raises(ValueError, match="no algorithm is called flow, nfft"):
        load_settings(tmp_path / "s.yaml")


# --- journal -------------------------------------------------------------------------------------------------------


def pretend(rewards):
    """Training that writes the files of a run; rewards: held-out reward before, then after each update."""

    def train(recipe):
        config = Config.model_validate(yaml.safe_load(recipe.read_text()))
        from pathlib import Path

        run = Path(config.run.folder)
        run.mkdir(parents=True)
        for number in (1, 2):
            (run / f"checkpoint-{number:06d}").mkdir()
        (run / "config.yaml").write_text(recipe.read_text())
        updates = range(1, len(rewards))
        rows = [
            {"update": u, "seconds": {"sampling": 2.0 * u, "training": 1.0 * u, "evaluation": 9.0}} for u in updates
        ]
        (run / "metrics.jsonl").write_text("".join(json.dumps(row) + "\n" for row in rows))
        points = [{"label": "x", "update": u, "means": {"reward": r}} for u, r in enumerate(rewards)]
        (run / "evaluations.jsonl").write_text("".join(json.dumps(row) + "\n" for row in points))

    return train


def measured(gain, kl=0.1):
    columns = {"reward": [gain, gain - 0.05, gain + 0.05], "geneval/strict": [gain / 2, 0.0, gain]}
    before = {"reward": [0.5, 0.0, 1.0], "geneval/strict": [0.3, 0.2, 0.4]}
    level = {"reward": [0.5 + gain, 0.0, 1.0], "geneval/strict": [0.3 + gain / 2, 0.2, 0.4]}
    return lambda run: {
        "before": before, "after": level, "gain": columns, "diversity": {"before": 0.3, "after": 0.2}, "kl": kl,
        "pictures": 10,
    }  # fmt: skip


def test_a_finished_cell_is_not_run_again_and_an_interrupted_one_starts_afresh(journal):
    cell, runs = Cell("geneval", "nft", 0), []
    train = pretend([0.4, 0.6])

    def counted(recipe):
        runs.append(recipe)
        train(recipe)
        if len(runs) == 1:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        journal.run(cell, measured(0.2), counted)
    assert not journal.done(cell)
    journal.run(cell, measured(0.2), counted)
    found = journal.run(cell, measured(0.9), counted)
    assert len(runs) == 2
    assert found["gain"]["reward"][0] == 0.2
    kept = {p.name for p in journal.place(cell).iterdir()}
    assert kept == {"config.yaml", "metrics.jsonl", "evaluations.jsonl", "measured.json", "checkpoint-000002"}


def test_an_interrupted_cell_goes_on_from_its_checkpoint_if_it_was_the_same_run(journal):
    cell, resumed = Cell("geneval", "nft", 0), []

    def interrupted(recipe):
        config = recipes.load(str(recipe))
        resumed.append(config.run.resume)
        place = journal.place(cell)
        (place / "checkpoint-000001").mkdir(parents=True, exist_ok=True)
        (place / "checkpoint-000001" / "manifest.json").write_text("{}")
        (place / "config.yaml").write_text(recipes.to_yaml(config))
        raise KeyboardInterrupt

    def attempt():
        with pytest.raises(KeyboardInterrupt):
            journal.run(cell, measured(0.2), interrupted)

    attempt()
    attempt()
    attempt()
    journal.settings = journal.settings.model_copy(update={"pictures": 8})
    attempt()
    here = str(journal.place(cell))
    assert resumed == [None, here, here, None]


def test_two_processes_do_not_run_the_same_cell(journal):
    cell, inner = Cell("geneval", "nft", 0), []
    train = pretend([0.4, 0.6])

    def meanwhile(recipe):
        inner.append(journal.run(cell, measured(0.9), train))
        train(recipe)

    found = journal.run(cell, measured(0.2), meanwhile)
    assert inner == [None]
    assert found["gain"]["reward"][0] == 0.2
    assert sorted(p.name for p in journal.place(cell).parent.iterdir()) == ["seed0"]


def test_tuning_chooses_the_best_trial_and_the_comparison_uses_it(journal):
    for cell in journal.trials():
        journal.run(cell, measured(0.1 * (1 + cell.trial) if cell.algorithm == "nft" else 0.1), pretend([0.4, 0.5]))
    assert journal.choose() == {"flow_grpo": 0, "nft": 1}
    assert journal.config(Cell("geneval", "nft", 0)).objective.section()["beta"] == 0.1
    assert journal.config(Cell("geneval", "nft", 100, 0)).objective.section()["beta"] == 0.2


def test_a_trial_is_judged_by_its_last_held_out_evaluation(journal):
    cell = Cell("geneval", "nft", 100, 1)
    found = journal.run(cell, last_evaluation, pretend([0.4, 0.5, 0.7]))
    assert found == {"before": {"reward": [0.4]}, "after": {"reward": [0.7]}}
    assert journal.config(cell).evaluation.pictures == journal.settings.tuning_pictures


# --- report --------------------------------------------------------------------------------------------------------


def test_a_curve_reaches_a_target_between_its_points():
    curve = Curve([0, 100, 200], [0, 1, 2], [0.4, 0.5, 0.8])
    assert curve.cost_to(0.3) == 0
    assert curve.cost_to(0.5) == 100
    assert curve.cost_to(0.65) == pytest.approx(150)
    assert curve.cost_to(0.9) is None


def test_curves_leave_held_out_evaluation_out_of_the_seconds(tmp_path, journal):
    cell = Cell("geneval", "nft", 0)
    journal.run(cell, measured(0.2), pretend([0.4, 0.6, 0.7]))
    curve = curve_of(journal.place(cell), cost_per_rollout=50, updates_per_rollout=2)
    assert curve.cost == [0, 25, 50]
    assert curve.seconds == [0.0, 3.0, 6.0]
    assert curve.reward == pytest.approx([0.5, 0.7, 0.7])  # before .5, gain on few pictures .2, after .7


def test_an_interval_is_students():
    mean, low, high = interval([1.0, 2.0, 3.0])
    assert mean == 2
    assert high - mean == pytest.approx(4.302653 / math.sqrt(3), rel=1e-5)
    assert mean - low == pytest.approx(high - mean)
    assert interval([]) is None
    assert math.isnan(interval([1.0])[1])


def test_a_cost_is_that_of_the_mean_of_runs_with_an_interval_over_runs_drawn_again():
    runs = [Curve([0, 100, 200], [0, 1, 2], [0.4, 0.4 + gain, 0.4 + 2 * gain]) for gain in (0.1, 0.2, 0.3)]
    assert mean_curve(runs).reward == pytest.approx([0.4, 0.6, 0.8])
    cost, low, high = cost_to(runs, 0.7)
    assert cost == pytest.approx(150)
    assert low == pytest.approx(100)  # the fastest three times
    assert high == math.inf  # the slowest three times, up to 0.6
    assert cost_to(runs, 0.9) is None
    assert cost_to([], 0.5) is None
    alone = cost_to(runs[:1], 0.5)
    assert alone[0] == pytest.approx(100) and math.isnan(alone[1])


def test_runs_of_different_length_have_no_mean():
    with pytest.raises(ValueError, match="evaluated at different costs"):
        mean_curve([Curve([0, 100], [0, 1], [0.4, 0.5]), Curve([0, 50], [0, 1], [0.4, 0.5])])


def test_times_fewer_evaluations_are_counted_to_the_mean_final_reward_of_the_reference():
    reference = [Curve([0, 100, 200], [0, 1, 2], [0.4, 0.5, final]) for final in (0.55, 0.65)]
    fast = [Curve([0, 10, 200], [0, 1, 2], [0.4, 0.6, 0.9])] * 2
    ratio, low, high = fewer(reference, fast)
    assert ratio == pytest.approx(200 / 10)
    assert low < ratio < high
    assert low == pytest.approx(200 / (10 + 190 * 0.05 / 0.3))  # against the better reference twice
    slow = [Curve([0, 200], [0, 2], [0.4, 0.5])]
    assert fewer(reference, slow)[0] == 0
    assert fewer(reference, []) is None and fewer([], fast) is None
    same = fewer(reference, reference)
    assert same[0] == 1 and same[1] <= 1 <= same[2]


def test_a_report_has_empty_places_for_what_is_missing_and_a_picture_of_what_is_there(journal, tmp_path):
    for seed in (0, 1):
        journal.run(Cell("geneval", "nft", seed), measured(0.2 + 0.02 * seed), pretend([0.4, 0.6, 0.8 + 0.1 * seed]))
    journal.run(Cell("geneval", "flow_grpo", 0), measured(0.1), pretend([0.4, 0.45, 0.5]))
    write_report(journal, tmp_path / "out", "the command")
    page = (tmp_path / "out" / "README.md").read_text()
    assert "`the command`" in page and "20,000 network evaluations" in page
    rows = {
        line.split("|")[1].strip(): [c.strip() for c in line.split("|")[2:-1]]
        for line in page.partition("## ocr")[0].splitlines()
        if "|" in line
    }
    assert rows["flow_grpo"][0] == "1"
    assert rows["flow_grpo"][1] == "0.100 [0.050, 0.150]"  # of one seed, over prompts
    assert rows["flow_grpo"][2] == "0.050 [0, 0.100]"  # wholly right pictures
    assert rows["nft"][0] == "2"
    assert rows["nft"][1].startswith("0.210 [")
    assert rows["nft"][-1] == ""  # the mean of the runs does not get there
    assert rows["nft"][-2] != ""
    assert "| nft | 1 |  | `objective.beta=0.1` |" in page
    assert rows["nft"][7] != ""
    assert (tmp_path / "out" / "geneval.png").stat().st_size > 5000
    assert not (tmp_path / "out" / "ocr.png").exists()
    stored = json.loads((tmp_path / "out" / "results.json").read_text())
    assert stored["geneval"]["nft"]["seeds"] == [0, 1]
    assert stored["ocr"]["nft"]["seeds"] == []
    assert table(results(journal), "ocr").splitlines()[-1].startswith("| nft | 0 |  |")
