"""Hugging Face's M2M-100 with the weights of one of our dense pre-norm models, as a peer."""

from typing import Any, Literal

import torch
from torch import Tensor
from transformers import M2M100Config, M2M100ForConditionalGeneration

from pipeline.batching.batch import Packing
from pipeline.model.regularization import Regularization
from pipeline.model.transformer import Transformer

AttentionKernel = Literal["eager", "sdpa"]
NO_DROPOUT = Regularization()

LAYER_NAMES = {
    "self_attention_norm": "self_attn_layer_norm",
    "self_attention.query": "self_attn.q_proj",
    "self_attention.key": "self_attn.k_proj",
    "self_attention.value": "self_attn.v_proj",
    "self_attention.output": "self_attn.out_proj",
    "cross_attention_norm": "encoder_attn_layer_norm",
    "cross_attention.query": "encoder_attn.q_proj",
    "cross_attention.key": "encoder_attn.k_proj",
    "cross_attention.value": "encoder_attn.v_proj",
    "cross_attention.output": "encoder_attn.out_proj",
    "feed_forward_norm": "final_layer_norm",
    "feed_forward.up": "fc1",
    "feed_forward.down": "fc2",
}
"""Names within a layer: ours → Hugging Face's."""


def m2m100_peer(
    model: Transformer,
    *,
    eos_id: int,
    kernel: AttentionKernel = "sdpa",
    rates: Regularization = NO_DROPOUT,
) -> Any:
    """A peer with copies of the model's weights, on its device, in its dtype, not in training."""
    ours = model.spec.model
    config_type: Any = M2M100Config
    config = config_type(
        vocab_size=model.spec.vocabulary_size,
        max_position_embeddings=ours.max_positions,
        d_model=ours.width,
        encoder_layers=ours.encoder_layers,
        decoder_layers=ours.decoder_layers,
        encoder_ffn_dim=ours.feed_forward_width,
        decoder_ffn_dim=ours.feed_forward_width,
        encoder_attention_heads=ours.num_heads,
        decoder_attention_heads=ours.num_heads,
        encoder_layerdrop=0.0,
        decoder_layerdrop=0.0,
        activation_function=ours.activation,
        dropout=rates.dropout,
        attention_dropout=rates.attention_dropout,
        activation_dropout=0.0,
        scale_embedding=ours.scale_embedding,
        pad_token_id=model.spec.pad_id,
        bos_token_id=0,
        eos_token_id=eos_id,
        decoder_start_token_id=eos_id,
        attn_implementation=kernel,
    )
    peer: Any = M2M100ForConditionalGeneration(config)
    weight = next(model.parameters())
    peer = peer.to(weight.device, weight.dtype)
    missing, unexpected = peer.load_state_dict(peer_weights(model), strict=False)
    tied = {"lm_head.weight", "model.encoder.embed_tokens.weight"}
    assert not unexpected
    assert set(missing) <= {*tied, "model.decoder.embed_tokens.weight"}, missing
    return peer.eval()


def peer_weights(model: Transformer) -> dict[str, Tensor]:
    """The model's weights under Hugging Face's names."""
    weights = {}
    for name, value in model.state_dict().items():
        stack, _, rest = name.partition(".")
        if rest.startswith("layers."):
            _, layer, inner = rest.split(".", 2)
            module, _, kind = inner.rpartition(".")
            weights[f"model.{stack}.layers.{layer}.{LAYER_NAMES[module]}.{kind}"] = value
        elif rest.startswith("final_norm."):
            weights[f"model.{stack}.layer_norm.{rest.removeprefix('final_norm.')}"] = value
        else:
            assert name == "embedding.weight", name
            weights["model.shared.weight"] = value
    return weights


def padded(ids_N: Tensor, packing: Packing, *, fill: int) -> Tensor:
    """Packed ids as a right-padded (batch, length) grid."""
    cells = packing.batch * packing.length
    grid = torch.full((cells,), fill, dtype=torch.int64, device=ids_N.device)
    grid[packing.index_N] = ids_N
    return grid.view(packing.batch, packing.length)
