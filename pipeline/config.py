"""Recipes: every setting of the science once, typed, documented, with its default.

A recipe is a TOML file. It may name a ``parent`` and then states only what differs. A name can be
followed by overlays, ``bible24_moe+smoke``: each overlay is a recipe file without a parent whose
settings are laid over what stands before it. Where files lie, how many processes run and which
machine they run on are not settings of a recipe (see ``jobs/plan.py``, ``ds_configs/``,
``slurm/``).
"""

import re
from collections.abc import Iterable, Mapping
from importlib import resources
from pathlib import Path
from typing import Annotated, Any, Literal, Self

from pydantic import (
    BeforeValidator,
    Field,
    ValidationError,
    model_validator,
)

from pipeline.documents import merge, read_toml
from pipeline.errors import ConfigError
from pipeline.hints import hint
from pipeline.languages import Regions
from pipeline.overrides import override_texts
from pipeline.settings import Settings, describe_validation, number, shown, whole

TagScheme = Literal["src-tgt", "tgt", "src-suffix-tgt"]
TAG_PRESETS: dict[str, TagScheme] = {
    "m2m100": "src-tgt",
    "mrasp2": "src-tgt",
    "nllb": "src-tgt",
    "nllb-legacy": "src-suffix-tgt",
}
"""Model family → the scheme its checkpoints were trained with, for ``batches.tag_scheme``. mRASP2's
text begins with the source's token, and its decoder is forced to begin with the target's; NLLB's
tokenizer in transformers has put the source's token first since ``legacy_behaviour`` is False."""
CombineWeights = Literal["renormalized", "probability"]
DecoderRouter = Literal["token", "language_group"]
Activation = Literal["relu", "gelu"]
Route = Literal["specific", "shared"]
"""Which way through a model whose languages have weights of their own: theirs, or those of all."""

Seed = Annotated[int, whole(0, 2**63 - 1)]
Lines = Annotated[int, whole(0, 10**12)]
Updates = Annotated[int, whole(1, 10**9)]
BatchTokens = Annotated[int, whole(1, 10**8)]
Layers = Annotated[int, whole(1, 1000)]
Temperature = Annotated[float, number(above=0, most=float("inf"))]
"""1: proportional; inf: uniform."""
DropRate = Annotated[float, number(least=0, below=1)]
LossWeight = Annotated[float, number(least=0, most=1000)]
CapacityFactor = Annotated[float, number(above=0, most=1000)]
MAX_VOCABULARY = 10**7
NUM_SPECIALS = 4
"""Padding, beginning and end of a sentence, and what is unknown."""
EXTRA_TOKENS = 2
"""Positions of a sentence beside its own tokens: a tag and end-of-sentence."""
MAX_EXPERTS = 2**14
MAX_GROUPS = 10**4
MAX_STATES = 10**6
SEGMENTERS = ("characters", "mecab", "punctuation")
"""Those that need no file of the user's (``artifacts/segmenters.py``)."""
FUNCTION_OF_A_FILE = re.compile(r".*\.py:[^\W\d]\w*")
MAX_POSITION_VALUES = 2**30
"""Width times positions: 4 GiB of sinusoids."""


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
    languages that the identifier does not know are never judged."""
    language_model: str = ""
    """Of fasttext: a local file, lid.176.bin or GlotLID's model.bin."""
    language_min_characters: Annotated[int, whole(1, 10**9)] = 40
    """Shorter sides are not judged by their language."""
    drop_duplicates: bool = True
    drop_near_duplicates: bool = False
    """Lines that nearly repeat an earlier one of their pair, digits, case and punctuation aside."""
    near_duplicate_similarity: Annotated[float, number(above=0, most=1)] = 0.8
    """Jaccard similarity of the character 5-grams of both sides from which on they do."""
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
    """Unigram: probabilities are taken to this power; BPE: share of merges that are left out."""
    segmentation_nbest: Annotated[int, whole(2, 1000)] = 64
    """Unigram draws from so many best segmentations."""
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


class MoEConfig(Settings):
    """Mixture-of-experts feed-forwards (MMNMT, §4.1)."""

    num_experts: Annotated[int, whole(1, MAX_EXPERTS)] = 32
    top_k: Annotated[int, whole(1, MAX_EXPERTS)] = 2
    every: Layers = 2
    """Every n-th layer of encoder and decoder has experts: layers n, 2n, … counted from 1."""
    decoder_router: DecoderRouter = "token"
    """The encoder always routes by token."""
    num_groups: Annotated[int, whole(2, MAX_GROUPS)] | None = None
    """Expected number of language groups; None: whatever the groups artifact has."""
    combine_weights: CombineWeights = "renormalized"
    """Kept probabilities made to sum 1, or as they are (Switch, with top_k = 1)."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    capacity_factor: CapacityFactor = 1.25
    """Slots per expert in training = ceil(capacity_factor · top_k · tokens / num_experts)."""
    batch_prioritized: bool = True
    """Slots go by descending top probability; otherwise by position."""
    evaluation_capacity_factor: CapacityFactor | None = None
    """None: evaluation and decoding drop nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} exceeds num_experts {self.num_experts}: lower it, or have "
                "more experts"
            )
        return self


