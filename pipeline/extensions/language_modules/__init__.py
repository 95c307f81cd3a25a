"""Language-specific modules: low-rank matrices (LMS), feed-forwards, gated projections (CLSR).

The settings are here (``model.language_modules``). Read ``extension.py`` next, then ``stack.py``
and the module of one kind.
"""

from typing import Annotated, Any, ClassVar, Literal

from pydantic import Field

from pipeline.config.settings import InstalledExtension, LanguageModuleSettings, whole


class RoutedModules(LanguageModuleSettings):
    """Modules that the languages of a sentence select."""

    decoder_language: Literal["target", "source"] = "target"
    """Language that selects the decoder's modules, with kind low_rank in language-wise synthesis
    (target in the paper, source in its code). The encoder's is the source."""
    shared: bool = False
    """Add a module for all languages and its route, which fuse distillation trains."""

    @property
    def has_shared_route(self) -> bool:
        """Return whether the model has a route for all languages."""
        return self.shared


class LowRankConfig(RoutedModules):
    """Language-specific matrix synthesis: linear layers W + V F, V and F of rank d per language."""

    fits_encoder_alone: ClassVar[bool] = True
    removed: ClassVar = {
        "encoder_layers": (None,),
        "decoder_layers": (None,),
    }

    kind: Literal["low_rank"] = "low_rank"
    rank: Annotated[int, whole(1, 2**16)] = 32
    synthesis: Literal["pair_wise", "language_wise"] = "pair_wise"
    """``pair_wise``: V of the source and F of the target language; ``language_wise``: both of the
    same language, which is the source in the encoder."""
    within: Annotated[
        tuple[Literal["feed_forward", "self_attention", "cross_attention"], ...],
        Field(min_length=1),
    ] = ("feed_forward",)
    """Sublayers that have modules in their linear layers, except experts (model.moe). The authors'
    code has all three; the sizes of the paper's table 6 leave out cross-attention."""

    @property
    def needs_dense_layers(self) -> bool:
        """Return whether only feed-forwards have modules."""
        return set(self.within) == {"feed_forward"}

    @classmethod
    def of_today(cls, values: dict[str, Any]) -> dict[str, Any]:
        """Read ``attention`` and ``both``, and whether ``cross_attention`` had modules."""
        if isinstance(within := values.get("within"), str):
            has_cross = values.pop("cross_attention", True)
            attention = ["self_attention", *(["cross_attention"] if has_cross else [])]
            named = {"attention": attention, "both": ["feed_forward", *attention]}
            values["within"] = named.get(within, [within])
        return values


class LanguageExpertsConfig(RoutedModules):
    """Language experts: one feed-forward per language."""

    removed: ClassVar = {"every": (1,)}
    kind: Literal["language_experts"] = "language_experts"

    @property
    def needs_dense_layers(self) -> bool:
        """Return True: they are feed-forwards."""
        return True


class ClsrConfig(LanguageModuleSettings):
    """Conditional language-specific routing: gates between projections (Zhang et al., 2021)."""

    removed: ClassVar = {"noise": (5.0,)}
    kind: Literal["clsr"] = "clsr"
    tables: Literal["per_side", "per_sublayer"] = "per_side"
    """One set of projections for the encoder and one for the decoder, or (CLSR*) one for every
    sublayer."""
    shared_projection: Literal["per_sublayer", "none"] = "per_sublayer"
    """W_shared. ``per_sublayer``: a linear layer in every sublayer, which replaces the output
    projection of attention (the authors' code). ``none``: attention keeps its output projection,
    a gate of 0 leaves the result of the sublayer unchanged, and the model starts as the plain one.
    Without ``cross_attention`` and with a ``gate_width`` of 64, ``none`` gives the sizes that Xu et
    al. (2023) state for CLSR and CLSR*."""
    cross_attention: bool = True
    """Whether projections also follow cross-attention."""
    gate_width: Annotated[int, whole(1, 2**16)] = 128
    """Hidden width of the gate network."""


LANGUAGE_MODULES: tuple[type[LanguageModuleSettings], ...] = (
    LowRankConfig,
    LanguageExpertsConfig,
    ClsrConfig,
)


class _LanguageModules(InstalledExtension):
    language_modules = LANGUAGE_MODULES

    def load_model(self) -> Any:
        from pipeline.extensions.language_modules.extension import LanguageModules

        return LanguageModules()


EXTENSION = _LanguageModules()
