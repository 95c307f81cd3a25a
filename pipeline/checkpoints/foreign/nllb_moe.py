"""Read NLLB-200's mixture of experts, Hugging Face's NllbMoeForConditionalGeneration.

Like M2M-100, with experts in every n-th layer. A token goes to its two best experts, whose weights
sum to 1. fairseq and NLLB mask outputs of experts in training without scaling up the others, and
evaluation multiplies every output by the share that was kept. :class:`ScaledExperts` puts that
factor into the last linear layer of an expert.

The format has no language-group router, W x and W_g x averaged (MMNMT, eq. 1). For one group g that
is an ordinary router with W' = (W + W_g) / 2: :func:`of_one_group` exports the model of one group.
"""

from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor

from pipeline.checkpoints.foreign.m2m100 import EMBEDDINGS, POSITIONS, M2M100Config, model_config
from pipeline.checkpoints.foreign.model_folder import refuse_other
from pipeline.checkpoints.foreign.tensors import NameTable, Row
from pipeline.checkpoints.names import tensor_shapes
from pipeline.checkpoints.sources import ModelSource, Tensors
from pipeline.errors import CheckpointError, ConfigError
from pipeline.languages import find_code
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec

LAYERS = NameTable.parse("""
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
TABLE = EMBEDDINGS + POSITIONS + LAYERS
TOP_K = 2
"""The number of experts per token, which is fixed in NllbMoeTop2Router."""


class NllbMoeConfig(M2M100Config):
    """The fields of ``config.json`` that describe the model; defaults are those of transformers."""

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
    """Return the model that ``config.json`` describes.

    Raises:
        CheckpointError: A setting is not supported.
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
            f"{origin} has moe_token_dropout = {config.moe_token_dropout}, which is no rate from 0 "
            "to below 1. Name another checkpoint."
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
    """Return the settings of the number of tokens that an expert takes in evaluation.

    Theirs is a share of all tokens, padding included; 1 drops none. Ours is a multiple of the mean
    load, top_k · tokens / experts, padding excluded.
    """
    fraction = config.moe_eval_capacity_token_fraction
    if fraction >= 1:
        return {"dispatch": "dropless"}
    if fraction <= 0:
        raise CheckpointError(
            f"{origin} has moe_eval_capacity_token_fraction = {fraction}: its experts take "
            "expert_capacity tokens of any batch, but ours take a share of it. Name a checkpoint "
            "with a fraction above 0."
        )
    refuse_other(
        origin,
        normalize_router_prob_before_dropping=(config.normalize_router_prob_before_dropping, False),
    )
    factor = fraction * config.num_experts / TOP_K
    return {"dispatch": "capacity", "evaluation_capacity_factor": factor}


OUTPUT = Row("{stack}.layers.{layer}.feed_forward.experts.{expert}.down.{kind}", "output")
"""Matches our names of an expert's last linear layer."""


@dataclass(frozen=True)
class ScaledExperts:
    """Multiplies the last layer of every expert, in float32 or wider to round only once."""

    factor: float

    def __call__(self, name: str, value: Tensor) -> Tensor:
        """Return our value of the tensor with our name ``name``."""
        if self.factor == 1 or OUTPUT.to_ours(name) is None:
            return value
        return value.to(torch.promote_types(value.dtype, torch.float32)) * self.factor


@dataclass(frozen=True)
class OneGroupTensors:
    """The tensors of a model whose language-group routers are reduced to one group."""

    tensors: Tensors
    group: int
    group_weights: Mapping[str, str]
    """Name of a router's weight → name of the stacked weights of its groups."""

    @property
    def origin(self) -> Path:
        """Return the checkpoint that holds the tensors."""
        return self.tensors.origin

    def names(self) -> list[str]:
        """Return the names of all tensors, sorted."""
        return sorted(set(self.tensors.names()) - set(self.group_weights.values()))

    def shape(self, name: str) -> tuple[int, ...]:
        """Return the shape of a tensor."""
        return self.tensors.shape(name)

    def read(self, name: str) -> Tensor:
        """Return one tensor; a router's weight is that of the group."""
        value = self.tensors.read(name)
        if name not in self.group_weights:
            return value
        return (value + self.tensors.read(self.group_weights[name])[self.group]) / 2


def of_one_group(source: ModelSource, group: int) -> ModelSource:
    """Return the model that translates into the languages of one group only."""
    assert source.spec.model.moe is not None
    moe = source.spec.model.moe.model_copy(update={"decoder_router": "token", "num_groups": None})
    model = source.spec.model.model_copy(update={"moe": moe})
    spec = source.spec.model_copy(update={"model": model, "language_groups": None})
    of_groups = tensor_shapes(source.spec).keys() - tensor_shapes(spec).keys()
    weights = {name.removesuffix("group_weight") + "weight": name for name in of_groups}
    tensors = OneGroupTensors(source.tensors, group, weights)
    return ModelSource(spec, source.tokenizer, tensors, source.record)


def chosen_group(origin: Path, spec: ModelSpec, choice: str) -> int:
    """Return the group that ``--target-group`` names by its number or by one of its languages.

    Raises:
        ConfigError: The model has no groups, or no such group or language.
    """
    if spec.language_groups is None:
        raise ConfigError(f"{origin} has no language groups. Leave out --target-group.")
    if choice.isdecimal():
        if int(choice) >= spec.num_groups:
            raise ConfigError(
                f"--target-group {choice}: {origin} has the groups {described_groups(spec)}. Name "
                "one of them."
            )
        return int(choice)
    code = find_code(choice, spec.languages)
    if code is None:
        raise ConfigError(
            f"--target-group {choice}: {origin} has no such language. Name one of "
            f"{', '.join(spec.languages)}, or the number of a group."
        )
    return spec.language_groups[spec.languages.index(code)]


def languages_of_group(spec: ModelSpec, group: int) -> list[str]:
    """Return the codes of the languages of a group."""
    groups = spec.language_groups or ()
    return [code for code, own in zip(spec.languages, groups, strict=True) if own == group]


def described_groups(spec: ModelSpec) -> str:
    """Return the groups with their languages, as in ``0 (de, en), 1 (ru)``."""
    return ", ".join(
        f"{group} ({', '.join(languages_of_group(spec, group))})"
        for group in range(spec.num_groups)
    )
