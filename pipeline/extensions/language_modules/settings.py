"""Settings of weights that belong to single languages (``model.language_modules``)."""

from typing import Annotated, ClassVar, Literal

from pydantic import model_validator

from pipeline.config.settings import number, whole
from pipeline.config.variants import LanguageModuleSettings, ModelShape


class LowRankConfig(LanguageModuleSettings):
    """Language-specific matrix synthesis: linear layers W + V F, V and F of rank d per language."""

    fits_encoder_alone: ClassVar[bool] = True

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

    def check_shape(self, model: ModelShape) -> None:
        for name, chosen, layers in (
            ("encoder_layers", self.encoder_layers, model.encoder_layers),
            ("decoder_layers", self.decoder_layers, model.decoder_layers),
        ):
            if chosen is not None and max(chosen, default=0) >= layers:
                raise ValueError(
                    f"language_modules.{name} names layer {max(chosen)}, and there are "
                    f"{layers}, counted from 0: leave it out"
                )

    @property
    def has_shared_route(self) -> bool:
        return self.shared


class LanguageExpertsConfig(LanguageModuleSettings):
    """A language-level mixture of experts: one whole feed-forward per language."""

    kind: Literal["language_experts"] = "language_experts"
    every: Annotated[int, whole(1, 1000)] = 1
    """Every n-th layer has them: layers n, 2n, … counted from 1."""
    shared: bool = False
    """A further feed-forward for all languages, which fuse distillation teaches, and its route."""
    decoder_language: Literal["target", "source"] = "target"
    """Whose feed-forwards the decoder has; the encoder has the source's."""

    @property
    def has_shared_route(self) -> bool:
        return self.shared


class ClsrConfig(LanguageModuleSettings):
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


LANGUAGE_MODULES: tuple[type[LanguageModuleSettings], ...] = (
    LowRankConfig,
    LanguageExpertsConfig,
    ClsrConfig,
)
