"""Folders of every family that is read, each saved by its own library, and that library's answers.

The tokenizers are made from one small SentencePiece model; the weights are random and well spread.
"""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor
from transformers import (
    M2M100Config,
    M2M100ForConditionalGeneration,
    M2M100Tokenizer,
    MBart50Tokenizer,
    MBartConfig,
    MBartForConditionalGeneration,
    NllbMoeConfig,
    NllbMoeForConditionalGeneration,
    NllbTokenizer,
)

from support.foreign_models import SETTINGS, m2m100_folder, sentencepiece_model, spread

VOCABULARY_FILE = "sentencepiece.bpe.model"
MBART_SEED = 3
"""Of values with which mBART's beam search tells sentences apart."""
SPARE = 3
"""Rows of the embedding beyond the tokenizer's ids."""


@dataclass(frozen=True)
class Family:
    """How a folder is made, and with which tokenizer it is read by its own library."""

    make: Callable[..., Any]
    """(folder, changes to its configuration) → the model that it holds."""
    tokenizer: Any
    source: str
    target: str

    def read_tokenizer(self, folder: Path) -> Any:
        """The folder's tokenizer from English to German."""
        return self.tokenizer.from_pretrained(folder, src_lang=self.source, tgt_lang=self.target)

    def tag(self, tokenizer: Any) -> int:
        """The id of German."""
        is_m2m100 = self.tokenizer is M2M100Tokenizer
        find = tokenizer.get_lang_id if is_m2m100 else tokenizer.convert_tokens_to_ids
        found: int = find(self.target)
        return found


def nllb_folder(
    directory: Path, *, legacy: bool = False, sentencepiece: bytes | None = None, **changes: object
) -> Any:
    """NLLB-200's dense model, over a SentencePiece model that may be given."""
    config_type: Any = M2M100Config
    size = _save_tokenizer(directory, NllbTokenizer, model=sentencepiece, legacy_behaviour=legacy)
    config = config_type(**SETTINGS | {"vocab_size": size + SPARE} | changes)
    return saved(M2M100ForConditionalGeneration(config), directory)


def legacy_nllb_folder(directory: Path, **changes: Any) -> Any:
    """NLLB-200's dense model with the tags of transformers before April 2023."""
    return nllb_folder(directory, legacy=True, **changes)


def nllb_moe_folder(directory: Path, **changes: object) -> Any:
    """NLLB-200's mixture of experts: the second of two layers has six."""
    config_type: Any = NllbMoeConfig
    size = _save_tokenizer(directory, NllbTokenizer)
    settings = {"num_experts": 6, "encoder_sparse_step": 2, "decoder_sparse_step": 2}
    config = config_type(**SETTINGS | settings | {"vocab_size": size + SPARE} | changes)
    return saved(NllbMoeForConditionalGeneration(config), directory)


def mbart50_folder(directory: Path, **changes: object) -> Any:
    """mBART-50."""
    config_type: Any = MBartConfig
    size = _save_tokenizer(directory, MBart50Tokenizer)
    settings = {"scale_embedding": True, "decoder_start_token_id": 2, "vocab_size": size}
    config = config_type(**SETTINGS | settings | changes)
    return saved(MBartForConditionalGeneration(config), directory, seed=MBART_SEED)


def untied_folder(directory: Path, **changes: Any) -> Any:
    """M2M-100 with an output projection of its own."""
    return m2m100_folder(directory, tie_word_embeddings=False, **changes)


FAMILIES = {
    "M2M-100": Family(m2m100_folder, M2M100Tokenizer, "en", "de"),
    "untied M2M-100": Family(untied_folder, M2M100Tokenizer, "en", "de"),
    "NLLB-200": Family(nllb_folder, NllbTokenizer, "eng_Latn", "deu_Latn"),
    "legacy NLLB-200": Family(legacy_nllb_folder, NllbTokenizer, "eng_Latn", "deu_Latn"),
    "NLLB-MoE": Family(nllb_moe_folder, NllbTokenizer, "eng_Latn", "deu_Latn"),
    "mBART-50": Family(mbart50_folder, MBart50Tokenizer, "en_XX", "de_DE"),
}


def saved(model: Any, directory: Path, *, seed: int = 1) -> Any:
    """The model with spread values, written to the folder."""
    model = spread(model, eos_id=2, seed=seed)
    model.save_pretrained(directory)
    return model


def _save_tokenizer(
    directory: Path, kind: Any, *, model: bytes | None = None, **settings: object
) -> int:
    """Writes a tokenizer's files; returns its number of ids."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / VOCABULARY_FILE
    path.write_bytes(model or sentencepiece_model())
    tokenizer = kind(str(path), **settings)
    tokenizer.save_pretrained(directory)
    return len(tokenizer)


@torch.no_grad()
def forced_logits(
    peer: Any, tokenizer: Any, pairs: Sequence[tuple[str, str]], *, tag: int
) -> list[Tensor]:
    """Their logits after the prompt (end-of-sentence, tag), sentence by sentence, of one batch.

    The decoder's input is what ``generate`` gives it when the tag is forced, whatever a tokenizer
    makes of a target.
    """
    batch = tokenizer([source for source, _ in pairs], padding=True, return_tensors="pt")
    targets = [tokenizer.convert_tokens_to_ids(tokenizer.tokenize(target)) for _, target in pairs]
    rows = [torch.tensor([tokenizer.eos_token_id, tag, *target]) for target in targets]
    logits = peer(
        input_ids=batch["input_ids"],
        attention_mask=batch["attention_mask"],
        decoder_input_ids=torch.nn.utils.rnn.pad_sequence(
            rows, batch_first=True, padding_value=tokenizer.pad_token_id
        ),
    ).logits
    return [one[1 : len(row)] for one, row in zip(logits, rows, strict=True)]
