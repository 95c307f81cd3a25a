"""fairseq's Transformer: mRASP2, transformer_big with 12 + 12 layers, and their relatives.

fairseq is not installed here. Names, defaults and meaning are those of its public source:
``fairseq/models/transformer/transformer_{base,config,legacy}.py``,
``fairseq/modules/transformer_layer.py`` and ``fairseq/modules/multihead_attention.py``, with the
upgrades of older files that ``upgrade_state_dict_named`` has there; mRASP2's shape is that of
``transformer_big_t2t_12e12d`` in PANXiao1994/mRASP2 (``mcolt/arches/transformer.py``): pre-norm,
learned positions, unscaled embeddings with a norm.

Positions count from the padding's id + 1 and sinusoids are sines, then cosines, as here.

A checkpoint of fairseq, in one file or in those of many ranks, as a model of ours.
"""

from argparse import Namespace
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, ValidationError, field_validator
from torch import Tensor

from pipeline.artifacts.tokenizer import LanguageTokenScheme
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.foreign.model_folder import Described
from pipeline.checkpoints.foreign.refusals import refuse_other
from pipeline.checkpoints.foreign.tensors import NameTable
from pipeline.checkpoints.foreign.torch_file import RESTORE, StateDict
from pipeline.config.settings import DropRate, shown
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import EmbeddingConfig, ModelConfig, MoEConfig

TABLE = NameTable.parse("""
encoder.embed_tokens.weight                            embedding.weight
decoder.embed_tokens.weight                            embedding.weight                  # tied, saved once more
encoder.version                                        -                                 # 3 since norms follow the last layer
decoder.version                                        -                                 # 3 since norms follow the last layer
{stack}.embed_positions._float_tensor                  -                                 # sinusoids: computed
{stack}.embed_positions.weights                        -                                 # sinusoids: computed
{stack}.embed_positions.weight                         {stack}.positions.weight          # learned; row 2 is the first
{stack}.layernorm_embedding.{kind}                     {stack}.embedding_norm.{kind}
{stack}.layer_norm.{kind}                              {stack}.final_norm.{kind}         # where norms go before
{stack}.layers.{layer}.self_attn_layer_norm.{kind}     {stack}.layers.{layer}.self_attention_norm.{kind}
{stack}.layers.{layer}.self_attn.q_proj.{kind}         {stack}.layers.{layer}.self_attention.query.{kind}
{stack}.layers.{layer}.self_attn.k_proj.{kind}         {stack}.layers.{layer}.self_attention.key.{kind}
{stack}.layers.{layer}.self_attn.v_proj.{kind}         {stack}.layers.{layer}.self_attention.value.{kind}
{stack}.layers.{layer}.self_attn.out_proj.{kind}       {stack}.layers.{layer}.self_attention.output.{kind}
{stack}.layers.{layer}.encoder_attn_layer_norm.{kind}  {stack}.layers.{layer}.cross_attention_norm.{kind}
{stack}.layers.{layer}.encoder_attn.q_proj.{kind}      {stack}.layers.{layer}.cross_attention.query.{kind}
{stack}.layers.{layer}.encoder_attn.k_proj.{kind}      {stack}.layers.{layer}.cross_attention.key.{kind}
{stack}.layers.{layer}.encoder_attn.v_proj.{kind}      {stack}.layers.{layer}.cross_attention.value.{kind}
{stack}.layers.{layer}.encoder_attn.out_proj.{kind}    {stack}.layers.{layer}.cross_attention.output.{kind}
{stack}.layers.{layer}.final_layer_norm.{kind}         {stack}.layers.{layer}.feed_forward_norm.{kind}
{stack}.layers.{layer}.fc1.{kind}                      {stack}.layers.{layer}.feed_forward.up.{kind}
{stack}.layers.{layer}.fc2.{kind}                      {stack}.layers.{layer}.feed_forward.down.{kind}
encoder.layers.{layer}.layer_norms.0.{kind}            encoder.layers.{layer}.self_attention_norm.{kind}   # before 0.6
encoder.layers.{layer}.layer_norms.1.{kind}            encoder.layers.{layer}.feed_forward_norm.{kind}     # before 0.6
decoder.layers.{layer}.layer_norms.0.{kind}            decoder.layers.{layer}.self_attention_norm.{kind}   # before 0.6
decoder.layers.{layer}.layer_norms.1.{kind}            decoder.layers.{layer}.cross_attention_norm.{kind}  # before 0.6
decoder.layers.{layer}.layer_norms.2.{kind}            decoder.layers.{layer}.feed_forward_norm.{kind}     # before 0.6
""")  # noqa: E501 (a table)

TIED_OUTPUT = NameTable.parse("""
decoder.output_projection.weight    embedding.weight           # tied, saved once more
""")
UNTIED_OUTPUT = NameTable.parse("""
decoder.output_projection.weight    embedding.output_weight
decoder.embed_out                   embedding.output_weight    # before 0.10
""")

