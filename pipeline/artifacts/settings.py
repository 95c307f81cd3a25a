"""Settings of data preparation, from the corpus to the language groups."""

import re
from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import (
    NUM_SPECIALS,
    BatchTokens,
    Lines,
    Seed,
    Settings,
    Temperature,
    Updates,
    number,
    whole,
)
from pipeline.languages import Regions

MAX_VOCABULARY = 10**7
SEGMENTERS = ("characters", "mecab", "punctuation")
"""Segmenters that need no file of the user (``artifacts/segmenters.py``)."""
FUNCTION_OF_A_FILE = re.compile(r".*\.py:[^\W\d]\w*")


class CldrConfig(Settings):
    """Number of localized phrases to make from Unicode CLDR (``data_prep/readers/cldr.py``)."""

    pivot: str = "en"
    """Language that every other one is paired with."""
    train_pairs: dict[str, Annotated[int, whole(1, 10**9)]] = Field(default_factory=dict)
    """Language → number of training phrases paired with the pivot."""
    zero_shot: tuple[str, ...] = ()
    """Languages that are also paired with each other, with test phrases but no training phrases."""
    valid_phrases: Annotated[int, whole(0, 10**9)] = 100
    """Validation phrases per pair."""
    test_phrases: Annotated[int, whole(0, 10**9)] = 200
    """Test phrases per pair."""
    seed: Seed = 1
    """Seed of the phrases drawn."""


class ListedText(Settings):
    """Text of one split of one pair (``data_prep/readers/listed.py``)."""

    split: Literal["train", "valid", "test"] = "train"
    pair: str
    """``de-en``: the order of the two files, or of the columns of a file that does not name
    them."""
    paths: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    """One file per language, or one file of both; relative to the raw folder."""


class CorpusConfig(Settings):
    """import_corpus: the form of the raw text, and how much of it to import."""

    source: Literal["tree", "cldr", "hub", "tmx", "tsv", "moses", "columns", "listed"] = "tree"
    """``tree``: folders of pairs as in OPUS-100; ``cldr``: phrases made here; ``hub``: a data set
    of the Hugging Face hub; ``tmx``: translation memories; ``tsv``: tab-separated tables;
    ``moses``: pairs of files; ``columns``: Parquet, JSON lines and CSV; ``listed``: the ``files``.
    The command line says where they are."""
    cldr: CldrConfig = CldrConfig()
    """Settings of ``cldr``."""
    files: tuple[ListedText, ...] = ()
    """Files for ``listed``, read in this order."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Language → column of its text, for ``columns`` and listed files. Empty: the column has the
    language's code as its name, or ``translation`` holds both texts."""
    languages: tuple[str, ...] = ()
    """Import only pairs of these languages; empty: all pairs found."""
    regions: Regions = "joined"
    """``joined``: ``pt-br`` and ``pt`` are one language, and a record that has both gives the text
    without region. ``apart``: they are two, one of them ``pt_BR``. A language that comes from one
    region alone has a code without region."""
    untested: tuple[str, ...] = ()
    """Import no test lines of pairs with one of these languages."""
    directions: Literal["all", "zero_shot", "pivot"] = "all"
    """Pairs made of text in more than two languages. ``all``: each language with each; ``pivot``:
    the pivot with each other language; ``zero_shot``: like ``pivot``, and for test lines each with
    each."""
    pivot: str = "en"
    """Pivot for ``directions``."""
    max_train_lines: Annotated[int, whole(1, 10**12)] | None = None
    """Keep at most this many training lines per pair, the first ones."""
    max_valid_lines: Lines | None = None
    """Keep at most this many validation lines per pair."""
    max_test_lines: Lines | None = None
    """Keep at most this many test lines per pair."""
    max_line_bytes: Annotated[int, whole(1, 2**30)] = 2**20
    """Move longer lines to the quarantine; they are never held in memory."""
    swapped_sides: Literal["refuse", "accept"] = "refuse"
    """Refuse a pair of files that are each in the other's language, or accept it with a line in the
    summary."""


class OutsideTestsConfig(Settings):
    """import_tests: languages of external test sets, and how they are paired."""

    languages: tuple[str, ...] = ()
    """Import only these languages; empty: all found. If a language has several scripts, its usual
    one is ``zh`` and any other ``zho_Hant``."""
    directions: Literal["pivot", "all"] = "pivot"
    """For one file per language: pair the pivot with every other language, or each with each (n
    languages make n · (n - 1) / 2 pairs, each with its own copy of the text)."""
    pivot: str = "en"
    """Pivot for ``directions``."""
    max_line_bytes: Annotated[int, whole(1, 2**30)] = 2**20
    """Move longer lines to the quarantine."""


