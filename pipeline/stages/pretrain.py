"""Train a dense, MoE or MoE-LGR model from scratch: the stage ``pretrain`` (MMNMT, §4.1).

It reads shards, a mixture and, for a language-group router, groups, and makes a checkpoint. Every
rank runs this module; ``mmnmt pretrain --processes N`` or a launcher, for example ``torchrun``,
starts the ranks. :func:`train`, which :mod:`~pipeline.stages.finetune` calls, too, checks the data
and starts the loop of :mod:`pipeline.training.loop`.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import math
import sys
from collections.abc import Collection, Iterable, Mapping
from dataclasses import dataclass, replace
from typing import Literal

from pipeline.artifacts.artifact import ArtifactWriter
from pipeline.artifacts.corpus import Direction, Resource, language_of, tiers_of
from pipeline.artifacts.manifest import Kind
from pipeline.artifacts.shards import read_mixture
from pipeline.artifacts.tokenizer import Tokenizer, tokenizer_folder
from pipeline.batching.equal_epochs import with_resolved_updates, with_share_of_updates
from pipeline.batching.feed import TrainingData
from pipeline.checkpoints.checkpoint import write_model_files
from pipeline.distributed.world import World, distributed_world, leave, local_device
from pipeline.errors import ConfigError
from pipeline.estimates.devices import micro_batches_that_fit, peak_operations
from pipeline.languages import parts_words_by_spaces
from pipeline.model.building import build_model
from pipeline.model.moe.language_groups import read_groups
from pipeline.model.parameters import cost_without_experts, initialize_weights
from pipeline.model.spec import ModelSpec, groups_of_languages, make_spec, marks_of_vocabulary
from pipeline.model.sublayer import Regularization
from pipeline.model.transformer import Transformer
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed
from pipeline.training.engine import connect, expert_parallel_group
from pipeline.training.loop import train_task
from pipeline.training.settings import TrainingConfig


def run(call: StageCall) -> None:
    """Build the recipe's model, initialize it and train it."""
    training = call.recipe.training
    with distributed_world(stacks_dir=call.stacks_dir) as world:
        call.open_inputs()
        connect(world)
        data, device = training_data(call), local_device(world.local_rank)
        spec = model_spec(call, data.tokenizer)
        model = build_model(
            spec,
            regularization=Regularization.of(training),
            expert_parallel=expert_parallel_group(training.expert_parallel_size, world=world),
            device=device,
        )
        initialize_weights(model, seed=training.seed)
        if device.type == "cuda":  # a CPU has no peak, and a pass for each micro-batch
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


def training_data(call: StageCall) -> TrainingData:
    """Read the shards and the mixture of a training stage."""
    return TrainingData(
        call.artifacts["shards"],
        read_mixture(call.artifacts["mixture"]),
        call.recipe.batches,
        seed=call.recipe.training.seed,
    )


def train(call: StageCall, model: Transformer, data: TrainingData, *, world: World) -> None:
    """Train a translation model and write the stage's checkpoint; all ranks call this.

    Raises:
        ConfigError: the data does not fit the recipe or the model.
    """
    # The manifest records the recipe as given (call.config), not with the resolved updates.
    recipe = call.recipe
    if recipe.training.updates_of == "bytes":
        call = replace(call, recipe=with_resolved_updates(recipe, data))
    if recipe.training.updates_of == "dense":
        recipe = with_share_of_updates(recipe, cost_without_experts(model.spec))
        call = replace(call, recipe=recipe)
        check_phases(data, recipe.training)
    check_tier(call, data)
    check_languages(data, model.spec)
    notes = unspaced_notes(model.spec, data.train_lines, segmented=data.tokenizer.segmenters.keys())
    for note in notes if world.rank == 0 else ():
        print(f"{call.out_dir}: {note}.", file=sys.stderr, flush=True)
    train_task(call, model, Translation(call, data, notes=notes), world=world)


def check_phases(data: TrainingData, training: TrainingConfig) -> None:
    """Check that all phases of the mixture begin within the updates of this model.

    Raises:
        ConfigError: the last one does not.
    """
    begin, updates = data.mixture.phases[-1].from_update, training.updates
    if begin > updates:
        raise ConfigError(
            f"A phase of the mixture begins at update {begin:,}, and this model makes {updates:,} "
            'updates (training.updates_of = "dense"). Let the phase begin earlier (mixture.phases).'
        )


def check_tier(call: StageCall, data: TrainingData) -> None:
    """Check that some trained pair with validation is of the resource tier ``training.best_by``.

    Raises:
        ConfigError: none is.
    """
    training, of_pairs = call.recipe.training, tiers_of_training(call)
    tiers = {of_pairs[way.pair] for way in data.validated() if way.pair in of_pairs}
    if training.best_by != "all" and training.best_by not in tiers:
        found = ", ".join(sorted(tiers)) or "none"
        raise ConfigError(
            f"training.best_by is {training.best_by}, and no pair with training and validation "
            f"sentences is of that resource tier, only of {found}. Name one of them, or change "
            "training.resource_thresholds."
        )


def tiers_of_training(call: StageCall) -> dict[str, Resource]:
    """Return the resource tier of every pair that is trained."""
    return tiers_of(call.artifacts["shards"], thresholds=call.recipe.training.resource_thresholds)


