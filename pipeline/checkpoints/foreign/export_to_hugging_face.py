"""Write a model of ours as a folder of Hugging Face's, and the model card of any export.

M2M-100 and NLLB-MoE can be written, with ``M2M100Tokenizer`` or ``NllbTokenizer``. Weights are
written in files of bounded size; at most one is in memory. The ids that the tokenizers assign to a
text are ours, renumbered by a :class:`Layout`; if a text contains a special or a language token,
theirs read the token and ours read text.
"""

import base64
import json
import re
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial, reduce
from pathlib import Path
from typing import Any

import torch
from jinja2 import Environment, PackageLoader, StrictUndefined
from sentencepiece import SentencePieceProcessor
from torch import Tensor

from pipeline.artifacts.artifact import Artifact, ArtifactWriter, Lineage, open_recorded
from pipeline.artifacts.corpus import pair_name
from pipeline.artifacts.manifest import how_to_restore, to_json, write_hashed
from pipeline.artifacts.spelling import with_any_rule
from pipeline.artifacts.vocabularies import MODEL_NAME, piece_field
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.files import CONFIG_FILE, INDEX_FILE, WEIGHTS_FILE
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    FAST_TOKENIZER_FILE,
    GENERATION_FILE,
    SENTENCEPIECE_FILE,
    SENTENCEPIECE_SPECIALS,
    SPECIAL_TOKENS_FILE,
    SPECIALS,
    TOKENIZER_CONFIG_FILE,
    VOCABULARY_FILE,
    Layout,
)
from pipeline.checkpoints.foreign.tensor_names import (
    M2M100_TABLE,
    NLLB_MOE_TABLE,
    without_name,
)
from pipeline.checkpoints.weights import file_pieces, files_of
from pipeline.distributed.process import track
from pipeline.errors import ArtifactError
from pipeline.languages import language
from pipeline.model.parameters import num_parameters, tensor_shapes
from pipeline.model.spec import ModelSpec

EMBEDDING = "embedding.weight"
METADATA = {"format": "pt"}
"""Metadata of safetensors as ``save_pretrained`` writes it; transformers asks for it."""
LONGEST_OUTPUT = 200
"""Default limit of a translation in tokens, as in the published M2M-100."""
_PIECES = 1
"""Number of the field of pieces in a SentencePiece model."""
_KEPT_WHOLE = 4
"""Type of a user-defined piece."""


def write_model(writer: ArtifactWriter, source: ModelSource, layout: Layout) -> str:
    """Write configuration, weights and tokenizer files; return the tokenizer's class.

    Raises:
        CheckpointError: The format has no name for a tensor; before any is read.
    """
    spec, directory = source.spec, writer.directory
    config = model_config(spec, vocabulary_size=len(layout.rows))
    dtype = _write_tensors(writer, foreign_tensors(source, layout))
    config["torch_dtype"] = str(dtype).removeprefix("torch.")
    _write_configs(directory, config, layout)
    assert source.tokenizer.model is not None
    model = with_any_rule(source.tokenizer.model)
    return write_vocabulary(directory, model, layout, max_length=spec.model.max_positions)


def model_config(spec: ModelSpec, *, vocabulary_size: int) -> dict[str, Any]:
    """Return the ``config.json`` of M2M-100 or, for a model with experts, of NLLB-MoE."""
    model, moe = spec.model, spec.model.moe
    config: dict[str, Any] = {
        "architectures": ["M2M100ForConditionalGeneration"],
        "model_type": "m2m_100",
        "activation_function": model.activation,
        "bos_token_id": 0,
        "d_model": model.width,
        "decoder_layerdrop": 0.0,
        "decoder_layers": model.decoder_layers,
        "decoder_start_token_id": 2,
        "encoder_layerdrop": 0.0,
        "encoder_layers": model.encoder_layers,
        "eos_token_id": 2,
        "is_encoder_decoder": True,
        "max_position_embeddings": model.max_positions,
        "num_hidden_layers": model.encoder_layers,
        "pad_token_id": 1,
        "scale_embedding": model.scale_embedding,
        "tie_word_embeddings": True,
        "vocab_size": vocabulary_size,
    }
    for stack in ("encoder", "decoder"):
        config[f"{stack}_attention_heads"] = model.num_heads
        config[f"{stack}_ffn_dim"] = model.feed_forward_width
    if moe is None:
        return config
    return config | {
        "architectures": ["NllbMoeForConditionalGeneration"],
        "model_type": "nllb-moe",
        "batch_prioritized_routing": moe.batch_prioritized,
        "decoder_sparse_step": moe.every,
        "encoder_sparse_step": moe.every,
        "moe_eval_capacity_token_fraction": 1.0,  # as many slots per expert as tokens: none drops
        "moe_token_dropout": 0.0,
        "normalize_router_prob_before_dropping": False,
        "num_experts": moe.num_experts,
        "router_bias": False,
        "router_dtype": "float32",
        "second_expert_policy": "all",
    }


