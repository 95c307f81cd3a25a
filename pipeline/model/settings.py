"""Settings of the model: the section ``[model]`` of a recipe."""

from typing import Annotated, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import (
    MAX_EXPERTS,
    MAX_GROUPS,
    Layers,
    Settings,
    number,
    whole,
)

CombineWeights = Literal["renormalized", "probability"]
DecoderRouter = Literal["token", "language_group"]
Activation = Literal["relu", "gelu"]
CapacityFactor = Annotated[float, number(above=0, most=1000)]
MAX_POSITION_VALUES = 2**30
"""Width times positions: 4 GiB of sinusoids."""


OddKernel = Literal[0, 1, 3, 5, 7, 9, 11, 13, 15]
Scale = Annotated[int, whole(0, 8)]
"""δ of MoCE: 0 looks at the token alone, δ > 0 convolves 2 δ - 1 tokens around it (its eq. 9)."""


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
