"""Settings of data preparation, from the corpus to the language groups."""

import re
from pathlib import Path
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import (
    NUM_SPECIALS,
    BatchTokens,
    Lines,
    Settings,
    Temperature,
    Updates,
    number,
    whole,
)
from pipeline.errors import hint
from pipeline.languages import Regions

MAX_VOCABULARY = 10**7
MAX_LINE_BYTES = 2**20
"""Longest line of raw text. Longer lines go to the quarantine and are never held in memory."""
SEGMENTERS = ("characters", "mecab", "punctuation")
"""Segmenters that need no file of the user (``artifacts/segmenters.py``)."""
FUNCTION_OF_A_FILE = re.compile(r".*\.py:[^\W\d]\w*")


class CldrConfig(Settings):
    """Localized phrases made from Unicode CLDR (``data_prep/readers/cldr.py``)."""

    removed: ClassVar = {"pivot": ("en",), "seed": (1,)}
    train_pairs: dict[str, Annotated[int, whole(1, 10**9)]] = Field(default_factory=dict)
    """Language → number of training phrases paired with English, for example ``{ de = 8000 }``."""
    zero_shot: tuple[str, ...] = ()
    """Languages with test phrases between them but no training phrases."""
    valid_phrases: Annotated[int, whole(0, 10**9)] = 100
    """Validation phrases per pair."""
    test_phrases: Annotated[int, whole(0, 10**9)] = 200
    """Test phrases per pair."""
    same_phrases: bool = False
    """Draw the training phrases of all languages from one list, its first ones for a language with
    fewer: their lines in the pivot are equal. Otherwise each language draws its own."""


class ListedText(Settings):
    """Text of one split of one pair (``data_prep/readers/file_pairs.py``)."""

    split: Literal["train", "valid", "test"] = "train"
    pair: str
    """Language pair, for example ``de-en``: the order of two files, or of the columns of a file
    that does not name them."""
    paths: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    """One file per language, for example ``["a.de.gz", "a.en.gz"]``, or one file of both; relative
    to the raw folder."""


class CorpusConfig(Settings):
    """Import of raw text by the stage import_corpus."""

    max_line_bytes: ClassVar[int] = MAX_LINE_BYTES
    removed: ClassVar = {"max_line_bytes": (MAX_LINE_BYTES,)}
    source: Literal["tree", "cldr", "hub", "tmx", "tsv", "moses", "columns", "listed"] = "tree"
    """Format of the raw text; its path is given on the command line. ``tree``: folders of pairs
    in the layout of OPUS-100; ``cldr``: phrases generated from Unicode CLDR; ``hub``: a data set of
    the Hugging Face hub; ``tmx``: translation memories; ``tsv``: tab-separated tables; ``moses``:
    pairs of files; ``columns``: Parquet, JSON lines and CSV; ``listed``: the entries of
    ``files``."""
    cldr: CldrConfig = CldrConfig()
    files: tuple[ListedText, ...] = ()
    """Files that source ``listed`` reads, in this order."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Language → column of its text, for example ``{ de = "source", en = "target" }``, for
    ``columns``, ``tsv`` and listed tables; empty: the column has the name of the language, or
    ``translation`` holds both."""
    languages: tuple[str, ...] = ()
    """Read only pairs of these languages; empty: all pairs found."""
    regions: Regions = "joined"
    """Treatment of regions. ``joined``: ``pt-br`` and ``pt`` are one language, and a record with
    both gives the text asked for, else the text without region; ``apart``: they are two languages,
    ``pt`` and ``pt_BR``. A language that occurs with a single region has its code without it."""
    untested: tuple[str, ...] = ()
    """Languages without test lines: no test lines of their pairs are read."""
    directions: Literal["all", "zero_shot", "pivot"] = "all"
    """Pairing of text in more than two languages. ``all``: each language with each; ``zero_shot``:
    the pivot with every other language, and test lines also between these; ``pivot``: the pivot
    with every other language only."""
    pivot: str = "en"
    """Language that others are paired with, see ``directions``, ``tests.directions`` and
    ``clean.joined_pairs``. For language groups its size counts as the largest other's."""
    max_train_lines: Annotated[int, whole(1, 10**12)] | None = None
    """Largest number of training lines per pair; later lines are left out."""
    max_valid_lines: Lines | None = None
    """Largest number of validation lines per pair."""
    max_test_lines: Lines | None = None
    """Largest number of test lines per pair."""
    swapped_sides: Literal["refuse", "accept"] = "refuse"
    """Reaction to a pair of files whose languages are swapped: an error, or a line in the
    summary."""