class CleanConfig(Settings):
    """clean: rules for training lines. Validation and test lines are never dropped."""

    max_characters: Annotated[int, whole(1, 10**9)] = 2000
    """Longest line on either side, in characters."""
    max_bytes: Annotated[int, whole(1, 10**9)] | None = None
    """Longest line on either side, in UTF-8 bytes; None: only ``max_characters`` limits it. The
    limit does not depend on the vocabulary (LOBEF, §4.3)."""
    max_length_ratio: Annotated[float, number(least=1, most=10**9)] = 4.0
    """Largest ratio of character counts, divided by the pair's median ratio."""
    drop_control_characters: bool = True
    """Drop lines with control characters."""
    drop_copies: bool = True
    """Drop lines with equal source and target."""
    drop_swapped: bool = True
    """Drop lines whose sides are each in the script of the other, for languages with different
    scripts."""
    identify_languages: Literal["no", "langdetect", "fasttext"] = "no"
    """Drop lines with a side identified as another language than its own. Languages that the
    identifier does not know are not judged."""
    language_model: str = ""
    """Local model file for ``fasttext``: lid.176.bin, or GlotLID's model.bin."""
    language_min_characters: Annotated[int, whole(1, 10**9)] = 40
    """Shortest side whose language is identified, in characters."""
    drop_duplicates: bool = True
    """Drop lines that repeat an earlier line of their pair."""
    drop_near_duplicates: bool = False
    """Drop lines that nearly repeat an earlier line of their pair, with digits, case and
    punctuation ignored."""
    near_duplicate_similarity: Annotated[float, number(above=0, most=1)] = 0.8
    """Jaccard similarity of the character 5-grams of both sides from which lines count as near
    duplicates."""
    drop_held_out_overlap: bool = True
    """Drop training lines with a side that is a validation or test line; only letters and digits
    count."""
    held_out_scope: Literal["all_pairs", "own_pair"] = "all_pairs"
    """``all_pairs``: compare with the held-out lines of the same language in every pair;
    ``own_pair``: in the same pair. Leaks are counted over all pairs in both cases."""


class TokenizerConfig(Settings):
    """train_tokenizer: kind and size of the vocabulary, and its training sample."""

    kind: Literal["sentencepiece", "characters", "byte_bpe", "bytes"] = "sentencepiece"
    """``sentencepiece``: pieces of text; ``characters``: one piece per character; ``byte_bpe``:
    pieces of UTF-8 bytes, so that no text is unknown; ``bytes``: single bytes."""
    vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 64000
    """Number of pieces with specials, without language tokens; for ``characters`` the maximum. With
    ``target_languages``, it counts the pieces of the other languages."""
    target_languages: tuple[str, ...] = ()
    """Languages with pieces of their own, the only ones translated into. All other languages share
    ``vocabulary_size`` pieces and are only translated from. Empty: one vocabulary."""
    target_vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 8000
    """Number of pieces of ``target_languages``, with specials."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """Algorithm for ``sentencepiece``."""
    byte_fallback: bool = False
    """Add a piece for each of the 256 bytes, to encode characters that the vocabulary lacks. For
    ``sentencepiece`` and ``characters``."""
    character_coverage: Annotated[float, number(least=0.98, most=1)] = 1.0
    """Share of the sample's characters with a piece of their own. Lower values garble Chinese."""
    sampling_temperature: Temperature = 5.0
    """Temperature of the sample over languages."""
    sample_lines: Annotated[int, whole(1, 10**12)] = 10_000_000
    """Number of lines to draw for training over all languages, limited by ``memory_bytes``."""
    memory_bytes: Annotated[int, whole(2**24, 2**50)] = 4 * 2**30
    """Predicted memory of training, which limits the sample. The default suits a machine with 8 GB
    and allows about 200 MB of text."""
    seed: Seed = 1
    """Seed of the sample."""
    language_token_scheme: Literal["underscores", "angle"] = "underscores"
    """Spelling of language tokens: ``__de__`` or ``<2de>``."""
    segmenters: dict[str, str] = Field(default_factory=dict)
    """Language written without spaces → segmenter that finds its words, for model.front ``wsf``
    with ``bytes`` or ``characters``: ``characters``, ``mecab`` (Japanese), ``punctuation`` (split
    off words), or a function as ``path/to/file.py:function`` (``artifacts/segmenters.py``)."""

    @property
    def output_ids(self) -> int | None:
        """Return the number of ids that translations consist of; None if all ids may occur."""
        return self.target_vocabulary_size if self.target_languages else None

    @property
    def ids(self) -> int:
        """Return the number of ids without language tokens; both sides share the specials."""
        own = self.target_vocabulary_size - NUM_SPECIALS if self.target_languages else 0
        return self.vocabulary_size + own

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_languages and self.kind == "bytes":
            raise ValueError(
                "target_languages have pieces of their own, and bytes are the same for all "
                "languages: leave it out"
            )
        self._check_segmenters()
        if self.byte_fallback and self.kind in ("byte_bpe", "bytes"):
            raise ValueError(
                f"byte_fallback is for characters that a vocabulary lacks, and kind {self.kind!r} "
                "lacks none: leave it out"
            )
        return self

    def _check_segmenters(self) -> None:
        if self.segmenters and self.kind not in ("bytes", "characters"):
            raise ValueError(
                "segmenters are for pieces that are white space or text, not both, and kind "
                f'{self.kind!r} has others: leave them out, or name kind "bytes" or "characters"'
            )
        for code, name in self.segmenters.items():
            if name not in SEGMENTERS and not FUNCTION_OF_A_FILE.fullmatch(name):
                raise ValueError(
                    f"segmenters names {name!r} for {code}, which is none: name one of "
                    f"{', '.join(SEGMENTERS)}, or a function of yours as path/to/file.py:function"
                )


