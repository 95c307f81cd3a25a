"""Analyses: languages inside a model; scales, lengths and language vectors of byte models.

Each analysis is a stage that makes an artifact of kind ``analysis``: data as JSON, and pictures of
it as SVG. ``report`` shows them next to the scores of an evaluation.
"""

from collections.abc import Mapping
from typing import Any, ClassVar

from pipeline.config.settings import InstalledExtension
from pipeline.extensions.analysis.settings import AnalysisConfig


class _Analysis(InstalledExtension):
    sections: ClassVar = {"analysis": AnalysisConfig}

    def load_stages(self) -> Any:
        from pipeline.extensions.analysis.stages import STAGES

        return STAGES

    def report_sections(self, analyses: Mapping[str, Any]) -> Any:
        from pipeline.extensions.analysis.report import analysis_sections

        return analysis_sections(analyses)


EXTENSION = _Analysis()