class OutsideTestsConfig(Settings):
    """Test sets from outside, imported by the stage import_tests."""

    removed: ClassVar = {
        "max_line_bytes": (MAX_LINE_BYTES,),
        "pivot": ("en",),
    }
    languages: tuple[str, ...] = ()
    """Languages to read; empty: all found. If a language has several scripts, its usual one is,
    for example, ``zh``, and any other ``zho_Hant``."""
    directions: Literal["pivot", "all"] = "pivot"
    """Pairing if there is one file per language: the pivot with every other language, or each with
    each (n languages make n · (n - 1) / 2 pairs, each with its own copy of the text)."""


class CleanConfig(Settings):
    """Cleaning of training lines by the stage clean; it never drops validation or test lines."""

    removed: ClassVar = {
        "drop_control_characters": (True,),
        "drop_copies": (True,),
        "drop_duplicates": (True,),
        "drop_near_duplicates": (False,),
        "drop_swapped": (True,),
        "held_out_scope": ("all_pairs",),
        "language_min_characters": (40,),
        "language_model": ("",),
        "near_duplicate_similarity": (0.8,),
        "pivot": ("en",),
    }
    max_characters: Annotated[int, whole(1, 10**9)] = 2000
    """Longest line, on either side, in characters."""
    max_bytes: Annotated[int, whole(1, 10**9)] | None = None
    """Longest line, on either side, in UTF-8 bytes; not set: bounded by ``max_characters`` only.
    The same lines are dropped for every vocabulary (LOBEF, §4.3)."""
    max_length_ratio: Annotated[float, number(least=1, most=10**9)] = 4.0
    """Largest ratio of character counts, after dividing by the pair's median ratio. If that is 2,
    for example, 4 permits 8 to 1."""
    identify_languages: str = "no"
    """Whether to drop lines with a side in another language than its own: ``no``; ``langdetect``,
    if fastText's lid.176 finds another, and langdetect or the script of the side confirms it; or
    the path of a fastText model, for example GlotLID's model.bin, in place of lid.176. Sides in
    languages that the model does not know, and sides of fewer than 40 characters, are never
    judged."""
    drop_held_out_overlap: bool = True
    """Drop training lines one side of which is a validation or test line of any pair, after folding
    letters and digits, for example ``3 Hours.`` to ``3hours``. Leaks are counted in any case."""
    joined_pairs: tuple[str, ...] = ()
    """Pairs without training text that get the lines of two pairs with equal pivot lines, for
    example ``de-fr`` from de-en and en-fr, equal in the line of ``corpus.pivot``. They are cleaned
    as all others, and stop being zero-shot."""

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read ``identify_languages = "fasttext"`` with ``language_model`` as the model's path."""
        if values.get("identify_languages") == "fasttext":
            values["identify_languages"] = values.pop("language_model", "") or "fasttext"
        return values

    @property
    def language_model(self) -> Path | None:
        """Return the path of a fastText model of the user; None: there is none."""
        is_path = self.identify_languages not in ("no", "langdetect")
        return Path(self.identify_languages) if is_path else None

    @model_validator(mode="after")
    def _check(self) -> Self:
        name, words = self.identify_languages, ("no", "langdetect")
        if name not in words and re.fullmatch(r"[\w-]*", name):  # else a path with "/" or "."
            fix = hint(name, words, otherwise="or the path of a fastText model, ./model.bin")
            raise ValueError(f"identify_languages names {name!r}{fix}")
        if not self.joined_pairs:
            return self
        for pair in self.joined_pairs:
            codes = set(pair.split("-"))
            if pair.count("-") != 1 or len(codes - {""}) < 2:
                raise ValueError(
                    f"joined_pairs names {pair!r}, which is no pair of two languages. Write it "
                    "like 'de-fr'"
                )
        if len({frozenset(pair.split("-")) for pair in self.joined_pairs}) < len(self.joined_pairs):
            raise ValueError("joined_pairs names a pair twice. Name each once")
        if not self.drop_held_out_overlap:
            raise ValueError(
                "joined_pairs needs drop_held_out_overlap = true: else lines are joined across a "
                "held-out line. Set it"
            )
        return self


