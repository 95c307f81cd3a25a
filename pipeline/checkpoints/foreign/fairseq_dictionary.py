"""Read fairseq's ``dict.txt``, which numbers the pieces of a SentencePiece model, as a tokenizer.

The format comes from the public source of fairseq, which is not installed here
(``fairseq/data/dictionary.py`` and ``fairseq/data/multilingual/multilingual_utils.py``). A line is
a symbol, a space and a count; four specials have the first ids, then the lines in order. A second
line for a symbol is an error unless it ends with ``#fairseq:overwrite``; then it replaces the
first. A task with several languages appends the language tokens that the dictionary lacks, in the
order of its list of languages.

Language tokens are known by their spelling: ``__en__`` (fairseq, M2M-100), ``[en_XX]`` (mBART's
style), ``LANG_TOK_EN`` (mRASP2), ``<2en>`` or ``eng_Latn``.
"""

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from pipeline.artifacts.manifest import InputRecord, raw_digest
from pipeline.artifacts.tokenizer import LanguageTokenScheme, TokenizerFiles
from pipeline.checkpoints.foreign.hugging_face_tokenizer import numbered, pieces_of
from pipeline.config.documents import read_bytes
from pipeline.config.settings import shown
from pipeline.errors import CheckpointError, ConfigError
from pipeline.languages import canonical

SPECIAL_IDS = {"<s>": 0, "<pad>": 1, "</s>": 2, "<unk>": 3}
"""The ids of the specials, which precede the lines of every dictionary."""
_OVERWRITE = "#fairseq:overwrite"
_MAX_BYTES = 2**28
"""A dictionary of a million lines has about 20 MB."""
_MOST_SPARE_ROWS = 16
"""Upper bound of the rows of an embedding that follow the dictionary and the languages: fairseq's
mask token, its tags for sources of data, and padding to a multiple of eight."""
_LEAST_KNOWN = 0.5
"""Least share of the SentencePiece model's pieces that its dictionary has."""
_CONTINUED = "@@"
"""End of a piece of subword-nmt that the next one continues. The first checkpoints in mRASP2's
repository have such a dictionary; its later one, of 100,000 pieces, is of SentencePiece."""

_CODE = r"(?P<code>[a-z]{2,3}(?:_[A-Za-z]{2,4})?)"
_SPELLINGS: Mapping[LanguageTokenScheme, re.Pattern[str]] = {
    "underscores": re.compile(f"__{_CODE}__"),
    "brackets": re.compile(rf"\[{_CODE}\]"),
    "lang_tok": re.compile(r"LANG_TOK_(?P<code>[A-Z]{2,3}(?:_[A-Z]{2,4})?)"),
    "angle": re.compile(f"<2{_CODE}>"),
    "plain": re.compile("(?P<code>[a-z]{3}_[A-Z][a-z]{3}|[a-z]{2}_[A-Z]{2})"),
}
_TASKS = frozenset({"dae", "lm"})
"""Tasks that fairseq spells like languages: ``__dae__`` and ``__lm__``."""


@dataclass(frozen=True)
class FairseqVocabulary:
    """The files of a fairseq checkpoint's vocabulary, and its languages."""

    dictionary: Path
    sentencepiece: Path
    languages: tuple[str, ...] = ()
    """Languages in the order of the model's task. Empty: as in the checkpoint's settings, or
    else all that have a token in the dictionary."""

    @classmethod
    def of_options(
        cls, dictionary: Path | None, sentencepiece: Path | None, languages: Sequence[str]
    ) -> "FairseqVocabulary | None":
        """Return the vocabulary that the command line names; None if it names none.

        Raises:
            ConfigError: One file is named without the other.
        """
        if dictionary is None and sentencepiece is None and not languages:
            return None
        if dictionary is None or sentencepiece is None:
            lacking = "--dictionary" if dictionary is None else "--sentencepiece"
            raise ConfigError(
                f"{lacking} is missing. Name both the dictionary of the fairseq checkpoint "
                "(dict.txt) and the SentencePiece model whose pieces it numbers. A folder of "
                "Hugging Face's takes neither of them, nor --languages."
            )
        return cls(dictionary, sentencepiece, tuple(languages))

    def files(self) -> dict[str, Path]:
        """Return the files by the option that names them."""
        return {"dictionary": self.dictionary, "sentencepiece": self.sentencepiece}

    def records(self) -> dict[str, InputRecord]:
        """Return the records of the files for a manifest."""
        return {
            name: InputRecord(kind="raw", path=str(path.absolute()), digest=raw_digest(path))
            for name, path in self.files().items()
        }

    def tokenizer(
        self, *, size: int, languages: Sequence[str] = (), style: LanguageTokenScheme
    ) -> TokenizerFiles:
        """Return the tokenizer of a model.

        Args:
            size: Rows of the model's embedding.
            languages: The languages in the checkpoint's settings.
            style: How its task spells the language tokens that the dictionary lacks.

        Raises:
            CheckpointError: A file cannot be read, or does not belong to the model.
        """
        content, model = (
            read_bytes(path, limit=_MAX_BYTES, error=CheckpointError, fix=f"name the {what}")
            for path, what in (
                (self.dictionary, "dictionary of this model (dict.txt)"),
                (self.sentencepiece, "SentencePiece model whose pieces the dictionary numbers"),
            )
        )
        symbols, num_ids = read_dictionary(content, self.dictionary)
        pieces = [symbols.get(piece) for piece in pieces_of(model, self.sentencepiece)]
        self._check_pieces(symbols, pieces)
        scheme, tokens = _language_tokens(symbols, num_ids, self.languages or languages, style)
        count = max(num_ids, *(index + 1 for index in tokens.values())) if tokens else num_ids
        if not size - _MOST_SPARE_ROWS <= count <= size:
            raise CheckpointError(
                f"{self.dictionary} makes {count:,} ids with the language tokens, but the model "
                f"has {size:,} embeddings. Name its own dictionary, and all of its languages in "
                "their order (--languages)."
            )
        if not tokens:
            raise CheckpointError(
                f"{self.dictionary} has no language tokens, and the checkpoint lists no languages. "
                "Name them in the order of its task (--languages de en)."
            )
        return numbered(
            self.dictionary,
            model,
            size=size,
            specials={"bos": 0, "pad": 1, "eos": 2, "unk": 3},
            pieces=pieces,
            languages=tokens,
            scheme=scheme,
        )

    def _check_pieces(self, symbols: Mapping[str, int], pieces: Sequence[int | None]) -> None:
        if any(symbol.endswith(_CONTINUED) for symbol in symbols) and not any(
            symbol.startswith("▁") for symbol in symbols
        ):
            raise CheckpointError(
                f"{self.dictionary} numbers pieces of subword-nmt ('…{_CONTINUED}'), which are not "
                "supported. Name a checkpoint with a dictionary of a SentencePiece model."
            )
        known = sum(index is not None for index in pieces)
        if known < _LEAST_KNOWN * len(pieces):
            raise CheckpointError(
                f"{self.dictionary} has {known:,} of the {len(pieces):,} pieces of "
                f"{self.sentencepiece}. Name the dictionary and the SentencePiece model of one "
                "checkpoint."
            )


