"""One small artifact of every kind, made by the stages where that is quick, and what reads them.

A reader takes a folder that holds one artifact, which may be broken, and a place for scratch files.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from itertools import islice
from pathlib import Path

import torch

from data_prep import group_languages, train_tokenizer
from pipeline.artifacts.artifact import Artifact, Kind, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.run_folders import read_position
from pipeline.artifacts.shards import read_mixture
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.artifacts.vocabularies import ByteVocabulary
from pipeline.batching.feed import TrainingData
from pipeline.checkpoints.assembly.rules import PARTS
from pipeline.checkpoints.averaging import average_checkpoints, average_states
from pipeline.checkpoints.checkpoint import load_model, open_checkpoint, write_model_files
from pipeline.checkpoints.inspection import diff, inspect, inspection_text, verify
from pipeline.checkpoints.pruning import prune_experts
from pipeline.checkpoints.resharding import Piece, PieceReader
from pipeline.checkpoints.weights import write_weights
from pipeline.config.documents import JsonLines
from pipeline.config.ds_config import load_ds_config
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.evaluation.history import trace_history
from pipeline.evaluation.nearest_neighbor import retrieve_all
from pipeline.jobs.plan import load_plan
from pipeline.model.moe.language_groups import read_groups
from pipeline.model.moe.routing_statistics import ROUTING_FILE, RoutingStatistics, moe_layer_names
from pipeline.model.parameters import tensor_shapes
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec, groups_of_languages
from pipeline.registry import STAGES
from pipeline.stage import StageCall
from pipeline.stages.finetune import refuse_other_model
from support.raw_trees import write
from support.stage_runs import run_stage
from support.stored_checkpoints import make_state, weights_of
from support.tiny_models import tiny_model

LINES = {
    "de-en": [("Hallo Welt", "hello world"), ("guten Morgen", "good morning"), ("ja", "yes")] * 6,
    "en-fr": [("one house", "une maison"), ("two cats", "deux chats"), ("no", "non")] * 4,
}
LANGUAGES = ("de", "en", "fr")
MOE = MoEConfig(num_experts=4, every=1, decoder_router="language_group")
SIZES = ModelConfig(
    encoder_layers=1,
    decoder_layers=1,
    width=16,
    feed_forward_width=32,
    num_heads=2,
    max_positions=64,
)
RECIPE = Recipe.model_validate(
    {
        "name": "test",
        "tokenizer": {"kind": "bytes"},
        "groups": {"method": "typology"},
        "clean": {"drop_held_out_overlap": False},
        "model": {**SIZES.model_dump(), "moe": MOE.model_dump()},
        "batches": {"tokens": 100, "micro_batches": 2, "window_steps": 2},
        "evaluation": {"language_accuracy": False, "bleu_tokenizer": "13a"},
    }
)


@dataclass(frozen=True)
class Shelf:
    """Where the artifacts lie, by name; none of them is changed."""

    folder: Path

    def path(self, name: str) -> Path:
        return self.folder / name

    def open(self, name: str) -> Artifact:
        directory = self.path(name)
        manifest = json.loads((directory / "manifest.json").read_text(encoding="utf-8"))
        return open_artifact(directory, kind=manifest["kind"])


def stage_call(
    stage_name: str, out_dir: Path, artifacts: Mapping[str, Artifact], *, recipe: Recipe = RECIPE
) -> StageCall:
    stage = STAGES[stage_name]
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=artifacts,
        raw={},
        out_dir=out_dir,
        records={name: artifact.as_input for name, artifact in artifacts.items()},
        config=recipe.sections(stage.sections),
    )


def run(
    stage_name: str,
    out_dir: Path,
    artifacts: Mapping[str, Artifact],
    *,
    recipe: Recipe = RECIPE,
    raw: Path | None = None,
) -> None:
    given = None if raw is None else RawInput((raw,))
    run_stage(stage_name, out_dir, artifacts, recipe, raw=given)


def build_shelf(folder: Path) -> Shelf:
    """Make one artifact of every kind, and the files that are none."""
    shelf = Shelf(folder)
    write_raw(shelf)
    run("import_corpus", shelf.path("imported"), {}, raw=folder / "raw")
    run("clean", shelf.path("corpus"), {"corpus": shelf.open("imported")})
    corpus = {"corpus": shelf.open("corpus")}
    run("train_tokenizer", shelf.path("tokenizer"), corpus)
    pieces = RECIPE.tokenizer.model_validate({"vocabulary_size": 36})
    recipe = RECIPE.model_copy(update={"tokenizer": pieces})
    run("train_tokenizer", shelf.path("pieces"), corpus, recipe=recipe)
    run("make_shards", shelf.path("shards"), {**corpus, "tokenizer": shelf.open("tokenizer")})
    shards = {"shards": shelf.open("shards")}
    run("mix", shelf.path("mixture"), shards)
    run("group_languages", shelf.path("groups"), shards)
    write_checkpoint(shelf, "experts", moe=MOE)
    write_checkpoint(shelf, "twice", moe=MOE, scale=2.0)
    write_checkpoint(shelf, "dense", moe=None)
    state_dir = shelf.path("run.run") / "states" / "update-0000003"
    state_dir.parent.mkdir(parents=True)
    weights = weights_of(tiny_model(model_spec(None)))
    make_state(
        state_dir,
        [
            Piece(what, name, 0, value.flatten().clone())
            for name, value in weights.items()
            for what in WHAT
        ],
    )
    (shelf.path("run.run") / "best").symlink_to(shelf.path("dense"))
    retrieve_all(shelf.path("translations"), shelf.open("corpus"), training=shelf.open("corpus"))
    write_documents(shelf)
    return shelf


WHAT = ("master", "exp_avg", "exp_avg_sq")


def write_raw(shelf: Shelf) -> None:
    """The same text as files, packed, and as tables; and test sets as FLORES-200 has them."""
    raw = {
        f"{pair}/{split}.{code}": "".join(f"{line[side]}\n" for line in chosen)
        for pair, lines in LINES.items()
        for split, chosen in (("train", lines), ("valid", lines[:2]), ("test", lines[:3]))
        for side, code in enumerate(pair.split("-"))
    }
    write(shelf.path("raw"), raw)
    write(shelf.path("packed"), {f"{name}.gz": text for name, text in raw.items()})
    tests = {f"{c}.devtest": f"one {c}\ntwo {c}\n" for c in ("eng_Latn", "deu_Latn")}
    write(shelf.path("tests"), tests)
    lines = LINES["de-en"] * 5
    units = "".join(
        f'<tu><tuv xml:lang="de"><seg>{one}</seg></tuv><tuv xml:lang="en"><seg>{other}</seg></tuv>'
        "</tu>\n"
        for one, other in lines
    )
    rows = (json.dumps({"de": one, "en": other}) + "\n" for one, other in lines)
    tables = {
        "memories/a.tmx": f'<tmx version="1.4"><body>\n{units}</body></tmx>\n',
        "tables/train.de-en.tsv": "".join(f"{one}\t{other}\n" for one, other in lines),
        "rows/de-en/a.jsonl": "".join(rows),
        "cells/de-en/a.csv": "de,en\n" + "".join(f'"{one}","{other}"\n' for one, other in lines),
    }
    write(shelf.folder, tables)


def model_spec(moe: MoEConfig | None) -> ModelSpec:
    return ModelSpec(
        model=SIZES.model_copy(update={"moe": moe}),
        vocabulary_size=ByteVocabulary.size + len(LANGUAGES),
        pad_id=ByteVocabulary.pad_id,
        languages=LANGUAGES,
        language_groups=None if moe is None else (0, 0, 1),
    )


def write_checkpoint(shelf: Shelf, name: str, *, moe: MoEConfig | None, scale: float = 1.0) -> None:
    spec = model_spec(moe)
    tensors = [(key, scale * value) for key, value in weights_of(tiny_model(spec)).items()]
    with stage_call("pretrain", shelf.path(name), {}).new_artifact() as writer:
        for part in range(2):
            write_weights(writer.directory / "weights", tensors[part::2], part=part)
        write_model_files(writer, spec=spec, tokenizer_dir=shelf.path("tokenizer"))
        writer.write_json(ROUTING_FILE, routing(spec).to_json())
        curves = JsonLines(writer.path("metrics.jsonl"))
        for update in (1, 2):
            for kind in ("train", "validation"):
                curves.write({"kind": kind, "update": update, "seconds": 1.5, "loss": 3.0})
        writer.statistics["update"] = 2


def routing(spec: ModelSpec) -> RoutingStatistics:
    layers = moe_layer_names(spec)
    experts = spec.model.moe.num_experts if spec.model.moe else 0
    counts = torch.arange(1, 1 + len(layers) * len(LANGUAGES) * experts, dtype=torch.float64)
    routed = counts.view(len(layers), len(LANGUAGES), experts).numpy()
    tokens = routed.sum(-1)
    return RoutingStatistics(
        layers=layers,
        languages=LANGUAGES,
        tokens_LG=tokens,
        entropy_LG=tokens,
        routed_LGE=routed,
        kept_LGE=routed,
    )


def write_documents(shelf: Shelf) -> None:
    folder = shelf.path("documents")
    folder.mkdir()
    (folder / "recipe.toml").write_text("[training]\nupdates = 9999\n[model]\nwidth = 64\n")
    (folder / "plan.toml").write_text(
        '[inputs]\ntext = "text"\n[stages.corpus]\nrun = "import_corpus"\n'
        'recipe = "demo_dense"\ninputs = { raw = "$text" }\nprocesses = 1\n'
    )
    (folder / "machine.json").write_text('{"zero_optimization": {"stage": 1}}')


# ---------------------------------------------------------------- what reads them

Read = Callable[[Shelf, Path, Path], object]
"""Intact artifacts, the folder to read, an empty folder for what is made of it."""


@dataclass(frozen=True)
class Reader:
    """Something that opens an artifact and uses all that it wants of it."""

    name: str
    of: str
    """Name of the artifact on the shelf."""
    read: Read
    files: str = ""
    """Reads only files that start with this, and the manifest."""
    without: tuple[str, ...] = field(default=())
    """Does not read files that start with these."""
    manifest: str = "statistics"
    """Of a manifest it reads what lies below this key; "": all of it."""


def import_from(source: str) -> Read:
    """Import by one of the readers of raw text."""
    corpus = RECIPE.corpus.model_validate({"source": source})
    recipe = RECIPE.model_copy(update={"corpus": corpus})
    return lambda _, raw, scratch: run("import_corpus", scratch / "out", {}, recipe=recipe, raw=raw)


def _import_tests(_: Shelf, raw: Path, scratch: Path) -> None:
    run("import_tests", scratch / "out", {}, raw=raw)


def stage_of(name: str, kind: Kind, given: str = "", **others: str) -> Read:
    """Run a stage with the artifact, as the input of its kind or another, and with others."""

    def read(shelf: Shelf, directory: Path, scratch: Path) -> None:
        inputs = {key: shelf.open(other) for key, other in others.items()}
        run(name, scratch / "out", {given or kind: open_artifact(directory, kind=kind), **inputs})

    return read


def _train_tokenizer(_: Shelf, directory: Path, scratch: Path) -> None:
    corpus = open_artifact(directory, kind="corpus")
    run("train_tokenizer", scratch / "out", {"corpus": corpus})
    sample = train_tokenizer.draw_sample(corpus, config=RECIPE.tokenizer)
    assert all(isinstance(line, str) for line in sample)


def _retrieve(_: Shelf, directory: Path, scratch: Path) -> None:
    corpus = open_artifact(directory, kind="corpus")
    retrieve_all(scratch / "out", corpus, training=corpus)


def _tokenizer(_: Shelf, directory: Path, __: Path) -> None:
    tokenizer = load_tokenizer(open_artifact(directory, kind="tokenizer").directory)
    tokenizer.decode(tokenizer.encode("guten Morgen, 世界"))
    for code in tokenizer.languages:
        tokenizer.language_token_id(code)


def _train_on(shards: Artifact, mixture: Artifact) -> None:
    """All that a training run reads before and during its first window."""
    data = TrainingData(shards, read_mixture(mixture), RECIPE.batches, seed=1)
    data.check(max_positions=SIZES.max_positions)
    for step in islice(data.planner.steps((0, 0)), 3):
        for micro_batch in step.micro_batches:
            data.train.batch(micro_batch)
    for _, micro_batch in data.validation(budget=100):
        data.valid.batch(micro_batch)


def _shards(shelf: Shelf, directory: Path, _: Path) -> None:
    _train_on(open_artifact(directory, kind="shards"), shelf.open("mixture"))


def _group(shelf: Shelf, directory: Path, scratch: Path) -> None:
    inputs = {"shards": open_artifact(directory, kind="shards"), "checkpoint": shelf.open("dense")}
    for method in ("typology", "embeddings"):
        config = RECIPE.groups.model_copy(update={"method": method})
        recipe = RECIPE.model_copy(update={"groups": config})
        run("group_languages", scratch / method, inputs, recipe=recipe)


def _mixture(shelf: Shelf, directory: Path, _: Path) -> None:
    _train_on(shelf.open("shards"), open_artifact(directory, kind="mixture"))


def _groups(_: Shelf, directory: Path, __: Path) -> None:
    groups = read_groups(open_artifact(directory, kind="groups"))
    groups_of_languages(RECIPE.model, languages=LANGUAGES, groups=groups)


def _inspect(_: Shelf, directory: Path, __: Path) -> None:
    found = inspect(directory, tensors=True)
    json.dumps(found)
    inspection_text(found).encode()
    verify(directory)


def _translate(_: Shelf, directory: Path, __: Path) -> None:
    checkpoint = open_artifact(directory, kind="checkpoint")
    decoding = DecodingConfig(beam_size=2, max_extra_length=2, max_length_ratio=0)
    translator = Translator(checkpoint, decoding)
    translator.translate(
        [Job(Direction("de", "en"), 0, "Hallo"), Job(Direction("en", "fr"), 1, "")]
    )


def _finetune(shelf: Shelf, directory: Path, scratch: Path) -> None:
    inputs = {"checkpoint": open_artifact(directory, kind="checkpoint")}
    inputs["shards"] = shelf.open("shards")
    call = stage_call("finetune", scratch / "out", inputs)
    tokenizer = load_tokenizer(shelf.path("tokenizer"))
    refuse_other_model(call, fingerprint=tokenizer.fingerprint)
    load_model(inputs["checkpoint"])


def _average(shelf: Shelf, directory: Path, scratch: Path) -> None:
    average_checkpoints([directory, shelf.path("twice")], out_dir=scratch / "out")


def _prune(_: Shelf, directory: Path, scratch: Path) -> None:
    prune_experts(directory, languages=["de"], experts=2, out_dir=scratch / "out")


def _diff(shelf: Shelf, directory: Path, _: Path) -> None:
    "\n".join(diff(directory, shelf.path("experts")).lines()).encode()


def _upcycle(shelf: Shelf, directory: Path, scratch: Path) -> None:
    checkpoint = open_artifact(directory, kind="checkpoint")
    inputs: dict[str, Artifact] = dict.fromkeys(PARTS, checkpoint)
    inputs["groups"] = shelf.open("groups")
    run("upcycle", scratch / "out", inputs)


def _embeddings(_: Shelf, directory: Path, __: Path) -> None:
    checkpoint = open_artifact(directory, kind="checkpoint")
    group_languages.language_embeddings(checkpoint, LANGUAGES)


def _state(_: Shelf, directory: Path, __: Path) -> None:
    state = open_artifact(directory, kind="training_state")
    read_position(state)
    reader = PieceReader(state)
    for name, shape in tensor_shapes(model_spec(None)).items():
        for what in WHAT:
            reader.read(what=what, tensor=name, start=0, length=shape.numel())


def _average_states(shelf: Shelf, directory: Path, scratch: Path) -> None:
    states = scratch / "of.run" / "states"
    states.mkdir(parents=True)
    (states / "update-0000003").symlink_to(directory)
    (scratch / "of.run" / "best").symlink_to(shelf.path("dense"))
    average_states(scratch / "of.run", last=1, out_dir=scratch / "out")


def _curves(shelf: Shelf, directory: Path, scratch: Path) -> None:
    """The history of a system whose checkpoint is the broken one."""
    checkpoint = open_checkpoint(directory)
    call = stage_call(
        "translate", scratch / "out", {"corpus": shelf.open("corpus"), "checkpoint": checkpoint}
    )
    with call.new_artifact():
        pass
    trace_history({"one": open_artifact(scratch / "out", kind="translations")})


def _recipe(_: Shelf, directory: Path, __: Path) -> None:
    load_recipe(str(directory / "recipe.toml"))


def _plan(_: Shelf, directory: Path, __: Path) -> None:
    load_plan(str(directory / "plan.toml"))


def _ds_config(_: Shelf, directory: Path, __: Path) -> None:
    load_ds_config(str(directory / "machine.json"))


_WEIGHTS = ("weights/part-00001",)
"""The second file of weights breaks as the first one does."""
_BIG = (*_WEIGHTS, "metrics.jsonl")

READERS: tuple[Reader, ...] = (
    Reader("import_corpus", "raw", import_from("tree"), files="de-en/train"),
    Reader("import_corpus of gzip", "packed", import_from("tree"), files="de-en/train.de"),
    Reader("import_corpus of TMX", "memories", import_from("tmx")),
    Reader("import_corpus of TSV", "tables", import_from("tsv")),
    Reader("import_corpus of JSON lines", "rows", import_from("columns")),
    Reader("import_corpus of CSV", "cells", import_from("columns")),
    Reader("import_tests", "tests", _import_tests, files="eng"),
    Reader("clean", "corpus", stage_of("clean", "corpus"), files="train/de-en/"),
    Reader("train_tokenizer", "corpus", _train_tokenizer, files="train/de-en/"),
    Reader(
        *("make_shards from a corpus", "corpus"),
        stage_of("make_shards", "corpus", tokenizer="tokenizer"),
        files="valid/de-en/",
    ),
    Reader("nearest neighbor", "corpus", _retrieve, files="train/de-en/"),
    Reader(
        *("evaluate a corpus", "corpus"),
        stage_of("evaluate", "corpus", **{"systems/one": "translations"}),
        files="test/de-en/",
    ),
    Reader("tokenizer of bytes", "tokenizer", _tokenizer),
    Reader("tokenizer of pieces", "pieces", _tokenizer),
    Reader(
        *("make_shards with a tokenizer", "pieces"),
        stage_of("make_shards", "tokenizer", corpus="corpus"),
    ),
    Reader("train on shards", "shards", _shards, files="train/de-en/de"),
    Reader("validate on shards", "shards", _shards, files="valid/en-fr/en"),
    Reader("tokenizer of shards", "shards", _shards, files="tokenizer/"),
    Reader("mix", "shards", stage_of("mix", "shards"), files="manifest.json"),
    Reader("group_languages", "shards", _group, files="manifest.json"),
    Reader("mixture", "mixture", _mixture),
    Reader("groups", "groups", _groups),
    Reader("inspect a checkpoint", "experts", _inspect, without=_BIG, manifest=""),
    Reader("inspect a state", "run.run/states/update-0000003", _inspect, manifest=""),
    Reader("translate", "experts", _translate, without=(*_BIG, "routing.json")),
    Reader("finetune", "experts", _finetune, files="model.json", without=_WEIGHTS),
    Reader("average", "experts", _average, files="weights/", without=_WEIGHTS),
    Reader("prune", "experts", _prune, files="routing.json"),
    Reader("diff", "experts", _diff, files="weights/", without=_WEIGHTS),
    Reader("upcycle", "dense", _upcycle, files="weights/", without=_WEIGHTS),
    Reader("embeddings", "dense", _embeddings, files="weights/", without=_WEIGHTS),
    Reader("resume", "run.run/states/update-0000003", _state),
    Reader("average states", "run.run/states/update-0000003", _average_states),
    Reader(
        *("evaluate a system", "translations"),
        stage_of("evaluate", "translations", "systems/one", corpus="corpus"),
        files="hypotheses/de-en",
        manifest="",
    ),
    Reader("curves", "dense", _curves, files="metrics.jsonl"),
    Reader("recipe", "documents", _recipe, files="recipe.toml"),
    Reader("plan", "documents", _plan, files="plan.toml"),
    Reader("ds_config", "documents", _ds_config, files="machine.json"),
)
