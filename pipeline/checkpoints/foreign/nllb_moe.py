"""NLLB-200's mixture of experts, as Hugging Face's NllbMoeForConditionalGeneration keeps it.

As M2M-100, with experts in every n-th layer. A token goes to its two best experts; the weights of
the two sum to 1.
"""

from pathlib import Path

from pipeline.checkpoints.foreign.m2m100 import M2M100Config, model_config
from pipeline.checkpoints.foreign.name_table import NameTable
from pipeline.checkpoints.foreign.refusals import refuse_other
from pipeline.config import ModelConfig
from pipeline.errors import CheckpointError

TABLE = NameTable.parse("""
model.shared.weight                                              embedding.weight
model.encoder.embed_tokens.weight                                embedding.weight  # tied, saved once more
model.decoder.embed_tokens.weight                                embedding.weight  # tied, saved once more
lm_head.weight                                                   embedding.weight  # tied, saved once more
model.encoder.embed_positions.weights                            -                 # sinusoids: computed
model.decoder.embed_positions.weights                            -                 # sinusoids: computed
model.{stack}.layer_norm.{kind}                                  {stack}.final_norm.{kind}
model.{stack}.layers.{layer}.self_attn_layer_norm.{kind}         {stack}.layers.{layer}.self_attention_norm.{kind}
model.{stack}.layers.{layer}.self_attn.q_proj.{kind}             {stack}.layers.{layer}.self_attention.query.{kind}
model.{stack}.layers.{layer}.self_attn.k_proj.{kind}             {stack}.layers.{layer}.self_attention.key.{kind}
model.{stack}.layers.{layer}.self_attn.v_proj.{kind}             {stack}.layers.{layer}.self_attention.value.{kind}
model.{stack}.layers.{layer}.self_attn.out_proj.{kind}           {stack}.layers.{layer}.self_attention.output.{kind}
model.{stack}.layers.{layer}.cross_attention_layer_norm.{kind}   {stack}.layers.{layer}.cross_attention_norm.{kind}
model.{stack}.layers.{layer}.cross_attention.q_proj.{kind}       {stack}.layers.{layer}.cross_attention.query.{kind}
model.{stack}.layers.{layer}.cross_attention.k_proj.{kind}       {stack}.layers.{layer}.cross_attention.key.{kind}
model.{stack}.layers.{layer}.cross_attention.v_proj.{kind}       {stack}.layers.{layer}.cross_attention.value.{kind}
model.{stack}.layers.{layer}.cross_attention.out_proj.{kind}     {stack}.layers.{layer}.cross_attention.output.{kind}
model.{stack}.layers.{layer}.ff_layer_norm.{kind}                {stack}.layers.{layer}.feed_forward_norm.{kind}
model.{stack}.layers.{layer}.ffn.fc1.{kind}                      {stack}.layers.{layer}.feed_forward.up.{kind}
model.{stack}.layers.{layer}.ffn.fc2.{kind}                      {stack}.layers.{layer}.feed_forward.down.{kind}
model.{stack}.layers.{layer}.ffn.router.classifier.weight        {stack}.layers.{layer}.feed_forward.router.weight  # has no bias: router_bias is refused
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc1.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.up.{kind}
model.{stack}.layers.{layer}.ffn.experts.expert_{expert}.fc2.{kind}  {stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}  # times 1 - moe_token_dropout
""")  # noqa: E501 (a table)
TOP_K = 2
"""NllbMoeTop2Router has no other."""


class NllbMoeConfig(M2M100Config):
    """What ``config.json`` says of the model; defaults are those of transformers."""

    num_experts: int = 128
    encoder_sparse_step: int = 4
    decoder_sparse_step: int = 4
    router_bias: bool = False
    router_dtype: str = "float32"
    second_expert_policy: str = "all"
    normalize_router_prob_before_dropping: bool = False
    batch_prioritized_routing: bool = False
    moe_eval_capacity_token_fraction: float = 1.0
    moe_token_dropout: float = 0.2


def moe_model_config(origin: Path, config: NllbMoeConfig) -> ModelConfig:
    """The model that ``config.json`` describes.

    Raises:
        CheckpointError: it has something that our model lacks; names it.
    """
    refuse_other(
        origin,
        router_bias=(config.router_bias, False),
        router_dtype=(config.router_dtype, "float32"),
        second_expert_policy=(config.second_expert_policy, "all"),
        decoder_sparse_step=(config.decoder_sparse_step, config.encoder_sparse_step),
    )
    if not 0 <= config.moe_token_dropout < 1:
        raise CheckpointError(
            f"{origin} has moe_token_dropout = {config.moe_token_dropout}, where a rate from 0 to "
            "below 1 is wanted: name another checkpoint."
        )
    moe = None
    if config.encoder_sparse_step > 0:
        moe = {
            "num_experts": config.num_experts,
            "top_k": TOP_K,
            "every": config.encoder_sparse_step,
            "combine_weights": "renormalized",
            "batch_prioritized": config.batch_prioritized_routing,
            **_evaluation_capacity(origin, config),
        }
    return model_config(origin, config, moe=moe)


def _evaluation_capacity(origin: Path, config: NllbMoeConfig) -> dict[str, object]:
    """How many tokens an expert takes in evaluation: a share of all, 1 drops none.

    Ours is that share of the mean load, top_k · tokens / experts, and of real tokens: theirs are
    counted with padding.
    """
    fraction = config.moe_eval_capacity_token_fraction
    if fraction >= 1:
        return {"dispatch": "dropless"}
    if fraction <= 0:
        raise CheckpointError(
            f"{origin} has moe_eval_capacity_token_fraction = {fraction}: its experts take "
            "expert_capacity tokens of any batch, where ours take a share of it; name a checkpoint "
            "with a fraction above 0."
        )
    refuse_other(
        origin,
        normalize_router_prob_before_dropping=(config.normalize_router_prob_before_dropping, False),
    )
    factor = fraction * config.num_experts / TOP_K
    return {"dispatch": "capacity", "evaluation_capacity_factor": factor}