UNSUPPORTED = (
    *("adaptive_softmax_cutoff", "adaptive_input", "tie_adaptive_weights", "char_inputs"),
    *("cross_self_attention", "no_cross_attention", "no_token_positional_embeddings"),
    *("no_decoder_final_norm", "quant_noise_pq", "quant_noise_scalar", "use_stable_embedding"),
    *("encoder_layers_to_keep", "decoder_layers_to_keep", "base_layers", "mix_prepost_norm"),
    *("re_zero", "scale_attn", "scale_fc", "scale_heads", "scale_resids", "deepnorm", "subln"),
    *("lang_tok_replacing_bos_eos", "use_xmoe", "encoder_moe_layers", "decoder_moe_layers"),
    *("transformer_moe_layers", "insert_transformer_moe_layers", "alternate_ffn_embed_dim"),
    *("alternate_encoder_ffn_embed_dim", "alternate_decoder_ffn_embed_dim", "moe_cmr"),
)
"""Settings of a model or its task that ours does without; those of mCOLT (mRASP2) among them."""
_TAGS_AT_END = "translation_from_pretrained_bart"
"""fairseq's task for mBART, whose source ends with its tag."""
_FINAL_NORM_VERSION = 3
"""A stack of an earlier version has no norm behind its last layer, whatever its settings say."""


class FairseqSettings(Described):
    """What a checkpoint says of its model; sizes are always there, the rest has fairseq's defaults.

    Layer drop, dropout and the like belong to training, and are the recipe's.
    """

    encoder_embed_dim: int
    encoder_ffn_embed_dim: int
    encoder_layers: int
    encoder_attention_heads: int
    decoder_embed_dim: int
    decoder_ffn_embed_dim: int
    decoder_layers: int
    decoder_attention_heads: int
    encoder_normalize_before: bool = False
    decoder_normalize_before: bool = False
    encoder_learned_pos: bool = False
    decoder_learned_pos: bool = False
    decoder_input_dim: int | None = None
    decoder_output_dim: int | None = None
    max_source_positions: int = 1024
    max_target_positions: int = 1024
    activation_fn: Activation = "relu"
    no_scale_embedding: bool = False
    layernorm_embedding: bool = False
    share_all_embeddings: bool = False
    share_decoder_input_output_embed: bool = False
    task: str = "translation"
    encoder_langtok: str | None = None
    decoder_langtok: bool = False
    langtoks: dict[str, tuple[str | None, str | None]] = Field(default_factory=dict)
    lang_tok_style: Literal["multilingual", "mbart"] = "multilingual"
    langs: tuple[str, ...] = ()
    moe_freq: int = 0
    encoder_moe_freq: int = 0
    decoder_moe_freq: int = 0
    moe_expert_count: int = 0
    moe_expert_ffn_dim: int | None = None
    moe_top1_expert: bool = False
    moe_second_expert_policy: str = "sampling"
    moe_eom: DropRate = 0.0
    moe_fom: DropRate = 0.0
    moe_batch_prioritized_routing: bool = False

    @field_validator("langs", mode="before")
    @classmethod
    def _split(cls, value: object) -> object:
        return [code.strip() for code in value.split(",")] if isinstance(value, str) else value

    @property
    def is_output_tied(self) -> bool:
        return self.share_all_embeddings or self.share_decoder_input_output_embed

    @property
    def token_style(self) -> LanguageTokenScheme:
        """How its task spells the tokens of languages that it appends to the dictionary."""
        return "brackets" if self.lang_tok_style == "mbart" else "underscores"

    def table(self) -> NameTable:
        """The names of a model with these settings, its experts aside."""
        output = TIED_OUTPUT if self.is_output_tied else UNTIED_OUTPUT
        return NameTable((*TABLE.rows, *output.rows))


def read_settings(state: Mapping[str, Any], origin: Path) -> FairseqSettings:
    """The settings in a checkpoint: ``args`` before fairseq 0.10, ``cfg`` by sections since.

    Raises:
        CheckpointError: there are none, or they ask for what our model lacks; names it.
    """
    values = _flat_settings(state, origin)
    for name in UNSUPPORTED:
        if not _is_off(values.get(name)):
            refuse_other(origin, **{name: (values[name], None)})
    if values.get("task") == _TAGS_AT_END:
        refuse_other(origin, task=(_TAGS_AT_END, "translation"))
    given = {name: value for name, value in values.items() if value is not None}
    try:
        return FairseqSettings.model_validate(given, strict=False)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        where = ".".join(map(str, first["loc"]))
        found = "no such setting" if first["type"] == "missing" else shown(first["input"])
        raise CheckpointError(
            f"{origin} has {where} = {found} in its settings ({first['msg']}), and no such model "
            "can be taken over: name another checkpoint."
        ) from error


def _is_off(value: object) -> bool:
    """Whether a setting says that there is no such thing."""
    return value is None or (isinstance(value, bool | int | float | str | list) and not value)


