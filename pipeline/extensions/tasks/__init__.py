"""Tasks other than translation on an XLM-R: named entities and question answering.

``finetune_task tagger`` and ``finetune_task reader`` train a head on the encoder, ``evaluate_task``
compares systems. Read ``named_entities`` or ``question_answering`` first: they turn files into
examples of a model.
"""

from typing import Any, ClassVar

from pipeline.config.variants import InstalledExtension
from pipeline.extensions.tasks.settings import TasksConfig


class _Tasks(InstalledExtension):
    sections: ClassVar = {"tasks": TasksConfig}

    def load_stages(self) -> Any:
        from pipeline.extensions.tasks.stages import STAGES

        return STAGES


EXTENSION = _Tasks()
