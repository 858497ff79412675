"""Small models of random weights, written to disk from the real classes, for the rewards that are networks.

`options(name)` are the keys with which a built-in reward runs on them. Each model is turned, by the sign of one
projection, so that the reward's own known answers hold: half of all random models disagree with them.
"""

from __future__ import annotations

import atexit
import json
import tempfile
from collections.abc import Callable
from contextlib import AbstractContextManager
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from flowrl_img.rewards import known_answers, registry

BOS, EOS = "<|startoftext|>", "<|endoftext|>"
BLIP = {"image": 224, "patch": 56, "vision_width": 32, "vision_layers": 2, "vision_heads": 2, "text_width": 24}
BLIP |= {"text_layers": 2, "text_heads": 3, "text_positions": 40}


def options(name: str) -> dict[str, Any]:
    """The options of a built-in reward on a small model; none for a reward that needs no model."""
    return MODELS[name]() if name in MODELS else {}


def kept(context: AbstractContextManager[Any]) -> Any:
    """What a context gives; it is left when the tests end, before the interpreter freezes threads that it waits for."""
    entered = context.__enter__()
    atexit.register(context.__exit__, None, None, None)
    return entered


@cache
def room() -> Path:
    """A folder that goes when the tests end."""
    return Path(kept(tempfile.TemporaryDirectory()))


def agrees(name: str, keys: dict[str, Any]) -> bool:
    try:
        known_answers.check(registry.load(name, **keys))
    except known_answers.KnownAnswerError:
        return False
    return True


