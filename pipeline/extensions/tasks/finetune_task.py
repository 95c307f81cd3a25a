"""finetune_task: train an XLM-R to find named entities (tagger) or answers in passages (reader).

Reads a Hugging Face folder with an XLM-R, and files of tagged text or questions by language; makes
a task model. The training loop, training states, resuming and ranks are those of translation
models.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import sys
from typing import Any

from pipeline.distributed.world import distributed_world, leave
from pipeline.extensions.tasks.files import entity_files, question_files, trained_languages
from pipeline.extensions.tasks.named_entities import tagging_data
from pipeline.extensions.tasks.question_answering import reading_data
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.task_model import TaskSpec
from pipeline.extensions.tasks.training import train_labeller
from pipeline.extensions.tasks.xlmr import Pretrained
from pipeline.stages.stage import StageCall
from pipeline.training.engine import connect


def run(call: StageCall) -> None:
    """Read the encoder and the data, and train a head and all of the encoder."""
    recipe, is_tagger = call.recipe, call.stage.name == "finetune_tagger"
    tasks = recipe.section_of(TasksConfig)
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        connect(world)
        files = (entity_files if is_tagger else question_files)(call.raw["data"].only_path())
        languages = trained_languages(files, tasks.languages)
        pretrained = Pretrained(call.raw["pretrained"].only_path())
        encoder = pretrained.spec(languages, recipe.model.language_modules)
        given: dict[str, Any] = {
            "pieces": pretrained.pieces,
            "recipe": recipe,
            "languages": languages,
        }
        if is_tagger:
            data, tags = tagging_data(files, **given)
            spec = TaskSpec(head="tagger", encoder=encoder, tags=tags, tasks=tasks)
        else:
            data = reading_data(files, **given)
            spec = TaskSpec(head="reader", encoder=encoder, tasks=tasks)
        train_labeller(call, world, data=data, spec=spec, pretrained=pretrained)


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main(f"finetune_{sys.argv[1]}", sys.argv[2:]))
