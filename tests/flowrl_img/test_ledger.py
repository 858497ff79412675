import math

import pytest

from flowrl_img.ledger import Ledger, Row

ROWS = [
    Row("base", "few/1/0", {"reward": 0.1, "ocr": math.nan}, "AA=="),
    Row("w=1.6", "few/1/0", {"reward": 1 / 3}, "BB=="),
]


def test_rows_come_back_to_the_bit_and_nan_stays_nan(tmp_path):
    Ledger(tmp_path, 0).append(ROWS)
    found = Ledger(tmp_path, 0).rows()
    assert list(found) == [("base", "few/1/0"), ("w=1.6", "few/1/0")]
    assert found["w=1.6", "few/1/0"] == ROWS[1]
    assert math.isnan(found["base", "few/1/0"].scores["ocr"])
    assert "NaN" not in (tmp_path / "scores-0.jsonl").read_text()


def test_rows_of_all_processes_are_one_ledger(tmp_path):
    for rank, row in enumerate(ROWS):
        Ledger(tmp_path, rank).append([row])
    assert len(Ledger(tmp_path, 0).rows()) == 2


def test_a_line_cut_by_a_kill_is_dropped_and_the_next_one_starts_on_its_own(tmp_path):
    Ledger(tmp_path, 0).append(ROWS)
    file = tmp_path / "scores-0.jsonl"
    whole = file.read_text()
    file.write_text(whole[:-20])
    assert list(Ledger(tmp_path, 1).rows()) == [("base", "few/1/0")]  # another process only reads it
    again = Ledger(tmp_path, 0)
    again.append(ROWS[1:])
    assert file.read_text() == whole


def test_a_line_that_is_no_row_is_named(tmp_path):
    Ledger(tmp_path, 0).append(ROWS)
    file = tmp_path / "scores-0.jsonl"
    file.write_text('{"variant": "base"}\n' + file.read_text())
    with pytest.raises(ValueError, match=r"scores-0.jsonl, line 1 is no row"):
        Ledger(tmp_path, 0).rows()


def test_other_settings_are_refused_by_name_until_the_folder_is_cleared(tmp_path):
    ledger = Ledger(tmp_path, 0)
    ledger.check_settings({"steps": 20, "shape": (1, 2)})
    ledger.append(ROWS)
    Ledger(tmp_path, 0).check_settings({"steps": 20, "shape": (1, 2)})
    with pytest.raises(
        ValueError, match=r"other settings \(steps; steps was 20, is 40\): give another folder with --out"
    ):
        ledger.check_settings({"steps": 40, "shape": (1, 2)})
    ledger.clear()
    ledger.check_settings({"steps": 40})
    assert ledger.rows() == {}
