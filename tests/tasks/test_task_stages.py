"""The stages of tasks: trained like translation, on any number of ranks, resumed, scored."""

import json
import math
import shutil
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from support.process_pool import ProcessPool
from support.readers_sweep import reseal
from support.tiny_training import sharing_passes, terminate_at_call
from support.tiny_xlmr import TOKENS, pieces_model, write_entities, write_questions, write_xlmr
from torch import Tensor

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.raw_input import raw_input
from pipeline.config.documents import merge
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.distributed.world import World
from pipeline.errors import CheckpointError, ConfigError, Interrupted, UserError
from pipeline.extensions.tasks import evaluate_task, finetune_task
from pipeline.extensions.tasks.named_entities import (
    NAMED_ENTITIES,
    read_entities,
    tag_sentences,
)
from pipeline.extensions.tasks.questions import answer_questions, read_questions
from pipeline.extensions.tasks.token_classifier import TaskModel
from pipeline.registry import STAGES
from pipeline.stage import StageCall, stage_config

pytestmark = pytest.mark.slow

LOW_RANK = {"kind": "low_rank", "rank": 2, "synthesis": "language_wise"}
SETTINGS: dict[str, dict[str, Any]] = {
    "ner": {
        "tasks": {"max_tokens": 48},
        "mixture": {"sampling_temperature": 1.0},
        "batches": {
            **{"micro_batches": 4, "tokens": 128, "window_steps": 2},
            "evaluation_tokens": 256,
        },
        "optimizer": {
            **{"learning_rate": 5e-3, "final_learning_rate": 0.0, "warmup_updates": 1},
            **{"betas": [0.9, 0.999], "clip_norm": 1.0},
        },
        "training": {"updates": 4, "dropout": 0.1, "validate_every": 2, "checkpoint_every": 2},
        "logging": {"every": 1},
        "saving": {"keep_states": "last"},
    }
}
SETTINGS["qa"] = merge(SETTINGS["ner"], {"batches": {"tokens": 256}})
"""Settings for an XLM-R of a few thousand parameters."""
INPUT_OF = {"ner": "entities", "qa": "questions"}
CPU = torch.device("cpu")


