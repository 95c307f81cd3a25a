"""NLLB-MoE, as Hugging Face's NllbMoeForConditionalGeneration keeps it.

M2M-100 with experts: every n-th layer of each stack, two experts per token, their weights
renormalised.
"""

from pathlib import Path
from typing import Any

from pipeline.checkpoints.foreign import m2m100
from pipeline.checkpoints.foreign.name_table import NameTable
from pipeline.checkpoints.foreign.refusals import Limit, refuse_beyond
from pipeline.model.spec import ModelSpec

TABLE = NameTable.parse("""
model.shared.weight                                               embedding.weight
model.encoder.embed_tokens.weight                                 embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight                                 embedding.weight  # tied, saved once more
lm_head.weight                                                    embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights                             -                 # sinusoids: computed
model.decoder.embed_positions.weights                             -                 # sinusoids: computed
model.{stack}.layer_norm.{kind}                                   {stack}.final_norm.{kind}
model.{stack}.layers.{layer}.self_attn_layer_norm.{kind}          {stack}.layers.{layer}.self_attention_norm.{kind}
model.{stack}.layers.{layer}.self_attn.q_proj.{kind}              {stack}.layers.{layer}.self_attention.query.{kind}
model.{stack}.layers.{layer}.self_attn.k_proj.{kind}              {stack}.layers.{layer}.self_attention.key.{kind}
model.{stack}.layers.{layer}.self_attn.v_proj.{kind}              {stack}.layers.{layer}.self_attention.value.{kind}
model.{stack}.layers.{layer}.self_attn.out_proj.{kind}            {stack}.layers.{layer}.self_attention.output.{kind}
model.{stack}.layers.{layer}.cross_attention_layer_norm.{kind}    {stack}.layers.{layer}.cross_attention_norm.{kind}
model.{stack}.layers.{layer}.cross_attention.q_proj.{kind}        {stack}.layers.{layer}.cross_attention.query.{kind}
model.{stack}.layers.{layer}.cross_attention.k_proj.{kind}        {stack}.layers.{layer}.cross_attention.key.{kind}
model.{stack}.layers.{layer}.cross_attention.v_proj.{kind}        {stack}.layers.{layer}.cross_attention.value.{kind}
model.{stack}.layers.{layer}.cross_attention.out_proj.{kind}      {stack}.layers.{layer}.cross_attention.output.{kind}
model.{stack}.layers.{layer}.ff_layer_norm.{kind}                 {stack}.layers.{layer}.feed_forward_norm.{kind}
model.{stack}.layers.{layer}.ffn.fc1.{kind}                       {stack}.layers.{layer}.feed_forward.up.{kind}
model.{stack}.layers.{layer}.ffn.fc2.{kind}                       {stack}.layers.{layer}.feed_forward.down.{kind}
model.{stack}.layers.{layer}.ffn.router.classifier.weight         {stack}.layers.{layer}.feed_forward.router.weight
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}
""")  # noqa: E501 (a table)


def refuse_unwritable(origin: Path, spec: ModelSpec) -> None:
    """Raises CheckpointError where a model of ours is none of this family."""
    limits = m2m100.common_limits(spec)
    moe = spec.model.moe
    if moe is None:
        limits.append(Limit("model.moe", None, ("experts",), "hf-m2m100"))
    else:
        limits += [
            Limit("model.moe.top_k", moe.top_k, (2,)),
            Limit("model.moe.combine_weights", moe.combine_weights, ("renormalized",)),
            Limit("model.moe.decoder_router", moe.decoder_router, ("token",)),
            Limit("model.moe.evaluation_capacity_factor", moe.evaluation_capacity_factor, (None,)),
        ]
    refuse_beyond(origin, limits, to="hf-nllb-moe")


def written_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """``config.json`` of a model of ours, which drops no token when it translates."""
    moe = spec.model.moe
    assert moe is not None
    return m2m100.common_config(spec, vocabulary_size=vocabulary_size) | {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "batch_prioritized_routing": moe.batch_prioritized,
        "decoder_sparse_step": moe.every,
        "encoder_sparse_step": moe.every,
        "moe_eval_capacity_token_fraction": 1.0,  # as many slots per expert as there are tokens
        "moe_token_dropout": 0.0,
        "normalize_router_prob_before_dropping": False,
        "num_experts": moe.num_experts,
        "router_bias": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
    }
