"""The layout is that of ComfyUI and kohya's scripts: key names are written out by hand from their sources."""

import pytest
import torch

from flowrl_img.export.comfyui import from_comfyui, is_comfyui, to_comfyui
from flowrl_img.lora import Pair
from flowrl_img.models.sd3 import SD3

# Two blocks with the family's targets; the last block has no to_add_out.
GOLDEN = [
    "lora_unet_joint_blocks_0_context_block_attn_proj.alpha",
    "lora_unet_joint_blocks_0_context_block_attn_proj.lora_down.weight",
    "lora_unet_joint_blocks_0_context_block_attn_proj.lora_up.weight",
    "lora_unet_joint_blocks_0_context_block_attn_qkv.alpha",
    "lora_unet_joint_blocks_0_context_block_attn_qkv.lora_down.weight",
    "lora_unet_joint_blocks_0_context_block_attn_qkv.lora_up.weight",
    "lora_unet_joint_blocks_0_x_block_attn_proj.alpha",
    "lora_unet_joint_blocks_0_x_block_attn_proj.lora_down.weight",
    "lora_unet_joint_blocks_0_x_block_attn_proj.lora_up.weight",
    "lora_unet_joint_blocks_0_x_block_attn_qkv.alpha",
    "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_down.weight",
    "lora_unet_joint_blocks_0_x_block_attn_qkv.lora_up.weight",
    "lora_unet_joint_blocks_1_context_block_attn_qkv.alpha",
    "lora_unet_joint_blocks_1_context_block_attn_qkv.lora_down.weight",
    "lora_unet_joint_blocks_1_context_block_attn_qkv.lora_up.weight",
    "lora_unet_joint_blocks_1_x_block_attn_proj.alpha",
    "lora_unet_joint_blocks_1_x_block_attn_proj.lora_down.weight",
    "lora_unet_joint_blocks_1_x_block_attn_proj.lora_up.weight",
    "lora_unet_joint_blocks_1_x_block_attn_qkv.alpha",
    "lora_unet_joint_blocks_1_x_block_attn_qkv.lora_down.weight",
    "lora_unet_joint_blocks_1_x_block_attn_qkv.lora_up.weight",
]

OTHERS = {
    "transformer_blocks.3.attn2.to_q": "lora_unet_joint_blocks_3_x_block_attn2_qkv",
    "transformer_blocks.3.attn2.to_out.0": "lora_unet_joint_blocks_3_x_block_attn2_proj",
    "transformer_blocks.3.ff.net.0.proj": "lora_unet_joint_blocks_3_x_block_mlp_fc1",
    "transformer_blocks.3.ff.net.2": "lora_unet_joint_blocks_3_x_block_mlp_fc2",
    "transformer_blocks.3.norm1.linear": "lora_unet_joint_blocks_3_x_block_adaLN_modulation_1",
    "transformer_blocks.11.ff_context.net.0.proj": "lora_unet_joint_blocks_11_context_block_mlp_fc1",
    "transformer_blocks.11.ff_context.net.2": "lora_unet_joint_blocks_11_context_block_mlp_fc2",
    "context_embedder": "lora_unet_context_embedder",
    "proj_out": "lora_unet_final_layer_linear",
    "time_text_embed.timestep_embedder.linear_2": "lora_unet_t_embedder_mlp_2",
    "time_text_embed.text_embedder.linear_1": "lora_unet_y_embedder_mlp_0",
}


def pair(seed: int, rank: int = 4, alpha: float = 8.0, width: int = 6) -> Pair:
    stream = torch.Generator().manual_seed(seed)
    down, up = (torch.randn(shape, generator=stream) for shape in ((rank, 5), (width, rank)))
    return Pair(down, up, alpha)


def tuned() -> dict[str, Pair]:
    names = [f"transformer_blocks.{block}.{target}" for block in (0, 1) for target in SD3.lora_targets]
    return {name: pair(k) for k, name in enumerate(names) if name != "transformer_blocks.1.attn.to_add_out"}


def test_the_keys_are_the_golden_list():
    assert sorted(to_comfyui(tuned())) == GOLDEN


@pytest.mark.parametrize(("module", "stem"), OTHERS.items())
def test_further_modules_have_their_names_both_ways(module, stem):
    tensors = to_comfyui({module: pair(0)})
    assert {name.partition(".")[0] for name in tensors} == {stem}
    assert module in from_comfyui(tensors)