class EmbeddingConfig(Settings):
    """Ids to states, and states to logits."""

    input: Literal["learned", "frozen", "one_hot"] = "learned"
    """A table that is trained, one that stays as it was initialised, or row i = e_i with a learned
    scale: then the vocabulary must not exceed model.width."""
    output: Literal["tied", "untied"] = "tied"
    """The output projection is the input's table, or one of its own."""
    one_hot: Literal["one_scale", "two_scales", "fixed_scale"] = "one_scale"
    """Scales of ``input = "one_hot"``, all of which start at sqrt(width). ``one_scale``: encoder
    and decoder share one that is learned; ``two_scales``: each learns its own, and nothing is
    dropped of the last decoder layer's sublayers (the code of Shaham and Levy, 2021, and of LOBEF
    with ``--no-embed``); ``fixed_scale``: none is learned, and encoder and decoder drop as with
    learned embeddings (LOBEF's scripts)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.one_hot != "one_scale" and self.input != "one_hot":
            raise ValueError(
                f"one_hot is {self.one_hot!r}, and input is {self.input!r}, which has no such "
                'scales: leave it out, or set input to "one_hot"'
            )
        if self.one_hot == "fixed_scale" and self.output == "tied":
            raise ValueError(
                "one_hot is 'fixed_scale' and output is 'tied', so that no logit could be learned: "
                'set output to "untied"'
            )
        return self


class SubwordsConfig(Settings):
    """The front of a model whose tokens are taken as they are."""

    kind: Literal["subwords"] = "subwords"


OddKernel = Literal[0, 1, 3, 5, 7, 9, 11, 13, 15]
Scale = Annotated[int, whole(0, 8)]
"""δ of MoCE: 0 looks at the token alone, δ > 0 convolves 2 δ - 1 tokens around it (its eq. 9)."""


class MscConfig(Settings):
    """Multi-scale contextualisation before a layer's queries, keys and values (MoCE, §2.2)."""

    kind: Literal["msc"] = "msc"
    kernels: Annotated[tuple[OddKernel, ...], Field(min_length=1)] = (0, 0, 3, 3, 5, 5, 7, 7)
    """Of each group that the width is cut into; 0: it stays as it is. MoCE takes 0, 0, 1, 1, 3, 5,
    5, 7 for OPUS-100."""
    layer: Annotated[int, whole(0, 999)] = 0
    """Of the encoder, counted from 0."""


class MshaConfig(Settings):
    """Every head of a layer's attention at a scale of its own (MoCE, §3.1)."""

    kind: Literal["msha"] = "msha"
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0, 0, 2, 2, 3, 3, 4, 4)
    """δ of each head."""
    layer: Annotated[int, whole(0, 999)] = 0
    scaled: Literal["after", "before"] = "after"
    """Queries are scaled after they are contextualised (MoCE, eq. 8), or before, as its code."""


class AdaMshaConfig(Settings):
    """Every head of every token mixes the scales that a router chooses (MoCE, §3.2)."""

    kind: Literal["ada_msha"] = "ada_msha"
    max_scale: Annotated[int, whole(1, 8)] = 5
    """Δ: experts are δ = 0 … Δ."""
    top_k: Annotated[int, whole(1, 9)] = 2
    layer: Annotated[int, whole(0, 999)] = 0
    language_vector: bool = False
    """The router sees the embedding of the source language's token, too (``+lid``, §3.3)."""
    separate_routers: bool = False
    """One router each for queries, keys and values, not one for all."""
    weights: Literal["logits", "probabilities"] = "logits"
    """A softmax over the chosen experts' logits, as MoCE's code, or over their probabilities, as
    its eqs. 2 and 12 say."""
    single_weight: Literal["straight_through", "logit"] = "straight_through"
    """With top_k 1: the weight 1 with a gradient to its logit, or, as in MoCE's code, the logit."""
    scaled: Literal["after", "before"] = "after"
    """Queries are scaled after they are contextualised (MoCE, eq. 8), or before, as its code."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.max_scale + 1:
            raise ValueError(
                f"top_k {self.top_k} exceeds the {self.max_scale + 1} experts of max_scale "
                f"{self.max_scale}: lower it"
            )
        return self


class NcfConfig(Settings):
    """n-grams of states fused after the first layers (LOBEF, §3.1)."""

    kind: Literal["ncf"] = "ncf"
    layers_before: Annotated[int, whole(0, 999)] = 1
    """Layers of the encoder that come before it; LOBEF's code has 4 of 6."""
    orders: Annotated[tuple[Annotated[int, whole(1, 16)], ...], Field(min_length=1)] = (1, 2, 3, 4)
    """n; 1 is the state itself."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if len(set(self.orders)) < len(self.orders):
            raise ValueError("orders names an n more than once: name it once")
        return self


class WsfConfig(Settings):
    """Attention within words in the first layers (LOBEF, §3.2).

    Words are what white space parts. In a language that is written without (Chinese, Japanese,
    Thai, Lao, Khmer, Burmese, Tibetan) a line has hardly more than one word, and these layers see
    it as the others do; training names such languages with their lines. As sources alone they can
    be had with spaces: part their words by any segmenter before the text is imported.
    """

    kind: Literal["wsf"] = "wsf"
    layers: Annotated[int, whole(1, 1000)] = 4
    """Of the encoder, from the first on; LOBEF's code has 2 of 6."""


FrontConfig = Annotated[
    SubwordsConfig | MscConfig | MshaConfig | AdaMshaConfig | NcfConfig | WsfConfig,
    Field(discriminator="kind"),
]
"""Of the encoder's front, told apart by ``kind``."""


class DenseConfig(Settings):
    """The feed-forward of layers without experts: up, activation, down."""

    kind: Literal["dense"] = "dense"


FeedForwardConfig = DenseConfig
"""Of layers without experts: a union once there are several, told apart by ``kind``."""