def _write_configs(directory: Path, config: dict[str, Any], layout: Layout) -> None:
    """Write ``config.json`` and ``generation_config.json``."""
    (directory / CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    longest = min(LONGEST_OUTPUT, config["max_position_embeddings"])
    ids = ("bos_token_id", "eos_token_id", "pad_token_id", "decoder_start_token_id")
    generation = {name: config[name] for name in ids} | {"max_length": longest, "num_beams": 5}
    if layout.absent:
        # Rows of zeros have logits too: exclude them from the choice and from the normalization.
        generation |= {"suppress_tokens": layout.absent, "renormalize_logits": True}
    (directory / GENERATION_FILE).write_text(to_json(generation), encoding="utf-8")


def foreign_tensors(source: ModelSource, layout: Layout) -> Iterator[tuple[str, Tensor]]:
    """Yield all tensors by their names in the format, read one at a time.

    Raises:
        CheckpointError: The format has no name for a tensor; before any is read.
    """
    table = NLLB_MOE_TABLE if source.spec.model.moe else M2M100_TABLE
    names = {name: table.to_theirs(name) for name in tensor_shapes(source.spec)}
    lacking = [name for name, theirs in names.items() if theirs is None]
    if lacking:
        raise without_name(source.origin, lacking[0])
    for name, theirs in track(names.items(), label="export"):
        assert theirs is not None
        value = source.tensors.read(name)
        yield theirs, layout.rearranged(value) if name == EMBEDDING else value


def _write_tensors(writer: ArtifactWriter, tensors: Iterator[tuple[str, Tensor]]) -> torch.dtype:
    """Write ``model.safetensors``, or several files and their index if they are large.

    Returns:
        The type that has all values of all tensors, as which transformers can load the model.
    """
    directory = writer.directory
    parts, sizes, dtypes = [], [], []
    for number, held in enumerate(files_of(tensors)):
        path = directory / f"part-{number:05d}.safetensors"
        parts.append((path, write_hashed(path, file_pieces(held, metadata=METADATA))))
        sizes.append({name: value.nbytes for name, value in held.items()})
        dtypes += [value.dtype for value in held.values()]
    names = [WEIGHTS_FILE]
    if len(parts) > 1:  # their names have the number of files, which is known now
        numbers = range(1, len(parts) + 1)
        names = [f"model-{number:05d}-of-{len(parts):05d}.safetensors" for number in numbers]
        index = {
            "metadata": {"total_size": sum(sum(held.values()) for held in sizes)},
            "weight_map": {
                tensor: name for name, held in zip(names, sizes, strict=True) for tensor in held
            },
        }
        (directory / INDEX_FILE).write_text(to_json(index), encoding="utf-8")
    for (path, record), name in zip(parts, names, strict=True):
        writer.settled[path.rename(directory / name)] = record
    return reduce(torch.promote_types, dtypes)


def write_vocabulary(directory: Path, model: bytes, layout: Layout, *, max_length: int) -> str:
    """Write the tokenizer files of a layout; ``model`` is our SentencePiece model.

    Returns:
        The class that reads them. ``NllbTokenizer`` of transformers 5 makes a BPE tokenizer of any
        model; ``NllbTokenizerFast`` takes ``tokenizer.json`` as it is.
    """
    settings = _class_settings(layout)
    chosen: str = settings["tokenizer_class"]
    if layout.of_hundred:
        names = [*SPECIALS.values(), *layout.pieces]
        vocabulary = {name: index for index, name in enumerate(names)}
        text = json.dumps(vocabulary, indent=1, ensure_ascii=True)
        (directory / VOCABULARY_FILE).write_text(text + "\n", encoding="utf-8")
    else:
        model = with_pieces(model, layout.pieces)
        if found := fast_tokenizer(model):
            tokens = _added_tokens(layout)["added_tokens_decoder"].items()
            found["added_tokens"] = [{"id": int(index), **token} for index, token in tokens]
            text = json.dumps(found, ensure_ascii=False) + "\n"
            (directory / FAST_TOKENIZER_FILE).write_text(text, encoding="utf-8")
            chosen += "Fast"
    (directory / SENTENCEPIECE_FILE).write_bytes(model)
    specials = {f"{name}_token": token for name, token in SPECIALS.items()}
    specials |= {"sep_token": "</s>"}
    listed = {"additional_special_tokens": list(layout.language_tokens)}
    config = specials | listed | _added_tokens(layout) | settings
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    (directory / TOKENIZER_CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    (directory / SPECIAL_TOKENS_FILE).write_text(to_json(specials | listed), encoding="utf-8")
    return chosen


def _class_settings(layout: Layout) -> dict[str, Any]:
    if layout.of_hundred:
        return {
            "tokenizer_class": "M2M100Tokenizer",
            "language_codes": "m2m100",
            "num_madeup_words": layout.num_spare,
        }
    return {
        "tokenizer_class": "NllbTokenizer",
        "legacy_behaviour": False,
        "cls_token": "<s>",
        "mask_token": None,
        "src_lang": layout.token_of.get("en", layout.language_tokens[0]),
    }


def _added_tokens(layout: Layout) -> dict[str, Any]:
    """Return the tokens that are found in a text before it is split into pieces, by id."""
    first = len(SPECIALS) + len(layout.pieces)
    numbered = [*enumerate(SPECIALS.values()), *enumerate(layout.language_tokens, first)]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True, **flags} for index, token in numbered
        }
    }


