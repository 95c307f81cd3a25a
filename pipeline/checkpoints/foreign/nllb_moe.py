"""NLLB-200's mixture of experts, as Hugging Face's NllbMoeForConditionalGeneration keeps it.

As M2M-100, with experts in every n-th layer. A token goes to its two best experts; the weights of
the two sum to 1.

Experts whose output is what theirs is in evaluation.

fairseq and NLLB mask outputs of experts in training and do not scale up what remains; evaluation
multiplies every output by the share that was kept. Ours needs no correction: the factor goes into
an expert's last linear layer.

A language-group router, for the languages of one group, is an ordinary router.

It says (W x + W_g x) / 2 (MMNMT, eq. 1): for one group g that is W' x, W' = (W + W_g) / 2.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoints.foreign.m2m100 import M2M100Config, model_config
from pipeline.checkpoints.foreign.refusals import refuse_other
from pipeline.checkpoints.foreign.tensors import NameTable, Row
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.errors import CheckpointError, ConfigError
from pipeline.languages import find_code
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec

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


OUTPUT = Row("{stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}", "output")
"""Ours that are what an expert ends with."""


@dataclass(frozen=True)
class ScaledExperts:
    """Multiplies the last layer of every expert, in float32 at least: to round once is enough."""

    factor: float

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Our value of a tensor by our name."""
        if self.factor == 1 or OUTPUT.to_ours(name) is None:
            return value
        return value.to(torch.promote_types(value.dtype, torch.float32)) * self.factor


@dataclass(frozen=True)
class OneGroupTensors:
    """Tensors whose routers are those of one language group."""

    tensors: Tensors
    group: int
    group_weights: Mapping[str, str]
    """The weight of a router → the stacked weights of its groups."""

    @property
    def origin(self) -> Path:
        return self.tensors.origin

    def names(self) -> list[str]:
        return sorted(set(self.tensors.names()) - set(self.group_weights.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        return self.tensors.shape(name)

    def read(self, name: str) -> Tensor:
        value = self.tensors.read(name)
        if name not in self.group_weights:
            return value
        return (value + self.tensors.read(self.group_weights[name])[self.group]) / 2


def of_one_group(source: ModelSource, group: int) -> ModelSource:
    """The same model, into the languages of one group alone."""
    assert source.spec.model.moe is not None
    moe = source.spec.model.moe.model_copy(update={"decoder_router": "token", "num_groups": None})
    model = source.spec.model.model_copy(update={"moe": moe})
    spec = source.spec.model_copy(update={"model": model, "language_groups": None})
    of_groups = tensor_shapes(source.spec).keys() - tensor_shapes(spec).keys()
    weights = {name.removesuffix("group_weight") + "weight": name for name in of_groups}
    tensors = OneGroupTensors(source.tensors, group, weights)
    return ModelSource(spec, source.tokenizer, tensors, source.record)


def chosen_group(origin: Path, spec: ModelSpec, choice: str) -> int:
    """The group that is meant by its number or by one of its languages.

    Raises:
        ConfigError: the model has no groups, or no such group or language.
    """
    if spec.language_groups is None:
        raise ConfigError(
            f"{origin} has no language groups: leave out --target-group, its routers are ordinary."
        )
    if choice.isdecimal():
        if int(choice) >= spec.num_groups:
            raise ConfigError(
                f"--target-group {choice}: {origin} has the groups {described_groups(spec)}; name "
                "one of them."
            )
        return int(choice)
    code = find_code(choice, spec.languages)
    if code is None:
        raise ConfigError(
            f"--target-group {choice}: {origin} has no such language; name one of "
            f"{', '.join(spec.languages)}, or the number of a group."
        )
    return spec.language_groups[spec.languages.index(code)]


def languages_of_group(spec: ModelSpec, group: int) -> list[str]:
    """Codes of the languages of a group."""
    groups = spec.language_groups or ()
    return [code for code, own in zip(spec.languages, groups, strict=True) if own == group]


def described_groups(spec: ModelSpec) -> str:
    """``0 (de, en), 1 (ru)``."""
    return ", ".join(
        f"{group} ({', '.join(languages_of_group(spec, group))})"
        for group in range(spec.num_groups)
    )
