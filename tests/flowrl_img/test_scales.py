import pytest

from flowrl_img.scales import Constant, Ramp, Switch, Variant, as_scale, parse_scale, parse_variants


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
    with pytest.raises(ValueError, match=r"scale|share"):
        parse_scale(text)


def test_a_list_keeps_its_order_and_each_strength_once():
    found = parse_variants("0, 1,1.0,2..0", 1)
    assert [v.label for v in found] == ["base", "tuned", "w=2..0"]
    assert [v.weight for v in found] == [0, 1, None]


def test_unequal_strengths_have_unequal_labels():
    found = parse_variants("1,1.0000001,0.1234567,0.1234568,0.1:0@2,0.10000001:0@2,0..1,0..1.0000001", 1)
    assert len({variant.label for variant in found}) == 8


def test_several_tuned_models_take_one_scale_or_one_each():
    found = parse_variants("0,1,1.5,1.5/0.5", 2)
    assert [v.label for v in found] == ["base", "tuned", "w=1.5", "w=1.5/0.5"]
    assert found[2] == Variant((Constant(1.5), Constant(1.5)))
    assert [v.weight for v in found] == [0, 1, 1.5, None]
    assert parse_variants("0", 0) == [Variant(())] and Variant(()).label == "base" and Variant(()).weight == 0


@pytest.mark.parametrize(
    ("text", "sides", "message"),
    [
        ("0,x", 1, r"'x' is no scale: write a number"),
        (",", 1, "no scale in ','"),
        ("1/2/3", 2, "'1/2/3' gives 3 scales for 2 tuned models"),
        ("1.6", 0, "nothing tuned is given"),
    ],
)
def test_strengths_that_make_no_sense_are_refused(text, sides, message):
    with pytest.raises(ValueError, match=message):
        parse_variants(text, sides)


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
