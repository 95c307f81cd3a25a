"""Settings of the model: the section ``[model]`` of a recipe."""

from typing import TYPE_CHECKING, Annotated, Any, ClassVar, Literal, Self

from pydantic import model_validator

from pipeline.config.settings import (
    MAX_EXPERTS,
    MAX_GROUPS,
    FrontSettings,
    LanguageModuleSettings,
    Layers,
    Settings,
    VariantSettings,
    number,
    one_of,
    whole,
)
from pipeline.extensions.installed import INSTALLED

CombineWeights = Literal["renormalized", "probability"]
DecoderRouter = Literal["token", "language_group"]
GROUP_ROUTERS: tuple[DecoderRouter, ...] = ("language_group",)
"""Routers that need the language groups of a groups artifact."""
Activation = Literal["relu", "gelu"]
CapacityFactor = Annotated[float, number(above=0, most=1000)]
MAX_POSITION_VALUES = 2**30
"""Largest product of width and positions: a float32 table of sinusoids takes 4 GiB."""


class MoEConfig(Settings):
    """Mixture-of-experts feed-forwards (MMNMT, §4.1)."""

    num_experts: Annotated[int, whole(1, MAX_EXPERTS)] = 32
    top_k: Annotated[int, whole(1, MAX_EXPERTS)] = 2
    every: Layers = 2
    """Interval of MoE layers in encoder and decoder: layers n, 2n, … counted from 1."""
    decoder_router: DecoderRouter = "token"
    """Router of the decoder's MoE layers. The encoder always routes by token."""
    num_groups: Annotated[int, whole(2, MAX_GROUPS)] | None = None
    """Expected number of language groups. None accepts any number in the groups artifact."""
    combine_weights: CombineWeights = "renormalized"
    """Weights of the chosen experts. ``renormalized``: their probabilities, scaled to sum to 1;
    ``probability``: their probabilities unchanged (Switch Transformer, with top_k = 1)."""
    dispatch: Literal["dropless", "capacity"] = "dropless"
    """``dropless`` serves every route; ``capacity`` serves a limited number per expert."""
    capacity_factor: CapacityFactor = 1.25
    """Slots per expert in training = ceil(capacity_factor · top_k · tokens / num_experts)."""
    batch_prioritized: bool = True
    """Assign slots by descending top probability; otherwise by position."""
    evaluation_capacity_factor: CapacityFactor | None = None
    """Capacity factor of evaluation and decoding. None drops no route."""

    @property
    def needs_groups(self) -> bool:
        """Return whether the decoder's router needs language groups."""
        return self.decoder_router in GROUP_ROUTERS

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.num_experts:
            raise ValueError(
                f"top_k {self.top_k} exceeds num_experts {self.num_experts}: lower it, or have "
                "more experts"
            )
        return self


