"""Train a checkpoint further with a new optimizer: the stage ``finetune`` (MMNMT, §4.3).

It reads shards, a mixture and the checkpoint to start from, assembled or not, and makes a
checkpoint. The checkpoint owns the model's shape; the recipe decides how the model is trained.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

from dataclasses import replace

from pipeline.checkpoints.checkpoint import (
    load_model,
    read_spec,
    read_tokenizer,
    refuse_other_tokenizer,
)
from pipeline.config.recipe import describe_change
from pipeline.distributed.world import distributed_world, leave, local_device
from pipeline.errors import ConfigError
from pipeline.estimates.devices import micro_batches_that_fit, peak_operations
from pipeline.model.spec import in_codes
from pipeline.model.sublayer import Regularization
from pipeline.stage import StageCall
from pipeline.stages.pretrain import train, training_data
from pipeline.training.engine import connect, expert_parallel_group


def run(call: StageCall) -> None:
    """Load the checkpoint's model and train it further."""
    training, checkpoint = call.recipe.training, call.artifacts["checkpoint"]
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        call.open_inputs()
        connect(world)
        data, device = training_data(call), local_device(world.local_rank)
        refuse_other_model(call, fingerprint=data.tokenizer.fingerprint)
        model = load_model(
            checkpoint,
            regularization=Regularization.of(training),
            expert_parallel=expert_parallel_group(training.expert_parallel_size, world=world),
            device=device,
        )
        if device.type == "cuda":  # a CPU has no peak, and a pass for each micro-batch
            call = replace(
                call,
                peak_operations=peak_operations(call.ds_config),
                per_pass=micro_batches_that_fit(call, model.spec),
            )
        train(call, model, data, world=world)


def refuse_other_model(call: StageCall, *, fingerprint: str) -> None:
    """Check that recipe and shards belong to the checkpoint's model.

    Raises:
        ConfigError: they do not.
    """
    checkpoint, shards = call.artifacts["checkpoint"], call.artifacts["shards"]
    tokenizer = read_tokenizer(checkpoint)
    refuse_other_tokenizer(checkpoint, tokenizer)
    if tokenizer.fingerprint != fingerprint:
        raise ConfigError(
            f"The tokenizers of {checkpoint.directory} and {shards.directory} differ. Make the "
            "shards with the checkpoint's tokenizer."
        )
    spec, recipe = read_spec(checkpoint), call.recipe
    over = {"initialization"}  # how a model was initialized is not part of a trained one
    models = (in_codes(model, spec.languages) for model in (spec.model, recipe.model))
    own, asked = (model.model_dump(exclude=over) for model in models)
    change = describe_change(own, asked)
    if change is None and spec.tag_scheme != recipe.batches.tag_scheme:
        change = f"tag_scheme: {spec.tag_scheme} → {recipe.batches.tag_scheme}"
    if change is not None:
        absent = [name for name in own if own[name] is None is not asked[name]]
        fix = (
            f"An overlay removes no setting: use a recipe without model.{absent[0]}"
            if absent
            else f"Lay the checkpoint's over it: mmnmt checkpoint inspect {checkpoint.directory} "
            f"--recipe > model.toml, then --recipe {recipe.name}+model.toml"
        )
        raise ConfigError(
            f"Recipe {recipe.name!r} describes another model than {checkpoint.directory} holds "
            f"({change}). {fix}."
        )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune"))