def test_the_change_of_a_fused_matrix_is_that_of_its_parts_in_their_rows():
    pairs, tensors = tuned(), to_comfyui(tuned())
    stem = "lora_unet_joint_blocks_0_x_block_attn_qkv"
    down, up = tensors[f"{stem}.lora_down.weight"], tensors[f"{stem}.lora_up.weight"]
    change = float(tensors[f"{stem}.alpha"]) / len(down) * up @ down
    parts = [pairs[f"transformer_blocks.0.attn.to_{x}"] for x in "qkv"]
    torch.testing.assert_close(change, torch.cat([p.scale * p.up @ p.down for p in parts]))
    assert len(down) == 12 and float(tensors[f"{stem}.alpha"]) == 24


def test_converting_back_is_exact():
    pairs = tuned()
    back = from_comfyui(to_comfyui(pairs))
    assert back.keys() == pairs.keys()
    for name in pairs:
        assert torch.equal(back[name].down, pairs[name].down) and torch.equal(back[name].up, pairs[name].up)
        assert back[name].alpha == pairs[name].alpha


def test_parts_of_unequal_rank_and_alpha_or_missing_ones_keep_their_products():
    name = "transformer_blocks.0.attn.to_"
    pairs = {f"{name}q": pair(0, rank=4, alpha=8), f"{name}v": pair(1, rank=2, alpha=1)}
    back = from_comfyui(to_comfyui(pairs))
    for part in "qv":
        one, other = back[name + part], pairs[name + part]
        torch.testing.assert_close(one.scale * one.up @ one.down, other.scale * other.up @ other.down)
    assert not (back[f"{name}k"].up @ back[f"{name}k"].down).any()


def test_an_adapter_trained_on_the_fused_matrix_is_read_with_its_products():
    stem = "lora_unet_joint_blocks_0_context_block_attn_qkv"
    fused = pair(0, rank=3, alpha=1.5, width=18)
    tensors = {f"{stem}.lora_down.weight": fused.down, f"{stem}.lora_up.weight": fused.up}
    for alpha, scale in ((None, 1.0), (torch.tensor(1.5), 0.5)):
        found = from_comfyui(tensors if alpha is None else {**tensors, f"{stem}.alpha": alpha})
        changes = [found[f"transformer_blocks.0.attn.add_{x}_proj"] for x in "qkv"]
        torch.testing.assert_close(torch.cat([p.scale * p.up @ p.down for p in changes]), scale * fused.up @ fused.down)


def test_a_module_without_a_counterpart_is_refused_with_the_nearest():
    with pytest.raises(ValueError, match=r"'transformer_blocks.0.attn.to_qq'.*did you mean 'attn.to_q'"):
        to_comfyui({"transformer_blocks.0.attn.to_qq": pair(0)})
    for module in ("transformer_blocks.1.norm1_context.linear", "norm_out.linear"):
        with pytest.raises(ValueError, match="no ComfyUI name"):
            to_comfyui({module: pair(0)})


@pytest.mark.parametrize("stem", ["lora_unet_double_blocks_0_img_attn_qkv", "lora_te1_text_model_x", "lora_unet_x"])
def test_keys_of_other_models_are_refused(stem):
    with pytest.raises(ValueError, match="is no linear layer of Stable Diffusion 3"):
        from_comfyui({f"{stem}.lora_down.weight": torch.zeros(2, 2), f"{stem}.lora_up.weight": torch.zeros(2, 2)})


@pytest.mark.parametrize("end", ["dora_scale", "lora_mid.weight", "diff_b", "lora_A.weight"])
def test_parts_that_no_lora_has_are_refused_and_not_left_out(end):
    tensors = to_comfyui({"proj_out": pair(0)})
    with pytest.raises(ValueError, match=f"{end}' is no part of a LoRA"):
        from_comfyui({**tensors, f"lora_unet_final_layer_linear.{end}": torch.ones(4)})


def test_half_an_adapter_is_refused():
    stem = "lora_unet_joint_blocks_0_x_block_attn_proj"
    with pytest.raises(ValueError, match=f"lacks {stem}.lora_down.weight"):
        from_comfyui({f"{stem}.lora_up.weight": torch.zeros(2, 2)})


def test_the_layout_is_recognised_by_its_prefix():
    assert is_comfyui(to_comfyui(tuned()))
    assert not is_comfyui({"transformer.transformer_blocks.0.attn.to_q.lora_A.weight": torch.zeros(1)})
