"""The network of ImageReward on the Blip classes of transformers, and the names of its checkpoint in them.

The publication's own classes no longer import; these have the same arithmetic once three defaults are overruled: 12
text heads (not 8), an epsilon of 1e-6 in the vision tower (not 1e-5), and text attention in both directions.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

from torch import Tensor, nn

from flowrl_img.rewards.neural import ScoreHead
from flowrl_img.rewards.pretrained import library, transformers_class

__all__ = ["MEAN", "STD", "BlipReward", "BlipSizes", "build_blip", "renamed"]

MEAN, STD = 0.16717362830052426, 1.0333394966054072  # of raw scores, as published

# Trained with the network, unused by the score.
UNUSED = re.compile(r"blip\.(vision_proj|text_proj)\.(weight|bias)|blip\.text_encoder\.embeddings\.position_ids")
BLOCK = r"blip\.visual_encoder\.blocks\.(\d+)\."
NAMES = (
    (r"blip\.visual_encoder\.cls_token", "vision.embeddings.class_embedding"),
    (r"blip\.visual_encoder\.pos_embed", "vision.embeddings.position_embedding"),
    (r"blip\.visual_encoder\.patch_embed\.proj\.", "vision.embeddings.patch_embedding."),
    (r"blip\.visual_encoder\.norm\.", "vision.post_layernorm."),
    (BLOCK + r"norm([12])\.", r"vision.encoder.layers.\1.layer_norm\2."),
    (BLOCK + r"attn\.qkv\.", r"vision.encoder.layers.\1.self_attn.qkv."),
    (BLOCK + r"attn\.proj\.", r"vision.encoder.layers.\1.self_attn.projection."),
    (BLOCK + r"mlp\.", r"vision.encoder.layers.\1.mlp."),
    (r"blip\.text_encoder\.", "text."),
    (r"mlp\.", "head."),
)


@dataclass(frozen=True)
class BlipSizes:
    """Widths and depths; the defaults are those of ImageReward-v1.0 (ViT-L/16 at 224, BERT-base)."""

    image: int = 224
    patch: int = 16
    vision_width: int = 1024
    vision_layers: int = 24
    vision_heads: int = 16
    text_width: int = 768
    text_layers: int = 12
    text_heads: int = 12
    text_positions: int = 512
    vocabulary: int = 30524


class BlipReward(nn.Module):
    """A text encoder that attends to the picture; the first token's state is scored."""

    def __init__(self, vision: nn.Module, text: nn.Module, width: int) -> None:
        super().__init__()
        self.vision, self.text, self.head = vision, text, ScoreHead(width)

    def forward(self, pixels: Tensor, ids: Tensor, mask: Tensor) -> Tensor:
        """pixels: float32 [B, 3, size, size]; ids, mask: [B, L]. The normalised score [B]."""
        patches = self.vision(pixel_values=pixels).last_hidden_state
        read = self.text(input_ids=ids, attention_mask=mask, encoder_hidden_states=patches, is_decoder=False)
        return (self.head(read.last_hidden_state[:, 0]) - MEAN) / STD


def build_blip(sizes: BlipSizes) -> BlipReward:
    """The network with random weights."""
    own = partial(transformers_class, "imagereward")
    vision = own("BlipVisionConfig")(
        hidden_size=sizes.vision_width, intermediate_size=4 * sizes.vision_width, image_size=sizes.image,
        num_hidden_layers=sizes.vision_layers, num_attention_heads=sizes.vision_heads, patch_size=sizes.patch,
        hidden_act="gelu", layer_norm_eps=1e-6,
    )  # fmt: skip
    text = own("BlipTextConfig")(
        hidden_size=sizes.text_width, intermediate_size=4 * sizes.text_width, vocab_size=sizes.vocabulary,
        num_hidden_layers=sizes.text_layers, num_attention_heads=sizes.text_heads, hidden_act="gelu",
        max_position_embeddings=sizes.text_positions, encoder_hidden_size=sizes.vision_width, layer_norm_eps=1e-12,
        bos_token_id=None, sep_token_id=None, eos_token_id=None,
        is_decoder=True,  # the layers for cross-attention; the forward pass is bidirectional all the same
    )  # fmt: skip
    reader = library("imagereward", "transformers.models.blip.modeling_blip_text", "install transformers 4.57 or newer")
    model = own("BlipVisionModel")(vision), reader.BlipTextModel(text, add_pooling_layer=False)
    return BlipReward(*model, sizes.text_width)


def renamed(checkpoint: Mapping[str, Any]) -> dict[str, Any]:
    """The tensors under the names of `BlipReward`. Unknown names stay as they are, for the strict load to refuse."""
    return {_renamed(key): tensor for key, tensor in checkpoint.items() if not UNUSED.fullmatch(key)}


def _renamed(key: str) -> str:
    for pattern, name in NAMES:
        new, count = re.subn(rf"^{pattern}", name, key)
        if count:
            return new
    return key
