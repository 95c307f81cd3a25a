"""upcycle: an MoE model assembled from the modules of trained models (paper §4.2).

Reads one checkpoint for the embeddings and, unless they start fresh, one each for encoder and
decoder; makes a checkpoint and its receipt (``receipt.json``).
"""

if __name__ == "__main__":
    from pipeline.entry import prepare_process

    prepare_process()  # before torch is loaded

import sys
from collections import Counter
from collections.abc import Mapping

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.language_groups import read_groups
from pipeline.artifacts.settings_diff import describe_change
from pipeline.artifacts.tokenizer import tokenizer_folder
from pipeline.checkpoints.assembly import Part, assemble, plan_assembly, receipt_lines
from pipeline.checkpoints.checkpoint import read_spec, read_tokenizer, write_model_files
from pipeline.checkpoints.weights import TensorFiles, write_weights
from pipeline.errors import ConfigError
from pipeline.model.spec import ModelSpec, groups_of_languages, make_spec
from pipeline.stages import StageCall

PARTS: tuple[Part, ...] = ("embeddings", "encoder", "decoder")


def run(call: StageCall) -> None:
    """Plan the assembly, print and save its receipt, write the checkpoint."""
    checkpoints = {part: call.artifacts[part] for part in PARTS if part in call.artifacts}
    spec = target_spec(call, checkpoints)
    config = call.recipe.upcycling
    sources = {
        part: TensorFiles(checkpoints[part], "weights/") if part in checkpoints else None
        for part in PARTS
    }
    plan = plan_assembly(spec, sources, config)
    directories = {part: checkpoints[part].directory.name for part in checkpoints}
    print("\n".join(receipt_lines(plan, {part: directories.get(part, "") for part in PARTS})))
    with call.new_artifact() as writer:
        writer.settled |= write_weights(
            writer.directory / "weights", assemble(plan, spec, sources, config)
        )
        tokenizer_dir = tokenizer_folder(checkpoints["embeddings"])
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_dir)
        writer.write_json("receipt.json", [vars(entry) for entry in plan])
        writer.statistics["tensors"] = len(plan)
        rules = Counter(entry.rule for entry in plan)
        counts = ", ".join(f"{count:,} {rule}" for rule, count in sorted(rules.items()))
        writer.summary.append(f"{len(plan):,} tensors: {counts}; each one's source in receipt.json")


def target_spec(call: StageCall, checkpoints: Mapping[Part, Artifact]) -> ModelSpec:
    """The shape of the result: the recipe's model over the sources' vocabulary and groups.

    Raises:
        ConfigError: the sources do not fit each other or the recipe.
    """
    model = call.recipe.model
    first = checkpoints["embeddings"]
    for checkpoint in checkpoints.values():
        _refuse_misfit(checkpoint, first, call)
    decoder_groups = None
    if "decoder" in checkpoints:
        spec = read_spec(checkpoints["decoder"])
        decoder_groups = dict(zip(spec.languages, spec.language_groups or (), strict=False))
    groups = call.artifacts.get("groups")
    given = read_groups(groups) if groups is not None else None
    if decoder_groups and given and any(decoder_groups[c] != given.get(c) for c in decoder_groups):
        raise ConfigError(
            f"The groups given differ from those {checkpoints['decoder'].directory} was trained "
            "with: leave --groups out."
        )
    base = read_spec(first)
    language_groups = groups_of_languages(
        model, languages=base.languages, groups=decoder_groups or given
    )
    return make_spec(**{**dict(base), "model": model, "language_groups": language_groups})


def _refuse_misfit(checkpoint: Artifact, first: Artifact, call: StageCall) -> None:
    if read_tokenizer(checkpoint).fingerprint != read_tokenizer(first).fingerprint:
        raise ConfigError(
            f"The tokenizers of {first.directory} and {checkpoint.directory} differ: modules can "
            "be assembled only from models with one vocabulary."
        )
    spec = read_spec(checkpoint)
    free = {"moe", "encoder_layers", "decoder_layers", "initialization"}
    change = describe_change(
        spec.model.model_dump(exclude=free), call.recipe.model.model_dump(exclude=free)
    )
    if change is None and spec.tag_scheme != read_spec(first).tag_scheme:
        change = f"tag_scheme: {spec.tag_scheme} → {read_spec(first).tag_scheme}"
    if change is not None:
        raise ConfigError(
            f"{checkpoint.directory} does not fit recipe {call.recipe.name!r} (model.{change}): "
            "modules keep their sizes and conventions."
        )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    sys.exit(stage_main("upcycle"))
