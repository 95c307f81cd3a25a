"""Open fairseq's Transformer as a model of ours, dense or with experts: mRASP2, NLLB and others.

fairseq is not installed here. Names, defaults and meaning come from its public source:
``fairseq/models/transformer/transformer_{base,config,legacy}.py``,
``fairseq/modules/transformer_layer.py`` and ``fairseq/modules/multihead_attention.py``; mRASP2's
shape is ``transformer_big_t2t_12e12d``'s in PANXiao1994/mRASP2
(``mcolt/arches/transformer.py``): pre-norm, learned positions, unscaled embeddings with a norm. As
here, positions count from the padding's id + 1, and sinusoids are sines, then cosines.

Experts come from fairseq's branches ``moe`` and ``nllb`` (``fairseq/moe_checkpoint_utils.py``,
``fairseq/modules/transformer_layer.py``,
``fairseq/modules/moe/{moe_layer,top1gate,top2gate}.py``). ``X-shared.pt`` holds all other tensors;
``X-rank-K.pt`` holds the experts of rank K: with n experts per rank, its expert i is expert
K · n + i of the model. A layer has experts if its number from 1 is a multiple of ``moe_freq``. The
probabilities of two kept experts are renormalized; the probability of a single expert is not.

fairseq's evaluation drops tokens beyond an expert's capacity. A model of ours does so only if a
recipe says so, because the result depends on the other sentences of a batch.
"""

import re
from argparse import Namespace
from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal

import torch
from pydantic import Field, field_validator

from pipeline.artifacts.manifest import json_digest, raw_digest
from pipeline.artifacts.tokenizer import LanguageTokenScheme
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.fairseq_dictionary import FairseqVocabulary
from pipeline.checkpoints.foreign.files import (
    Described,
    StateDict,
    described,
    described_model,
    read_torch_file,
    refuse_other,
    refuse_unequal,
)
from pipeline.checkpoints.foreign.hugging_face import raw_record
from pipeline.checkpoints.foreign.tensor_names import (
    FAIRSEQ_OUTPUT,
    FAIRSEQ_TABLE,
    ForeignTensors,
    with_output,
)
from pipeline.config.settings import DropRate, shown
from pipeline.errors import CheckpointError
from pipeline.kernels.products import Activation
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import make_spec
from pipeline.terminal import listed

UNSUPPORTED = """
    adaptive_softmax_cutoff adaptive_input tie_adaptive_weights char_inputs cross_self_attention
    no_cross_attention no_token_positional_embeddings no_decoder_final_norm quant_noise_pq
    quant_noise_scalar use_stable_embedding encoder_layers_to_keep decoder_layers_to_keep
    base_layers mix_prepost_norm re_zero scale_attn scale_fc scale_heads scale_resids deepnorm
    subln lang_tok_replacing_bos_eos use_xmoe encoder_moe_layers decoder_moe_layers
    transformer_moe_layers insert_transformer_moe_layers alternate_ffn_embed_dim
    alternate_encoder_ffn_embed_dim alternate_decoder_ffn_embed_dim moe_cmr
""".split()
"""Settings of a model or task that ours does not have, also of mCOLT (mRASP2)."""
PAD_ID = 1
"""The id of padding in every dictionary of fairseq."""
_EMBEDDINGS = ("encoder.embed_tokens.weight", "decoder.embed_tokens.weight")
_OLD_NAMES = (".in_proj_", ".layer_norms.", "decoder.embed_out")
"""Parts of names that fairseq before 0.10 gave to tensors."""
_TAGS_AT_END = "translation_from_pretrained_bart"
"""The task of mBART, where the source ends with its tag."""
_FINAL_NORM_VERSION = 3
"""A stack of an earlier version has no norm after its last layer, whatever its settings say."""
_SHARED = "-shared.pt"
_RANK = re.compile(r"-rank-(0|[1-9]\d{0,4})\.pt", re.ASCII)
_EXPERT = re.compile(r"(.+\.moe_layer\.experts)\.(0|[1-9]\d{0,4})\.(.+)", re.ASCII)
"""The name of a tensor of an expert: its layer, the number of the expert, the rest."""


