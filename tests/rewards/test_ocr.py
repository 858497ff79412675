"""The OCR reward, with its real engine on rendered signs and with scripted ones."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from PIL import Image, ImageDraw, ImageFont

from flowrl_img.rewards import ocr
from flowrl_img.rewards.ocr import Ocr, read_text
from flowrl_img.rewards.protocol import RewardOutput
from flowrl_img.rewards.score import score
from flowrl_img.world import load_split, render, scene_for

Engine = Callable[..., Any]
BOX = [[0, 0], [20, 0], [20, 10], [0, 10]]


def as_batch(*pictures: Any) -> torch.Tensor:
    return torch.stack([torch.from_numpy(np.array(picture)).permute(2, 0, 1) / 255 for picture in pictures])


def blank() -> np.ndarray:
    return np.full((64, 64, 3), 40, np.uint8)


def ask(reward: Ocr, images: torch.Tensor, prompts: list[str], policy: str = "mask") -> RewardOutput:
    return score(reward, images, prompts, [{}] * len(prompts), [str(k) for k in range(len(prompts))], policy=policy)


@pytest.fixture
def engine(monkeypatch: pytest.MonkeyPatch) -> Callable[[Engine], None]:
    def use(fake: Engine) -> None:
        monkeypatch.setattr(ocr, "_engine", lambda pid: fake)

    return use


def test_signs_of_the_world_are_read_exactly() -> None:
    rows = load_split("test", "ocr")[:6]
    images = as_batch(*(render(scene_for(row, np.random.default_rng(k))) for k, row in enumerate(rows)))
    out = ask(Ocr(), images, [row["prompt"] for row in rows])
    assert out.values.tolist() == [1.0] * 6
    assert all(out.details["exact"])


def test_a_wrong_text_scores_low_and_a_blank_picture_zero() -> None:
    sign = render(scene_for({"ocr_target": "HELM"}, np.random.default_rng(0)))
    out = ask(Ocr(), as_batch(sign, sign, blank()), ['"HELM"', '"X94T"', '"HELM"'])
    assert out.valid.all()
    assert out.values[0] == 1.0 and out.values[1] < 0.5 and out.values[2] == 0.0


FONTS = ("Aileron", "DejaVuSans", "DejaVuSerif-Bold", "DejaVuSansMono")  # the first is Pillow's own
WORDS = ("HELLO", "Dragon", "OPEN 24", "Grand\nOpening")


def written(text: str, size: int, font: str, colors: tuple[str, str]) -> Image.Image:
    """`text` over 80 % of the width of a size x size picture. Skips where the font is not installed."""
    picture = Image.new("RGB", (size, size), colors[0])
    draw = ImageDraw.Draw(picture)

    def face(points: float) -> ImageFont.FreeTypeFont:
        try:
            found = ImageFont.load_default(points) if font == "Aileron" else ImageFont.truetype(f"{font}.ttf", points)
        except OSError:
            pytest.skip(f"{font} is not installed")
        assert isinstance(found, ImageFont.FreeTypeFont)
        return found

    left, _, right, _ = draw.multiline_textbbox((0, 0), text, font=face(100))
    chosen = face(100 * 0.8 * size / (right - left))
    draw.multiline_text((size / 2, size / 2), text, colors[1], font=chosen, anchor="mm", align="center")
    return picture


@pytest.mark.parametrize("size", [64, 128, 256])
@pytest.mark.parametrize("font", FONTS)
def test_rendered_words_and_phrases_of_two_lines_are_read(font: str, size: int) -> None:
    pictures = [
        written(text, size, font, colors)
        for text, colors in zip(WORDS, [("white", "black"), ("#203060", "#ffe040")] * 2, strict=True)
    ]
    prompts = [f'a sign that says "{text}"'.replace("\n", " ") for text in WORDS]
    values = ask(Ocr(), as_batch(*pictures), prompts).values
    assert values.mean() >= (0.9 if size == 64 else 0.97), values  # a letter may be lost where strokes are a pixel


@pytest.mark.parametrize(
    ("prompt", "value"),
    [
        ('a sign that says "Hello World"', 1.0),
        ("a sign that says “hello world”", 1.0),
        ('"Hello" over "World"', 1.0),
        ('"World" over "Hello"', 1.0),
        ('a sign that says "Hello"', 0.0),
        ('a sign that says "HelloWorldHello"', 10 / 15),
    ],
)
def test_the_text_read_is_compared_with_the_quoted_target(
    engine: Callable[[Engine], None], prompt: str, value: float
) -> None:
    engine(lambda image, use_cls: ([[BOX, "Hello World", 0.9]], None))
    assert ask(Ocr(), as_batch(blank()), [prompt]).values.item() == pytest.approx(value)


def test_the_engine_gets_an_enlarged_picture_in_blue_green_red_order(engine: Callable[[Engine], None]) -> None:
    seen = []
    engine(lambda image, use_cls: (seen.append((image.shape, image[0, 0].tolist(), use_cls)), None))
    red = blank()
    red[:] = (200, 10, 30)
    assert read_text(red) == ""
    assert read_text(np.repeat(np.repeat(red, 8, axis=0), 5, axis=1)) == ""
    assert seen == [((256, 256, 3), [30, 10, 200], False), ((512, 320, 3), [30, 10, 200], False)]


def test_a_crash_of_the_engine_is_invalid_and_not_zero(engine: Callable[[Engine], None]) -> None:
    def crash_on_dark(image: np.ndarray, use_cls: bool) -> Any:
        if image.mean() < 10:
            raise RuntimeError("onnx session died")
        return [[BOX, "AB", 0.9]], None

    engine(crash_on_dark)
    out = ask(Ocr(), as_batch(blank(), np.zeros_like(blank())), ['"AB"', '"AB"'])
    assert out.valid.tolist() == [True, False]
    assert out.values[0] == 1.0 and out.values[1].isnan()
    assert out.details["error"][1] == "RuntimeError: onnx session died"
    assert out.details["exact"] == [True, None]  # an evaluation averages it


def test_lines_without_confidence_are_dropped(engine: Callable[[Engine], None]) -> None:
    engine(lambda image, use_cls: ([[BOX, "AB", 0.9], [[[x + 30, y] for x, y in BOX], "XX", 0.0]], None))
    assert read_text(blank()) == "AB"


def test_a_prompt_without_a_text_is_refused_when_prompts_are_loaded() -> None:
    Ocr().validate(['"A"', "x"], [{}, {"ocr_target": "B"}])
    with pytest.raises(ValueError, match=r"line 2: no text to look for in 'a sign'"):
        Ocr().validate(['"A"', "a sign"], [{}, {}])


def test_extra_text_costs_what_the_penalty_says(engine: Callable[[Engine], None]) -> None:
    for text, value in (("ABCD", 1.0), ("xABCD", 1 - 0.5 / 4), ("ABCDEFGHIJKL", 0.0), ("AB", 0.5)):
        engine(lambda image, use_cls, text=text: ([[BOX, text, 0.9]], None))
        reward = Ocr(mode="substring", extra_text_penalty=0.5)
        assert ask(reward, as_batch(blank()), ['"ABCD"']).values.item() == pytest.approx(value), text
    with pytest.raises(ValueError, match="0 or more, got -1"):
        Ocr(extra_text_penalty=-1)


def test_substring_is_an_option(engine: Callable[[Engine], None]) -> None:
    engine(lambda image, use_cls: ([[BOX, "xxABxx", 0.9]], None))
    assert ask(Ocr(mode="substring"), as_batch(blank()), ['"AB"']).values.item() == 1.0
    assert ask(Ocr(), as_batch(blank()), ['"AB"']).values.item() == 0.0
