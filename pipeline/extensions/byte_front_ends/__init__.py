"""Encoder front ends of byte-level models: MSC, MSHA, Ada-MSHA, Byte-nCF and Byte-WSF.

The settings are here (``model.front``). Read ``extension.py`` next, then the module of a front end.
A front end makes queries, keys and values depend on neighboring tokens (MSC, MSHA, Ada-MSHA), fuses
n-grams (nCF), or restricts attention to words (WSF). Its parameters are named ``front.…``.
"""

from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import Field, model_validator

from pipeline.config.settings import FrontSettings, InstalledExtension, ModelShape, PieceIds, whole

OddKernel = Literal[0, 1, 3, 5, 7, 9, 11, 13, 15]
Scale = Annotated[int, whole(0, 8)]
"""Scale δ of MoCE (eq. 9): 0 uses only the token; δ > 0 convolves 2 δ - 1 tokens around it."""


class ContextualizingFront(FrontSettings):
    """Front ends that contextualize the queries, keys and values of one encoder layer."""

    layer: Annotated[int, whole(0, 999)] = 0
    """Encoder layer with contextualization, counted from 0."""

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the layer does not exist."""
        _check_layer("layer", self.layer, last=model.encoder_layers - 1, model=model)


class ScalingFront(ContextualizingFront):
    """Front ends with a scale of each head."""

    removed: ClassVar = {
        "scaled": ("after",),
        "separate_routers": (False,),
        "single_weight": ("straight_through",),
        "weights": ("logits",),
    }
    reading: Literal["default", "code", "equations"] = "default"
    """Form of a front end of which MoCE's equations and code differ. ``default``: queries are
    scaled after contextualization (eq. 8), a softmax over the logits of the chosen scales weights
    them, and with top_k = 1 the weight is 1, with a gradient to the logit; ``code``: queries are
    scaled before, and with top_k = 1 the weight is the logit; ``equations``: as ``default``, but
    the softmax is over the probabilities of the chosen scales (eqs. 2 and 12)."""


class MscConfig(ContextualizingFront):
    """MSC: convolutions before the queries, keys and values of one layer (MoCE, §2.2)."""

    kind: Literal["msc"] = "msc"
    kernels: Annotated[tuple[OddKernel, ...], Field(min_length=1)] = (0, 0, 3, 3, 5, 5, 7, 7)
    """Kernel size of each group that the width is split into; 0 leaves a group unchanged. MoCE uses
    0, 0, 1, 1, 3, 5, 5, 7 for OPUS-100."""

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the layer does not exist or the groups do not divide the width."""
        super().check_shape(model)
        if model.width % len(self.kernels):
            raise ValueError(
                f"width {model.width} is not a multiple of the {len(self.kernels)} groups of "
                "front.kernels: change one of them"
            )


class MshaConfig(ScalingFront):
    """MSHA: each attention head of one layer has its own scale (MoCE, §3.1)."""

    kind: Literal["msha"] = "msha"
    scales: Annotated[tuple[Scale, ...], Field(min_length=1)] = (0, 0, 2, 2, 3, 3, 4, 4)
    """Scale δ of each head; at 3, for example, a head convolves 5 tokens."""

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the layer does not exist or the scales do not match the heads."""
        super().check_shape(model)
        if len(self.scales) != model.num_heads:
            raise ValueError(
                f"front.scales names {len(self.scales)} scales for num_heads {model.num_heads}: "
                "name one for each head"
            )


class AdaMshaConfig(ScalingFront):
    """Ada-MSHA: a router chooses the scales that each head of each token mixes (MoCE, §3.2)."""

    kind: Literal["ada_msha"] = "ada_msha"
    max_scale: Annotated[int, whole(1, 8)] = 5
    """Largest scale Δ: the experts are δ = 0 … Δ."""
    top_k: Annotated[int, whole(1, 9)] = 2
    """Number of scales that a head mixes."""
    language_vector: bool = False
    """Whether the router also sees the embedding of the source language's token (``+lid``,
    §3.3)."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        if self.top_k > self.max_scale + 1:
            raise ValueError(
                f"top_k {self.top_k} exceeds the {self.max_scale + 1} experts of max_scale "
                f"{self.max_scale}: lower it"
            )
        return self

    def marks(self, vocabulary: PieceIds) -> dict[str, Any]:
        """Return the ids of the language tokens, if the router sees them."""
        if not self.language_vector:
            return {}
        return {
            "language_token_ids": tuple(map(vocabulary.language_token_id, vocabulary.languages))
        }


class NcfConfig(FrontSettings):
    """Byte-nCF: fusion of n-grams of states after the first layers (LOBEF, §3.1)."""

    removed: ClassVar = {"orders": ([1, 2, 3, 4], (1, 2, 3, 4))}
    kind: Literal["ncf"] = "ncf"
    layers_before: Annotated[int, whole(0, 999)] = 1
    """Number of encoder layers before the fusion. LOBEF's code has 4 of 6."""

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the encoder has fewer layers."""
        _check_layer("layers_before", self.layers_before, last=model.encoder_layers, model=model)


class WsfConfig(FrontSettings):
    """Byte-WSF: attention within words in the first layers (LOBEF, §3.2).

    White space separates words. In a language written without spaces (Chinese, Japanese, Thai, Lao,
    Khmer, Burmese, Tibetan), a line is about one word, and these layers attend to the whole
    line; training lists such languages with their lines. If such a language is only a source,
    insert spaces with a segmenter before the import.
    """

    parts_words: ClassVar[bool] = True

    kind: Literal["wsf"] = "wsf"
    layers: Annotated[int, whole(1, 1000)] = 4
    """Number of first encoder layers that attend within words. LOBEF's code has 2 of 6."""

    def check_shape(self, model: ModelShape) -> None:
        """Raise ValueError if the encoder has fewer layers."""
        _check_layer("layers", self.layers, last=model.encoder_layers, model=model)

    def marks(self, vocabulary: PieceIds) -> dict[str, Any]:
        """Return the ids that are a word each: white space and language tokens."""
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


class _ByteFrontEnds(InstalledExtension):
    front_ends = FRONT_ENDS

    def load_model(self) -> Any:
        from pipeline.extensions.byte_front_ends.extension import ByteFrontEnds

        return ByteFrontEnds()


EXTENSION = _ByteFrontEnds()