class FairseqSettings(Described):
    """The settings of a checkpoint that describe its model; optional ones have fairseq's defaults.

    The recipe owns dropout, layer drop and the other settings of training.
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
        """Return whether the output shares the weight of the embedding."""
        return self.share_all_embeddings or self.share_decoder_input_output_embed

    @property
    def token_style(self) -> LanguageTokenScheme:
        """Return how the task spells the language tokens that it appends to the dictionary."""
        return "brackets" if self.lang_tok_style == "mbart" else "underscores"

    @property
    def kept_share(self) -> float:
        """Return the factor that fairseq's evaluation multiplies outputs of experts by.

        Training masks outputs of experts (``moe_eom``) and of whole layers (``moe_fom``).
        """
        return (1 - self.moe_eom) * (1 - self.moe_fom)


def read_settings(state: Mapping[str, Any], origin: Path) -> FairseqSettings:
    """Read the settings of a checkpoint: ``args`` before fairseq 0.10, ``cfg`` by section since.

    Raises:
        CheckpointError: There are none, or one is not supported.
    """
    values = _flat_settings(state, origin)
    for name in UNSUPPORTED:
        if not _is_off(values.get(name)):
            refuse_other(origin, **{name: (values[name], None)})
    if values.get("task") == _TAGS_AT_END:
        refuse_other(origin, task=(_TAGS_AT_END, "translation"))
    given = {name: value for name, value in values.items() if value is not None}
    return described(FairseqSettings, given, origin)


def _is_off(value: object) -> bool:
    """Return whether the value of a setting switches it off."""
    return value is None or (isinstance(value, bool | int | float | str | list) and not value)


def _flat_settings(state: Mapping[str, Any], origin: Path) -> dict[str, Any]:
    """Return setting → value; settings of the model take precedence over its task's."""
    if isinstance(state.get("args"), Namespace):
        return dict(vars(state["args"]))
    sections = state.get("cfg")
    if not isinstance(sections, dict) or "model" not in sections:
        raise CheckpointError(
            f"{origin} has no settings of a model ('args' or 'cfg' of fairseq). Name a checkpoint "
            "of fairseq, or restore it from where it was published."
        )
    task = _section(sections.get("task"))
    values = task | _section(sections["model"])
    values["task"] = task.get("_name") or values.get("task")
    for side in ("encoder", "decoder"):  # a dataclass of fairseq 0.12 nests what was encoder_…
        values |= {f"{side}_{name}": value for name, value in _section(values.get(side)).items()}
    return values


def _section(found: object) -> dict[str, Any]:
    """Return a section's settings; models without a dataclass have a Namespace for a section."""
    if isinstance(found, Namespace):
        return dict(vars(found))
    return dict(found) if isinstance(found, dict) else {}


def model_config(settings: FairseqSettings, origin: Path) -> ModelConfig:
    """Return the model that settings describe.

    Raises:
        CheckpointError: A setting is not supported, or the settings describe no model.
    """
    width = settings.encoder_embed_dim
    is_learned = settings.encoder_learned_pos
    refuse_other(
        origin,
        decoder_embed_dim=(settings.decoder_embed_dim, width),
        decoder_input_dim=(settings.decoder_input_dim or width, width),
        decoder_output_dim=(settings.decoder_output_dim or width, width),
    )
    for name in ("ffn_embed_dim", "attention_heads", "normalize_before", "learned_pos"):
        encoder, decoder = (
            getattr(settings, f"encoder_{name}"),
            getattr(settings, f"decoder_{name}"),
        )
        refuse_unequal(origin, **{name: (encoder, decoder)})
    if is_learned:
        positions = settings.max_target_positions, settings.max_source_positions
        refuse_other(origin, max_target_positions=positions)
    model = {
        "encoder_layers": settings.encoder_layers,
        "decoder_layers": settings.decoder_layers,
        "width": width,
        "feed_forward_width": settings.encoder_ffn_embed_dim,
        "num_heads": settings.encoder_attention_heads,
        "norm": "pre" if settings.encoder_normalize_before else "post",
        "activation": settings.activation_fn,
        "positions": "learned" if is_learned else "sinusoidal",
        "max_positions": min(settings.max_source_positions, settings.max_target_positions),
        "scale_embedding": not settings.no_scale_embedding,
        "embedding_norm": settings.layernorm_embedding,
        "embedding": {"output": "tied" if settings.is_output_tied else "untied"},
        "moe": _moe_settings(settings, origin),
    }
    return described_model(model, origin)