class ShardsConfig(Settings):
    """make_shards: sentence length, and segmentations of training lines."""

    max_tokens: BatchTokens | None = None
    """Longest training and validation sentence on either side, in tokens; longer ones are left out
    and counted. None: the limit of model.max_positions and batches.tokens, less a tag and
    end-of-sentence."""
    segmentations: Annotated[int, whole(1, 1000)] = 1
    """1: the best segmentation. More: write every training line this many times, each with pieces
    drawn anew (subword regularization). One epoch of the shards is then this many epochs of the
    text; disk and time grow alike."""
    segmentation_alpha: Annotated[float, number(above=0, most=10)] = 0.1
    """Unigram: exponent of the probabilities; BPE: share of merges left out."""
    segmentation_nbest: Annotated[int, whole(2, 1000)] = 64
    """Number of best segmentations that a unigram model draws from."""
    seed: Seed = 1
    """Seed of the segmentations."""


class PhaseConfig(Settings):
    """Pairs and temperature from an update on."""

    from_update: Updates = 1
    """First update of the phase, counted from 1."""
    pairs: tuple[str, ...] = ()
    """Pairs to draw (``de-en``); empty: all."""
    sampling_temperature: Temperature | None = None
    """Temperature of the phase; None: mixture.sampling_temperature."""


class MixtureConfig(Settings):
    """mix: p_i ∝ (n_i / Σn)^(1/T) over language pairs or directions."""

    sampling_temperature: Temperature = 5.0
    """Temperature T."""
    sampling_over: Literal["pairs", "directions"] = "pairs"
    """``pairs``: draw both directions of a pair equally often; ``directions``: draw each direction
    by its own size, which differs when sizes are counted in tokens."""
    sampling_unit: Literal["sentences", "tokens"] = "sentences"
    """Unit of n_i and p_i: sentence pairs, or target tokens."""
    max_upsampling: Annotated[float, number(least=1, most=10**9)] | None = None
    """Largest repetition of a pair (or direction), relative to T = 1: p_i ≤ max_upsampling · n_i /
    Σn. The remainder goes to the others in proportion. 1: proportional sampling; None: no limit."""
    targets: tuple[str, ...] = ()
    """Draw and validate only directions into these languages; empty: all."""
    phases: tuple[PhaseConfig, ...] = ()
    """Phases, ascending from update 1; empty: all pairs, always."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        begins = [phase.from_update for phase in self.phases]
        if begins and (begins[0] != 1 or begins != sorted(set(begins))):
            raise ValueError(
                f"phases begin at updates {begins}, where the first is to begin at 1 and each "
                "later than the one before: change from_update"
            )
        return self


class GroupsConfig(Settings):
    """group_languages: method and size of language groups (MMNMT, §4.1)."""

    method: Literal["typology", "embeddings", "paper"] = "embeddings"
    """``typology``: language families; ``embeddings``: families merged by the embeddings of a dense
    model; ``paper``: the groups of MMNMT."""
    max_group_share: Annotated[float, number(above=0, most=1)] = 15 / 56
    """T_max as a share of the corpus: groups merge only while their joint size stays below it."""
    pivot: str = "en"
    """Language of every pair, which counts as large as the largest other one."""
    extend: dict[str, Annotated[int, whole(1, 4)]] = Field(default_factory=dict)
    """Additions to the paper's table, language → group 1 to 4."""


class LanguagesConfig(Settings):
    """Languages that the registry (``pipeline/languages.py``) does not describe."""

    family: dict[str, str] = Field(default_factory=dict)
    """Language → family, ``{ chr = "Iroquoian" }``; overrides the registry."""