def check_languages(data: TrainingData, spec: ModelSpec) -> None:
    """Check that a model with language modules has one for every language of the shards.

    Raises:
        ConfigError: a language has none.
    """
    own = spec.languages_with_modules
    pairs = (*data.train.offsets, *data.valid.offsets)
    missing = sorted({language_of(side) for pair in pairs for side in pair.split("-")} - set(own))
    if missing:
        raise ConfigError(
            f"The shards have text in {', '.join(missing)}, for which the model has no language "
            f"module: it has modules for {', '.join(own)}. Make shards of these languages only "
            "(corpus.languages), or train a model that has all modules."
        )


@dataclass(frozen=True)
class TranslationLosses:
    """Validation losses per token, in nats, and the perplexity over all tokens.

    Attributes:
        directions: loss of each direction.
        pairs: loss of each language pair, over both of its directions.
        resources: loss of each resource tier, over all of its pairs.
    """

    loss: float
    perplexity: float
    directions: Mapping[str, float]
    pairs: Mapping[str, float]
    resources: Mapping[str, float]

    def perplexity_of(self, tier: Resource | Literal["all"]) -> float:
        """Return the perplexity over all pairs or over the pairs of one tier, which must exist."""
        return self.perplexity if tier == "all" else perplexity_of_loss(self.resources[tier])


def perplexity_of_loss(loss: float) -> float:
    """Return exp(loss), bounded so that it stays finite."""
    return math.exp(min(loss, 700.0))


def summarize_validation(
    losses: dict[Direction, tuple[float, int]], *, tiers: Mapping[str, Resource]
) -> TranslationLosses:
    """Average summed losses over tokens, by direction, pair and resource tier.

    Args:
        losses: direction → (summed loss in nats, labels).
        tiers: the tier of every pair that is trained; zero-shot pairs have none.
    """

    def mean(chosen: Iterable[Direction]) -> float:
        pairs = [losses[direction] for direction in chosen]
        return sum(loss for loss, _ in pairs) / sum(labels for _, labels in pairs)

    by_pair: dict[str, list[Direction]] = {}
    by_resource: dict[str, list[Direction]] = {}
    for direction in losses:
        by_pair.setdefault(direction.pair, []).append(direction)
        if direction.pair in tiers:
            by_resource.setdefault(tiers[direction.pair], []).append(direction)
    overall = mean(losses)
    return TranslationLosses(
        loss=overall,
        perplexity=perplexity_of_loss(overall),
        directions={str(direction): mean([direction]) for direction in losses},
        pairs={pair: mean(chosen) for pair, chosen in by_pair.items()},
        resources={resource: mean(chosen) for resource, chosen in by_resource.items()},
    )


@dataclass(frozen=True)
class Translation:
    """Training on the sentence pairs of shards, sampled by a mixture."""

    call: StageCall
    data: TrainingData
    makes: Kind = "checkpoint"
    notes: tuple[str, ...] = ()

    def summarize(self, losses: dict[Direction, tuple[float, int]]) -> TranslationLosses:
        """Average losses by direction, pair and resource tier."""
        return summarize_validation(losses, tiers=tiers_of_training(self.call))

    def kept_by(self, found: TranslationLosses) -> float:
        """Return the perplexity over all directions, or of the tier ``training.best_by``."""
        return found.perplexity_of(self.call.recipe.training.best_by)

    def describe(self, writer: ArtifactWriter, spec: ModelSpec) -> None:
        """Write the model's shape and tokenizer."""
        tokenizer_dir = tokenizer_folder(self.call.artifacts["shards"])
        write_model_files(writer, spec=spec, tokenizer_dir=tokenizer_dir)

    def trained_on(self) -> str:
        """Return the numbers of sentence pairs and language pairs."""
        lines = self.data.train_lines
        return (
            f"{counted(sum(lines.values()), 'sentence pair')} of "
            f"{counted(len(lines), 'language pair')}"
        )


def unspaced_lines(
    spec: ModelSpec, train_lines: Mapping[str, int], *, segmented: Collection[str] = ()
) -> dict[str, int]:
    """Return language → training lines of its pairs, for languages that Byte-WSF cannot split.

    Byte-WSF takes everything between two white spaces for one word: the whole line in a language
    without spaces. ``segmented``: the languages in which a segmenter finds words.
    """
    if not spec.model.front.parts_words:
        return {}
    found: dict[str, int] = {}
    for pair, lines in train_lines.items():
        for code in map(language_of, pair.split("-")):
            if code not in segmented and not parts_words_by_spaces(code):
                found[code] = found.get(code, 0) + lines
    return dict(sorted(found.items()))


def unspaced_notes(
    spec: ModelSpec, train_lines: Mapping[str, int], *, segmented: Collection[str] = ()
) -> tuple[str, ...]:
    """Return a sentence about these languages, without a full stop; empty if there are none."""
    lines = unspaced_lines(spec, train_lines, segmented=segmented)
    if not lines:
        return ()
    names = listed(f"{code} ({counted(number, 'line')})" for code, number in lines.items())
    return (
        "model.front wsf parts words by white space, which is not written between words of "
        f"{names}: what stands between two spaces is one word there, as a rule the whole line "
        "(tokenizer.segmenters can name what parts it)",
    )


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("pretrain"))
