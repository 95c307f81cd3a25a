"""finetune_tagger: an XLM-R that finds named entities.

Reads a folder of Hugging Face's with an XLM-R, and files of tagged text by language; makes a task
model. Trained as translation models are: the same loop, states, resuming and ranks.
"""

from pipeline.distributed.world import distributed_world, leave, local_device
from pipeline.extensions.tasks.files import entity_files
from pipeline.extensions.tasks.named_entities import read_training, tagging_data
from pipeline.extensions.tasks.settings import TasksConfig
from pipeline.extensions.tasks.task_model import TaskSpec, build_labeller
from pipeline.extensions.tasks.training import Labelling, trained_languages
from pipeline.extensions.tasks.xlmr import Pretrained
from pipeline.model.regularization import Regularization
from pipeline.stages.stage import StageCall
from pipeline.training.engine import connect
from pipeline.training.loop import train_task

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded


def run(call: StageCall) -> None:
    """Read the encoder and the text, and train a head and all of the encoder."""
    recipe = call.recipe
    tasks = recipe.section_of(TasksConfig)
    with distributed_world() as world:
        connect(world)
        files = entity_files(call.raw["data"].only_path())
        languages = trained_languages(files, tasks.languages)
        train, valid, tags = read_training(files, languages)
        pretrained = Pretrained(call.raw["pretrained"].only_path())
        pieces, encoder = (
            pretrained.pieces,
            pretrained.spec(languages, recipe.model.language_modules),
        )
        spec = TaskSpec(head="tagger", encoder=encoder, tags=tags, tasks=tasks)
        data = tagging_data(train, valid, tags, pieces=pieces, recipe=recipe, languages=languages)
        model = build_labeller(
            spec,
            regularization=Regularization.of(recipe.training),
            device=local_device(world.local_rank),
        )
        pretrained.fill(model, spec.encoder, seed=recipe.training.seed)
        train_task(call, model, Labelling(data, spec, pieces), world=world)


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune_tagger"))