@pytest.fixture(scope="module")
def sources(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Write an encoder, and text of two languages for both tasks."""
    folder = tmp_path_factory.mktemp("tasks")
    write_xlmr(folder / "xlmr")
    write_entities(folder / "ner", ["de", "en"])
    write_questions(folder / "qa", ["de", "en"])
    return folder


def make_recipe(task: str, **changes: Any) -> Recipe:
    return Recipe.model_validate(merge(load_recipe(None, SETTINGS[task]).model_dump(), changes))


def make_call(
    task: str, sources: Path, out_dir: Path, recipe: Recipe, *, ds_config: str = "cpu_fp32"
) -> StageCall:
    stage = STAGES["finetune_task"]
    raw = {
        "pretrained": raw_input([str(sources / "xlmr")]),
        INPUT_OF[task]: raw_input([str(sources / task)]),
    }
    records = {
        key: one for name, source in raw.items() for key, one in source.records(name).items()
    }
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts={},
        raw=raw,
        out_dir=out_dir,
        records=records,
        config=stage_config(stage, recipe=recipe, ds_config=ds_config),
    )


def finetune(
    world: World,
    task: str,
    sources: Path,
    out_dir: Path,
    recipe: Recipe,
    *,
    terminate_at: int | None = None,
    ds_config: str = "cpu_fp32",
) -> str:
    """Run a stage in a rank of a pool; return how it ended."""
    from contextlib import ExitStack, contextmanager
    from unittest import mock

    @contextmanager
    def here(**_: object) -> Any:
        yield world

    with ExitStack() as stack:
        stack.enter_context(mock.patch.object(finetune_task, "distributed_world", here))
        if terminate_at is not None:
            terminate_at_call(stack, terminate_at)
        try:
            finetune_task.run(make_call(task, sources, out_dir, recipe, ds_config=ds_config))
        except Interrupted:
            return "stopped"
        except UserError as error:
            return str(error)
    return "done"


def test_micro_batches_that_share_a_pass_are_refused(
    sources: Path, pool1: ProcessPool, tmp_path: Path
) -> None:
    ds_config = sharing_passes(tmp_path, 2)
    recipe = make_recipe("ner")
    assert recipe.batches.micro_batches > 1
    [said] = pool1.run(finetune, "ner", sources, tmp_path / "out", recipe, ds_config=ds_config)
    assert said.startswith("The ds_config sets micro_batches_per_pass, which is for translation")


@pytest.mark.parametrize("share", [math.nan, 0])
def test_shares_of_another_formula_that_cannot_be_drawn_are_refused(
    share: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    shares = {"de-de": 0.0, "en-en": share}
    monkeypatch.setattr(finetune_task, "temperature_probabilities", lambda *_, **__: shares)
    examples: Any = {code: [SimpleNamespace(ids=[0, 5, 2])] for code in ("de", "en")}
    collate: Any = None
    split = finetune_task.LabelledSplit(examples, languages=[*examples], collate=collate)
    with pytest.raises(ConfigError, match="temperature_probabilities returned"):
        finetune_task.LabelledData(split, split, make_recipe("ner"))


def weights(directory: Path) -> dict[str, Tensor]:
    saved = open_artifact(directory, kind="task_model")
    return {
        name: value
        for file in saved.names("weights/")
        for name, value in load_file(saved.file(file)).items()
    }


def losses(directory: Path) -> list[float]:
    lines = (directory / "metrics.jsonl").read_text().splitlines()
    return [one["loss"] for one in map(json.loads, lines)]


@pytest.mark.parametrize("task", ["ner", "qa"])
def test_two_ranks_train_what_one_trains(
    pool1: ProcessPool, pool2: ProcessPool, sources: Path, tmp_path: Path, task: str
) -> None:
    recipe = make_recipe(task, model={"language_modules": LOW_RANK})
    assert pool1.run(finetune, task, sources, tmp_path / "one", recipe) == ["done"]
    assert pool2.run(finetune, task, sources, tmp_path / "two", recipe) == ["done"] * 2
    assert losses(tmp_path / "one") == pytest.approx(losses(tmp_path / "two"), rel=1e-5)
    one, two = weights(tmp_path / "one"), weights(tmp_path / "two")
    assert sorted(one) == sorted(two)
    assert "encoder.layers.1.feed_forward.down.low_rank.de.flat" in one
    for name, value in one.items():
        if name.endswith("key.bias") or (task == "qa" and name == "head.bias"):
            continue  # added to all scores of a softmax alike: its gradient is 0, but for rounding
        torch.testing.assert_close(two[name], value, rtol=1e-3, atol=1e-4, msg=name)


@pytest.mark.parametrize("task", ["ner", "qa"])
def test_a_run_that_is_stopped_goes_on_to_the_same_weights(
    pool1: ProcessPool, sources: Path, tmp_path: Path, task: str
) -> None:
    recipe = make_recipe(task)
    assert pool1.run(finetune, task, sources, tmp_path / "whole", recipe) == ["done"]
    again = tmp_path / "again"
    assert pool1.run(finetune, task, sources, again, recipe, terminate_at=2) == ["stopped"]
    assert pool1.run(finetune, task, sources, again, recipe) == ["done"]
    found, expected = weights(again), weights(tmp_path / "whole")
    assert sorted(found) == sorted(expected)
    assert all(torch.equal(found[name], value) for name, value in expected.items())


def test_a_tagger_can_be_the_mean_of_its_last_states(
    pool1: ProcessPool, sources: Path, tmp_path: Path
) -> None:
    runs = {"mean": (2, 4), "of_2": (1, 2), "of_4": (1, 4)}
    for name, (last, updates) in runs.items():
        recipe = make_recipe(
            "ner",
            training={"updates": updates, "average_last": last},
            optimizer={"schedule": "inverse_sqrt"},
        )
        assert pool1.run(finetune, "ner", sources, tmp_path / name, recipe) == ["done"]
    found = {name: weights(tmp_path / name) for name in runs}
    for name, value in found["mean"].items():
        both = found["of_2"][name].double() + found["of_4"][name].double()
        assert torch.equal(value, (both / 2).float()), name


def finetune_on_other_files(
    world: World, task: str, sources: Path, out_dir: Path, recipe: Recipe, others: Path
) -> str:
    """Run a stage in which rank 1 reads other sources."""
    return finetune(world, task, others if world.rank else sources, out_dir, recipe)


@pytest.mark.parametrize("task", ["ner", "qa"])
def test_a_rank_with_another_copy_of_the_text_is_named_on_all_ranks(
    task: str, pool2: ProcessPool, sources: Path, tmp_path: Path
) -> None:
    others = Path(shutil.copytree(sources, tmp_path / "others"))
    next(path for path in (others / task).rglob("*train*")).write_text("")
    given = (task, sources, tmp_path / "out", make_recipe(task), others)
    for said in pool2.run(finetune_on_other_files, *given):
        assert said.startswith(
            f"Rank 1 was given other settings or inputs than rank 0 (inputs.{INPUT_OF[task]}"
        )


def learned(task: str, folder: Path, pool1: ProcessPool, **changes: Any) -> Path:
    """Train a small encoder whose every word is a piece; return the model's folder."""
    words = pieces_model([" ".join(TOKENS)] * 20, kind="word")
    write_xlmr(folder / "xlmr", model=words, num_hidden_layers=1)
    if task == "ner":
        write_entities(folder / task, ["de", "en"])
    else:
        write_questions(folder / task, ["de", "en"])
    recipe = make_recipe(
        task,
        training={"updates": 50, "validate_every": 50, "checkpoint_every": 50, "dropout": 0.0},
        optimizer={"learning_rate": 0.02},
        **changes,
    )
    assert pool1.run(finetune, task, folder, folder / "model", recipe) == ["done"]
    return folder / "model"


def test_a_tagger_learns_what_names_look_like_and_a_shared_route_serves_any_language(
    pool1: ProcessPool, tmp_path: Path
) -> None:
    """An encoder that looks at its token can learn which are names."""
    modules = {"language_modules": {**LOW_RANK, "shared": True}}
    loss = {"objective": "fuse_distillation"}
    tagger = learned("ner", tmp_path, pool1, model=modules, loss=loss)
    write_entities(tmp_path / "tests", ["de", "fr"])
    report = evaluated(tmp_path / "tests", {"fd": tagger}, tmp_path / "scores")
    assert [one["name"] for one in report["systems"]] == ["fd", "fd (shared)"]
    assert report["left_out"] == {}
    for one in report["systems"]:
        assert set(one["languages"]) == {"de", "fr"}
        assert one["mean"]["f1"] > 90


def test_a_reader_learns_to_find_the_only_name_of_a_passage(
    pool1: ProcessPool, tmp_path: Path
) -> None:
    reader = learned("qa", tmp_path, pool1)
    report = evaluated(tmp_path / "qa", {"reader": reader}, tmp_path / "scores")
    (found,) = report["systems"]
    assert found["mean"]["exact_match"] > 70
    assert found["mean"]["f1"] >= found["mean"]["exact_match"]


def evaluated(data: Path, systems: dict[str, Path], out_dir: Path) -> dict[str, Any]:
    stage = STAGES["evaluate_task"]
    artifacts = {
        f"systems/{name}": open_artifact(path, kind="task_model") for name, path in systems.items()
    }
    raw = raw_input([str(data)])
    call = StageCall(
        stage=stage,
        recipe=Recipe(name="defaults"),
        artifacts=artifacts,
        raw={"data": raw},
        out_dir=out_dir,
        records={key: one.as_input for key, one in artifacts.items()} | raw.records("data"),
        config={},
    )
    evaluate_task.run(call)
    found: dict[str, Any] = open_artifact(out_dir, kind="task_evaluation").read_json("scores.json")
    return found


@pytest.fixture(scope="module")
def trained(
    pool1: ProcessPool, sources: Path, tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """Two seeds of a tagger with modules, one without, and a reader."""
    folder = tmp_path_factory.mktemp("trained")
    modules = {"language_modules": LOW_RANK}
    settings: dict[str, tuple[str, dict[str, Any]]] = {
        "lms@1": ("ner", {"model": modules, "training": {"seed": 1, "updates": 2}}),
        "lms@2": ("ner", {"model": modules, "training": {"seed": 2, "updates": 2}}),
        "plain": ("ner", {"training": {"updates": 2}}),
        "reader": ("qa", {"training": {"updates": 2}}),
    }
    for name, (task, changes) in settings.items():
        recipe = make_recipe(task, **changes)
        assert pool1.run(finetune, task, sources, folder / name, recipe) == ["done"]
    return {name: folder / name for name in settings}


def test_runs_of_one_system_are_averaged_and_languages_without_modules_left_out(
    trained: dict[str, Path], tmp_path: Path
) -> None:
    write_entities(tmp_path / "tests", ["de", "en", "fr"])
    systems = {name: trained[name] for name in ("plain", "lms@1", "lms@2")}
    found = evaluated(tmp_path / "tests", systems, tmp_path / "scores")
    assert found["examples"] == {"de": 8, "en": 8}
    assert found["left_out"] == {"fr": 8}
    plain, lms = found["systems"]
    assert (plain["name"], lms["name"], list(lms["runs"])) == ("plain", "lms", ["1", "2"])
    runs = [lms["runs"][run]["de"]["f1"] for run in ("1", "2")]
    assert lms["languages"]["de"]["f1"] == pytest.approx(sum(runs) / 2)
    assert plain["spread"] == {}
    report = (tmp_path / "scores" / "report.md").read_text()
    assert "±" in report
    assert "Left out, since not every system knows them: fr." in report
    lines = (tmp_path / "scores" / "predictions" / "plain" / "de.jsonl").read_text().splitlines()
    assert len(lines) == 8


@pytest.mark.parametrize(
    ("name", "shown"), [("LMS|FD", r"LMS\|FD"), ("pé |<b>", r"pé \|&lt;b&gt;")]
)
def test_a_systems_name_is_shown_as_it_is(name: str, shown: str) -> None:
    score = {"precision": 50.0, "recall": 50.0, "f1": 50.0}
    scores = {"plain": {"de": score}, f"{name}@1": {"de": score}, f"{name}@2": {"de": score}}
    reports = evaluate_task.describe_systems(scores)
    text = evaluate_task.markdown(reports, kind=NAMED_ENTITIES, examples={"de": 8}, skipped=())
    headings = [line for line in text.splitlines() if line.startswith("| Language")]
    assert set(headings) == {f"| Language | {NAMED_ENTITIES.unit} | plain | {shown} |"}
    assert f"Means over runs ({shown} of 2)" in text
    assert name not in text
    assert [report.name for report in reports] == ["plain", name]


def test_systems_that_cannot_be_compared_are_refused(
    trained: dict[str, Path], tmp_path: Path, sources: Path
) -> None:
    both = {"a": trained["plain"], "b": trained["reader"]}
    with pytest.raises(ConfigError, match="'a' is a tagger and 'b' a reader"):
        evaluated(sources / "ner", both, tmp_path / "scores")
    for named in (["lms", "lms@2"], ["plain@1", "plain@2", "plain"]):
        mixed = dict.fromkeys(named, trained["plain"])
        with pytest.raises(ConfigError, match=f"{named[0][:3]}.* is named without a seed"):
            evaluated(sources / "ner", mixed, tmp_path / "scores")
    write_entities(tmp_path / "fr", ["fr"])
    with pytest.raises(ConfigError, match=r"No language of the test files \(fr\) has modules"):
        evaluated(tmp_path / "fr", {"lms": trained["lms@1"]}, tmp_path / "scores")


def asked(directory: Path) -> TaskModel:
    return TaskModel.load(open_artifact(directory, kind="task_model"), device=CPU)


def test_what_a_model_says_of_a_text_does_not_depend_on_its_neighbours(
    trained: dict[str, Path], sources: Path
) -> None:
    tagger, reader = asked(trained["lms@1"]), asked(trained["reader"])
    sentences = read_entities(sources / "ner" / "de" / "test.tsv", "de")
    together = tag_sentences(tagger, sentences, language="de")
    alone = [tag_sentences(tagger, [one], language="de")[0] for one in sentences]
    assert together == alone
    assert [len(tags) for tags in together] == [len(one.tokens) for one in sentences]
    questions = read_questions(sources / "qa" / "made.de.test.json")
    answers = answer_questions(reader, questions, language="de")
    assert answers == [answer_questions(reader, [one], language="de")[0] for one in questions]
    for one, answer in zip(questions, answers, strict=True):
        assert answer
        assert answer in one.context


def test_a_tensor_beyond_the_model_is_refused(trained: dict[str, Path], tmp_path: Path) -> None:
    copied = Path(shutil.copytree(trained["plain"], tmp_path / "more"))
    path = next(copied.glob("weights/*"))
    path.unlink()  # a link to the original
    save_file({**load_file(next(trained["plain"].glob("weights/*"))), "odd": torch.ones(2)}, path)
    reseal(copied)
    with pytest.raises(CheckpointError, match=r"more holds tensors beyond the model \(1\): odd\."):
        asked(copied)


@pytest.mark.parametrize("names", [(), ("entities", "questions")])
def test_text_of_no_task_or_of_two_is_refused(
    names: tuple[str, ...], sources: Path, tmp_path: Path
) -> None:
    call = make_call("ner", sources, tmp_path / "out", make_recipe("ner"))
    text = raw_input([str(sources / "ner")])
    raw = {"pretrained": call.raw["pretrained"], **dict.fromkeys(names, text)}
    with pytest.raises(ConfigError, match="Name one of them"):
        finetune_task.run(replace(call, raw=raw))


@pytest.mark.parametrize(
    ("task", "changes", "complaint"),
    [
        ("ner", {"tasks": {"languages": ("de", "xx")}}, "no training file for xx"),
        ("ner", {"tasks": {"max_tokens": 200}, "batches": {"tokens": 10}}, "batches.tokens is 10"),
        ("qa", {"loss": {"label_smoothing": 0.1}}, "label_smoothing is 0.1"),
        ("qa", {"training": {"best_by": "low"}}, "best_by is 'low', which is for translation"),
        ("ner", {"training": {"best_by": "high"}}, "best_by is 'high', which is for translation"),
        ("qa", {"tasks": {"max_tokens": 80}}, "is 80, and the model has 64 positions"),
        ("ner", {"tasks": {"max_tokens": 65}}, "is 65, and the model has 64 positions"),
        ("ner", {"model": {"language_modules": {"kind": "clsr"}}}, "supports only low_rank"),
    ],
    ids=str,
)
def test_settings_that_do_not_fit_the_text_or_the_model_are_one_sentence(
    pool1: ProcessPool,
    sources: Path,
    tmp_path: Path,
    task: str,
    changes: dict[str, Any],
    complaint: str,
) -> None:
    recipe = make_recipe(task, **changes)
    (said,) = pool1.run(finetune, task, sources, tmp_path / "out", recipe)
    assert complaint in said
    assert "\n" not in said
    assert not (tmp_path / "out").exists()