def bytes_to_symbols() -> list[str]:
    """The printable stand-ins of the 256 bytes in byte-level vocabularies, printable bytes first."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    return [chr(b) for b in printable] + [chr(256 + n) for n in range(256 - len(printable))]


def clip_tokenizer() -> Any:
    """518 tokens: bytes, bytes that end a word, four merges, start and end."""
    from transformers import CLIPTokenizer

    symbols = bytes_to_symbols()
    merges = [("t", "h"), ("th", "e</w>"), ("r", "e"), ("re", "d</w>")]
    words = [*symbols, *(s + "</w>" for s in symbols), *(a + b for a, b in merges), BOS, EOS]
    made = CLIPTokenizer(
        vocab={word: k for k, word in enumerate(words)}, merges=merges, model_max_length=77, bos_token=BOS,
        eos_token=EOS, unk_token=EOS, pad_token=EOS,
    )  # fmt: skip
    assert len(made) == 518
    return made


def clip_model(tokenizer: Any, projection: int = 32, act: str = "gelu") -> Any:
    from transformers import CLIPConfig, CLIPModel

    tower = {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 2}
    tower |= {"projection_dim": projection, "hidden_act": act}
    ids = {"bos_token_id": tokenizer.bos_token_id, "eos_token_id": tokenizer.eos_token_id}
    text = {**tower, **ids, "pad_token_id": tokenizer.eos_token_id, "vocab_size": len(tokenizer)}
    torch.manual_seed(0)
    config = CLIPConfig(
        text_config=text,
        vision_config={**tower, "image_size": 224, "patch_size": 32},
        projection_dim=projection,
        logit_scale_init_value=4.6052,
    )
    return CLIPModel(config).eval()


@cache
def clip_folder(projection: int = 32, act: str = "gelu", dtype: torch.dtype = torch.float32) -> str:
    """Model, tokenizer and preprocessing in one folder, as `save_pretrained` writes them."""
    from transformers import CLIPImageProcessorPil, CLIPProcessor

    folder = room() / f"clip-{projection}-{act}-{dtype}"
    tokenizer = clip_tokenizer()
    model = clip_model(tokenizer, projection, act)
    CLIPProcessor(image_processor=CLIPImageProcessorPil(), tokenizer=tokenizer).save_pretrained(folder)
    model.to(dtype).save_pretrained(folder)
    if not agrees("clipscore", {"model": str(folder), "processor": str(folder)}):
        model.text_projection.weight.data.neg_()
        model.save_pretrained(folder)
    return str(folder)


def pair(folder: str) -> dict[str, Any]:
    return {"model": folder, "processor": folder}


@cache
def hps_files() -> dict[str, str]:
    """`architecture` (JSON) and `weights`, the latter under 'state_dict' as in the published checkpoint."""
    open_clip = pytest.importorskip("open_clip", reason="needs flowrl-img[openclip]")
    config = {
        "embed_dim": 32,
        "vision_cfg": {"image_size": 224, "layers": 2, "width": 32, "head_width": 16, "patch_size": 32},
        "text_cfg": {"context_length": 77, "vocab_size": 49408, "width": 32, "heads": 2, "layers": 2},
    }
    architecture, weights = room() / "hps.json", room() / "hps.pt"
    architecture.write_text(json.dumps(config))
    torch.manual_seed(0)
    state = open_clip.CLIP(**config).state_dict()
    torch.save({"epoch": 3, "state_dict": state}, weights)
    keys = {"architecture": str(architecture), "weights": str(weights)}
    if not agrees("hpsv2", {"version": "v2.1", **keys}):
        torch.save({"epoch": 3, "state_dict": {**state, "text_projection": -state["text_projection"]}}, weights)
    return keys


def head(width: int) -> dict[str, Tensor]:
    """The five linear layers under their published names, around a mean rating of 5."""
    generator = torch.Generator().manual_seed(1)
    sizes = [width, 1024, 128, 64, 16, 1]
    names = [0, 2, 4, 6, 7]
    layers = {}
    for name, rows, columns in zip(names, sizes[1:], sizes, strict=False):
        layers[f"layers.{name}.weight"] = torch.randn(rows, columns, generator=generator) / columns**0.5
        layers[f"layers.{name}.bias"] = torch.zeros(rows)
    layers["layers.7.bias"] += 5
    return layers


@cache
def head_file() -> str:
    path = room() / "sac+logos+ava1-l14-linearMSE.pth"
    torch.save(head(768), path)
    return str(path)


@cache
def bert_folder() -> str:
    """A word-piece tokenizer of single letters, digits, marks and a few words."""
    from transformers import BertTokenizer

    letters = "abcdefghijklmnopqrstuvwxyz0123456789"
    words = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "[MASK]", "photo", "red", "blue", "circle", "square", '"', "."]
    words += [*letters, *(f"##{letter}" for letter in letters)]
    folder = room() / "bert"
    BertTokenizer(vocab={word: k for k, word in enumerate(words)}).save_pretrained(folder)
    return str(folder)


def vocabulary() -> int:
    """Tokens of `bert_folder` with BLIP's two."""
    from transformers import AutoTokenizer

    return len(AutoTokenizer.from_pretrained(bert_folder())) + 2