class LowRankConfig(Settings):
    """Language-specific matrix synthesis: linear layers W + V F, V and F of rank d per language."""

    kind: Literal["low_rank"] = "low_rank"
    rank: Annotated[int, whole(1, 2**16)] = 32
    synthesis: Literal["pair_wise", "language_wise"] = "pair_wise"
    """V of the source and F of the target language; or both of one language, in the encoder the
    source."""
    decoder_language: Literal["target", "source"] = "target"
    """Of language-wise synthesis: whose modules the decoder has (paper: the target's; its code: the
    source's)."""
    within: Literal["feed_forward", "attention", "both"] = "feed_forward"
    """Which linear layers have modules; those of experts (model.moe) have none."""
    cross_attention: bool = True
    """With modules in attention, whether the attention of the decoder to the source has them, too,
    as in the authors' code. Without, the sizes are those of the paper's table 6."""
    encoder_layers: tuple[Annotated[int, whole(0, 999)], ...] | None = None
    """Layers that have modules, counted from 0; None: all."""
    decoder_layers: tuple[Annotated[int, whole(0, 999)], ...] | None = None
    shared: bool = False
    """A further module for all languages, which fuse distillation teaches, and its route."""
    languages: tuple[str, ...] | None = None
    """Languages that have modules; None: all of the tokenizer's."""


class LanguageExpertsConfig(Settings):
    """A language-level mixture of experts: one whole feed-forward per language."""

    kind: Literal["language_experts"] = "language_experts"
    every: Layers = 1
    """Every n-th layer has them: layers n, 2n, … counted from 1."""
    shared: bool = False
    """A further feed-forward for all languages, which fuse distillation teaches, and its route."""
    decoder_language: Literal["target", "source"] = "target"
    """Whose feed-forwards the decoder has; the encoder has the source's."""
    languages: tuple[str, ...] | None = None
    """Languages that have modules; None: all of the tokenizer's."""


class ClsrConfig(Settings):
    """Conditional language-specific routing: gates between projections (Zhang et al., 2021)."""

    kind: Literal["clsr"] = "clsr"
    tables: Literal["per_side", "per_sublayer"] = "per_side"
    """One set of projections for the encoder and one for the decoder, or (CLSR*) one for every
    sublayer."""
    shared_projection: Literal["per_sublayer", "none"] = "per_sublayer"
    """W_shared. ``per_sublayer``: a linear layer in every sublayer, in place of the output
    projection of attention (the authors' code). ``none``: attention keeps its output projection,
    and where the gate is 0 the result of the sublayer passes unchanged; the model starts as the
    plain one. Without ``cross_attention`` and with a ``gate_width`` of 64, ``none`` gives the sizes
    that Xu et al. (2023) state for CLSR and CLSR*."""
    cross_attention: bool = True
    """Whether projections follow the attention of the decoder to the source, too."""
    gate_width: Annotated[int, whole(1, 2**16)] = 128
    noise: Annotated[float, number(least=0, most=1000)] = 5.0
    """Standard deviation of the noise on gates at the end of training; it grows from 0."""
    languages: tuple[str, ...] | None = None
    """Languages that have modules; None: all of the tokenizer's."""

    @model_validator(mode="before")
    @classmethod
    def _refuse_shared_tables(cls, values: object) -> object:
        """Refuse models of earlier versions, whose sublayers shared one W_shared per table."""
        if isinstance(values, dict) and "attention_output" in values:
            raise ValueError(
                "attention_output is of an earlier version, which shared W_shared between the "
                "sublayers and so was not CLSR: set shared_projection instead, and train the "
                "model again"
            )
        return values


LanguageModulesConfig = Annotated[
    LowRankConfig | LanguageExpertsConfig | ClsrConfig, Field(discriminator="kind")
]


