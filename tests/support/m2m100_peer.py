"""Models of Hugging Face with the weights of dense models of ours, as peers."""

import re
from typing import Any, Literal

import torch
from torch import Tensor, nn
from transformers import M2M100Config, M2M100ForConditionalGeneration

from pipeline.batching.batch import Packing
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer

AttentionKernel = Literal["eager", "sdpa"]
NO_DROPOUT = Regularization()

PEER_NAMES = (
    (r"embedding\.weight", "model.shared.weight"),
    (r"embedding\.output_weight", "lm_head.weight"),
    (r"(\w+coder)\.positions\.weight", r"model.\1.embed_positions.weight"),
    (r"(\w+coder)\.embedding_norm\.(\w+)", r"model.\1.layernorm_embedding.\2"),
    (r"(\w+coder)\.final_norm\.(\w+)", r"model.\1.layer_norm.\2"),
    (r"(.+)\.self_attention\.query\.(\w+)", r"model.\1.self_attn.q_proj.\2"),
    (r"(.+)\.self_attention\.key\.(\w+)", r"model.\1.self_attn.k_proj.\2"),
    (r"(.+)\.self_attention\.value\.(\w+)", r"model.\1.self_attn.v_proj.\2"),
    (r"(.+)\.self_attention\.output\.(\w+)", r"model.\1.self_attn.out_proj.\2"),
    (r"(.+)\.self_attention_norm\.(\w+)", r"model.\1.self_attn_layer_norm.\2"),
    (r"(.+)\.cross_attention\.query\.(\w+)", r"model.\1.encoder_attn.q_proj.\2"),
    (r"(.+)\.cross_attention\.key\.(\w+)", r"model.\1.encoder_attn.k_proj.\2"),
    (r"(.+)\.cross_attention\.value\.(\w+)", r"model.\1.encoder_attn.v_proj.\2"),
    (r"(.+)\.cross_attention\.output\.(\w+)", r"model.\1.encoder_attn.out_proj.\2"),
    (r"(.+)\.cross_attention_norm\.(\w+)", r"model.\1.encoder_attn_layer_norm.\2"),
    (r"(.+)\.feed_forward\.up\.(\w+)", r"model.\1.fc1.\2"),
    (r"(.+)\.feed_forward\.down\.(\w+)", r"model.\1.fc2.\2"),
    (r"(.+)\.feed_forward_norm\.(\w+)", r"model.\1.final_layer_norm.\2"),
)
"""Our names and Hugging Face's, which M2M-100, mBART and BART share."""


def peer_name(name: str) -> str:
    (found,) = (
        re.sub(ours, theirs, name) for ours, theirs in PEER_NAMES if re.fullmatch(ours, name)
    )
    return found


def copy_weights(model: Transformer, peer: nn.Module) -> None:
    """Give the peer our weights; every tensor of both must be accounted for."""
    theirs = dict(peer.named_parameters())
    ours = dict(model.named_parameters())
    assert {peer_name(name) for name in ours} == set(theirs)
    with torch.no_grad():
        for name, value in ours.items():
            theirs[peer_name(name)].copy_(value)


def peer_settings(
    spec: ModelSpec, *, eos_id: int, rates: Regularization = NO_DROPOUT
) -> dict[str, Any]:
    """Settings of a configuration of Hugging Face's for a model of this shape."""
    model = spec.model
    return {
        "vocab_size": spec.vocabulary_size,
        "d_model": model.width,
        "encoder_layers": model.encoder_layers,
        "decoder_layers": model.decoder_layers,
        "encoder_attention_heads": model.num_heads,
        "decoder_attention_heads": model.num_heads,
        "encoder_ffn_dim": model.feed_forward_width,
        "decoder_ffn_dim": model.feed_forward_width,
        "encoder_layerdrop": 0.0,
        "decoder_layerdrop": 0.0,
        "activation_function": model.activation,
        "scale_embedding": model.scale_embedding,
        "max_position_embeddings": model.max_positions,
        "dropout": rates.dropout,
        "attention_dropout": rates.attention_dropout,
        "activation_dropout": 0.0,
        "pad_token_id": spec.pad_id,
        "bos_token_id": 0,
        "eos_token_id": eos_id,
        "decoder_start_token_id": eos_id,
        "forced_eos_token_id": None,
    }


def m2m100_peer(
    model: Transformer,
    *,
    eos_id: int,
    kernel: AttentionKernel = "sdpa",
    rates: Regularization = NO_DROPOUT,
) -> Any:
    """A peer with copies of the model's weights, on its device, in its dtype, not in training."""
    config_type: Any = M2M100Config
    settings = peer_settings(model.spec, eos_id=eos_id, rates=rates)
    config = config_type(**settings, attn_implementation=kernel)
    weight = next(model.parameters())
    peer: Any = M2M100ForConditionalGeneration(config)
    peer = peer.to(weight.device, weight.dtype)
    copy_weights(model, peer)
    return peer.eval()


def padded(ids_N: Tensor, packing: Packing, *, fill: int) -> Tensor:
    """Packed ids as a right-padded (batch, length) grid."""
    cells = packing.batch * packing.length
    grid = torch.full((cells,), fill, dtype=torch.int64, device=ids_N.device)
    grid[packing.index_N] = ids_N
    return grid.view(packing.batch, packing.length)