class SyntheticConfig(Settings):
    """Pairs of lines and their machine translations, made by the stage add_translations."""

    use: Literal["back_translation", "distillation"] = "back_translation"
    """Side of the translations. ``back_translation``: the source, which begins with a tag;
    ``distillation``: the target."""
    min_score: Annotated[float, number(least=-(10**9), most=0)] | None = None
    """Lowest score by ``translate --text`` that is kept, for example -1.0; not set: all."""
    min_round_trip: Annotated[float, number(least=0, most=100)] | None = None
    """Lowest chrF++, 0 to 100, of a line with its round trip, the translation of its translation
    (``--back``); not set: all."""


class TokenizerConfig(Settings):
    """Vocabulary trained by the stage train_tokenizer."""

    removed: ClassVar = {
        "language_token_scheme": ("underscores",),
        "seed": (1,),
    }
    kind: Literal["sentencepiece", "characters", "byte_bpe", "bytes"] = "sentencepiece"
    """Kind of vocabulary. ``byte_bpe``: pieces of UTF-8 bytes, to which no text is unknown;
    ``bytes``: single bytes."""
    vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 64000
    """Number of pieces, including specials but not language tokens; an upper bound for
    ``characters``. Covers all languages but ``target_languages``. With a base: number of pieces
    learned from the languages that it lacks, of which those that it has already are not added."""
    target_languages: tuple[str, ...] = ()
    """Languages with their own vocabulary, for example ``en``. Only they are translated into; the
    others share ``vocabulary_size`` pieces and are translated from. Empty: one vocabulary."""
    target_vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 8000
    """Number of pieces of ``target_languages``, including specials."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """Algorithm of kind ``sentencepiece``; with a base, the algorithm of the base."""
    normalization: Literal["plain", "nfc"] = "plain"
    """Spelling of text before it becomes pieces, in training and translation alike. ``nfc``:
    letters composed, white space as spaces; ``plain``: also letters and digits of full width or
    in ligatures in their plain form, and invisible characters dropped. No effect on ``byte_bpe``
    and ``bytes``; a base keeps its own."""
    byte_fallback: bool = False
    """Use 256 pieces for bytes, which spell characters that the vocabulary lacks (kinds
    ``sentencepiece`` and ``characters``)."""
    character_coverage: Annotated[float, number(least=0.98, most=1)] = 1.0
    """Share of characters that the vocabulary covers; less than 1 garbles Chinese."""
    sampling_temperature: Temperature = 5.0
    """Temperature T with which languages are sampled for training: p ∝ n^(1/T)."""
    sample_lines: Annotated[int, whole(1, 10**12)] = 10_000_000
    """Lines drawn for training over all languages, as far as ``memory_bytes`` permits."""
    memory_bytes: Annotated[int, whole(2**24, 2**50)] = 4 * 2**30
    """Predicted memory that training may take, in bytes; bounds the sample. The default fits a
    machine with 8 GB, where about 200 MB of text are drawn."""
    segmenters: dict[str, str] = Field(default_factory=dict)
    """Language → segmenter for text without spaces, for model.front ``wsf`` over ``bytes`` or
    ``characters``: ``characters``, ``mecab`` (Japanese), ``punctuation`` (splits it off the
    preceding word), or a function, for example ``words.py:split`` (``artifacts/segmenters.py``)."""

    @property
    def output_ids(self) -> int | None:
        """Number of ids of translations, if they differ from the ids of source text; else None."""
        return self.target_vocabulary_size if self.target_languages else None

    @property
    def ids(self) -> int:
        """Number of ids without language tokens; both vocabularies share the specials."""
        if self.kind == "bytes":
            return NUM_SPECIALS + 256
        own = self.target_vocabulary_size - NUM_SPECIALS if self.target_languages else 0
        return self.vocabulary_size + own

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.target_languages and self.kind == "bytes":
            raise ValueError(
                "target_languages have pieces of their own, and bytes are the same for all "
                "languages. Leave it out"
            )
        self._check_segmenters()
        if self.byte_fallback and self.kind in ("byte_bpe", "bytes"):
            raise ValueError(
                f"byte_fallback is for characters that a vocabulary lacks, and kind {self.kind!r} "
                "lacks none. Leave it out"
            )
        return self

    def _check_segmenters(self) -> None:
        if self.segmenters and self.kind not in ("bytes", "characters"):
            raise ValueError(
                "segmenters are for pieces that are white space or text, not both, and kind "
                f'{self.kind!r} has others. Leave them out, or name kind "bytes" or "characters"'
            )
        for code, name in self.segmenters.items():
            if name not in SEGMENTERS and not FUNCTION_OF_A_FILE.fullmatch(name):
                raise ValueError(
                    f"segmenters names {name!r} for {code}, which is none. Name "
                    f"{', '.join(SEGMENTERS)}, or a function of yours as path/to/file.py:function"
                )


class ShardsConfig(Settings):
    """Tokenized text written by the stage make_shards."""

    removed: ClassVar = {
        "seed": (1,),
        "segmentation_alpha": (0.1,),
        "segmentation_nbest": (64,),
        "segmentations": (1,),
    }
    max_tokens: BatchTokens | None = None
    """Longest training or validation sentence, on either side, in tokens; longer ones are left out
    and counted. Not set: what model.max_positions and batches.tokens permit, less a tag and
    end-of-sentence."""


class PhaseConfig(Settings):
    """A phase of training with its own choice of pairs, for example natural pairs only."""

    from_update: Updates = 1
    """The first update of the phase, counted from 1."""
    pairs: tuple[str, ...] = ()
    """Pairs that are drawn, for example ``de-en``; empty: all."""
    sampling_temperature: Temperature | None = None
    """Temperature of the phase; not set: mixture.sampling_temperature."""


class MixtureConfig(Settings):
    """Sampling of language pairs or directions: p_i ∝ (n_i / Σn)^(1/T), by the stage mix."""

    sampling_temperature: Temperature = 5.0
    """Temperature T; 1: proportional, inf: uniform. At 5, for example, a pair with 32 times the
    lines is drawn twice as often."""
    sampling_over: Literal["pairs", "directions"] = "pairs"
    """Unit of sampling. ``pairs``: both directions of a pair are drawn equally often;
    ``directions``: each direction by its own size, which differs if sizes are counted in tokens."""
    sampling_unit: Literal["sentences", "tokens"] = "sentences"
    """Unit of n_i and of the shares p_i: sentence pairs, or target tokens."""
    max_upsampling: Annotated[float, number(least=1, most=10**9)] | None = None
    """Bound on upsampling: p_i ≤ max_upsampling · n_i / Σn. The excess goes to the other pairs (or
    directions) in proportion. 1: proportional sampling; not set: no bound."""
    targets: tuple[str, ...] = ()
    """Target languages of training and validation; empty: all."""
    synthetic_share: Annotated[float, number(least=0, most=1)] | None = None
    """Share p of pairs with a side that a machine wrote, in phases that draw both these and others;
    not set: by their sizes, as all pairs."""
    phases: tuple[PhaseConfig, ...] = ()
    """Phases in ascending order, the first from update 1; empty: all pairs, always."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        begins = [phase.from_update for phase in self.phases]
        if begins and (begins[0] != 1 or begins != sorted(set(begins))):
            raise ValueError(
                f"phases begin at updates {begins}, where the first is to begin at 1 and each "
                "later than the one before. Change from_update"
            )
        if self.synthetic_share is not None and self.max_upsampling is not None:
            raise ValueError(
                "max_upsampling would change the share that synthetic_share sets. Leave one out"
            )
        return self