class ModelConfig(Settings):
    """The encoder–decoder Transformer of the fairseq / Hugging Face M2M-100 family."""

    encoder_layers: Layers = 12
    decoder_layers: Layers = 12
    width: Annotated[int, whole(1, 2**16)] = 1024
    feed_forward_width: Annotated[int, whole(1, 2**20)] = 4096
    num_heads: Annotated[int, whole(1, 2**12)] = 8
    norm: Literal["pre", "post"] = "pre"
    activation: Activation = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: Annotated[int, whole(4, 2**20)] = 1024
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width)."""
    embedding_norm: bool = False
    embedding: EmbeddingConfig = EmbeddingConfig()
    front: FrontConfig = SubwordsConfig()
    feed_forward: FeedForwardConfig = DenseConfig()
    moe: MoEConfig | None = None
    language_modules: LanguageModulesConfig | None = None
    """Weights of languages' own, beside those of all."""
    initialization: Literal["xavier", "fairseq"] = "xavier"
    """What linear layers start from (``model/initial_values.py``). ``xavier``: Xavier-uniform
    weights, biases 0; ``fairseq``: as fairseq's MultiheadAttention, whose query, key and value
    weights are smaller by sqrt(2), and its feed-forwards, which are PyTorch's linear layers.
    Embeddings, norms and routers are fairseq's in both."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(
                f"width {self.width} is not a multiple of num_heads {self.num_heads}: change one "
                "of them"
            )
        modules = self.language_modules
        if isinstance(modules, LowRankConfig):
            for name in ("encoder_layers", "decoder_layers"):
                chosen, layers = getattr(modules, name), getattr(self, name)
                if chosen is not None and max(chosen, default=0) >= layers:
                    raise ValueError(
                        f"language_modules.{name} names layer {max(chosen)}, and there are "
                        f"{layers}, counted from 0: leave it out"
                    )
        if self.width * self.max_positions > MAX_POSITION_VALUES:
            raise ValueError(
                f"width {self.width:,} times max_positions {self.max_positions:,} exceeds "
                f"{MAX_POSITION_VALUES:,}: lower one of them"
            )
        self._check_front()
        return self

    def _check_front(self) -> None:
        """Of what a front needs of the model."""
        front = self.front
        match front:
            case MscConfig() | MshaConfig() | AdaMshaConfig():
                layer, last = ("front.layer", front.layer), self.encoder_layers - 1
            case NcfConfig():
                layer, last = ("front.layers_before", front.layers_before), self.encoder_layers
            case WsfConfig():
                layer, last = ("front.layers", front.layers), self.encoder_layers
            case _:
                return
        if layer[1] > last:
            raise ValueError(
                f"{layer[0]} {layer[1]} lies beyond encoder_layers {self.encoder_layers}: lower it"
            )
        if isinstance(front, MscConfig) and self.width % len(front.kernels):
            raise ValueError(
                f"width {self.width} is not a multiple of the {len(front.kernels)} groups of "
                "front.kernels: change one of them"
            )
        if isinstance(front, MshaConfig) and len(front.scales) != self.num_heads:
            raise ValueError(
                f"front.scales names {len(front.scales)} scales for num_heads {self.num_heads}: "
                "name one for each head"
            )


def _scheme_of_preset(value: object) -> object:
    return TAG_PRESETS.get(value, value) if isinstance(value, str) else value


class BatchesConfig(Settings):
    """The global step: an ordered list of micro-batches that depends on (seed, step) alone."""

    micro_batches: Annotated[int, whole(1, 10**6)] = 32
    """M: micro-batches per update over all ranks; the number of ranks must divide it."""
    tokens: BatchTokens = 4096
    """Per micro-batch: the larger of its padded source and target tokens stays within this."""
    window_steps: Annotated[int, whole(1, 10**6)] = 32
    """About this many updates are drawn at once and sorted by length."""
    one_direction: bool = False
    """Keep every micro-batch to one translation direction."""
    tag_scheme: Annotated[TagScheme, BeforeValidator(_scheme_of_preset)] = "src-tgt"
    """Where the tags of the languages stand (``artifacts/tokenizer.py``); or, as another name of
    its scheme, a family of models: m2m100, mrasp2, nllb or nllb-legacy."""
    tag_is_label: bool = False
    """The target language's tag, which decoding forces, is learnt and counted as the first label of
    a sentence, as fairseq does: needed where losses and perplexities are compared with those of
    the paper, which have it (its Figures 1 and 5)."""
    evaluation_tokens: BatchTokens = 4096
    """Token budget of a validation micro-batch."""

    @property
    def extra_labels(self) -> int:
        """Labels of a sentence besides its tokens: end-of-sentence, and the tag where it is one."""
        return 1 + self.tag_is_label

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.tag_is_label and self.tag_scheme == "tgt":
            raise ValueError(
                f"tag_is_label is true with tag_scheme {self.tag_scheme!r}, which forces no tag on "
                'the decoder: set it to false, or tag_scheme to "src-tgt"'
            )
        return self


class OptimizerConfig(Settings):
    """Adam and its schedule (MMNMT, §5.1)."""

    learning_rate: Annotated[float, number(above=0, most=10)] = 2e-4
    final_learning_rate: Annotated[float, number(least=0, most=10)] = 1e-5
    """Where polynomial decay ends."""
    schedule: Literal["polynomial", "inverse_sqrt"] = "polynomial"
    warmup_updates: Annotated[int, whole(0, 10**9)] = 4000
    betas: tuple[DropRate, DropRate] = (0.9, 0.98)
    epsilon: Annotated[float, number(above=0, most=1)] = 1e-8
    weight_decay: Annotated[float, number(least=0, most=10)] = 0.0
    clip_norm: Annotated[float, number(least=0, most=10**6)] = 0.5
    """Largest norm of the gradient; 0: it is not clipped."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.schedule == "polynomial" and self.final_learning_rate > self.learning_rate:
            raise ValueError(
                f"final_learning_rate {self.final_learning_rate} exceeds learning_rate "
                f"{self.learning_rate}: lower it, the rate decays"
            )
        return self


class LossConfig(Settings):
    """Token-mean cross entropy plus the load-balance term."""

    objective: Literal["cross_entropy", "fuse_distillation"] = "cross_entropy"
    """What is minimised, one case each of ``training/losses.py``. ``fuse_distillation``: both
    routes of a model with language modules and a shared one, and how far they are apart."""
    label_smoothing: DropRate = 0.0
    balance_weight: LossWeight = 0.1
    """Weight of the load-balance loss, summed over MoE layers."""
    router_z_weight: LossWeight = 0.0
    """Weight of the router z-loss (ST-MoE), summed over MoE layers."""
    distillation: Literal["symmetric", "to_shared"] = "symmetric"
    """Of fuse distillation: half of each divergence, and both routes learn; or that of the
    languages' route from the shared one, from which only the latter learns."""
    distillation_weight: LossWeight = 1.0
    gate_budget: Annotated[float, number(least=0, most=1)] = 0.3
    """Of gated projections (model.language_modules, clsr): the mean of the gates, to be had."""
    gate_weight: LossWeight = 1.0
    """Weight of the distance of that mean from the budget."""


