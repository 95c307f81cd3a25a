"""Settings of the model: the section ``[model]`` of a recipe."""

from typing import TYPE_CHECKING, Annotated, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import MAX_EXPERTS, MAX_GROUPS, Layers, Settings, number, whole
from pipeline.config.variants import FrontSettings, LanguageModuleSettings, VariantSettings, one_of
from pipeline.extensions.installed import INSTALLED

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


class SubwordsConfig(FrontSettings):
    """No front end: tokens are taken as they are."""

    kind: Literal["subwords"] = "subwords"


class DenseConfig(Settings):
    """The feed-forward of layers without experts: up, activation, down."""

    kind: Literal["dense"] = "dense"


FeedForwardConfig = DenseConfig
"""Of layers without experts: a union once there are several, told apart by ``kind``."""


if TYPE_CHECKING:
    FrontConfig = FrontSettings
    LanguageModulesConfig = LanguageModuleSettings
else:
    FrontConfig = one_of((SubwordsConfig, *(kind for one in INSTALLED for kind in one.front_ends)))
    LanguageModulesConfig = one_of([kind for one in INSTALLED for kind in one.language_modules])


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
        if self.width * self.max_positions > MAX_POSITION_VALUES:
            raise ValueError(
                f"width {self.width:,} times max_positions {self.max_positions:,} exceeds "
                f"{MAX_POSITION_VALUES:,}: lower one of them"
            )
        for variant in self.variants:
            variant.check_shape(self)
        return self

    @property
    def variants(self) -> tuple[VariantSettings, ...]:
        """The settings of the front end and, if there are any, of the language modules."""
        return (self.front, *([] if self.language_modules is None else [self.language_modules]))

    @property
    def has_shared_route(self) -> bool:
        """Whether there is a route for all languages beside those of single languages."""
        return self.language_modules is not None and self.language_modules.has_shared_route
