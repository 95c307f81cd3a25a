"""finetune_reader: train an XLM-R to find answers in passages.

Reads a Hugging Face folder with an XLM-R, and files of questions by language; makes a task model.
The training loop, training states, resuming and ranks are those of translation models.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

from pipeline.distributed.world import distributed_world, leave
from pipeline.extensions.tasks.files import question_files, trained_languages
from pipeline.extensions.tasks.question_answering import reading_data
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.task_model import TaskSpec
from pipeline.extensions.tasks.training import train_labeller
from pipeline.extensions.tasks.xlmr import Pretrained
from pipeline.stages.stage import StageCall
from pipeline.training.engine import connect


def run(call: StageCall) -> None:
    """Read the encoder and the questions, and train a head and all of the encoder."""
    recipe = call.recipe
    tasks = recipe.section_of(TasksConfig)
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        connect(world)
        files = question_files(call.raw["data"].only_path())
        languages = trained_languages(files, tasks.languages)
        pretrained = Pretrained(call.raw["pretrained"].only_path())
        encoder = pretrained.spec(languages, recipe.model.language_modules)
        data = reading_data(files, pieces=pretrained.pieces, recipe=recipe, languages=languages)
        spec = TaskSpec(head="reader", encoder=encoder, tasks=tasks)
        train_labeller(call, world, data=data, spec=spec, pretrained=pretrained)


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune_reader"))
