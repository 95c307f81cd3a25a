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
"""Those that need no file of the user's (``artifacts/segmenters.py``)."""
FUNCTION_OF_A_FILE = re.compile(r".*\.py:[^\W\d]\w*")


class CldrConfig(Settings):
    """How many localised phrases to make from Unicode CLDR (``data_prep/readers/cldr.py``)."""

    pivot: str = "en"
    train_pairs: dict[str, Annotated[int, whole(1, 10**9)]] = Field(default_factory=dict)
    """Language → number of training phrases paired with the pivot."""
    zero_shot: tuple[str, ...] = ()
    """Languages between which there are test phrases but no training phrases."""
    valid_phrases: Annotated[int, whole(0, 10**9)] = 100
    test_phrases: Annotated[int, whole(0, 10**9)] = 200
    seed: Seed = 1


class ListedText(Settings):
    """Text of one split of one pair (``data_prep/readers/listed.py``)."""

    split: Literal["train", "valid", "test"] = "train"
    pair: str
    """``de-en``: the order of two files, or of the columns of one that does not name them."""
    paths: Annotated[tuple[str, ...], Field(min_length=1, max_length=2)]
    """A file per language, or one of both; from the raw folder on."""


class CorpusConfig(Settings):
    """import_corpus: where raw text comes from."""

    source: Literal["tree", "cldr", "hub", "tmx", "tsv", "moses", "columns", "listed"] = "tree"
    """``tree``: folders of pairs as OPUS-100 has them; ``cldr``: phrases made here; ``hub``: a data
    set of the Hugging Face hub; ``tmx``: translation memories; ``tsv``: tab-separated tables;
    ``moses``: pairs of files; ``columns``: Parquet, JSON lines and CSV; ``listed``: what ``files``
    names. Where they lie is said on the command line."""
    cldr: CldrConfig = CldrConfig()
    files: tuple[ListedText, ...] = ()
    """What ``listed`` reads, in this order."""
    columns: dict[str, str] = Field(default_factory=dict)
    """Language → column of its text, for ``columns`` and files listed; empty: the column is named
    by the language, or ``translation`` holds both."""
    languages: tuple[str, ...] = ()
    """Read only pairs of these languages; empty: all pairs found."""
    regions: Regions = "joined"
    """Whether ``pt-br`` and ``pt`` are one language, of which a record gives the text without
    region where it has both, or, ``apart``, two, of which one is ``pt_BR``. A language that comes
    from one region alone has its code without it."""
    untested: tuple[str, ...] = ()
    """No test lines are read of pairs with one of these languages."""
    directions: Literal["all", "zero_shot", "pivot"] = "all"
    """How text of more than two languages at once is paired: each language with each; the pivot
    with each other one, and for test lines these with each other too; or the pivot alone."""
    pivot: str = "en"
    max_train_lines: Annotated[int, whole(1, 10**12)] | None = None
    """Keep at most this many training lines per pair, the first ones."""
    max_valid_lines: Lines | None = None
    max_test_lines: Lines | None = None
    max_line_bytes: Annotated[int, whole(1, 2**30)] = 2**20
    """Longer lines are no sentences: they go to the quarantine, and are never held in memory."""
    swapped_sides: Literal["refuse", "accept"] = "refuse"
    """What becomes of a pair of files each of which is in the language of the other: an error, or
    a line of the summary."""


class OutsideTestsConfig(Settings):
    """import_tests: which test sets from outside, and between which of their languages."""

    languages: tuple[str, ...] = ()
    """Read only these; empty: all found. Where there are several scripts of a language, its usual
    one is ``zh`` and any other ``zho_Hant``."""
    directions: Literal["pivot", "all"] = "pivot"
    """Where there is one file per language: pair the pivot with every other one, or each with
    each (n languages are n · (n - 1) / 2 pairs, each with its own copy of the text)."""
    pivot: str = "en"
    max_line_bytes: Annotated[int, whole(1, 2**30)] = 2**20
    """Longer lines are put into the quarantine."""


class CleanConfig(Settings):
    """clean: rules for training lines. Validation and test lines are never dropped."""

    max_characters: Annotated[int, whole(1, 10**9)] = 2000
    max_bytes: Annotated[int, whole(1, 10**9)] | None = None
    """Longest line, on either side, in UTF-8 bytes; None: bounded by ``max_characters`` alone. The
    same lines are dropped for every vocabulary (LOBEF, §4.3)."""
    max_length_ratio: Annotated[float, number(least=1, most=10**9)] = 4.0
    """Largest ratio of character counts, after dividing by the pair's median ratio."""
    drop_control_characters: bool = True
    drop_copies: bool = True
    """Source equal to target."""
    drop_swapped: bool = True
    """Lines each side of which is in the script of the other, of languages with two scripts."""
    identify_languages: Literal["no", "langdetect", "fasttext"] = "no"
    """Drops lines a side of which is found to be in another language than it is named for. Sides in
    languages that the identifier does not know, and sides of fewer than 40 characters, are never
    judged."""
    language_model: str = ""
    """Of fasttext: a local file, lid.176.bin or GlotLID's model.bin."""
    drop_duplicates: bool = True
    drop_near_duplicates: bool = False
    """Lines that nearly repeat an earlier one of their pair, digits, case and punctuation aside:
    the character 5-grams of both sides have a Jaccard similarity of 0.8 or more."""
    drop_held_out_overlap: bool = True
    """Training lines one side of which is, letters and digits folded, a valid or test line."""
    held_out_scope: Literal["all_pairs", "own_pair"] = "all_pairs"
    """Whose valid and test lines those are: a line of the same language in whichever pair, or of
    the same pair alone. Leaks are counted over all pairs in any case."""