class TrainingConfig(Settings):
    """pretrain and finetune."""

    updates: Updates = 100_000
    updates_of: Literal["tokens", "bytes"] = "tokens"
    """What ``updates`` are counted in. ``tokens``: updates of this vocabulary. ``bytes``: updates
    of a model of bytes. A model of longer pieces then makes fewer of its own, so that all
    vocabularies pass over the training text equally often (equal epochs; LOBEF, §4.6)."""
    seed: Seed = 1
    dropout: DropRate = 0.3
    attention_dropout: DropRate = 0.1
    moe_dropout: DropRate | None = None
    """Dropout on the output of MoE layers; None: as everywhere (NLLB raises it there)."""
    expert_output_masking: DropRate = 0.0
    """Probability that a token loses the output of one of its experts; the rest is scaled up, so
    that evaluation needs no correction (NLLB §6.2)."""
    router_jitter: DropRate = 0.0
    """Router inputs are multiplied by U(1 - jitter, 1 + jitter) (Switch Transformer §2.2)."""
    expert_parallel_size: Annotated[int, whole(1, 2**14)] = 1
    """Ranks that share one copy of the experts; must divide their number. A world it does not
    divide uses the greatest common divisor. It changes memory and speed, not the result. Experts
    of languages are shared alike; their number need not be divided."""
    recompute_layers: bool = False
    """Keep only what goes into every layer, and compute the rest again in the backward pass: less
    memory, about a third more work, the same result."""
    skip_nonfinite_after: Annotated[int, whole(0, 1000)] = 0
    """An update whose gradient is not finite is tried this many times again; then its micro-batches
    that cause it are left out, and named in the run's quarantine. 0: training ends there. With
    fp16, overflows that a smaller loss scale mends are none of these tries."""
    cpu_kernels: Literal["processor", "measured"] = "processor"
    """On CPU, kernels by what rank 0's processor has, so that a run done again there is the same to
    the last bit; or those that rank 0 measures to be the fastest when the run begins, which differ
    in rounding: they stand in the training states, and are kept when the run goes on."""
    validate_every: Updates = 1000
    best_by: Literal["all", "high", "medium", "low", "extremely_low"] = "all"
    """Whose validation perplexity says which weights are kept: that of all directions, or of the
    pairs of one resource tier."""
    patience: Annotated[int, whole(0, 10**6)] = 0
    """Training ends when so many validations in a row found no lower perplexity; 0: never."""
    checkpoint_every: Updates = 1000
    keep_last: Annotated[int, whole(1, MAX_STATES)] = 1
    """Training states kept during training, besides the weights of the best validation (best_by)
    and the states that average_last needs; what stays of them afterwards says
    saving.keep_states."""
    average_last: Annotated[int, whole(0, MAX_STATES)] = 0
    """The result is the mean of the weights after the last so many multiples of checkpoint_every,
    the run's last update being one whatever its number; of all of them where there are fewer. It
    stands in place of the weights of the best validation, which then says when training ends
    (patience), and no more. 0: no mean."""
    best_by_route: Route = "specific"
    """By which route's validation the weights are kept, of a model that has two."""
    resource_thresholds: Annotated[tuple[Lines, ...], Field(min_length=2, max_length=3)] = (
        200_000,
        500_000,
    )
    """Pairs: low ≤ first, high ≥ second, medium between; of three numbers the first is the most of
    an extremely low one. A recipe with another ``corpus.source`` than its parent's does not inherit
    them: they are of the parent's corpus."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        thresholds = list(self.resource_thresholds)
        if thresholds != sorted(set(thresholds)):
            raise ValueError(
                f"resource_thresholds {thresholds} do not ascend: a pair of up to the first "
                "number of lines is low (extremely low, where there are three), one of the last "
                "or more is high"
            )
        if self.best_by == "extremely_low" and len(thresholds) < 3:
            raise ValueError(
                "best_by is extremely_low, which is a tier only where resource_thresholds has "
                "three numbers: give them, or name another tier"
            )
        chosen = [
            f"{name} is {value}"
            for name, value, default in (
                ("best_by", self.best_by, "all"),
                ("best_by_route", self.best_by_route, "specific"),
            )
            if value != default
        ]
        if self.average_last and not self.patience and chosen:
            raise ValueError(
                f"{chosen[0]}, which chooses a validation's weights, and average_last is "
                f"{self.average_last}, which takes the mean of the last ones: leave one of them "
                "out, or set patience, for which it says when training ends"
            )
        return self


class LoggingConfig(Settings):
    """What is written about a run; changes nothing in its result."""

    every: Updates = 100
    """Updates between two lines of metrics."""


class SavingConfig(Settings):
    """How training states are written; changes nothing in the result."""

    in_background: bool = False
    """Training goes on while a copy of the state (in host memory) is written."""
    keep_states: Literal["none", "last", "all"] = "none"
    """What of ``OUT.run`` stays when a training stage is done. ``none``: nothing, the folder is
    removed; ``last``: the state of the last update, from which training goes on where
    training.updates is raised later; ``all``: the last training.keep_last of them, for
    ``mmnmt checkpoint average --run``, and those of training.average_last."""


class UpcyclingConfig(Settings):
    """upcycle: dense feed-forwards become experts (MMNMT, §4.2)."""

    method: Literal["elementwise", "per_neuron", "noise"] = "elementwise"
    mask_ratio: DropRate = 0.1
    """Share of each expert's parameters (or hidden neurons) set to zero; 0 copies."""
    noise_std: Annotated[float, number(least=0, most=1000)] = 0.01
    """Standard deviation of method ``noise``, relative to the tensor's own."""
    token_routers: Literal["copy", "fresh"] = "copy"
    """What becomes of routers that a source has; where it has none they start fresh."""
    graft_group_routers: Literal["copy", "fresh"] = "copy"
    """Group routers over a token router: copies of it leave the function unchanged."""
    kept_experts: tuple[Annotated[int, whole(0, MAX_EXPERTS)], ...] = ()
    """Of sources that have more experts than the model: which of them stay, in this order."""
    seed: Seed = 1