def with_pieces(model: bytes, pieces: Sequence[str]) -> bytes:
    """Return a SentencePiece model with only unknown, ``<s>``, ``</s>`` and these pieces, in order.

    A model is a protocol buffer (``sentencepiece_model.proto`` of google/sentencepiece). Its field
    1 repeats, once per piece, and ids are the order. All other fields stay byte for byte.
    """
    processor = SentencePieceProcessor(model_proto=model)
    fields = list(_fields(model))
    stored = [whole for number, _, whole in fields if number == _PIECES]
    chosen = [
        stored[processor.unk_id()],
        piece_field("<s>", control=True),
        piece_field("</s>", control=True),
        *(stored[processor.piece_to_id(piece)] for piece in pieces),
    ]
    return b"".join([*chosen, *(whole for number, _, whole in fields if number != _PIECES)])


def fast_tokenizer(model: bytes) -> dict[str, Any] | None:
    """Return the ``tokenizer.json`` of a model of :func:`with_pieces`, without added tokens.

    The tokenizers library splits text by it as SentencePiece does. It has no counterpart of models
    of words or characters, nor of pieces that are always kept whole: None.
    """
    processor = SentencePieceProcessor(model_proto=model)
    ids, first = range(processor.get_piece_size()), len(SENTENCEPIECE_SPECIALS)
    pieces = [(processor.id_to_piece(index), processor.get_score(index)) for index in ids[first:]]
    # Fields 2 and 3 are TrainerSpec and NormalizerSpec of the .proto file, which has the defaults.
    parts = _values(model)
    trainer, normalizer = _values(parts.get(2, b"")), _values(parts.get(3, b""))
    model_type = {1: "Unigram", 2: "BPE"}.get(trainer.get(3, 1))
    kinds = (_values(value).get(3, 1) for number, value, _ in _fields(model) if number == _PIECES)
    if model_type is None or _KEPT_WHOLE in kinds:
        return None
    vocabulary = [*((token, 0.0) for token in SPECIALS.values()), *pieces]
    content: dict[str, Any] = {"byte_fallback": any(map(processor.is_byte, ids))}
    if model_type == "Unigram":
        content |= {"unk_id": [*SPECIALS].index("unk"), "vocab": vocabulary}
    else:
        content |= {"unk_token": SPECIALS["unk"], "fuse_unk": True}
        content |= {"vocab": {token: index for index, (token, _) in enumerate(vocabulary)}}
        content |= {"merges": _merges(dict(pieces))}
    normalizers: list[dict[str, Any]] = []
    if table := normalizer.get(2):
        encoded = base64.b64encode(table).decode("ascii")
        # As of tokenizers 0.22, Precompiled drops a mark after a letter and another mark.
        normalizers += [{"type": "NFC"}, {"type": "Precompiled", "precompiled_charsmap": encoded}]
    replaced = {r"\A +| +\z": "", " {2,}": " "} if normalizer.get(4, 1) else {}  # outer, repeated
    if add_dummy_prefix := normalizer.get(3, 1):
        replaced[r"\A\u2581"] = "\u2581\u2581"  # Metaspace adds no prefix to it
    for pattern, text in replaced.items():
        normalizers.append({"type": "Replace", "pattern": {"Regex": pattern}, "content": text})
    spaces = {
        "type": "Metaspace",
        "replacement": "\u2581",
        "prepend_scheme": "always" if add_dummy_prefix else "never",
        "split": False,
    }
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "normalizer": {"type": "Sequence", "normalizers": normalizers},
        "pre_tokenizer": spaces,
        "post_processor": None,  # NllbTokenizer sets its own
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, spaces]},
        "model": {"type": model_type, **content},
    }