class GroupsConfig(Settings):
    """Language groups made by the stage group_languages (MMNMT, §4.1)."""

    removed: ClassVar = {"pivot": ("en",)}
    method: Literal["typology", "embeddings", "paper"] = "embeddings"
    """Basis of the groups: typology, clustered embeddings of a dense checkpoint, or the paper's
    table."""
    max_group_share: Annotated[float, number(above=0, most=1)] = 15 / 56
    """Largest share of the corpus of a merged group (T_max): groups merge only while their joint
    size stays below it."""
    extend: dict[str, Annotated[int, whole(1, 4)]] = Field(default_factory=dict)
    """Additions to the paper's table: language → group 1 to 4, for example ``{ chr = 4 }``."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        share = type(self).model_fields["max_group_share"].default
        for name, default, method in (
            ("max_group_share", share, "embeddings"),
            ("extend", {}, "paper"),
        ):
            if getattr(self, name) != default and self.method != method:
                raise ValueError(
                    f"{name} has no effect with method {self.method!r}. Leave it out, or set "
                    f"method to {method!r}"
                )
        return self


class LanguagesConfig(Settings):
    """Knowledge about languages beyond the registry (``pipeline/languages.py``)."""

    family: dict[str, str] = Field(default_factory=dict)
    """Language → family, for example ``{ chr = "Iroquoian" }``; takes precedence over the
    registry."""
