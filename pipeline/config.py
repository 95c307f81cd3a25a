"""Recipes: every setting of the science once, typed, documented, with its default.

A recipe is a TOML file. It may name a ``parent`` and then states only what differs. A name can be
followed by overlays, ``bible24_moe+smoke``: each overlay is a recipe file without a parent whose
settings are laid over what stands before it. Where files lie, how many processes run and which
machine they run on are not settings of a recipe (see ``plan.py``, ``ds_configs/``, ``slurm/``).
"""

import tomllib
from importlib import resources
from pathlib import Path
from typing import Any, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from pipeline.errors import ConfigError

TagScheme = Literal["src-tgt", "tgt"]


class Settings(BaseModel):
    """Frozen settings that refuse unknown names."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class CldrConfig(Settings):
    """How many localised phrases to make from Unicode CLDR (``data_prep/cldr.py``)."""

    pivot: str = "en"
    train_pairs: dict[str, int] = Field(default_factory=dict)
    """Language → number of training phrases paired with the pivot."""
    zero_shot: tuple[str, ...] = ()
    """Languages between which there are test phrases but no training phrases."""
    valid_phrases: int = 100
    test_phrases: int = 200
    seed: int = 1


class CorpusConfig(Settings):
    """import_corpus: where raw text comes from."""

    source: Literal["tree", "cldr"] = "tree"
    cldr: CldrConfig = CldrConfig()
    languages: tuple[str, ...] = ()
    """Read only pairs of these languages; empty: all pairs found."""
    max_train_lines: int | None = None
    """Keep at most this many training lines per pair, the first ones."""
    max_valid_lines: int | None = None
    max_test_lines: int | None = None
    max_line_bytes: int = Field(default=2**20, ge=1)
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
    max_line_bytes: int = Field(default=2**20, ge=1)
    """Longer lines are put into the quarantine."""


class CleanConfig(Settings):
    """clean: rules for training lines. Validation and test lines are never dropped."""

    max_characters: int = 2000
    max_length_ratio: float = 4.0
    """Largest ratio of character counts, after dividing by the pair's median ratio."""
    drop_control_characters: bool = True
    drop_copies: bool = True
    """Source equal to target."""
    drop_swapped: bool = True
    """Lines each side of which is in the script of the other, of languages with two scripts."""
    drop_duplicates: bool = True
    drop_held_out_overlap: bool = True
    """Training lines one side of which is, letters and digits folded, a valid or test line."""


class TokenizerConfig(Settings):
    """train_tokenizer."""

    kind: Literal["sentencepiece", "bytes"] = "sentencepiece"
    vocabulary_size: int = 64000
    """Pieces, specials included, language tokens not."""
    model_type: Literal["unigram", "bpe"] = "unigram"
    character_coverage: float = 1.0
    """Less garbles Chinese."""
    sampling_temperature: float = Field(default=5.0, gt=0)
    sample_lines: int = 10_000_000
    """Lines drawn for training, over all languages."""
    seed: int = 1
    language_token_scheme: Literal["underscores", "angle"] = "underscores"
    """``__de__`` or ``<2de>``."""


class ShardsConfig(Settings):
    """make_shards."""

    max_tokens: int = 1000
    """Longer training sentences (either side, in tokens) are left out and counted; with tags and
    end-of-sentence they must fit model.max_positions and batches.tokens."""


class MixtureConfig(Settings):
    """mix: p_i ∝ (n_i / Σn)^(1/T) over language pairs."""

    sampling_temperature: float = Field(default=5.0, gt=0)


class GroupsConfig(Settings):
    """group_languages (mmnmt.md §4)."""

    method: Literal["typology", "embeddings", "paper"] = "embeddings"
    max_group_share: float = Field(default=15 / 56, gt=0, le=1)
    """T_max as a share of the corpus: groups merge only while their joint size stays below it."""
    pivot: str = "en"
    extend: dict[str, int] = Field(default_factory=dict)
    """Additions to the paper's table, language → group 1 to 4."""


class LanguagesConfig(Settings):
    """What a recipe knows of languages beyond the registry (``pipeline/languages.py``)."""

    family: dict[str, str] = Field(default_factory=dict)
    """Language → family, ``{ chr = "Iroquoian" }``; goes before the registry's."""


