"""Tasks other than translation on an XLM-R: named entities and question answering.

``finetune_task`` trains a head on the encoder, ``evaluate_task`` compares systems. Read
``named_entities`` or ``questions`` first: from files to examples, predictions and scores.
"""

from typing import Any, ClassVar

from pipeline.config.settings import InstalledExtension
from pipeline.extensions.tasks.settings import TasksConfig


class _Tasks(InstalledExtension):
    sections: ClassVar = {"tasks": TasksConfig}

    def load_stages(self) -> Any:
        from pipeline.extensions.tasks.stages import STAGES

        return STAGES


EXTENSION = _Tasks()