def _moe_settings(settings: FairseqSettings, origin: Path) -> dict[str, object] | None:
    encoder = max(settings.encoder_moe_freq, settings.moe_freq)
    decoder = max(settings.decoder_moe_freq, settings.moe_freq)
    if not encoder and not decoder:
        return None
    width = settings.encoder_ffn_embed_dim
    refuse_other(
        origin,
        decoder_moe_freq=(decoder, encoder),
        moe_expert_ffn_dim=(settings.moe_expert_ffn_dim or width, width),
    )
    if not settings.moe_top1_expert:  # other policies draw the second expert, in evaluation too
        refuse_other(origin, moe_second_expert_policy=(settings.moe_second_expert_policy, "all"))
    return {
        "num_experts": settings.moe_expert_count,
        "top_k": 1 if settings.moe_top1_expert else 2,
        "every": encoder,
        "combine_weights": "probability" if settings.moe_top1_expert else "renormalized",
        "batch_prioritized": settings.moe_batch_prioritized_routing,
    }


def tag_scheme(settings: FairseqSettings, origin: Path) -> TagScheme:
    """Return where the language tokens stand: ``src-tgt``, unless the task puts them elsewhere.

    mRASP2 has no setting for it: its source begins with ``LANG_TOK_EN``, and its decoder is forced
    to begin with the token of the target (``--lang-prefix-tok``), which is ``src-tgt``.

    Raises:
        CheckpointError: The task puts them where ours cannot.
    """
    options = settings.encoder_langtok, "tgt" if settings.decoder_langtok else None
    match settings.langtoks.get("main", options):  # langtoks takes precedence where it is given
        case (None, None) | ("src", "tgt"):
            return "src-tgt"
        case ("tgt", None):
            return "tgt"
        case encoder, decoder:
            raise CheckpointError(
                f"{origin} has encoder_langtok = {encoder!r} with decoder_langtok = {decoder!r}; "
                "only src with tgt, and tgt with None, are supported. Name another checkpoint."
            )


def check_weights(weights: StateDict, settings: FairseqSettings) -> None:
    """Check that encoder and decoder share their embedding and end with a norm if pre-norm.

    Raises:
        CheckpointError: One of both does not hold, or the names are older than fairseq 0.10.
    """
    old = next((n for n in weights.names() if any(part in n for part in _OLD_NAMES)), None)
    if old is not None:
        raise CheckpointError(
            f"{weights.origin} has the tensor {old}, as fairseq before 0.10 names it. Load the "
            "checkpoint with fairseq 0.12 and save it again, which renames its tensors."
        )
    encoder, decoder = (weights.tensors.get(name) for name in _EMBEDDINGS)
    if encoder is not None and decoder is not None:
        is_one = encoder.dtype == decoder.dtype and torch.equal(encoder, decoder)
        refuse_other(weights.origin, share_all_embeddings=(is_one, True))
    for name in ("encoder.version", "decoder.version"):
        version = weights.tensors.get(name)
        if settings.encoder_normalize_before and version is not None:
            is_late = version.is_floating_point() and bool((version >= _FINAL_NORM_VERSION).all())
            found = _FINAL_NORM_VERSION if is_late else shown(version.tolist())
            refuse_other(weights.origin, **{name: (found, _FINAL_NORM_VERSION)})


def rank_files(shared: Path) -> list[Path]:
    """Return the files of all ranks next to the shared file, in the order of ranks.

    Raises:
        CheckpointError: One is missing, or all are.
    """
    stem = shared.name.removesuffix(_SHARED)
    names = [path.name for path in shared.parent.iterdir() if path.name.startswith(stem)]
    matches = filter(None, (_RANK.fullmatch(name.removeprefix(stem)) for name in names))
    ranks = {int(match[1]) for match in matches}
    for rank in range(max(ranks, default=0) + 1):
        if rank not in ranks:
            raise _missing(shared, rank)
    return [_rank_file(shared, rank) for rank in sorted(ranks)]


