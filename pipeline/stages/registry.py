"""List the stages in the order data flows: inputs, output, settings, and module of each.

Plans, the command line and launchers know stages by this table alone. The code of stage ``clean``
is ``run(call)`` in the module named here; it opens the inputs it is given, and writes exactly one
new artifact.
"""

import time
from collections.abc import Mapping
from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from pipeline.artifacts.artifact import (
    Artifact,
    ArtifactWriter,
    InputRecord,
    Kind,
    new_artifact,
    stage_key,
)
from pipeline.artifacts.corpus import Split
from pipeline.artifacts.manifest import DECIDE_NOTHING, undeciding, without_settings
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.run_folders import Work
from pipeline.config.ds_config import UNDECIDING_KEYS, load_ds_config
from pipeline.config.recipe import Recipe, chosen_settings


@dataclass(frozen=True)
class Input:
    """One input of a stage: an artifact of a kind, or raw text."""

    kind: Kind | Literal["raw"]
    help: str
    required: bool = True
    many: bool = False
    """Whether it takes several named artifacts, NAME=DIR each."""
    splits: tuple[Split, ...] = ()
    """Splits of a corpus that the stage reads and that make its result stale; empty: all."""


def problem_of_name(name: str) -> str:
    """Return why an artifact among several cannot have a name; empty if it can."""
    if "/" not in name:
        return ""
    return f"the name {name!r} has a slash, and names become directories. Write {_without(name)!r}."


def _without(name: str) -> str:
    """Return the name with dashes in place of slashes."""
    return "-".join(part for part in name.split("/") if part) or "name"


@dataclass(frozen=True)
class Stage:
    """A stage: one command of the command line."""

    name: str
    module: str
    makes: Kind
    help: str
    sections: tuple[str, ...]
    """Sections of the recipe that decide the result, and single settings of other sections
    (``training.resource_thresholds``); the manifest records them."""
    inputs: dict[str, Input] = field(default_factory=dict)
    parallel: Literal["no", "workers", "ranks"] = "no"
    """``workers``: the stage forks its own processes; ``ranks``: a launcher starts it once per
    process."""
    trains: bool = False
    """Whether it trains, and so takes a ds_config."""
    undeciding: tuple[str, ...] = ()
    """Settings of its sections that the manifest records but that do not change the result."""
    needs_recipe: bool = True
    """Whether a recipe must be named for its sections; if not, their defaults apply."""

    @property
    def work(self) -> Work | None:
        """Kind of work that ``OUT.run`` keeps of an interrupted run, if any."""
        if self.name == "upcycle":
            return "assembly"
        if self.name == "make_shards":
            return "sharding"
        if self.parallel == "ranks":
            return "training" if self.trains else "translation"
        return None

    def deciding(self, config: Mapping[str, Any]) -> dict[str, Any]:
        """Select the settings of a manifest on which the stage's result depends."""
        chosen = chosen_settings(config, (*self.sections, "ds_config"))
        of_machine = (f"ds_config.{key}" for key in UNDECIDING_KEYS)
        return without_settings(chosen, (*undeciding(self.undeciding, config), *of_machine))


def stage_config(stage: Stage, *, recipe: Recipe, ds_config: str) -> dict[str, Any]:
    """Return the settings of a stage as its manifest records them."""
    config = recipe.sections(stage.sections)
    return {**config, "ds_config": load_ds_config(ds_config)} if stage.trains else config


@dataclass(frozen=True)
class StageCall:
    """Everything that a stage is given: settings, opened inputs, where to write."""

    stage: Stage
    recipe: Recipe
    artifacts: Mapping[str, Artifact]
    """Input name → artifact; for inputs that take many, ``input/name`` → artifact."""
    raw: Mapping[str, RawInput]
    """Input name → raw text."""
    out_dir: Path
    records: Mapping[str, InputRecord]
    config: Mapping[str, object]
    """The recipe's sections (and ds_config) as the manifest records them."""
    processes: int = 1
    mpi: bool = False
    """Whether the workers are the ranks of a launcher, for stages with workers."""
    overwrite: bool = False
    clock: float = field(default_factory=time.monotonic, compare=False)
    """Time at which the stage began, in seconds of the monotonic clock."""

    @property
    def ds_config(self) -> Mapping[str, Any]:
        """The parsed ds_config of a training stage."""
        ds_config = self.config["ds_config"]
        assert isinstance(ds_config, Mapping)
        return ds_config

    @property
    def key(self) -> str:
        """Key of the stage's output: its settings and the digests of its inputs."""
        return stage_key(
            stage=self.stage.name,
            kind=self.stage.makes,
            config=self.config,
            inputs={name: record.digest for name, record in self.records.items()},
        )

    def new_artifact(
        self, *, wall_seconds: float | None = None
    ) -> AbstractContextManager[ArtifactWriter]:
        """Build the stage's output within the block (``artifacts.artifact.new_artifact``).

        Its wall time counts from the beginning of the call, unless the stage passes the time of all
        attempts.
        """
        return new_artifact(
            self.out_dir,
            kind=self.stage.makes,
            stage=self.stage.name,
            config=self.config,
            inputs=self.records,
            overwrite=self.overwrite,
            clock=self.clock,
            wall_seconds=wall_seconds,
        )

    def many(self, name: str) -> dict[str, Artifact]:
        """Return the artifacts of an input that takes several, by name, in the order given."""
        prefix = f"{name}/"
        return {
            key.removeprefix(prefix): artifact
            for key, artifact in self.artifacts.items()
            if key.startswith(prefix)
        }