def imagereward_checkpoint() -> dict[str, Tensor]:
    """Every key of the published checkpoint, for two layers each."""
    generator = torch.Generator().manual_seed(0)
    vision, text, patch = BLIP["vision_width"], BLIP["text_width"], BLIP["patch"]
    made: dict[str, Tensor] = {}

    def weight(name: str, *shape: int, scale: float = 1.0) -> None:
        made[name] = scale * torch.randn(*shape, generator=generator) / shape[-1] ** 0.5

    def linear(name: str, rows: int, columns: int) -> None:
        weight(f"{name}.weight", rows, columns)
        made[f"{name}.bias"] = 0.1 * torch.randn(rows, generator=generator)

    def norm(name: str, width: int) -> None:
        made[f"{name}.weight"] = 1 + 0.1 * torch.randn(width, generator=generator)
        made[f"{name}.bias"] = 0.1 * torch.randn(width, generator=generator)

    eye = "blip.visual_encoder"
    # Patches small enough that the epsilon of the first norm counts.
    weight(f"{eye}.cls_token", 1, 1, vision, scale=0.01)
    weight(f"{eye}.pos_embed", 1, (BLIP["image"] // patch) ** 2 + 1, vision, scale=0.01)
    weight(f"{eye}.patch_embed.proj.weight", vision, 3, patch, patch, scale=3e-4)
    weight(f"{eye}.patch_embed.proj.bias", vision, scale=0.01)
    for k in range(BLIP["vision_layers"]):
        for name in ("norm1", "norm2"):
            norm(f"{eye}.blocks.{k}.{name}", vision)
        linear(f"{eye}.blocks.{k}.attn.qkv", 3 * vision, vision)
        linear(f"{eye}.blocks.{k}.attn.proj", vision, vision)
        linear(f"{eye}.blocks.{k}.mlp.fc1", 4 * vision, vision)
        linear(f"{eye}.blocks.{k}.mlp.fc2", vision, 4 * vision)
    norm(f"{eye}.norm", vision)
    reader = "blip.text_encoder"
    made[f"{reader}.embeddings.position_ids"] = torch.arange(BLIP["text_positions"])[None]
    weight(f"{reader}.embeddings.word_embeddings.weight", vocabulary(), text)
    weight(f"{reader}.embeddings.position_embeddings.weight", BLIP["text_positions"], text)
    norm(f"{reader}.embeddings.LayerNorm", text)
    for k in range(BLIP["text_layers"]):
        layer = f"{reader}.encoder.layer.{k}"
        for kind, source in (("attention", text), ("crossattention", vision)):
            linear(f"{layer}.{kind}.self.query", text, text)
            linear(f"{layer}.{kind}.self.key", text, source)
            linear(f"{layer}.{kind}.self.value", text, source)
            linear(f"{layer}.{kind}.output.dense", text, text)
            norm(f"{layer}.{kind}.output.LayerNorm", text)
        linear(f"{layer}.intermediate.dense", 4 * text, text)
        linear(f"{layer}.output.dense", text, 4 * text)
        norm(f"{layer}.output.LayerNorm", text)
    linear("blip.vision_proj", 8, vision)
    linear("blip.text_proj", 8, text)
    return made | {f"mlp.{name}": tensor for name, tensor in head(text).items()}


@cache
def imagereward_file() -> str:
    path = room() / "ImageReward.pt"
    checkpoint = imagereward_checkpoint()
    torch.save(checkpoint, path)
    if not agrees("imagereward", imagereward_options(str(path))):
        checkpoint["mlp.layers.7.weight"].neg_()
        torch.save(checkpoint, path)
    return str(path)


def imagereward_options(weights: str) -> dict[str, Any]:
    sizes = {**BLIP, "vocabulary": vocabulary()}
    return {"weights": weights, "tokenizer": bert_folder(), "sizes": sizes}


@cache
def mask2former_folder() -> str:
    """A Mask2Former of 80 classes and 12 queries. Its class logits are spread, so that scores differ and pass 0.3."""
    from transformers import Mask2FormerConfig, Mask2FormerForUniversalSegmentation, SwinConfig

    stages = {"depths": [1, 1, 1, 1], "num_heads": [1, 1, 2, 2], "out_features": [f"stage{k}" for k in range(1, 5)]}
    sizes = {key: 32 for key in ("feature_size", "mask_feature_size", "hidden_dim", "encoder_feedforward_dim")}
    torch.manual_seed(0)
    config = Mask2FormerConfig(
        backbone_config=SwinConfig(image_size=64, embed_dim=8, window_size=4, **stages), encoder_layers=1,
        decoder_layers=2, num_attention_heads=2, dim_feedforward=32, num_queries=12, num_labels=80, **sizes,
    )  # fmt: skip
    model = Mask2FormerForUniversalSegmentation(config)
    torch.nn.init.normal_(model.class_predictor.weight, std=1.0)
    folder = room() / "mask2former"
    model.save_pretrained(folder)
    return str(folder)


@cache
def judge() -> dict[str, Any]:
    """The options of a judge that is there until the tests end."""
    from judges import MODEL, judging

    return {"url": kept(judging()).url, "model": MODEL}


@cache
def source_picture() -> str:
    """The picture before an edit."""
    from PIL import Image

    path = room() / "source.png"
    Image.new("RGB", (64, 64), (90, 120, 150)).save(path)
    return str(path)


@cache
def hpsv3_package() -> str:
    """A package of the interface of hpsv3 1.0.0, importable from now on; gives the path of its weights."""
    import sys
    from types import ModuleType

    class Inferencer:
        use_special_tokens = True

        def __init__(self, config_path: Any = None, checkpoint_path: str = "", device: str = "cuda") -> None:
            self.model, self.path = torch.nn.Linear(1, 1), checkpoint_path

        def reward(self, image_paths: Any, prompts: Any) -> Tensor:
            return torch.stack([preference(picture, text) for picture, text in zip(image_paths, prompts, strict=True)])

    module: Any = ModuleType("hpsv3")
    module.HPSv3RewardInferencer = Inferencer
    sys.modules["hpsv3"] = module
    path = room() / "HPSv3.safetensors"
    path.write_bytes(b"weights")
    return str(path)


def preference(picture: Any, text: str) -> Tensor:
    """(mu, sigma) of a picture: the taste of the stand-in judge, on the scale of HPSv3."""
    import numpy as np
    from judges import taste

    return torch.tensor([5 + 6 * taste(np.asarray(picture), text), 0.5])


@cache
def deqa_folder() -> str:
    """A model folder with code of its own: the rating is 1 + 4 x the mean level."""
    folder = room() / "deqa"
    folder.mkdir()
    files = {"config.json": DEQA_CONFIG, "modeling_small.py": DEQA_CODE}
    for name, text in files.items():
        (folder / name).write_text(text)
    torch.save({"offset": torch.ones(1)}, folder / "pytorch_model.bin")
    return str(folder)


DEQA_CONFIG = """{
 "model_type": "small_deqa", "architectures": ["SmallForCausalLM"],
 "auto_map": {"AutoConfig": "modeling_small.SmallConfig", "AutoModelForCausalLM": "modeling_small.SmallForCausalLM"}
}"""
DEQA_CODE = """
import numpy as np
import torch
from transformers import PretrainedConfig, PreTrainedModel


class SmallConfig(PretrainedConfig):
    model_type = "small_deqa"


class SmallForCausalLM(PreTrainedModel):
    config_class = SmallConfig

    def __init__(self, config):
        super().__init__(config)
        self.offset = torch.nn.Parameter(torch.zeros(1))
        self.post_init()

    def _init_weights(self, module):
        pass

    def score(self, images, task_="quality", input_="image"):
        levels = torch.tensor([np.asarray(image).mean() / 255 for image in images])
        return (self.offset.float() + 4 * levels.float()).flatten()
"""


@cache
def reward_server() -> str:
    """The address of a service of `jpeg`, which goes when the tests end."""
    from services import serving

    from flowrl_img.rewards.score import Scorer

    return kept(serving({"jpeg": Scorer(registry.load("jpeg"))}))


MODELS: dict[str, Callable[[], dict[str, Any]]] = {
    "pickscore": lambda: pair(clip_folder()),
    "clipscore": lambda: pair(clip_folder()),
    "hpsv2": lambda: {"version": "v2.1", **hps_files()},
    "aesthetic": lambda: {**pair(clip_folder(projection=768, act="quick_gelu")), "head": head_file()},
    "deqa": lambda: {"model": deqa_folder(), "trust_remote_code": True, "device": "cpu"},
    "hpsv3": lambda: {"checkpoint": hpsv3_package(), "device": "cpu"},
    "unifiedreward": lambda: {"judge": judge(), "size": 64},
    "yesno": lambda: {"judge": judge()},
    "editscore": lambda: {"judge": judge()},
    "preference": lambda: {"judge": judge(), "size": 64},
    "remote": lambda: {"reward": "jpeg", "url": reward_server()},
    "imagereward": lambda: imagereward_options(imagereward_file()),
}
