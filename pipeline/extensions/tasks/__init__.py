"""Tasks other than translation: named entities and question answering, on an XLM-R."""

from typing import Any, ClassVar

from pipeline.config.variants import InstalledExtension
from pipeline.extensions.tasks.settings import TasksConfig


class _Tasks(InstalledExtension):
    sections: ClassVar = {"tasks": TasksConfig}

    def load_stages(self) -> Any:
        from pipeline.extensions.tasks.stages import STAGES

        return STAGES


EXTENSION = _Tasks()