class DecodingConfig(Settings):
    """How translations are found: beam search, or sampling."""

    search: Literal["beam", "sampling"] = "beam"
    beam_size: Annotated[int, whole(1, 1000)] = 5
    """Of beam search."""
    n_best: Annotated[int, whole(1, 1000)] = 1
    """Hypotheses that are kept of a sentence: of beam search the best, at most beam_size; of
    sampling as many independent samples, the first of which is the translation."""
    length_penalty: Annotated[float, number(least=-10, most=10)] = 1.0
    """Scores are divided by length to this power: more than 0 favours long hypotheses."""
    max_length_ratio: Annotated[float, number(least=0, most=1000)] = 2.0
    max_extra_length: Annotated[int, whole(0, 2**20)] = 10
    """A hypothesis has at most max_length_ratio · source tokens + max_extra_length tokens."""
    tokens: BatchTokens = 4096
    """Source tokens × hypotheses at work (beam_size, or samples) of a batch stay within this."""
    stopping: Literal["fairseq", "huggingface"] = "fairseq"
    """Whose rule ends a sentence and normalises scores; see ``decoding/stopping.py``."""
    precision: Literal["float32", "bfloat16", "int8"] = "float32"
    """int8, on CPU: linear layers in 8 bits, the rest in float32; see
    ``decoding/quantization.py``."""
    route: Route = "specific"
    """Of a model with language modules and a shared one: through which it translates."""
    sampling_temperature: Temperature = 1.0
    """Tokens are sampled in proportion to p^(1/T): towards 0 the likeliest, with inf uniformly."""
    top_k: Annotated[int, whole(0, 10**9)] = 0
    """Sampling draws from this many likeliest tokens; 0: from all."""
    top_p: Annotated[float, number(above=0, most=1)] = 1.0
    """Sampling draws from the fewest likeliest tokens that together have this probability."""
    seed: Seed = 1
    """Of sampling. A sentence's samples depend on it and on the sentence alone: equal lines have
    equal samples, whatever stands beside them."""
    banned: tuple[str, ...] = ()
    """Phrases that no translation has, as the vocabulary spells them."""
    required: tuple[str, ...] = ()
    """Phrases that every translation has, as the vocabulary spells them; of beam search."""
    targets: tuple[str, ...] = ()
    """Test lines are translated into these languages alone; empty: into all."""
    word_scores: bool = False
    """The log-probability of every word, by one pass over the finished translation."""
    router_language: str = ""
    """The language whose vector an Ada-MSHA router with ``language_vector`` sees, whatever language
    the source is in: MoCE's experiment with wrong ones (appendix I). Empty: the source's."""
    alignments: bool = False
    """Which source word each word looks at most, by the mean of the heads of a layer."""
    alignment_layer: Annotated[int, whole(0, 999)] | None = None
    """Decoder layer whose attention to the source aligns, counted from 0; None: the last."""

    @property
    def rows(self) -> int:
        """Hypotheses of a sentence that are at work at once."""
        return self.beam_size if self.search == "beam" else self.n_best

    @property
    def wants_details(self) -> bool:
        """Whether more than one hypothesis as text is asked for."""
        return self.n_best > 1 or self.word_scores or self.alignments

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.max_length_ratio == 0 and self.max_extra_length == 0:
            raise ValueError(
                "max_length_ratio and max_extra_length are both 0, so that no hypothesis could "
                "have a token: raise one of them"
            )
        if self.required and self.search != "beam":
            raise ValueError(
                'required phrases are found by beam search alone: set search = "beam", or leave '
                "them out"
            )
        if self.n_best > self.rows:
            raise ValueError(
                f"n_best {self.n_best} exceeds beam_size {self.beam_size}, and beam search keeps "
                "no more: lower it, or raise beam_size"
            )
        return self

    @model_validator(mode="after")
    def _check_sampling(self) -> Self:
        asked = {"sampling_temperature", "top_k", "top_p", "seed"}
        fields = type(self).model_fields
        changed = [one for one in sorted(asked) if getattr(self, one) != fields[one].default]
        if self.search == "beam" and changed:
            raise ValueError(
                f'{changed[0]} is of sampling, and search is "beam": leave it out, or set search '
                'to "sampling"'
            )
        return self


ScoreName = Literal[
    "bleu",
    "chrf",
    "comet",
    "language",
    "language_restricted",
    "length_ratio",
    "copies",
    "empty",
    "invalid",
    "loops",
]
"""As the line statistics of a direction are named."""
LANGUAGE_ACCURACIES: tuple[ScoreName, ...] = ("language", "language_restricted")