def _merges(scores: Mapping[str, float]) -> list[tuple[str, str]]:
    """Return the pairs that become a piece, in SentencePiece's order: the best piece first."""
    ranked = sorted(scores, key=lambda piece: -scores[piece])
    splits = ((piece[:at], piece[at:]) for piece in ranked for at in range(1, len(piece)))
    return [(left, right) for left, right in splits if left in scores and right in scores]


def _values(message: bytes) -> dict[int, Any]:
    """Return number → last value of the fields of a protocol buffer."""
    return {number: value for number, value, _ in _fields(message)}


def _fields(message: bytes) -> Iterator[tuple[int, Any, bytes]]:
    """Yield number, value and all bytes of each field of a protocol buffer."""
    start = 0
    while start < len(message):
        key, position = _varint(message, start)
        match key & 7:
            case 0:
                value, end = _varint(message, position)
                yield key >> 3, value, message[start:end]
            case kind:
                length, position = (4, position) if kind == 5 else _varint(message, position)
                end = position + length
                yield key >> 3, message[position:end], message[start:end]
        start = end


def _varint(message: bytes, position: int) -> tuple[int, int]:
    """Return a number, stored as groups of seven bits with the lowest first, and its end."""
    number = shift = 0
    while True:
        byte = message[position]
        number |= (byte & 0x7F) << shift
        position, shift = position + 1, shift + 7
        if byte < 0x80:
            return number, position


# ---------------------------------------------------------------- model card

OLDEST_TRANSFORMERS = ">=4.50"
BELOW_TRANSFORMERS_5 = ",<5"
"""Limit of NLLB-MoE: ``NllbMoeSparseMLP`` of transformers 5.0 to 5.24 gives ``NllbMoeExperts`` a
one-hot mask where it takes indices: each token goes to experts 0 and 1."""