class MoEConfig(Settings):
    """Mixture-of-experts feed-forwards (mmnmt.md §2)."""

    num_experts: int = Field(default=32, ge=1)
    top_k: int = Field(default=2, ge=1)
    every: int = Field(default=2, ge=1)
    """Every n-th layer of encoder and decoder has experts: layers n, 2n, … counted from 1."""
    decoder_router: Literal["token", "language_group"] = "token"
    """The encoder always routes by token."""
    num_groups: int | None = None
    """Expected number of language groups; None: whatever the groups artifact has."""
    combine_weights: Literal["renormalized", "probability"] = "renormalized"
    """Kept probabilities made to sum 1, or as they are (Switch, with top_k = 1)."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    capacity_factor: float = Field(default=1.25, gt=0)
    """Slots per expert in training = ceil(capacity_factor · top_k · tokens / num_experts)."""
    batch_prioritized: bool = True
    """Slots go by descending top probability; otherwise by position."""
    evaluation_capacity_factor: float | None = None
    """None: evaluation and decoding drop nothing."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(f"top_k {self.top_k} exceeds num_experts {self.num_experts}")
        return self


class ModelConfig(Settings):
    """The encoder–decoder Transformer of the fairseq / Hugging Face M2M-100 family."""

    encoder_layers: int = 12
    decoder_layers: int = 12
    width: int = 1024
    feed_forward_width: int = 4096
    num_heads: int = 8
    norm: Literal["pre", "post"] = "pre"
    activation: Literal["relu", "gelu"] = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: int = 1024
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width)."""
    embedding_norm: bool = False
    moe: MoEConfig | None = None

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.width % self.num_heads:
            raise ValueError(f"width {self.width} is not a multiple of num_heads {self.num_heads}")
        return self


class BatchesConfig(Settings):
    """The global step: an ordered list of micro-batches that depends on (seed, step) alone."""

    micro_batches: int = Field(default=32, ge=1)
    """M: micro-batches per update over all ranks; the number of ranks must divide it."""
    tokens: int = Field(default=4096, ge=1)
    """Per micro-batch: the larger of its padded source and target tokens stays within this."""
    window_steps: int = Field(default=32, ge=1)
    """About this many updates are drawn at once and sorted by length."""
    one_direction: bool = False
    """Keep every micro-batch to one translation direction."""
    tag_scheme: TagScheme = "src-tgt"
    evaluation_tokens: int = 4096
    """Token budget of a validation micro-batch."""


class OptimizerConfig(Settings):
    """Adam and its schedule (mmnmt.md §6)."""

    learning_rate: float = 2e-4
    final_learning_rate: float = 1e-5
    schedule: Literal["polynomial", "inverse_sqrt"] = "polynomial"
    warmup_updates: int = 4000
    betas: tuple[float, float] = (0.9, 0.98)
    epsilon: float = 1e-8
    weight_decay: float = 0.0
    clip_norm: float = 0.5


class LossConfig(Settings):
    """Token-mean cross entropy plus the load-balance term."""

    label_smoothing: float = Field(default=0.0, ge=0, lt=1)
    balance_weight: float = 0.1
    """Weight of the load-balance loss, summed over MoE layers."""
    router_z_weight: float = Field(default=0.0, ge=0)
    """Weight of the router z-loss (ST-MoE), summed over MoE layers."""


class TrainingConfig(Settings):
    """pretrain and finetune."""

    updates: int = Field(default=100_000, ge=1)
    seed: int = 1
    dropout: float = Field(default=0.3, ge=0, lt=1)
    attention_dropout: float = Field(default=0.1, ge=0, lt=1)
    moe_dropout: float | None = Field(default=None, ge=0, lt=1)
    """Dropout on the output of MoE layers; None: as everywhere (NLLB raises it there)."""
    expert_output_masking: float = Field(default=0.0, ge=0, lt=1)
    """Probability that a token loses the output of one of its experts; the rest is scaled up, so
    that evaluation needs no correction (NLLB §6.2)."""
    router_jitter: float = Field(default=0.0, ge=0, lt=1)
    """Router inputs are multiplied by U(1 - jitter, 1 + jitter) (Switch Transformer §2.2)."""
    expert_parallel_size: int = Field(default=1, ge=1)
    """Ranks that share one copy of the experts; must divide their number. A world it does not
    divide uses the greatest common divisor. It changes memory and speed, not the result."""
    validate_every: int = 1000
    checkpoint_every: int = 1000
    keep_last: int = Field(default=1, ge=1)
    """Training states kept besides the weights of the best validation perplexity."""
    resource_thresholds: tuple[int, int] = (200_000, 500_000)
    """Pairs: low ≤ first, high ≥ second, medium between (mmnmt.md §5)."""


class LoggingConfig(Settings):
    """What is written about a run; changes nothing in its result."""

    every: int = 100
    """Updates between two lines of metrics."""


class SavingConfig(Settings):
    """How training states are written; changes nothing in the result."""

    in_background: bool = False
    """Training goes on while a copy of the state (in host memory) is written."""


class UpcyclingConfig(Settings):
    """upcycle: dense feed-forwards become experts (mmnmt.md §3)."""

    method: Literal["elementwise", "per_neuron", "noise"] = "elementwise"
    mask_ratio: float = Field(default=0.1, ge=0, lt=1)
    """Share of each expert's parameters (or hidden neurons) set to zero; 0 copies."""
    noise_std: float = Field(default=0.01, ge=0)
    """Standard deviation of method ``noise``, relative to the tensor's own."""
    graft_group_routers: Literal["copy", "fresh"] = "copy"
    """Group routers over a token router: copies of it leave the function unchanged."""
    seed: int = 1


