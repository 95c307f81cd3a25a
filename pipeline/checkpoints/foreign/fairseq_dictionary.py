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
from pipeline.checkpoints.foreign.vocabularies import numbered, pieces_of
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
                "(dict.txt) and the SentencePiece model whose pieces it numbers."
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
        content = read_bytes(
            self.dictionary,
            limit=_MAX_BYTES,
            error=CheckpointError,
            fix="name the dictionary of this model (dict.txt)",
        )
        ids = read_dictionary(content, self.dictionary)
        model = read_bytes(
            self.sentencepiece,
            limit=_MAX_BYTES,
            error=CheckpointError,
            fix="name the SentencePiece model whose pieces the dictionary numbers",
        )
        folder, name = self.sentencepiece.parent, self.sentencepiece.name
        pieces = [ids.symbols.get(piece) for piece in pieces_of(model, folder, name=name)]
        self._check_pieces(ids, pieces)
        scheme, tokens, count = _language_tokens(ids, self.languages or languages, style)
        self._check_size(count, size)
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

    def _check_pieces(self, ids: "Dictionary", pieces: Sequence[int | None]) -> None:
        symbols = ids.symbols
        if any(symbol.endswith(_CONTINUED) for symbol in symbols) and not any(
            symbol.startswith("▁") for symbol in symbols
        ):
            raise CheckpointError(
                f"{self.dictionary} numbers pieces of subword-nmt ('…{_CONTINUED}'), which are not "
                "supported. Name a checkpoint whose dictionary is of a SentencePiece model."
            )
        known = sum(index is not None for index in pieces)
        if known < _LEAST_KNOWN * len(pieces):
            raise CheckpointError(
                f"{self.dictionary} has {known:,} of the {len(pieces):,} pieces of "
                f"{self.sentencepiece}. Name the dictionary and the SentencePiece model of one "
                "checkpoint."
            )

    def _check_size(self, count: int, size: int) -> None:
        if not size - _MOST_SPARE_ROWS <= count <= size:
            raise CheckpointError(
                f"{self.dictionary} makes {count:,} ids with the language tokens, but the model "
                f"has {size:,} embeddings. Name its own dictionary, and all of its languages in "
                "their order (--languages)."
            )


@dataclass(frozen=True)
class Dictionary:
    """The lines of a ``dict.txt``."""

    symbols: dict[str, int]
    """Symbol → id."""
    size: int
    """Number of ids, overwritten symbols included."""


def read_dictionary(content: bytes, path: Path) -> Dictionary:
    """Parse a ``dict.txt``.

    Raises:
        CheckpointError: A line is broken or repeats a symbol; names the first.
    """
    try:
        text = content.decode("utf-8")
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
    return Dictionary(symbols, len(SPECIAL_IDS) + len(lines))


def _language_tokens(
    ids: Dictionary, languages: Sequence[str], style: LanguageTokenScheme
) -> tuple[LanguageTokenScheme, dict[str, int], int]:
    """Return the spelling of language tokens, language → id, and the number of ids with them."""
    for scheme in _SPELLINGS:
        found = _tokens_in(ids, scheme)
        if not languages and found:
            return scheme, found, ids.size
        wanted = {language: _spelled(language, scheme) for language in languages}
        if found and any(code in found for code in wanted.values()):
            return scheme, *_with_appended(found, wanted, ids.size)
    return style, *_with_appended({}, dict(zip(languages, languages, strict=True)), ids.size)


def _with_appended(
    found: Mapping[str, int], wanted: Mapping[str, str], size: int
) -> tuple[dict[str, int], int]:
    """Return language → id and the number of ids; tokens not ``found`` follow the dictionary."""
    tokens = {}
    for language, code in wanted.items():
        if code in found:
            tokens[language] = found[code]
        else:
            tokens[language] = size
            size += 1
    return tokens, size


def _tokens_in(ids: Dictionary, scheme: LanguageTokenScheme) -> dict[str, int]:
    """Return code as spelled → id, of the symbols that are language tokens in a spelling."""
    found = {}
    for symbol, index in ids.symbols.items():
        match = _SPELLINGS[scheme].fullmatch(symbol)
        if match is not None and match["code"] not in _TASKS and _is_code(match["code"]):
            found[match["code"]] = index
    return found


def _spelled(language: str, scheme: LanguageTokenScheme) -> str:
    return language.upper() if scheme == "lang_tok" else language


def _is_code(spelling: str) -> bool:
    try:
        canonical(spelling)
    except ConfigError:
        return False
    return True
