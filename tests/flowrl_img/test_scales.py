import pytest

from flowrl_img.scales import Constant, Ramp, Switch, as_scale, parse_scale, parse_scales


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("1.6", Constant(1.6)),
        (" -0.5", Constant(-0.5)),
        ("2.", Constant(2.0)),
        ("1e-1", Constant(0.1)),
        ("1:0@12", Switch(1, 0, 12)),
        ("1:0@0.6", Switch(1, 0, 0.6)),
        ("0.5:-1.5@.25", Switch(0.5, -1.5, 0.25)),
        ("2..0", Ramp(2, 0)),
        ("2...5", Ramp(2, 0.5)),
        ("1.5..-1", Ramp(1.5, -1)),
    ],
)
def test_scales_are_written_as_numbers_switches_and_ramps(text, expected):
    assert parse_scale(text) == expected


@pytest.mark.parametrize("scale", [Constant(1.6), Switch(1, 0.25, 12), Switch(2, 0, 0.5), Ramp(2, 0)])
def test_the_text_of_a_scale_gives_it_back(scale):
    assert parse_scale(str(scale)) == scale


@pytest.mark.parametrize("text", ["strong", "", "1:0", "1@3", "1:0@-2", "1:0@1.5", "nan", "inf", "1e999", "..", "1,2"])
def test_what_is_no_scale_is_refused(text):
    with pytest.raises(ValueError, match="scale|share"):
        parse_scale(text)


def test_a_list_keeps_its_order_and_each_scale_once():
    assert [str(s) for s in parse_scales("0, 1,1.0,2..0")] == ["0", "1", "2..0"]
    with pytest.raises(ValueError, match=r"'x' is no scale: write a number"):
        parse_scales("0,x")
    with pytest.raises(ValueError, match="no scale in ','"):
        parse_scales(",")


def test_a_switch_keeps_its_share_of_any_number_of_steps():
    for num_steps, boundary in ((10, 6), (20, 12), (7, 4)):
        weights = [Switch(1, 0, 0.6)(k, num_steps) for k in range(num_steps)]
        assert weights == [1] * boundary + [0] * (num_steps - boundary)


def test_a_switch_after_a_number_of_steps_counts_them():
    assert [Switch(1, 0, 2)(k, 5) for k in range(5)] == [1, 1, 0, 0, 0]
    assert [Switch(1, 0, 9)(k, 3) for k in range(3)] == [1, 1, 1]


def test_a_ramp_reaches_both_ends():
    assert [Ramp(2, 0)(k, 5) for k in range(5)] == [2, 1.5, 1, 0.5, 0]
    assert Ramp(2, 0)(0, 1) == 2


def test_numbers_texts_and_functions_are_scales():
    assert as_scale(2) == Constant(2.0)
    assert as_scale("1:0@2") == Switch(1, 0, 2)
    assert as_scale(lambda step, num_steps: step / num_steps)(1, 2) == 0.5
    for wrong in (None, True, float("nan"), [1.6]):
        with pytest.raises(ValueError, match="scale"):
            as_scale(wrong)