class EvaluationConfig(Settings):
    """evaluate."""

    scores: tuple[ScoreName, ...] = ("bleu", "chrf", *LANGUAGE_ACCURACIES)
    """What is computed, in the order of the reports."""
    bleu_tokenizer: Literal["per-language", "13a", "flores101", "flores200"] = "per-language"
    language_accuracy: bool = True
    """False: without the language accuracies among the scores."""
    baseline: str = ""
    """The system that the others are held against, direction by direction; empty: the first."""
    language_sets: dict[str, tuple[str, ...]] = Field(default_factory=dict)
    """Languages whose directions are averaged under a name of their own, ``Long = ["my", "ta"]``:
    the language that is not the pivot decides, and it may be in several."""
    word_accuracy: bool = False
    """Whether words are scored by how often they were trained on, by their length and, where
    evaluate is given a tokenizer, by the number of their subwords."""
    word_side: Literal["target", "source"] = "target"
    """Which words are grouped: those of references and translations, or the source words that these
    are aligned to (LOBEF, Figures 3 and 4)."""
    word_lines: Annotated[int, whole(1, 10**12)] = 100_000
    """Training lines of a pair that are read for it at most, the first ones."""
    resamples: Annotated[int, whole(100, 10**6)] = 1000
    """Resamples of the test lines, for intervals and for the two tests against the baseline.
    Corrected for their number, m tests need 20 m resamples: where these leave a difference open, it
    is tested again with as many."""
    seed: Seed = 1
    """Seed of langdetect and of the resamples."""

    @property
    def computed_scores(self) -> tuple[ScoreName, ...]:
        """The scores, without language accuracies where those are not wanted."""
        if self.language_accuracy:
            return self.scores
        return tuple(name for name in self.scores if name not in LANGUAGE_ACCURACIES)

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [name for name in self.scores if self.scores.count(name) > 1]
        if twice:
            raise ValueError(f"scores names {twice[0]!r} more than once: name it once")
        if not self.computed_scores:
            raise ValueError(
                "scores leaves nothing to compute: name at least one score, and set "
                "language_accuracy to true if it is to be a language accuracy"
            )
        return self


class AnalysisConfig(Settings):
    """analyze_vectors: what is translated with wrong source-language vectors."""

    directions: tuple[str, ...] = ()
    """``ro-en``; empty: all test directions."""
    router_languages: tuple[str, ...] = ()
    """Languages whose vectors the router is shown; empty: all that the model knows."""


class TasksConfig(Settings):
    """finetune_tagger and finetune_reader: tasks other than translation, on an XLM-R."""

    languages: tuple[str, ...] = ()
    """Train on these; empty: on all that have training text."""
    max_tokens: Annotated[int, whole(16, 2**20)] = 384
    """Longer sentences are cut between words, longer passages into windows; specials included."""
    stride: Annotated[int, whole(0, 2**20)] = 128
    """Tokens that two neighbouring windows of a passage have in common."""
    max_question_tokens: Annotated[int, whole(1, 2**20)] = 64
    """Of a longer question the beginning is read."""
    max_answer_tokens: Annotated[int, whole(1, 2**20)] = 30
    """A longer answer is never given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [code for code in self.languages if self.languages.count(code) > 1]
        if twice:
            raise ValueError(f"languages names {twice[0]!r} more than once: name it once")
        return self


class Recipe(Settings):
    """All settings, one section per concern; a stage reads only the sections it declares."""

    name: str
    description: str = ""
    corpus: CorpusConfig = CorpusConfig()
    tests: OutsideTestsConfig = OutsideTestsConfig()
    clean: CleanConfig = CleanConfig()
    tokenizer: TokenizerConfig = TokenizerConfig()
    shards: ShardsConfig = ShardsConfig()
    mixture: MixtureConfig = MixtureConfig()
    groups: GroupsConfig = GroupsConfig()
    languages: LanguagesConfig = LanguagesConfig()
    model: ModelConfig = ModelConfig()
    batches: BatchesConfig = BatchesConfig()
    optimizer: OptimizerConfig = OptimizerConfig()
    loss: LossConfig = LossConfig()
    training: TrainingConfig = TrainingConfig()
    upcycling: UpcyclingConfig = UpcyclingConfig()
    decoding: DecodingConfig = DecodingConfig()
    evaluation: EvaluationConfig = EvaluationConfig()
    analysis: AnalysisConfig = AnalysisConfig()
    tasks: TasksConfig = TasksConfig()
    logging: LoggingConfig = LoggingConfig()
    saving: SavingConfig = SavingConfig()

    @model_validator(mode="after")
    def _check_warmup(self) -> Self:
        warmup, updates = self.optimizer.warmup_updates, self.training.updates
        if self.optimizer.schedule == "polynomial" and warmup >= updates:
            raise ValueError(
                f"optimizer.warmup_updates {warmup:,} is not below training.updates {updates:,}, "
                "so that the learning rate would only rise: lower it, or train longer"
            )
        return self

    @model_validator(mode="after")
    def _check_phases(self) -> Self:
        if self.training.updates_of == "bytes" and self.mixture.phases:
            raise ValueError(
                'training.updates_of is "bytes", and mixture.phases begin at updates, whose number '
                "then depends on the vocabulary: leave one of them out"
            )
        return self

    @model_validator(mode="after")
    def _check_experts(self) -> Self:
        """Of what is to be trained; a stored model of such a shape can still be used."""
        model, moe = self.model, self.model.moe
        if moe is None:
            return self
        if moe.every > max(model.encoder_layers, model.decoder_layers):
            raise ValueError(
                f"model.moe.every {moe.every} exceeds the numbers of layers, so that no layer "
                "would have experts: lower it, or leave [model.moe] out"
            )
        if moe.top_k == 1 < moe.num_experts and moe.combine_weights == "renormalized":
            raise ValueError(
                "model.moe.combine_weights is renormalized with top_k 1: the one weight is then "
                "always 1, and the router learns nothing from the translations; set it to "
                '"probability", or top_k to 2'
            )
        return self

    @model_validator(mode="after")
    def _check_targets(self) -> Self:
        into, own = self.mixture.targets, self.tokenizer.target_languages
        if own and not (into and set(into) <= set(own)):
            raise ValueError(
                f"tokenizer.target_languages, {', '.join(own)}, are all that can be translated "
                "into: let mixture.targets name them, or some of them"
            )
        if own and self.batches.tag_is_label:
            raise ValueError(
                "batches.tag_is_label is true, and with tokenizer.target_languages the model "
                "predicts pieces of those languages alone, no language token: set it to false"
            )
        return self

    @model_validator(mode="after")
    def _check_routes(self) -> Self:
        """Of what is to be trained: every module learns something."""
        modules = self.model.language_modules
        has_shared = not isinstance(modules, ClsrConfig | None) and modules.shared
        if self.loss.objective == "fuse_distillation" and not has_shared:
            raise ValueError(
                "loss.objective is fuse_distillation, which wants a model of two routes: set "
                "model.language_modules.shared to true, of kind low_rank or language_experts"
            )
        if self.loss.objective != "fuse_distillation" and has_shared:
            raise ValueError(
                "model.language_modules.shared is true, and the shared module would learn nothing: "
                'set it to false, or loss.objective to "fuse_distillation"'
            )
        return self

    @property
    def max_tokens(self) -> int:
        """Tokens of the longest sentence in shards: ``shards.max_tokens``, or what the model takes.

        A model takes a sentence that has a position for each token, tag and end-of-sentence, and
        fits into a micro-batch.
        """
        if self.shards.max_tokens is not None:
            return self.shards.max_tokens
        return max(1, min(self.model.max_positions, self.batches.tokens) - EXTRA_TOKENS)

    def sections(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The named sections, and settings of others (``training.seed``), as plain JSON.

        ``shards.max_tokens`` is resolved, so that a manifest says how long sentences could be.
        """
        shards = self.shards.model_copy(update={"max_tokens": self.max_tokens})
        resolved = self.model_copy(update={"shards": shards})
        return chosen_settings(resolved.model_dump(mode="json"), names)