def _flat_settings(state: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Setting → value; those of the model go before those of its task and of training."""
    if isinstance(state.get("args"), Namespace):
        return dict(vars(state["args"]))
    sections = state.get("cfg")
    if not isinstance(sections, dict) or "model" not in sections:
        raise CheckpointError(
            f"{origin} has no settings of a model ('args' or 'cfg' of fairseq): name a checkpoint "
            f"of fairseq, or {RESTORE}."
        )
    task = _section(sections.get("task"))
    values = task | _section(sections["model"])
    values["task"] = task.get("_name") or values.get("task")
    for side in ("encoder", "decoder"):  # a dataclass of fairseq 0.12 nests what was encoder_…
        values |= {f"{side}_{name}": value for name, value in _section(values.get(side)).items()}
    return values


def _section(found: object) -> dict[str, Any]:
    """A dictionary, or the Namespace that fairseq puts into one for models without a dataclass."""
    if isinstance(found, Namespace):
        return dict(vars(found))
    return dict(found) if isinstance(found, dict) else {}


def model_config(settings: FairseqSettings, origin: Path, *, moe: MoEConfig | None) -> ModelConfig:
    """The model that settings describe, with its experts.

    Raises:
        CheckpointError: it has something that our model lacks; names it.
    """
    width = settings.encoder_embed_dim
    is_learned = settings.encoder_learned_pos
    refuse_other(
        origin,
        decoder_embed_dim=(settings.decoder_embed_dim, width),
        decoder_input_dim=(settings.decoder_input_dim or width, width),
        decoder_output_dim=(settings.decoder_output_dim or width, width),
        decoder_ffn_embed_dim=(settings.decoder_ffn_embed_dim, settings.encoder_ffn_embed_dim),
        decoder_attention_heads=(
            settings.decoder_attention_heads,
            settings.encoder_attention_heads,
        ),
        decoder_normalize_before=(
            settings.decoder_normalize_before,
            settings.encoder_normalize_before,
        ),
        decoder_learned_pos=(settings.decoder_learned_pos, is_learned),
    )
    if is_learned:
        refuse_other(
            origin,
            max_target_positions=(settings.max_target_positions, settings.max_source_positions),
        )
    return ModelConfig(
        encoder_layers=settings.encoder_layers,
        decoder_layers=settings.decoder_layers,
        width=width,
        feed_forward_width=settings.encoder_ffn_embed_dim,
        num_heads=settings.encoder_attention_heads,
        norm="pre" if settings.encoder_normalize_before else "post",
        activation=settings.activation_fn,
        positions="learned" if is_learned else "sinusoidal",
        max_positions=min(settings.max_source_positions, settings.max_target_positions),
        scale_embedding=not settings.no_scale_embedding,
        embedding_norm=settings.layernorm_embedding,
        embedding=EmbeddingConfig(output="tied" if settings.is_output_tied else "untied"),
        moe=moe,
    )


def tag_scheme(settings: FairseqSettings, origin: Path) -> TagScheme:
    """Where the tags stand: the source's and the target's, unless the task puts them elsewhere.

    mRASP2 has no setting for it: its text begins with ``LANG_TOK_EN``, and its decoder is forced
    to begin with that of the target (``--lang-prefix-tok``), which is ``src-tgt``.

    Raises:
        CheckpointError: the task tags in a way that ours does not have.
    """
    options = settings.encoder_langtok, "tgt" if settings.decoder_langtok else None
    match settings.langtoks.get("main", options):  # which the task goes by, where it is given
        case (None, None) | ("src", "tgt"):
            return "src-tgt"
        case ("tgt", None):
            return "tgt"
        case encoder, decoder:
            raise CheckpointError(
                f"{origin} has encoder_langtok = {encoder!r} with decoder_langtok = {decoder!r}, "
                "and a model can be taken over with src and tgt, or tgt and None: name another "
                "checkpoint."
            )


def check_weights(weights: StateDict, settings: FairseqSettings) -> None:
    """Refuse embeddings that differ between encoder and decoder, and stacks of before 2018.

    Raises:
        CheckpointError: names what it is.
    """
    encoder = weights.tensors.get("encoder.embed_tokens.weight")
    decoder = weights.tensors.get("decoder.embed_tokens.weight")
    if encoder is not None and decoder is not None:
        is_one = encoder.dtype == decoder.dtype and torch.equal(encoder, decoder)
        refuse_other(weights.origin, share_all_embeddings=(is_one, True))
    for name in ("encoder.version", "decoder.version"):
        version = weights.tensors.get(name)
        if settings.encoder_normalize_before and version is not None:
            is_late = version.is_floating_point() and bool((version >= _FINAL_NORM_VERSION).all())
            found = _FINAL_NORM_VERSION if is_late else shown(version.tolist())
            refuse_other(weights.origin, **{name: (found, _FINAL_NORM_VERSION)})


def with_split_projections(weights: StateDict) -> StateDict:
    """Queries, keys and values under names of their own, where they are one matrix (before 0.8)."""
    tensors: dict[str, Tensor] = {}
    for name, value in weights.tensors.items():
        module, joined, kind = name.rpartition(".in_proj_")
        if joined and kind in ("weight", "bias") and value.dim() and len(value) % 3 == 0:
            for part, third in zip("qkv", value.chunk(3), strict=True):
                tensors[f"{module}.{part}_proj.{kind}"] = third
        else:
            tensors[name] = value
    return replace(weights, tensors=tensors)
