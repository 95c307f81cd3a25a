"""Checkpoints of ours with random weights that are well spread, to be written for others."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
import transformers
from transformers import AutoTokenizer, M2M100Tokenizer, NllbTokenizer, NllbTokenizerFast

from pipeline.artifacts.artifact import new_artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.artifacts.vocabularies import SPECIALS
from pipeline.batching.settings import TagScheme
from pipeline.checkpoints.checkpoint import ModelSource, own_source, tokenizer_directory, write_spec
from pipeline.checkpoints.weights import write_weights
from pipeline.model.building import build_model
from pipeline.model.parameters import named_slices
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec, marks_of_vocabulary
from pipeline.model.transformer import Transformer
from support.foreign_models import LINES, spread_values
from support.pieces import train_pieces
from support.tiny_models import embedding_table

HUNDRED = ("de", "en", "fr")
"""Languages that M2M-100 has."""
BEYOND = ("chr", "de", "en")
"""Cherokee is not among them."""
SPREAD = 2.2
"""With less of it few of these small models tell sentences apart."""


TRANSFORMERS_5 = not transformers.__version__.startswith("4.")
"""It computes NLLB-MoE wrongly and reads unigram vocabularies by NllbTokenizer as characters."""


def own_sentencepiece(
    lines: Sequence[str] = tuple(LINES * 20),
    *,
    size: int = 60,
    model_type: str = "unigram",
    normalization: str = "identity",
    **settings: Any,
) -> bytes:
    """A SentencePiece model as ``train_tokenizer`` makes it."""
    return train_pieces(
        lines,
        size=size,
        model_type=model_type,
        normalization_rule_name=normalization,
        **{f"{name}_id": SPECIALS[name] for name in ("pad", "bos", "eos", "unk")},
        num_threads=1,
        **settings,
    )


def own_tokenizer(languages: Sequence[str], model: bytes | None = None) -> TokenizerFiles:
    """A tokenizer of ours, its ids in our order."""
    description = TokenizerDescription(
        kind="sentencepiece", languages=tuple(languages), language_token_scheme="underscores"
    )
    return TokenizerFiles(description, model or own_sentencepiece())


def tokenizer_of_two(target_languages: Sequence[str] = ("en",)) -> TokenizerFiles:
    """Pieces of the languages that are translated from, and of those that are translated into."""
    description = TokenizerDescription(
        kind="sentencepiece",
        languages=HUNDRED,
        language_token_scheme="underscores",
        target_languages=tuple(target_languages),
    )
    return TokenizerFiles(
        description, own_sentencepiece(), own_sentencepiece(LINES[::2] * 20, size=40)
    )


def own_checkpoint(
    directory: Path,
    *,
    languages: Sequence[str] = HUNDRED,
    moe: MoEConfig | None = None,
    groups: tuple[int, ...] | None = None,
    tag_scheme: TagScheme = "src-tgt",
    tokenizer: TokenizerFiles | None = None,
    **model: object,
) -> ModelSource:
    """A checkpoint on disk."""
    files = tokenizer or own_tokenizer(languages)
    built = files.build()
    settings = {
        "encoder_layers": 2,
        "decoder_layers": 2,
        "width": 16,
        "feed_forward_width": 32,
        "num_heads": 2,
        "max_positions": 64,
        **model,
    }
    config = ModelConfig.model_validate({**settings, "moe": moe})
    spec = ModelSpec(
        model=config,
        vocabulary_size=built.size,
        pad_id=built.pad_id,
        languages=built.languages,
        language_groups=groups,
        tag_scheme=tag_scheme,
        **marks_of_vocabulary(config, built),
    )
    filled = spread(build_model(spec), eos_id=built.eos_id)
    with new_artifact(
        directory, kind="checkpoint", stage="pretrain", config={"loss": {}}, inputs={}
    ) as writer:
        write_weights(
            writer.directory / "weights", ((one.name, one.value) for one in named_slices(filled))
        )
        write_spec(writer, spec)
        files.write(tokenizer_directory(writer))
    return own_source(open_artifact(directory, kind="checkpoint"))


def spread(model: Transformer, *, eos_id: int) -> Transformer:
    """As ``foreign_models.spread``, of a model of ours."""
    spread_values(model, SPREAD)
    with torch.no_grad():
        embedding_table(model)[eos_id] *= 1.5
    return model


def automatic_tokenizer(folder: Path, **options: Any) -> Any:
    """Return the tokenizer that transformers chooses for a folder; it converts none itself."""
    kind: Any = AutoTokenizer
    return kind.from_pretrained(folder, use_fast=(folder / "tokenizer.json").exists(), **options)


def named_tokenizer(folder: Path, *, english: str, german: str) -> tuple[Any, int]:
    """Load an export's tokenizer as its card says; return it and the id of German.

    The names of languages are M2M-100's, ``en``, or NLLB's, ``eng_Latn``, which decide its class.
    """
    is_nllb = "_" in english
    options: dict[str, Any] = {"src_lang": english, "tgt_lang": german}
    fast: Any = NllbTokenizerFast
    slow: Any = NllbTokenizer if is_nllb else M2M100Tokenizer
    if is_nllb:
        tokenizer = fast(tokenizer_file=str(folder / "tokenizer.json"), **options)
    else:
        tokenizer = slow.from_pretrained(folder, **options)
    find = tokenizer.convert_tokens_to_ids if is_nllb else tokenizer.get_lang_id
    source, target = find(english), find(german)
    assert tokenizer.unk_token_id not in (source, target)
    assert tokenizer(LINES[0])["input_ids"][0] == source
    assert tokenizer(text_target=LINES[0])["input_ids"][0] == target
    kinds: list[Any] = [] if is_nllb and TRANSFORMERS_5 else [AutoTokenizer, slow]
    for other in [kind.from_pretrained(folder, **options) for kind in kinds]:
        for line in LINES:
            assert other(line)["input_ids"] == tokenizer(line)["input_ids"]
    return tokenizer, target