@dataclass(frozen=True)
class Card:
    """The facts of a model card, ``README.md`` with a header for model hubs.

    They are what manifests record: the manifest of the checkpoint, and the manifests of the
    artifacts that it was made from, if they can still be found. ``model_card.md.j2`` has the text.
    """

    checkpoint: Artifact
    spec: ModelSpec
    """The exported model."""
    to: str
    """The format: ``hf-m2m100``, ``hf-nllb-moe`` or ``ctranslate2``."""
    license: str
    targets: tuple[str, ...]
    """Target languages of the exported model."""
    scores: Artifact | None
    """The evaluation to quote."""

    def text(self, tokens: Mapping[str, str], *, tokenizer_class: str = "") -> str:
        """Return the whole file.

        Args:
            tokens: Code of a language → its token in the exported vocabulary.
            tokenizer_class: The class of transformers that reads the exported vocabulary.
        """
        lineage = Lineage()
        lineage.add(self.checkpoint, follow=lambda record: record.kind != "raw")
        artifacts = list(lineage.found.values())
        pairs = _training_pairs(artifacts)
        source, target = self._example(artifacts, pairs)
        scores, is_own = self._scores()
        kind = "M2M100" if self.to == "hf-m2m100" else "NllbMoe"
        only_4 = kind == "NllbMoe" or tokenizer_class == "NllbTokenizer"
        # The header is quoted as JSON because YAML reads ``no`` as a truth value.
        environment = Environment(
            loader=PackageLoader("pipeline.checkpoints.foreign", ""),
            undefined=StrictUndefined,
            trim_blocks=True,
            lstrip_blocks=True,
            autoescape=False,
            keep_trailing_newline=True,
        )
        environment.filters["json"] = partial(json.dumps, ensure_ascii=False)
        return environment.get_template("model_card.md.j2").render(
            vars(self),
            parameters=num_parameters(self.spec),
            targets=() if set(self.targets) == set(self.spec.languages) else self.targets,
            name_of=lambda code: language(code).name,
            tokens=tokens,
            # Hubs refuse codes with a script or a region
            hub_codes=dict.fromkeys(re.split("[_-]", code)[0] for code in self.spec.languages),
            source=source,
            target=target,
            sentencepiece=MODEL_NAME,
            is_prefixed=self.spec.tag_scheme == "src-tgt",
            model_class=f"{kind}ForConditionalGeneration",
            tokenizer_class=tokenizer_class,
            is_fast=tokenizer_class.endswith("Fast"),
            versions=OLDEST_TRANSFORMERS + BELOW_TRANSFORMERS_5 * only_4,
            pairs=pairs,
            missing=sorted(lineage.missing),
            manifests=[artifact.manifest for artifact in artifacts],
            scores=scores,
            is_own=is_own,
        )

    def _example(self, artifacts: Sequence[Artifact], pairs: Mapping[str, int]) -> tuple[str, str]:
        """Return source and target language of the example: the pair with most training text.

        If the text is not recorded, they are the first languages, a source from English.
        """
        trained = {
            code
            for artifact in artifacts
            if artifact.manifest.kind == "mixture"
            for code in artifact.manifest.config.get("mixture", {}).get("targets", ())
        }
        targets = [code for code in self.targets if code in trained] or self.targets
        ways = [(one, other) for other in targets for one in self.spec.languages if one != other]
        return min(
            ways,
            key=lambda way: (-pairs.get(pair_name(*way), 0), way[0] != "en", way),
            default=(targets[0], targets[0]),
        )

    def _scores(self) -> tuple[list[tuple[str, str, str, str]], bool]:
        """Return the rows of scores, and whether they are of this model's translations only."""
        if self.scores is None:
            return [], False
        systems = self.scores.statistics.get("systems", {})
        try:
            own = [name for name in systems if self._is_own(name)]
            return _score_rows({name: systems[name] for name in own or systems}), bool(own)
        except (AttributeError, TypeError, ValueError) as error:
            raise ArtifactError(
                f"{self.scores.directory} has no scores as evaluate writes them. "
                f"{how_to_restore(self.scores.directory)}."
            ) from error

    def _is_own(self, system: str) -> bool:
        """Return whether a system's translations are recorded as made by this checkpoint."""
        assert self.scores is not None
        record = self.scores.manifest.inputs.get(f"systems/{system}")
        translations = open_recorded(record, of=self.scores) if record else None
        used = translations.manifest.inputs.get("checkpoint") if translations else None
        return used is not None and used.digest == self.checkpoint.digest


def _training_pairs(artifacts: Sequence[Artifact]) -> dict[str, int]:
    """Return pair → number of training lines in the shards; each corpus counts once."""
    of_corpora: dict[str, dict[str, int]] = {}
    for artifact in artifacts:
        if artifact.manifest.kind == "shards":
            counts = artifact.statistics.get("pairs", {})
            corpus = artifact.manifest.inputs.get("corpus", artifact.as_input)
            of_corpora[corpus.digest] = {pair: lines["train"] for pair, lines in counts.items()}
    return dict(sum(map(Counter, of_corpora.values()), Counter[str]()))


def _score_rows(
    systems: Mapping[str, Mapping[str, Mapping[str, float | None]]],
) -> list[tuple[str, str, str, str]]:
    """Return a row per system, family of directions and score."""
    return [
        (system, family.replace("_", " "), score, "" if value is None else f"{value:.2f}")
        for system, families in systems.items()
        for family, scores in families.items()
        for score, value in scores.items()
    ]
