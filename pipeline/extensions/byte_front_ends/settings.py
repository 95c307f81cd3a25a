"""Settings of the encoder front ends of byte-level models (``model.front``)."""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import whole
from pipeline.config.variants import FrontSettings, ModelShape, Vocabulary

OddKernel = Literal[0, 1, 3, 5, 7, 9, 11, 13, 15]
Scale = Annotated[int, whole(0, 8)]
"""δ of MoCE: 0 looks at the token alone, δ > 0 convolves 2 δ - 1 tokens around it (its eq. 9)."""


class MscConfig(FrontSettings):
    """Multi-scale contextualisation before a layer's queries, keys and values (MoCE, §2.2)."""

    kind: Literal["msc"] = "msc"
    kernels: Annotated[tuple[OddKernel, ...], Field(min_length=1)] = (0, 0, 3, 3, 5, 5, 7, 7)
    """Of each group that the width is cut into; 0: it stays as it is. MoCE takes 0, 0, 1, 1, 3, 5,
    5, 7 for OPUS-100."""
    layer: Annotated[int, whole(0, 999)] = 0
    """Of the encoder, counted from 0."""

    def check_shape(self, model: ModelShape) -> None:
        _check_layer("layer", self.layer, last=model.encoder_layers - 1, model=model)
        if model.width % len(self.kernels):
            raise ValueError(
                f"width {model.width} is not a multiple of the {len(self.kernels)} groups of "
                "front.kernels: change one of them"
            )


class MshaConfig(FrontSettings):
    """Every head of a layer's attention at a scale of its own (MoCE, §3.1)."""

    kind: Literal["msha"] = "msha"
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0, 0, 2, 2, 3, 3, 4, 4)
    """δ of each head."""
    layer: Annotated[int, whole(0, 999)] = 0
    scaled: Literal["after", "before"] = "after"
    """Queries are scaled after they are contextualised (MoCE, eq. 8), or before, as its code."""

    def check_shape(self, model: ModelShape) -> None:
        _check_layer("layer", self.layer, last=model.encoder_layers - 1, model=model)
        if len(self.scales) != model.num_heads:
            raise ValueError(
                f"front.scales names {len(self.scales)} scales for num_heads {model.num_heads}: "
                "name one for each head"
            )


class AdaMshaConfig(FrontSettings):
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

    def check_shape(self, model: ModelShape) -> None:
        _check_layer("layer", self.layer, last=model.encoder_layers - 1, model=model)

    def marks(self, vocabulary: Vocabulary) -> dict[str, Any]:
        if not self.language_vector:
            return {}
        return {
            "language_token_ids": tuple(map(vocabulary.language_token_id, vocabulary.languages))
        }


class NcfConfig(FrontSettings):
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

    def check_shape(self, model: ModelShape) -> None:
        _check_layer("layers_before", self.layers_before, last=model.encoder_layers, model=model)


class WsfConfig(FrontSettings):
    """Attention within words in the first layers (LOBEF, §3.2).

    Words are what white space parts. In a language that is written without (Chinese, Japanese,
    Thai, Lao, Khmer, Burmese, Tibetan) a line has hardly more than one word, and these layers see
    it as the others do; training names such languages with their lines. As sources alone they can
    be had with spaces: part their words by any segmenter before the text is imported.
    """

    parts_words: ClassVar[bool] = True

    kind: Literal["wsf"] = "wsf"
    layers: Annotated[int, whole(1, 1000)] = 4
    """Of the encoder, from the first on; LOBEF's code has 2 of 6."""

    def check_shape(self, model: ModelShape) -> None:
        _check_layer("layers", self.layers, last=model.encoder_layers, model=model)

    def marks(self, vocabulary: Vocabulary) -> dict[str, Any]:
        tags = map(vocabulary.language_token_id, vocabulary.languages)
        return {"lone_ids": (*vocabulary.white_space_ids(), *tags)}


def _check_layer(name: str, layer: int, *, last: int, model: ModelShape) -> None:
    if layer > last:
        raise ValueError(
            f"front.{name} {layer} lies beyond encoder_layers {model.encoder_layers}: lower it"
        )


FRONT_ENDS: tuple[type[FrontSettings], ...] = (
    MscConfig,
    MshaConfig,
    AdaMshaConfig,
    NcfConfig,
    WsfConfig,
)