def with_experts(weights: StateDict, files: Sequence[Path], num_experts: int) -> StateDict:
    """Return the shared weights together with the experts in the files of all ranks.

    Raises:
        CheckpointError: A file is missing, holds other tensors than experts' or another number of
            experts than the first file, or two files have each other's name.
    """
    tensors = dict(weights.tensors)
    local = 0  # experts per rank, which the first file tells
    writers = []
    for rank, path in enumerate(files):
        state = read_torch_file(path, keep=["args", "cfg", "model"])
        writers.append(_rank_of_writer(state))
        experts = StateDict.checked(path, state.get("model"))
        numbers = set()
        for name, value in experts.tensors.items():
            match = _EXPERT.fullmatch(name)
            if match is None:
                raise CheckpointError(
                    f"{path} holds {name}, which belongs to no expert. Restore the files of all "
                    "ranks from one checkpoint."
                )
            layer, number, rest = match.groups()
            numbers.add(int(number))
            tensors[f"{layer}.{rank * local + int(number)}.{rest}"] = value
        if rank == 0:
            local = len(numbers)
            if len(files) * local < num_experts and num_experts % local == 0:
                raise _missing(weights.origin, len(files))
        if numbers != set(range(local)) or len(files) * local != num_experts:
            raise CheckpointError(
                f"{path} holds {len(numbers):,} experts of a layer, but {len(files):,} files "
                f"share {num_experts:,}. Restore the files of all ranks from one checkpoint."
            )
    # Files that were written anew may all name one rank: only other names of the same ranks count.
    if set(writers) == set(range(len(files))) and writers != list(range(len(files))):
        named = next(rank for rank, writer in enumerate(writers) if writer != rank)
        raise CheckpointError(
            f"{files[named]} was written by rank {writers[named]}, as its settings say "
            "(distributed_rank). Give the files of all ranks their own names back."
        )
    return replace(weights, tensors=tensors)


def _rank_of_writer(state: Mapping[str, Any]) -> int | None:
    """Return the rank in the settings of a file; None if they name none."""
    sections = state.get("cfg")
    section = sections.get("distributed_training") if isinstance(sections, dict) else None
    rank = _section(section or state.get("args")).get("distributed_rank")
    return rank if isinstance(rank, int) else None


def _rank_file(shared: Path, rank: int) -> Path:
    return shared.with_name(f"{shared.name.removesuffix(_SHARED)}-rank-{rank}.pt")


def _missing(shared: Path, rank: int) -> CheckpointError:
    return CheckpointError(
        f"{_rank_file(shared, rank)}, which holds the experts of a rank, is missing. Put the files "
        f"of all ranks next to {shared.name}."
    )


def open_file(path: Path, vocabulary: FairseqVocabulary | None) -> ModelSource:
    """Open ``X.pt``, or ``X-shared.pt`` with its ranks' files, by our names of its tensors.

    Raises:
        CheckpointError: The file or the vocabulary cannot be read, or has something that ours does
            not have.
    """
    if _RANK.search(path.name) is not None:
        shared = _RANK.sub(_SHARED, path.name)
        raise CheckpointError(f"{path} holds only the experts of one rank. Name {shared} instead.")
    if vocabulary is None:
        raise CheckpointError(
            f"{path} contains no vocabulary. Import it with its dictionary and its SentencePiece "
            f"model (mmnmt checkpoint import {path} --dictionary dict.txt --sentencepiece "
            "spm.model --out DIR), and use the result."
        )
    state = read_torch_file(path, keep=["args", "cfg", "model"])
    weights = StateDict.checked(path, state.get("model"))
    settings = read_settings(state, path)
    model = model_config(settings, path)
    files = [path]
    if path.name.endswith(_SHARED):
        if model.moe is None:
            raise CheckpointError(
                f"{path} has moe_freq = 0, but only models with experts have files of ranks. Name "
                "another checkpoint."
            )
        files += rank_files(path)
        weights = with_experts(weights, files[1:], model.moe.num_experts)
    check_weights(weights, settings)
    tables = (weights.tensors[name] for name in _EMBEDDINGS if name in weights.tensors)
    size = next((len(table) for table in tables if table.dim() == 2), None)
    if size is None:
        raise CheckpointError(
            f"{path} has no table of embeddings (encoder.embed_tokens.weight). Name a checkpoint "
            "of a Transformer that translates."
        )
    tokenizer = vocabulary.tokenizer(
        size=size, languages=settings.langs, style=settings.token_style
    )
    spec = make_spec(
        model=model,
        vocabulary_size=size,
        pad_id=PAD_ID,
        languages=tokenizer.description.languages,
        tag_scheme=tag_scheme(settings, path),
    )
    table = with_output(FAIRSEQ_TABLE, FAIRSEQ_OUTPUT, tied=settings.is_output_tied)
    tensors = ForeignTensors.through(
        table, weights, spec=spec, expert_output_scale=settings.kept_share
    )
    digests = {file.name: raw_digest(file) for file in files}
    if twins := [name for name, one in digests.items() if [*digests.values()].count(one) > 1]:
        raise CheckpointError(
            f"{path.parent} has copies of one file as {listed(twins)}. Restore the files of all "
            "ranks from one checkpoint."
        )
    digest = digests[path.name] if len(files) == 1 else json_digest(digests)
    return ModelSource(
        spec=spec, tokenizer=tokenizer, tensors=tensors, record=raw_record(path, digest)
    )
