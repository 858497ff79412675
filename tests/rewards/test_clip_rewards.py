"""PickScore and CLIPScore against CLIPModel itself, on a small model."""

from __future__ import annotations

import shutil
import warnings
from functools import cache
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor

from flowrl_img.rewards.clip_model import Clip
from flowrl_img.rewards.clipscore import ClipScore
from flowrl_img.rewards.pickscore import PickScore
from flowrl_img.rewards.pretrained import WeightsError
from flowrl_img.rewards.score import InvalidScoreError, score

PROMPTS = ["the red cube", "a blue heart and a ring", "é 😀 ＡＢ", "the"]
LONG = "the red cube " * 60


@cache
def images() -> Tensor:
    """[4, 3, 80, 64] on 8-bit levels."""
    levels = torch.randint(0, 256, (4, 3, 80, 64), generator=torch.Generator().manual_seed(0))
    return levels / 255


def ask(reward: Any, pictures: Tensor, prompts: list[str], policy: str = "raise") -> Any:
    return score(reward, pictures, prompts, [{}] * len(prompts), [str(k) for k in range(len(prompts))], policy=policy)


@cache
def pickscore() -> PickScore:
    return PickScore(**tiny_models.pair(tiny_models.clip_folder()))


def clipscore(**options: Any) -> ClipScore:
    return ClipScore(**tiny_models.pair(tiny_models.clip_folder()), **options)


def logits(prompts: list[str], dtype: torch.dtype = torch.float32, padding: str = "longest") -> Tensor:
    """What CLIPModel gives for each pair, from its own processor."""
    from transformers import CLIPImageProcessorPil, CLIPModel, CLIPTokenizer

    folder = tiny_models.clip_folder(dtype=dtype)
    model = CLIPModel.from_pretrained(folder, dtype=dtype).float().eval()
    tokens = CLIPTokenizer.from_pretrained(folder)(prompts, padding=padding, truncation=True, return_tensors="pt")
    levels = (images()[: len(prompts)] * 255).round().byte().permute(0, 2, 3, 1)
    pixels = CLIPImageProcessorPil.from_pretrained(folder)(list(levels.numpy()), return_tensors="pt").pixel_values
    with torch.no_grad():
        return model(
            input_ids=tokens.input_ids, attention_mask=tokens.attention_mask, pixel_values=pixels
        ).logits_per_image


@pytest.mark.parametrize("padding", ["longest", "max_length"])
def test_pickscore_is_clips_own_logit_over_26_whatever_the_padding(padding: str) -> None:
    expected = logits(PROMPTS, padding=padding).diagonal() / 26
    torch.testing.assert_close(ask(pickscore(), images(), PROMPTS).values, expected, rtol=0, atol=1e-6)


def test_a_checkpoint_in_bf16_is_scored_in_fp32() -> None:
    reward = PickScore(**tiny_models.pair(tiny_models.clip_folder(dtype=torch.bfloat16)))
    values = ask(reward, images(), PROMPTS).values
    assert {p.dtype for p in reward._clip.network.parameters()} == {torch.float32}
    # The weights rounded to bf16, all else in fp32. In bf16 arithmetic scores would move by 5e-3 and more.
    torch.testing.assert_close(values, logits(PROMPTS, torch.bfloat16).diagonal() / 26, rtol=0, atol=1e-6)


def test_a_pair_is_scored_with_its_own_prompt() -> None:
    straight = ask(pickscore(), images(), PROMPTS).values
    crossed = ask(pickscore(), images(), PROMPTS[::-1]).values
    assert (straight - crossed).abs().min() > 1e-4
    table = logits(PROMPTS) / 26
    torch.testing.assert_close(crossed, table.flip(1).diagonal(), rtol=0, atol=1e-6)  # values above 1: 8 units


def test_long_prompts_are_counted_and_told_once() -> None:
    reward = PickScore(**tiny_models.pair(tiny_models.clip_folder()))
    with pytest.warns(UserWarning, match=r"'pickscore' reads 77 tokens: 2 of 4 prompts \(50%\) are longer"):
        reward.validate([LONG, "the", LONG + "red", "red"], [{}] * 4)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        out = ask(reward, images(), ["the", LONG, "the", LONG])
    assert out.details["truncated"] == [False, True, False, True] and out.values.isfinite().all()
    assert (reward._clip.truncation.seen, reward._clip.truncation.cut) == (4 + 2, 2 + 1)  # each distinct prompt once