_TRAINING_SECTIONS = ("model", "batches", "optimizer", "loss", "training")
_TRAINING_INPUTS = {
    "shards": Input("shards", "tokenized sentences"),
    "mixture": Input("mixture", "sampling probabilities per pair"),
}

_TASK_SECTIONS = (
    *("tasks", "model.language_modules", "mixture.sampling_temperature"),
    *("batches", "optimizer", "loss", "training"),
)
_TASK_INPUTS = {"pretrained": Input("raw", "XLM-R as Hugging Face's save_pretrained writes it")}

STAGES: dict[str, Stage] = {
    stage.name: stage
    for stage in (
        Stage(
            name="import_corpus",
            module="data_prep.import_corpus",
            makes="corpus",
            help="import raw text, or phrases of CLDR, as a corpus",
            sections=("corpus",),
            inputs={
                "raw": Input(
                    "raw",
                    "raw text as corpus.source reads it: OPUS-100-like trees of pair folders, "
                    "folders of TMX files, …, or hub:OWNER/NAME@REVISION",
                    required=False,
                )
            },
            parallel="workers",
        ),
        Stage(
            name="import_tests",
            module="data_prep.import_tests",
            makes="corpus",
            help="import test sets (FLORES-200, NTREX-128, pairs of files) as a corpus",
            sections=("tests",),
            inputs={"raw": Input("raw", "folder with one file per language, or pairs of files")},
            needs_recipe=False,
        ),
        Stage(
            name="clean",
            module="data_prep.clean",
            makes="corpus",
            help="drop bad, repeated and held-out training lines",
            sections=("clean",),
            inputs={
                "corpus": Input("corpus", "imported corpus"),
                "tests": Input(
                    "corpus",
                    "NAME=DIR, further corpora whose held-out lines are not to be trained on",
                    required=False,
                    many=True,
                ),
            },
            parallel="workers",
        ),
        Stage(
            name="train_tokenizer",
            module="data_prep.train_tokenizer",
            makes="tokenizer",
            help="train a vocabulary on a temperature-balanced sample, and add language tokens",
            sections=("tokenizer",),
            inputs={"corpus": Input("corpus", "clean corpus", splits=("train",))},
        ),
        Stage(
            name="make_shards",
            module="data_prep.make_shards",
            makes="shards",
            help="convert text into memory-mapped token ids",
            sections=("shards",),
            inputs={
                "corpus": Input("corpus", "clean corpus", splits=("train", "valid")),
                "tokenizer": Input("tokenizer", "vocabulary"),
            },
            parallel="workers",
        ),
        Stage(
            name="mix",
            module="data_prep.mix",
            makes="mixture",
            help="compute sampling probabilities and expected epochs per pair, by temperature",
            sections=("mixture",),
            inputs={"shards": Input("shards", "tokenized sentences")},
        ),
        Stage(
            name="group_languages",
            module="data_prep.group_languages",
            makes="groups",
            help="group languages by family, by family and embeddings, or by the paper's table",
            sections=("groups", "languages"),
            inputs={
                "shards": Input("shards", "for the corpus sizes"),
                "checkpoint": Input(
                    "checkpoint", "dense model, for its language embeddings", required=False
                ),
            },
        ),
        Stage(
            name="pretrain",
            module="pipeline.stages.pretrain",
            makes="checkpoint",
            help="train a dense, MoE or MoE-LGR model from scratch",
            sections=_TRAINING_SECTIONS,
            inputs={
                **_TRAINING_INPUTS,
                "groups": Input("groups", "for a language-group router", required=False),
            },
            parallel="ranks",
            trains=True,
            undeciding=DECIDE_NOTHING,
        ),
        Stage(
            name="upcycle",
            module="pipeline.stages.upcycle",
            makes="checkpoint",
            help="assemble an MoE model from modules of trained models",
            sections=("model", "upcycling"),
            inputs={
                "embeddings": Input("checkpoint", "source of the embeddings"),
                "encoder": Input("checkpoint", "source of the encoder; none: fresh", False),
                "decoder": Input("checkpoint", "source of the decoder; none: fresh", False),
                "groups": Input("groups", "for a fresh language-group router", required=False),
            },
            parallel="workers",
        ),
        Stage(
            name="finetune",
            module="pipeline.stages.finetune",
            makes="checkpoint",
            help="train a model further with a new optimizer",
            sections=_TRAINING_SECTIONS,
            inputs={**_TRAINING_INPUTS, "checkpoint": Input("checkpoint", "where to start")},
            parallel="ranks",
            trains=True,
            undeciding=DECIDE_NOTHING,
        ),
        Stage(
            name="translate",
            module="pipeline.stages.translate",
            makes="translations",
            help="translate a corpus's test sets, or standard input",
            sections=("decoding",),
            inputs={
                "checkpoint": Input("checkpoint", "model to translate with"),
                "corpus": Input("corpus", "test sets"),
            },
            parallel="ranks",
        ),
        Stage(
            name="retrieve",
            module="pipeline.stages.nearest_neighbor",
            makes="translations",
            help="translate by the nearest training neighbor (baseline)",
            sections=(),
            inputs={"corpus": Input("corpus", "clean corpus with its test sets")},
        ),
        Stage(
            name="analyze_scales",
            module="pipeline.extensions.analysis.analyze_scales",
            makes="analysis",
            help="count the scales that an Ada-MSHA model chooses, by language and direction",
            sections=(),
            inputs={
                "checkpoint": Input("checkpoint", "model with an Ada-MSHA front"),
                "corpus": Input("corpus", "test sets"),
            },
        ),
        Stage(
            name="analyze_vectors",
            module="pipeline.extensions.analysis.analyze_vectors",
            makes="analysis",
            help="score an Ada-MSHA model whose router sees the vector of a wrong language",
            sections=("analysis", "decoding", "evaluation.bleu_tokenizer"),
            inputs={
                "checkpoint": Input("checkpoint", "model with language vectors"),
                "without": Input("checkpoint", "model without, to be scored too", required=False),
                "corpus": Input("corpus", "test sets"),
            },
            needs_recipe=False,
        ),
        Stage(
            name="analyze_lengths",
            module="pipeline.extensions.analysis.analyze_lengths",
            makes="analysis",
            help="count the bytes that languages need for the same test lines",
            sections=(),
            inputs={
                "corpus": Input("corpus", "test sets, of one text in all languages"),
                "tokenizer": Input(
                    "tokenizer", "for pieces a word and the share of unknown ones", required=False
                ),
            },
        ),
        Stage(
            name="evaluate",
            module="pipeline.stages.evaluate",
            makes="evaluation",
            help="score systems side by side; JSON, Markdown and HTML reports",
            sections=("evaluation", "training.resource_thresholds"),
            inputs={
                "corpus": Input("corpus", "references"),
                "systems": Input("translations", "NAME=DIR, one per system", many=True),
                "training": Input(
                    "corpus",
                    "what the systems were trained on, where the references' has test sets alone",
                    required=False,
                ),
                "tokenizer": Input(
                    "tokenizer", "for word accuracy by number of subwords", required=False
                ),
                "comet": Input(
                    "raw", "folder of a COMET model, for the score comet", required=False
                ),
                "analyses": Input(
                    "analysis", "NAME=DIR, shown in the reports", required=False, many=True
                ),
            },
            parallel="workers",
        ),
        Stage(
            name="finetune_tagger",
            module="pipeline.extensions.tasks.finetune_tagger",
            makes="task_model",
            help="train an XLM-R to find named entities",
            sections=_TASK_SECTIONS,
            inputs={
                **_TASK_INPUTS,
                "data": Input("raw", "LANGUAGE/train and dev, as WikiANN or Universal NER"),
            },
            parallel="ranks",
            trains=True,
            undeciding=DECIDE_NOTHING,
        ),
        Stage(
            name="finetune_reader",
            module="pipeline.extensions.tasks.finetune_reader",
            makes="task_model",
            help="train an XLM-R to find answers in passages",
            sections=_TASK_SECTIONS,
            inputs={
                **_TASK_INPUTS,
                "data": Input("raw", "NAME.LANGUAGE.train.json and dev, as SQuAD v1.1"),
            },
            parallel="ranks",
            trains=True,
            undeciding=DECIDE_NOTHING,
        ),
        Stage(
            name="evaluate_task",
            module="pipeline.extensions.tasks.evaluate_task",
            makes="task_evaluation",
            help="score taggers or readers side by side, by language",
            sections=(),
            inputs={
                "data": Input("raw", "test files, beside the training files or alone"),
                "systems": Input(
                    "task_model", "NAME=DIR; NAME@RUN=DIR of several runs of one", many=True
                ),
            },
        ),
    )
}
