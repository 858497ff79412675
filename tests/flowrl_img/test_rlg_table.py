import runpy
from pathlib import Path

import pytest

SCRIPT = Path(__file__).parents[2] / "scripts" / "rlg_table.py"


@pytest.fixture
def main():
    return runpy.run_path(str(SCRIPT))["main"]


def test_the_table_over_scales_is_made_for_each_run_and_goes_on_where_it_was(
    main, tiny_run, tmp_path, capsys, monkeypatch
):
    run = tiny_run(evaluation={"steps": 1, "sheet": 0})
    words = [f"first={run}", "--to", str(tmp_path / "out"), "--pictures", "4", "--reward", "sample_rewards:brightness"]
    main([*words, "--scales", "0,1"])
    rows = (run / "evaluation-rlg" / "scores-0.jsonl").read_text()
    main(words)
    assert (run / "evaluation-rlg" / "scores-0.jsonl").read_text().startswith(rows)
    text = (tmp_path / "out" / "rlg.md").read_text()
    lines = [line for line in text.splitlines() if line.startswith("| ")]
    assert [line.split(" | ")[0] for line in lines[2:]] == [f"| {w}" for w in ("0", "0.5", "1", "1.5", "2", "3")]
    assert "report/sample_rewards:brightness" in lines[0] and "## first" in text
    assert (tmp_path / "out" / "rlg.png").exists()
    assert "held-out reward:" in capsys.readouterr().out


def test_a_run_without_a_name_is_refused(main, capsys):
    with pytest.raises(SystemExit):
        main(["runs/a", "--to", "x"])
    assert "'runs/a': write NAME=RUN" in capsys.readouterr().err
