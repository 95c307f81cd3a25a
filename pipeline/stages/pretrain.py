"""Train a dense, MoE or MoE-LGR model from scratch: the stage ``pretrain`` (MMNMT, §4.1).

It reads shards, a mixture and, for a language-group router, groups, and makes a checkpoint. Every
rank runs this module; ``mmnmt pretrain --processes N`` or a launcher such as ``torchrun`` starts
the ranks. :func:`pipeline.training.translation.train` checks the data and starts the loop of
:mod:`pipeline.training.loop`.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

from dataclasses import replace

from pipeline.artifacts.language_groups import read_groups
from pipeline.artifacts.tokenizer import Tokenizer
from pipeline.distributed.world import distributed_world, leave, local_device
from pipeline.estimates.devices import micro_batches_that_fit, peak_operations
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights
from pipeline.model.spec import ModelSpec, groups_of_languages, make_spec, marks_of_vocabulary
from pipeline.stage import StageCall
from pipeline.training.engine import connect, expert_parallel_group
from pipeline.training.settings import Regularization
from pipeline.training.translation import train, training_data


def run(call: StageCall) -> None:
    """Build the recipe's model, initialize it and train it."""
    training = call.recipe.training
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        call.open_inputs()
        connect(world)
        data = training_data(call)
        spec = model_spec(call, data.tokenizer)
        model = build_model(
            spec,
            regularization=Regularization.of(training),
            expert_parallel=expert_parallel_group(training.expert_parallel_size, world=world),
            device=local_device(world.local_rank),
        )
        initialize_weights(model, seed=training.seed)
        call = replace(
            call,
            peak_operations=peak_operations(call.ds_config),
            per_pass=micro_batches_that_fit(call, spec),
        )
        train(call, model, data, world=world)


def model_spec(call: StageCall, tokenizer: Tokenizer) -> ModelSpec:
    """Return the spec of the recipe's model; every checkpoint of the model stores it."""
    groups = call.artifacts.get("groups")
    recipe = call.recipe
    return make_spec(
        model=recipe.model,
        vocabulary_size=tokenizer.size,
        pad_id=tokenizer.pad_id,
        languages=tokenizer.languages,
        language_groups=groups_of_languages(
            recipe.model,
            languages=tokenizer.languages,
            groups=read_groups(groups) if groups is not None else None,
        ),
        tag_scheme=recipe.batches.tag_scheme,
        **marks_of_vocabulary(recipe.model, tokenizer),
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("pretrain"))
