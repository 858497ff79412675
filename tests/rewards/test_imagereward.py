"""ImageReward's network against the published arithmetic, written out on the published keys."""

from __future__ import annotations

import math
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import tiny_models
import torch
from torch import Tensor
from torch.nn import functional as F

from flowrl_img.rewards.blip import BlipSizes, build_blip, renamed
from flowrl_img.rewards.imagereward import ImageReward
from flowrl_img.rewards.pretrained import WeightsError, load_strict, read
from flowrl_img.rewards.score import score

PROMPTS = ["a red circle", "photo of 3 blue squares, and more", "x"]
LONG = "red circle " * 30


@cache
def reward() -> ImageReward:
    made = tiny_models.options("imagereward")
    return ImageReward(**{**made, "sizes": BlipSizes(**made["sizes"])})


@cache
def images() -> Tensor:
    return torch.randint(0, 256, (3, 3, 72, 64), generator=torch.Generator().manual_seed(0)) / 255


def ask(made: ImageReward, prompts: list[str] = PROMPTS) -> Any:
    return score(made, images(), prompts, [{}] * 3, list("abc"))


def attend(q: Tensor, k: Tensor, v: Tensor, heads: int, mask: Tensor | None = None) -> Tensor:
    q, k, v = (x.unflatten(-1, (heads, -1)).transpose(1, 2) for x in (q, k, v))
    scores = q @ k.transpose(-1, -2) / math.sqrt(q.shape[-1])
    if mask is not None:
        scores = scores - 10_000 * (1 - mask[:, None, None].double())
    return (scores.softmax(-1) @ v).transpose(1, 2).flatten(2)


class Published:
    """The forward pass of BLIP's vision transformer and text encoder in float64, from their descriptions."""

    def __init__(self, weights: dict[str, Tensor]) -> None:
        self.w = {key: tensor.double() for key, tensor in weights.items()}

    def linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self.w[f"{name}.weight"], self.w[f"{name}.bias"])

    def norm(self, name: str, x: Tensor, eps: float) -> Tensor:
        return F.layer_norm(x, x.shape[-1:], self.w[f"{name}.weight"], self.w[f"{name}.bias"], eps)

    def see(self, pixels: Tensor) -> Tensor:
        eye = "blip.visual_encoder"
        proj = f"{eye}.patch_embed.proj"
        x = (
            F.conv2d(pixels, self.w[f"{proj}.weight"], self.w[f"{proj}.bias"], stride=tiny_models.BLIP["patch"])
            .flatten(2)
            .transpose(1, 2)
        )
        x = torch.cat([self.w[f"{eye}.cls_token"].expand(len(x), -1, -1), x], 1) + self.w[f"{eye}.pos_embed"]
        for k in range(2):
            block = f"{eye}.blocks.{k}"
            q, key, v = self.linear(f"{block}.attn.qkv", self.norm(f"{block}.norm1", x, 1e-6)).chunk(3, -1)
            x = x + self.linear(f"{block}.attn.proj", attend(q, key, v, heads=2))
            wide = F.gelu(self.linear(f"{block}.mlp.fc1", self.norm(f"{block}.norm2", x, 1e-6)))
            x = x + self.linear(f"{block}.mlp.fc2", wide)
        return self.norm(f"{eye}.norm", x, 1e-6)

    def attention(self, name: str, x: Tensor, source: Tensor, mask: Tensor | None) -> Tensor:
        q = self.linear(f"{name}.self.query", x)
        k, v = (self.linear(f"{name}.self.{part}", source) for part in ("key", "value"))
        return self.norm(
            f"{name}.output.LayerNorm",
            self.linear(f"{name}.output.dense", attend(q, k, v, heads=3, mask=mask)) + x,
            1e-12,
        )

    def score(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        seen, reader = self.see(pixels.double()), "blip.text_encoder"
        places = self.w[f"{reader}.embeddings.position_embeddings.weight"][: ids.shape[1]]
        x = self.w[f"{reader}.embeddings.word_embeddings.weight"][ids] + places
        x = self.norm(f"{reader}.embeddings.LayerNorm", x, 1e-12)
        for k in range(2):
            layer = f"{reader}.encoder.layer.{k}"
            x = self.attention(f"{layer}.attention", x, x, mask)
            x = self.attention(f"{layer}.crossattention", x, seen, None)
            wide = F.gelu(self.linear(f"{layer}.intermediate.dense", x))
            x = self.norm(f"{layer}.output.LayerNorm", self.linear(f"{layer}.output.dense", wide) + x, 1e-12)
        x = x[:, 0]
        for k in (0, 2, 4, 6, 7):
            x = self.linear(f"mlp.layers.{k}", x)
        return (x.squeeze(-1) - 0.16717362830052426) / 1.0333394966054072


def test_the_score_is_the_published_arithmetic_on_the_published_keys() -> None:
    made = reward()
    tokens = made._tokenizer(PROMPTS, padding="max_length", truncation=True, max_length=35, return_tensors="pt")
    assert tokens.input_ids.shape == (3, 35)
    levels = (images() * 255).round().byte().permute(0, 2, 3, 1)
    pixels = made._pixels.pictures(levels)
    expected = Published(read(Path(made.weights))).score(pixels, tokens.input_ids, tokens.attention_mask)
    values = ask(made).values
    assert values.std() > 0.1
    torch.testing.assert_close(values.double(), expected, rtol=0, atol=5e-6)  # float32 against float64, values near 5


def test_a_complete_checkpoint_loads_strictly_and_every_used_key_is_renamed() -> None:
    checkpoint = tiny_models.imagereward_checkpoint()
    names = renamed(checkpoint)
    assert len(checkpoint) - len(names) == 5  # two projections of BLIP's pre-training, and a buffer
    assert not [name for name in names if name.startswith(("blip.", "mlp."))]
    load_strict(build_blip(reward().sizes), names, "checkpoint")


def test_the_published_sizes_are_the_default() -> None:
    assert BlipSizes() == BlipSizes(224, 16, 1024, 24, 16, 768, 12, 12, 512, 30524)


def test_wrong_keys_are_refused_with_their_numbers(tmp_path: Path) -> None:
    checkpoint = tiny_models.imagereward_checkpoint()
    checkpoint["blip.visual_encoder.blocks.1.attn.bias_table"] = torch.zeros(1)
    for key in ("query.weight", "query.bias"):
        del checkpoint[f"blip.text_encoder.encoder.layer.0.crossattention.self.{key}"]
    torch.save(checkpoint, tmp_path / "x.pt")
    made = ImageReward(str(tmp_path / "x.pt"), tiny_models.bert_folder(), sizes=reward().sizes)
    with pytest.raises(WeightsError, match=r"2 missing \(such as text\.encoder\.layer\.0\.cross.*1 unexpected"):
        ask(made)


def test_prompts_are_read_to_35_tokens() -> None:
    made = ImageReward(reward().weights, reward().tokenizer, sizes=reward().sizes)
    with pytest.warns(UserWarning, match=r"'imagereward' reads 35 tokens: 2 of 3 prompts \(67%\)"):
        out = ask(made, [LONG, LONG + "blue", "x"])
    assert out.details["truncated"] == [True, True, False]
    again = ask(made, [LONG + "blue", LONG, "x"]).values
    torch.testing.assert_close(again, out.values, rtol=0, atol=1e-6)  # what stands behind the cut changes nothing


def test_a_tokenizer_of_another_vocabulary_is_refused() -> None:
    with pytest.raises(WeightsError, match=r"\d+ tokens with BLIP's two, the model has 30524"):
        ImageReward(reward().weights, reward().tokenizer).validate(["x"], [{}])