def test_a_cut_prompt_still_ends_with_the_end_token() -> None:
    clip = pickscore()._clip
    ids = clip.tokenizer([LONG], truncation=True, max_length=clip.truncation.limit)["input_ids"][0]
    assert len(ids) == 77 and ids[-1] == clip.tokenizer.eos_token_id


def test_an_embedding_without_a_direction_is_invalid_not_0() -> None:
    reward = PickScore(**tiny_models.pair(tiny_models.clip_folder()))
    reward._clip.network.visual_projection.weight.zero_()
    out = ask(reward, images(), PROMPTS, policy="mask")
    assert out.values.isnan().all() and not out.valid.any()
    with pytest.raises(InvalidScoreError, match="embedding is zero or not finite"):
        ask(reward, images(), PROMPTS)


def test_a_gradient_is_that_of_the_score() -> None:
    floats = torch.nn.functional.interpolate(images(), size=(96, 96)).requires_grad_()
    pickscore().differentiable(floats, PROMPTS).sum().backward()
    assert floats.grad is not None
    direction = floats.grad / floats.grad.norm()
    with torch.no_grad():
        ends = [pickscore().differentiable(floats + step * direction, PROMPTS).sum() for step in (0.05, -0.05)]
    # Central difference over 0.1 in fp32: curvature and rounding leave well under 2 %.
    assert (ends[0] - ends[1]).item() / 0.1 == pytest.approx(floats.grad.norm().item(), rel=0.02)


def test_gradients_flow_after_a_first_use_in_inference_mode() -> None:
    reward = PickScore(**tiny_models.pair(tiny_models.clip_folder()))
    with torch.inference_mode():
        ask(reward, images(), PROMPTS)
    floats = images().clone().requires_grad_()
    reward.differentiable(floats, PROMPTS).sum().backward()
    assert floats.grad is not None and floats.grad.abs().sum() > 0
    assert not any(p.requires_grad for p in reward._clip.network.parameters())


def test_clipscore_variants_are_functions_of_one_cosine() -> None:
    cos = ask(clipscore(), images(), PROMPTS).values
    torch.testing.assert_close(cos, logits(PROMPTS).diagonal() / torch.tensor(4.6052).exp(), rtol=0, atol=1e-6)
    assert (cos < 0).any() and (cos > 0).any()
    sign = clipscore(variant="torchmetrics")
    torch.testing.assert_close(ask(sign, images(), PROMPTS).values, 100 * cos.clamp(min=0), rtol=1e-6, atol=1e-5)
    prefixed = ask(clipscore(prefix="A photo depicts "), images(), PROMPTS).values
    assert (prefixed - cos).abs().min() > 1e-5
    hessel = ask(clipscore(variant="hessel"), images(), PROMPTS).values
    torch.testing.assert_close(hessel, 2.5 * prefixed.clamp(min=0), rtol=1e-6, atol=1e-6)
    own = ask(clipscore(variant="hessel", scale=1 / 30, prefix=""), images(), PROMPTS).values
    torch.testing.assert_close(own, cos.clamp(min=0) / 30)


@pytest.mark.parametrize("variant", ["hessel", "torchmetrics"])
def test_a_negative_cosine_is_0_only_where_the_variant_says_so(variant: str) -> None:
    reward = clipscore(variant=variant)
    values = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [torch.nan, 0.0]])
    out = reward._formula(values, torch.tensor([[1.0, 0.0]]).expand(3, 2))
    assert out[0] > 0 and out[1] == 0 and out[2].isnan()


def test_the_wrong_activation_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"text_config runs gelu, the weights were trained with quick_gelu"):
        ask(clipscore(activation="quick_gelu"), images(), PROMPTS)
    runs_gelu = {"text_config": {}, "vision_config": {"hidden_act": "gelu"}}
    with pytest.raises(WeightsError, match=r"vision_config runs gelu.*quick_gelu"):
        Clip("clipscore", "openai/clip-vit-base-patch32", "x/y")._check_activation(runs_gelu)


def test_a_tokenizer_of_another_model_is_refused(tmp_path: Any) -> None:
    folder = shutil.copytree(tiny_models.clip_folder(), tmp_path / "clip")
    other = tiny_models.clip_tokenizer()
    other.add_tokens(["cube"])
    other.save_pretrained(folder)
    with pytest.raises(WeightsError, match="its tokenizer knows 519 tokens, the model 518"):
        PickScore(model=tiny_models.clip_folder(), processor=str(folder)).validate(["the"], [{}])


def test_an_unknown_variant_is_refused() -> None:
    with pytest.raises(ValueError, match="torchmetrics"):
        ClipScore(variant="mean")
