"""The parts of the embedded model, all stock classes of diffusers and transformers.

A Stable Diffusion 3 pipeline in miniature: an f = 8 autoencoder, an SD3 transformer over 8 x 8 latent tokens, two CLIP
text encoders with a tokenizer of their own and no T5. It is saved and loaded by `StableDiffusion3Pipeline` alone.
"""

from __future__ import annotations

import json
from typing import Any

from flowrl_img.world.vocabulary import CHARACTERS, COLORS, NUMBERS, PLURALS, SHAPES

__all__ = [
    "LATENT_CHANNELS",
    "MAX_SEQUENCE_LENGTH",
    "TOKENS",
    "assemble",
    "autoencoder",
    "scheduler",
    "text_encoder",
    "tokenizer",
    "transformer",
]

LATENT_CHANNELS = 12
LATENT_SIZE = 8
TOKENS = 14  # text tokens of each CLIP encoder, with start and end
# Without T5 the stock pipeline appends this many zero tokens, which are not inert: one value serves everywhere.
MAX_SEQUENCE_LENGTH = 1
TEXT_WIDTH = 96
WIDTH, LAYERS, HEAD = 128, 6, 32
BOS, EOS = "<|startoftext|>", "<|endoftext|>"


def words() -> list[str]:
    """Every lower-case word of the world's prompts."""
    fixed = ["a", "an", "and", "photo", "of", "sign", "that", "says", "left", "right", "above", "below"]
    return sorted({*fixed, *SHAPES, *PLURALS.values(), *COLORS, *NUMBERS.values()})


def tokenizer() -> Any:
    """CLIPTokenizer whose merges spell every word of the world as one token, with capitals as tokens of their own.

    Capitals and digits of a sign are matched before lower-casing, so a sign text is read character by character.
    """
    from transformers import AddedToken, CLIPTokenizer

    vocab, merges = _merges()
    for special in (BOS, EOS):
        vocab[special] = len(vocab)
    made = CLIPTokenizer(
        vocab=vocab, merges=merges, model_max_length=TOKENS, bos_token=BOS, eos_token=EOS, unk_token=EOS, pad_token=EOS
    )
    made.add_tokens([AddedToken(c, normalized=False) for c in CHARACTERS])
    return made


def _merges() -> tuple[dict[str, int], list[tuple[str, str]]]:
    """Byte-pair vocabulary and merges learnt on the words alone, until each word is one token."""
    from tokenizers import Tokenizer, models, pre_tokenizers, trainers

    symbols = [chr(code) for code in range(33, 127)]
    learner = Tokenizer(models.BPE(end_of_word_suffix="</w>"))
    learner.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    # Distinct frequencies leave no ties, so the merges are the same wherever they are learnt.
    corpus = [" ".join([word] * (2 + rank)) for rank, word in enumerate(words())]
    learner.train_from_iterator(
        corpus, trainers.BpeTrainer(vocab_size=10_000, end_of_word_suffix="</w>", show_progress=False)
    )
    learnt = json.loads(learner.to_str())["model"]["merges"]
    vocab = {symbol: index for index, symbol in enumerate([*symbols, *(f"{symbol}</w>" for symbol in symbols)])}
    for left, right in learnt:
        vocab.setdefault(left + right, len(vocab))
    return vocab, [(left, right) for left, right in learnt]


def text_encoder(vocabulary: int, eos_token_id: int, bos_token_id: int) -> Any:
    """A CLIP text encoder with projection, randomly initialised: 3 layers, width 96."""
    from transformers import CLIPTextConfig, CLIPTextModelWithProjection

    return CLIPTextModelWithProjection(
        CLIPTextConfig(
            vocab_size=vocabulary,
            hidden_size=TEXT_WIDTH,
            intermediate_size=4 * TEXT_WIDTH,
            projection_dim=TEXT_WIDTH,
            num_hidden_layers=3,
            num_attention_heads=3,
            max_position_embeddings=TOKENS,
            hidden_act="gelu",
            eos_token_id=eos_token_id,
            bos_token_id=bos_token_id,
            pad_token_id=eos_token_id,
        )
    )


def autoencoder() -> Any:
    """AutoencoderKL, 64 x 64 x 3 to 8 x 8 x 12, convolutions only."""
    from diffusers import AutoencoderKL

    return AutoencoderKL(
        in_channels=3,
        out_channels=3,
        down_block_types=("DownEncoderBlock2D",) * 4,
        up_block_types=("UpDecoderBlock2D",) * 4,
        block_out_channels=(16, 32, 64, 96),
        layers_per_block=1,
        latent_channels=LATENT_CHANNELS,
        norm_num_groups=8,
        sample_size=64,
        scaling_factor=1.0,
        shift_factor=0.0,
        mid_block_add_attention=False,
    )


def transformer() -> Any:
    """SD3Transformer2DModel over 64 latent tokens, randomly initialised."""
    from diffusers import SD3Transformer2DModel

    return SD3Transformer2DModel(
        sample_size=LATENT_SIZE,
        patch_size=1,
        in_channels=LATENT_CHANNELS,
        out_channels=LATENT_CHANNELS,
        num_layers=LAYERS,
        attention_head_dim=HEAD,
        num_attention_heads=WIDTH // HEAD,
        joint_attention_dim=2 * TEXT_WIDTH,
        caption_projection_dim=WIDTH,
        pooled_projection_dim=2 * TEXT_WIDTH,
        pos_embed_max_size=LATENT_SIZE,
        qk_norm="rms_norm",
    )


def scheduler(shift: float = 3.0) -> Any:
    """FlowMatchEulerDiscreteScheduler with the static shift of Stable Diffusion 3."""
    from diffusers import FlowMatchEulerDiscreteScheduler

    return FlowMatchEulerDiscreteScheduler(num_train_timesteps=1000, shift=shift)


def assemble(parts: dict[str, Any], shift: float = 3.0) -> Any:
    """The stock pipeline from `transformer, vae, text_encoder, text_encoder_2, tokenizer`."""
    from diffusers import StableDiffusion3Pipeline

    return StableDiffusion3Pipeline(
        transformer=parts["transformer"],
        scheduler=scheduler(shift),
        vae=parts["vae"],
        text_encoder=parts["text_encoder"],
        tokenizer=parts["tokenizer"],
        text_encoder_2=parts["text_encoder_2"],
        tokenizer_2=parts["tokenizer"],
        text_encoder_3=None,
        tokenizer_3=None,
    )