def chosen_settings(tree: Mapping[str, Any], names: Iterable[str]) -> dict[str, Any]:
    """Of nested settings, the sections (``loss``) and settings (``training.seed``) named."""
    found: dict[str, Any] = {}
    for name in names:
        section, _, setting = name.partition(".")
        value = tree.get(section)
        if not setting and section in tree:
            found[section] = value
        elif isinstance(value, Mapping) and setting in value:
            found[section] = {**found.get(section, {}), setting: value[setting]}
    return found


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package, overlays included."""
    folder = resources.files("pipeline") / "recipes"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str | None, overrides: Mapping[str, Any] | None = None) -> Recipe:
    """Resolve ``NAME`` or ``PATH.toml``: its parents, itself, its ``+overlays``, the overrides.

    Args:
        name: the recipe; None: all settings at their defaults.
        overrides: sections and settings, as ``--set`` of a command or ``set`` of a plan has them.

    Raises:
        ConfigError: no such recipe, a circle of parents, or a setting that does not exist or fit.
    """
    base, *overlays = (None,) if name is None else name.split("+")
    merged = {} if base is None else _with_parents(base, seen=())
    for overlay in overlays:
        merged = _laid_over(merged, read_overlay(overlay, base=base))
    sections = overrides or {}
    where = "The default settings" if name is None else f"Recipe {name!r}"
    if sections:
        where += f" with {', '.join(map(shown, override_texts(sections)))}"
    for key in ("name", "description", "parent"):
        if key in sections:
            raise ConfigError(f"{where}: {key!r} is not a section. Set SECTION.SETTING.")
    try:
        resolved = {**_laid_over(merged, sections), "name": "defaults" if name is None else name}
        return Recipe.model_validate(resolved)
    except ValidationError as error:
        said = describe_validation(error, Recipe, also=("parent",))
        raise ConfigError(f"{where}: {said}") from error


def read_overlay(name: str, *, base: str | None) -> dict[str, Any]:
    """Return what an overlay states.

    Raises:
        ConfigError: no such recipe, or it has a parent.
    """
    document = _read_recipe(name)
    if "parent" in document:
        raise ConfigError(
            f"Recipe {name!r} has a parent, so it cannot be laid over {base!r}: "
            "an overlay states only differences."
        )
    return document


def _with_parents(name: str, *, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise ConfigError(f"Recipes {' → '.join((*seen, name))} form a circle: remove one parent.")
    document = _read_recipe(name)
    parent = document.pop("parent", None)
    if parent is None:
        return document
    if not isinstance(parent, str):
        raise ConfigError(f"Recipe {name!r}: its parent is the name of a recipe: write one.")
    return _laid_over(_with_parents(parent, seen=(*seen, name)), document)


def _laid_over(base: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return the settings of ``base`` with those of ``document`` laid over them."""
    return merge(_inherited(base, document), dict(document))


def _inherited(parent: dict[str, Any], document: Mapping[str, Any]) -> dict[str, Any]:
    """Return what a recipe inherits: all of its parent, but no thresholds of another corpus.

    ``training.resource_thresholds`` are numbers of lines of the parent's corpus: by those of the
    demo every pair of a corpus of ordinary size would be high-resource.
    """
    source = CorpusConfig().source
    own, its = (
        tree["corpus"].get("source", default) if isinstance(tree.get("corpus"), dict) else default
        for tree, default in ((parent, source), (document, None))
    )
    training = parent.get("training")
    if its in (None, own) or not isinstance(training, dict):
        return parent
    kept = {name: value for name, value in training.items() if name != "resource_thresholds"}
    return {**parent, "training": kept}


def _read_recipe(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        return read_toml(Path(name))
    if name not in recipe_names():
        if Path(f"{name}.toml").is_file():
            raise ConfigError(f"There is no recipe {name!r}: did you mean '{name}.toml'?")
        choices = hint(name, recipe_names(), otherwise="or give the path of a .toml file")
        raise ConfigError(f"There is no recipe {name!r}{choices}")
    return read_toml(Path(str(resources.files("pipeline") / "recipes" / f"{name}.toml")))
