"""Tokenizer files as Hugging Face's M2M100Tokenizer and NllbTokenizer read them.

Their ids of a text are ours, renumbered by a :class:`Layout`. Where a text has a special or a
language token written out, theirs takes it for one, and ours for text.
"""

import json
from pathlib import Path
from typing import Any

from pipeline.artifacts.manifest import to_json
from pipeline.checkpoints.foreign.layouts import Entries, Layout
from pipeline.checkpoints.foreign.piece_order import with_pieces
from pipeline.checkpoints.foreign.vocabularies import M2M100_SPECIALS, SENTENCEPIECE_FILE
from pipeline.errors import CheckpointError

TOKENIZER_CONFIG_FILE = "tokenizer_config.json"


def refuse_unknown_pieces(origin: Path, entries: Entries, layout: Layout) -> None:
    """Raises CheckpointError where NllbTokenizer would give ids to pieces that have none."""
    if entries.unknown_pieces and not layout.of_hundred:
        raise CheckpointError(
            f"The vocabulary of {origin} has {entries.unknown_pieces:,} pieces that its model does "
            "not know, and NllbTokenizer, which languages and tokens other than M2M-100's need, "
            "knows them all: export it --to ctranslate2."
        )


def write_vocabulary(directory: Path, model: bytes, layout: Layout, *, max_length: int) -> None:
    """Write the tokenizer files of a layout; ``model`` is the SentencePiece model of ours."""
    if layout.of_hundred:
        names = [*M2M100_SPECIALS.values(), *layout.pieces]
        vocabulary = {name: index for index, name in enumerate(names)}
        text = json.dumps(vocabulary, indent=1, ensure_ascii=True)
        (directory / "vocab.json").write_text(text + "\n", encoding="utf-8")
    else:
        model = with_pieces(model, layout.pieces)
    (directory / SENTENCEPIECE_FILE).write_bytes(model)
    specials = {f"{name}_token": token for name, token in M2M100_SPECIALS.items()}
    specials |= {"sep_token": "</s>"}
    tokens = {"additional_special_tokens": list(layout.language_tokens)}
    config = specials | tokens | _added_tokens(layout) | _class_settings(layout)
    config |= {"clean_up_tokenization_spaces": False, "model_max_length": max_length}
    (directory / TOKENIZER_CONFIG_FILE).write_text(to_json(config), encoding="utf-8")
    (directory / "special_tokens_map.json").write_text(to_json(specials | tokens), encoding="utf-8")


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
    """Tokens that are looked for in a text before it is split into pieces, by id."""
    first = len(M2M100_SPECIALS) + len(layout.pieces)
    numbered = [*enumerate(M2M100_SPECIALS.values()), *enumerate(layout.language_tokens, first)]
    flags = dict.fromkeys(("lstrip", "normalized", "rstrip", "single_word"), False)
    return {
        "added_tokens_decoder": {
            str(index): {"content": token, "special": True, **flags} for index, token in numbered
        }
    }
