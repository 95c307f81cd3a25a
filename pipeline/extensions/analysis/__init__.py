"""Analyses: languages inside a model; scales, lengths and language vectors of byte models.

Each analysis is a stage that makes an artifact of kind ``analysis``: data as JSON, and pictures of
it as SVG. ``report`` shows them next to the scores of an evaluation.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pipeline.config.settings import InstalledExtension, Settings


class AnalysisConfig(Settings):
    """Translation with wrong source-language vectors by the stage analyze_vectors."""

    directions: tuple[str, ...] = ()
    """Directions to translate, for example ``ro-en``; empty: all test directions."""
    router_languages: tuple[str, ...] = ()
    """Languages: the router is given the vector of each; empty: all that the model knows."""


class _Analysis(InstalledExtension):
    sections: ClassVar = {"analysis": AnalysisConfig}

    def load_stages(self) -> Any:
        from pipeline.stage import Input, Stage

        return (
            Stage(
                name="analyze_scales",
                command="analyze scales",
                module="pipeline.extensions.analysis.analyze_scales",
                makes="analysis",
                help="count the scales that an Ada-MSHA model chooses, by language and direction",
                sections=(),
                inputs={
                    "checkpoint": Input("checkpoint", "model with an Ada-MSHA front"),
                    "corpus": Input("corpus", "test sets"),
                },
            ),
            Stage(
                name="analyze_vectors",
                command="analyze vectors",
                module="pipeline.extensions.analysis.analyze_vectors",
                makes="analysis",
                help="score an Ada-MSHA model whose router sees the vector of a wrong language",
                sections=("analysis", "decoding", "evaluation.bleu_tokenizer"),
                inputs={
                    "checkpoint": Input("checkpoint", "model with language vectors"),
                    "without": Input(
                        "checkpoint", "model without, to be scored too", required=False
                    ),
                    "corpus": Input("corpus", "test sets"),
                },
                undeciding=("decoding.tokens",),
                needs_recipe=False,
            ),
            Stage(
                name="analyze_languages",
                command="analyze languages",
                module="pipeline.extensions.analysis.analyze_languages",
                makes="analysis",
                help="compare languages inside a model: experts of directions, encoder states of "
                "lines",
                sections=(),
                inputs={
                    "checkpoint": Input("checkpoint", "model"),
                    "corpus": Input("corpus", "test sets, best of one text in all languages"),
                    "training": Input(
                        "corpus", "training text, if corpus has none", required=False
                    ),
                },
            ),
            Stage(
                name="analyze_lengths",
                command="analyze lengths",
                module="pipeline.extensions.analysis.analyze_lengths",
                makes="analysis",
                help="count the bytes that languages need for the same test lines",
                sections=(),
                inputs={
                    "corpus": Input("corpus", "test sets, of one text in all languages"),
                    "tokenizer": Input(
                        "tokenizer",
                        "for pieces a word and the share of unknown ones",
                        required=False,
                    ),
                },
            ),
        )

    def report_sections(self, analyses: Mapping[str, Any]) -> Any:
        from pipeline.extensions.analysis.report import analysis_sections

        return analysis_sections(analyses)


EXTENSION = _Analysis()