class EmbeddingConfig(Settings):
    """Input embeddings and the output projection."""

    removed: ClassVar = {"one_hot": ("one_scale",)}
    input: Literal["learned", "frozen", "one_hot", "one_hot_two_scales", "one_hot_fixed_scale"] = (
        "learned"
    )
    """Input embeddings. ``learned``: a trained table; ``frozen``: a table that keeps its initial
    values; ``one_hot``: row i is the unit vector e_i times a scale that encoder and decoder share
    and learn, which starts at sqrt(width); ``one_hot_two_scales``: each learns its own, and the
    sublayers of the last decoder layer have no dropout (the code of Shaham and Levy, 2021, and of
    LOBEF with ``--no-embed``); ``one_hot_fixed_scale``: no scale is learned, and dropout is as for
    learned embeddings (LOBEF's scripts). For one-hot embeddings the vocabulary must not exceed
    model.width."""
    output: Literal["tied", "untied"] = "tied"
    """Output projection: the input's table (``tied``) or a separate one (``untied``)."""

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read the scales that ``one_hot`` named as part of ``input``."""
        if values.get("input") == "one_hot" and values.get("one_hot", "one_scale") != "one_scale":
            values["input"] = f"one_hot_{values.pop('one_hot')}"
        return values

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.input == "one_hot_fixed_scale" and self.output == "tied":
            raise ValueError(
                "input is 'one_hot_fixed_scale' and output is 'tied', so that no logit could be "
                'learned: set output to "untied"'
            )
        return self


class SubwordsConfig(FrontSettings):
    """No front end: embeddings enter the encoder unchanged."""

    kind: Literal["subwords"] = "subwords"


class DenseConfig(Settings):
    """Dense feed-forward: up projection, activation, down projection."""

    kind: Literal["dense"] = "dense"


FeedForwardConfig = DenseConfig
"""Feed-forward of layers without experts. Further kinds make it a union, tagged by ``kind``."""


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
    """Position of layer norms: before each sublayer, or after its residual connection."""
    activation: Activation = "relu"
    positions: Literal["sinusoidal", "learned"] = "sinusoidal"
    max_positions: Annotated[int, whole(4, 2**20)] = 1024
    converter_layers: Annotated[int, whole(0, 1000)] = 0
    """Top encoder layers that convert the source into the target language (LCS, arXiv 2406.02876):
    the target language's embedding is added to every source token before them. The layers below see
    the source's tag only, with ``batches.tag_scheme = "src-tgt"``. 0: none."""
    scale_embedding: bool = True
    """Multiply embeddings by sqrt(width)."""
    embedding_norm: bool = False
    embedding: EmbeddingConfig = EmbeddingConfig()
    front: FrontConfig = SubwordsConfig()
    feed_forward: FeedForwardConfig = DenseConfig()
    moe: MoEConfig | None = None
    language_modules: LanguageModulesConfig | None = None
    """Language-specific weights in addition to the shared ones. None: no such weights."""
    initialization: Literal["xavier", "fairseq"] = "xavier"
    """Initial values of linear layers (``model/parameters.py``). ``xavier``: Xavier-uniform
    weights, biases 0; ``fairseq``: as fairseq's MultiheadAttention, whose query, key and value
    weights are smaller by sqrt(2), and its feed-forwards, which are PyTorch's linear layers.
    Embeddings, norms and routers start as fairseq's in both."""

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
        if self.converter_layers > self.encoder_layers:
            raise ValueError(
                f"converter_layers {self.converter_layers} exceeds encoder_layers "
                f"{self.encoder_layers}: lower it"
            )
        for variant in self.variants:
            variant.check_shape(self)
        return self

    @property
    def variants(self) -> tuple[VariantSettings, ...]:
        """The settings of the front end and, if there are any, of the language modules."""
        return (self.front, *([] if self.language_modules is None else [self.language_modules]))

    def untrainable_experts(self, *, section: str) -> str:
        """Return why experts of such settings cannot be trained; empty if they can.

        ``section`` is the name of their section for the user.
        """
        moe = self.moe
        if moe is None:
            return ""
        if moe.every > max(self.encoder_layers, self.decoder_layers):
            return (
                f"{section}.every {moe.every} exceeds the numbers of layers, so that no layer "
                f"would have experts. Lower it, or leave [{section}] out"
            )
        if moe.every > self.decoder_layers and moe.decoder_router != "token":
            return (
                f"{section}.every {moe.every} exceeds decoder_layers {self.decoder_layers}, so "
                f"that no router would be {moe.decoder_router!r}. Lower it, or leave "
                f"{section}.decoder_router out"
            )
        modules = self.language_modules
        if moe.every == 1 and modules is not None and modules.needs_dense_layers:
            return (
                f"{section}.every is 1, so that no layer would have the {modules.kind} of "
                "model.language_modules. Raise it, or leave one of these sections out"
            )
        if moe.top_k == 1 < moe.num_experts and moe.combine_weights == "renormalized":
            return (
                f"{section}.combine_weights is renormalized with top_k 1: the one weight is then "
                "always 1, and the router learns nothing from the translations. Set it to "
                '"probability", or top_k to 2'
            )
        return ""

    @property
    def has_shared_route(self) -> bool:
        """Return whether the model has a shared route in addition to the language-specific one."""
        return self.language_modules is not None and self.language_modules.has_shared_route