class TokenizerConfig(Settings):
    """train_tokenizer."""

    kind: Literal["sentencepiece", "characters", "byte_bpe", "bytes"] = "sentencepiece"
    """``byte_bpe``: pieces of UTF-8 bytes, so that no text is unknown; ``bytes``: its bytes."""
    vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 64000
    """Pieces, specials included, language tokens not; of ``characters`` the most there may be. Of
    all languages but ``target_languages``."""
    target_languages: tuple[str, ...] = ()
    """Languages with pieces of their own, which are all that is translated into; the other
    languages share ``vocabulary_size`` pieces, and are translated from. None: one vocabulary."""
    target_vocabulary_size: Annotated[int, whole(5, MAX_VOCABULARY)] = 8000
    """Pieces of ``target_languages``, specials included."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    """Of ``sentencepiece``."""
    byte_fallback: bool = False
    """Of ``sentencepiece`` and ``characters``: 256 of the pieces are bytes, for characters that
    the vocabulary lacks."""
    character_coverage: Annotated[float, number(least=0.98, most=1)] = 1.0
    """Less garbles Chinese."""
    sampling_temperature: Temperature = 5.0
    sample_lines: Annotated[int, whole(1, 10**12)] = 10_000_000
    """Lines drawn for training, over all languages, as far as ``memory_bytes`` has room."""
    memory_bytes: Annotated[int, whole(2**24, 2**50)] = 4 * 2**30
    """What training may take by prediction, which bounds the sample. A machine with 8 GB has the
    default beside its system; about 200 MB of text then are drawn."""
    seed: Seed = 1
    language_token_scheme: Literal["underscores", "angle"] = "underscores"
    """``__de__`` or ``<2de>``."""
    segmenters: dict[str, str] = Field(default_factory=dict)
    """Language → what parts into words what it writes without spaces, for model.front ``wsf`` over
    ``bytes`` or ``characters``: ``characters``, ``mecab`` (Japanese), ``punctuation`` (from the
    words that it follows), or a function of one's own as ``path/to/file.py:function``
    (``artifacts/segmenters.py``)."""

    @property
    def output_ids(self) -> int | None:
        """Ids that translations consist of, where others are of source text."""
        return self.target_vocabulary_size if self.target_languages else None

    @property
    def ids(self) -> int:
        """Ids that it gives, language tokens not counted; the specials are of both sides."""
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
    """make_shards."""

    max_tokens: BatchTokens | None = None
    """Longer training and validation sentences (either side, in tokens) are left out and counted.
    None: what model.max_positions and batches.tokens take, less a tag and end-of-sentence."""
    segmentations: Annotated[int, whole(1, 1000)] = 1
    """1: the best one. More: every training line stands in the shards so many times, each time
    by pieces that are drawn anew (subword regularisation); one epoch of the shards then is so many
    of the text, and disk and time grow with it."""
    segmentation_alpha: Annotated[float, number(above=0, most=10)] = 0.1
    """Unigram draws from the 64 best segmentations, by their probabilities to this power; BPE:
    share of merges that are left out."""
    seed: Seed = 1
    """Of the segmentations."""


class PhaseConfig(Settings):
    """What is drawn from an update on."""

    from_update: Updates = 1
    """The first update of the phase, counted from 1."""
    pairs: tuple[str, ...] = ()
    """The pairs that are drawn (``de-en``); empty: all."""
    sampling_temperature: Temperature | None = None
    """None: mixture.sampling_temperature."""


class MixtureConfig(Settings):
    """mix: p_i ∝ (n_i / Σn)^(1/T) over language pairs or directions."""

    sampling_temperature: Temperature = 5.0
    sampling_over: Literal["pairs", "directions"] = "pairs"
    """``pairs``: both directions of a pair are drawn equally often; ``directions``: each direction
    by its own size, which is another one where sizes are counted in tokens."""
    sampling_unit: Literal["sentences", "tokens"] = "sentences"
    """What n_i counts, and of what p_i is the share: sentence pairs, or target tokens."""
    max_upsampling: Annotated[float, number(least=1, most=10**9)] | None = None
    """No pair (or direction) is repeated more than this many times as often as all text would be at
    T = 1: p_i ≤ max_upsampling · n_i / Σn. What that takes away goes to the others in proportion.
    1: proportional; None: no bound."""
    targets: tuple[str, ...] = ()
    """Only directions into these languages are drawn, and validated on; empty: all."""
    phases: tuple[PhaseConfig, ...] = ()
    """What is drawn from which update on, ascending from update 1; empty: all pairs, always."""

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
    """group_languages (MMNMT, §4.1)."""

    method: Literal["typology", "embeddings", "paper"] = "embeddings"
    max_group_share: Annotated[float, number(above=0, most=1)] = 15 / 56
    """T_max as a share of the corpus: groups merge only while their joint size stays below it."""
    pivot: str = "en"
    extend: dict[str, Annotated[int, whole(1, 4)]] = Field(default_factory=dict)
    """Additions to the paper's table, language → group 1 to 4."""


class LanguagesConfig(Settings):
    """What a recipe knows of languages beyond the registry (``pipeline/languages.py``)."""

    family: dict[str, str] = Field(default_factory=dict)
    """Language → family, ``{ chr = "Iroquoian" }``; goes before the registry's."""