def read_dictionary(content: bytes, path: Path) -> tuple[dict[str, int], int]:
    """Return symbol → id of a ``dict.txt``, and the number of ids, overwritten symbols included.

    Raises:
        CheckpointError: A line is broken or repeats a symbol; names the first.
    """
    try:
        text = content.decode("utf-8-sig")  # some editors put a mark before the first piece
    except UnicodeDecodeError as error:
        raise CheckpointError(
            f"{path} is no text in UTF-8. Name the dictionary of this model (dict.txt)."
        ) from error
    lines = re.split(r"\r\n|\r|\n", text)  # as Python reads a file; pieces may have other breaks
    if lines[-1] == "":
        lines.pop()
    symbols = dict(SPECIAL_IDS)
    for number, line in enumerate(lines, start=1):
        rest = line.rstrip()
        is_overwriting = rest.endswith(f" {_OVERWRITE}")
        symbol, space, count = rest.removesuffix(f" {_OVERWRITE}").rpartition(" ")
        if not space or not re.fullmatch(r"[+-]?\d+", count, re.ASCII):
            raise CheckpointError(
                f"Line {number:,} of {path} is {shown(line)!r}, not a symbol, a space and a count. "
                "Name the dictionary of this model (dict.txt)."
            )
        if symbol in symbols and not is_overwriting:
            raise CheckpointError(
                f"Line {number:,} of {path} repeats {shown(symbol)!r}. Restore the dictionary, or "
                f"end the line with {_OVERWRITE} if the later one is meant."
            )
        symbols[symbol] = len(SPECIAL_IDS) + number - 1
    return symbols, len(SPECIAL_IDS) + len(lines)


def _language_tokens(
    symbols: Mapping[str, int], num_ids: int, languages: Sequence[str], style: LanguageTokenScheme
) -> tuple[LanguageTokenScheme, dict[str, int]]:
    """Return the spelling of language tokens, and language → id.

    Without ``languages``, all that have a token. Tokens that the dictionary lacks follow it.
    """
    wanted: Sequence[str]
    spelled: Sequence[str]
    for scheme in _SPELLINGS:
        known = _tokens_in(symbols, scheme)
        wanted = languages or list(known)
        spelled = [code.upper() if scheme == "lang_tok" else code for code in wanted]
        if not known.keys().isdisjoint(spelled):
            break
    else:
        scheme, known, wanted, spelled = style, {}, languages, languages
    lacking = [code for code in dict.fromkeys(spelled) if code not in known]
    ids = known | {code: num_ids + index for index, code in enumerate(lacking)}
    return scheme, {language: ids[code] for language, code in zip(wanted, spelled, strict=True)}


def _tokens_in(symbols: Mapping[str, int], scheme: LanguageTokenScheme) -> dict[str, int]:
    """Return code as spelled → id, of the symbols that are language tokens in a spelling."""
    matches = ((_SPELLINGS[scheme].fullmatch(symbol), index) for symbol, index in symbols.items())
    codes = {match["code"]: index for match, index in matches if match is not None}
    return {code: index for code, index in codes.items() if code not in _TASKS and _is_code(code)}


def _is_code(spelling: str) -> bool:
    try:
        canonical(spelling)
    except ConfigError:
        return False
    return True