class DecodingConfig(Settings):
    """Beam search (mmnmt.md §7)."""

    beam_size: int = Field(default=5, ge=1)
    length_penalty: float = 1.0
    max_length_ratio: float = 2.0
    max_extra_length: int = 10
    """A hypothesis has at most max_length_ratio · source tokens + max_extra_length tokens."""
    tokens: int = 4096
    """Source tokens × beam_size of a batch stay within this."""
    stopping: Literal["fairseq", "huggingface"] = "fairseq"
    """Whose rule ends a sentence and normalises scores; see ``decoding.py``."""
    precision: Literal["float32", "bfloat16"] = "float32"


class EvaluationConfig(Settings):
    """evaluate."""

    bleu_tokenizer: Literal["per-language", "13a", "flores200"] = "per-language"
    language_accuracy: bool = True
    seed: int = 1
    """Seed of langdetect."""


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
    logging: LoggingConfig = LoggingConfig()
    saving: SavingConfig = SavingConfig()

    def sections(self, names: tuple[str, ...]) -> dict[str, Any]:
        """The named sections as plain JSON, for manifests and stage keys."""
        dump = self.model_dump(mode="json")
        return {name: dump[name] for name in names}


def recipe_names() -> list[str]:
    """Names of the recipes that ship with the package, overlays included."""
    folder = resources.files("pipeline") / "recipes"
    return sorted(entry.name[:-5] for entry in folder.iterdir() if entry.name.endswith(".toml"))


def load_recipe(name: str) -> Recipe:
    """Resolve ``NAME`` or ``PATH.toml``, its parents and its ``+overlays``.

    Raises:
        ConfigError: no such recipe, a circle of parents, or a setting that does not exist or fit.
    """
    base, *overlays = name.split("+")
    merged = _with_parents(base, seen=())
    for overlay in overlays:
        document = _read_recipe(overlay)
        if "parent" in document:
            raise ConfigError(
                f"Recipe {overlay!r} has a parent, so it cannot be laid over {base!r}: "
                "an overlay states only differences."
            )
        merged = merge(merged, document)
    try:
        return Recipe.model_validate({**merged, "name": name})
    except ValidationError as error:
        raise ConfigError(f"Recipe {name!r}: {describe_validation(error)}") from error


def merge(base: dict[str, Any], difference: dict[str, Any]) -> dict[str, Any]:
    """Lay ``difference`` over ``base``, table by table; lists and values replace."""
    merged = dict(base)
    for key, value in difference.items():
        old = merged.get(key)
        both_tables = isinstance(old, dict) and isinstance(value, dict)
        merged[key] = merge(old, value) if both_tables else value  # type: ignore[arg-type]
    return merged


def describe_validation(error: ValidationError) -> str:
    """pydantic's findings as one sentence: where, and what is wrong."""
    findings = [
        f"{'.'.join(str(part) for part in finding['loc']) or 'settings'}: {finding['msg']}"
        for finding in error.errors()
    ]
    return "; ".join(findings) + "."


def read_toml(path: Path) -> dict[str, Any]:
    """Parse a TOML file; ConfigError says where it is broken."""
    try:
        return tomllib.loads(path.read_text(encoding="utf-8"))
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise ConfigError(f"{path} is not valid TOML ({error}): correct that line.") from error
    except OSError as error:
        raise ConfigError(f"{path} cannot be read: {error.strerror}.") from error


def _with_parents(name: str, *, seen: tuple[str, ...]) -> dict[str, Any]:
    if name in seen:
        raise ConfigError(f"Recipes {' → '.join((*seen, name))} form a circle: remove one parent.")
    document = _read_recipe(name)
    parent = document.pop("parent", None)
    if parent is None:
        return document
    return merge(_with_parents(str(parent), seen=(*seen, name)), document)


def _read_recipe(name: str) -> dict[str, Any]:
    if name.endswith(".toml"):
        return read_toml(Path(name))
    path = resources.files("pipeline") / "recipes" / f"{name}.toml"
    if not path.is_file():
        raise ConfigError(
            f"There is no recipe {name!r}: choose one of {', '.join(recipe_names())}, "
            "or give the path of a .toml file."
        )
    return read_toml(Path(str(path)))
