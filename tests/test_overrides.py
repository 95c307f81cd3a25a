"""Overrides: what ``--set`` and ``set`` of a plan do to a recipe."""

import json
import re
import tomllib
from pathlib import Path
from typing import Any

import pytest
from support.folder_listing import names_in

from pipeline import cli
from pipeline.artifacts.artifact import read_manifest
from pipeline.config.documents import toml_lines
from pipeline.config.recipe import (
    load_recipe,
    override_texts,
    parse_overrides,
    setting_origins,
    without_stated,
)
from pipeline.errors import ConfigError
from pipeline.jobs.plan import load_plan, resolve_plan


@pytest.mark.parametrize(
    ("text", "expected"),
    [
        ("training.updates=300", {"training": {"updates": 300}}),
        ("training.updates = 1_000", {"training": {"updates": 1000}}),
        ("optimizer.learning_rate=2e-3", {"optimizer": {"learning_rate": 0.002}}),
        ("mixture.sampling_temperature=inf", {"mixture": {"sampling_temperature": float("inf")}}),
        ("training.recompute_layers=true", {"training": {"recompute_layers": True}}),
        ("corpus.source=tmx", {"corpus": {"source": "tmx"}}),
        ("corpus.source='tmx'", {"corpus": {"source": "tmx"}}),
        ("corpus.languages=['de', 'no']", {"corpus": {"languages": ["de", "no"]}}),
        ("model.front.kind=ncf", {"model": {"front": {"kind": "ncf"}}}),
        (
            "evaluation.language_sets.'L.R.'=['az']",
            {"evaluation": {"language_sets": {"L.R.": ["az"]}}},
        ),
        (
            "evaluation.language_sets.'T = 5'=['az']",
            {"evaluation": {"language_sets": {"T = 5": ["az"]}}},
        ),
    ],
)
def test_a_value_is_toml_or_a_bare_word(text: str, expected: dict[str, Any]) -> None:
    assert parse_overrides([text]) == expected


@pytest.mark.parametrize(
    "text",
    [
        *("training.updates", "updates=300", "=300", "training.updates=", "training.=3"),
        *("training..updates=3", "corpus.languages=['de'", 'corpus.source="tmx', "a b.c=3"),
        *("training.updates=3\ntraining.seed=2", "a." * 40 + "b=1", f"a.b={'[' * 900}{']' * 900}"),
        r'decoding.comet="a\u0000b"',
    ],
)
def test_what_cannot_be_read_is_refused_in_one_line(text: str) -> None:
    with pytest.raises(ConfigError) as refused:
        parse_overrides([text])
    assert str(refused.value).startswith("--set ")
    assert "\n" not in str(refused.value)


def test_a_later_override_replaces_an_earlier_one() -> None:
    found = parse_overrides(["training.updates=3", "training.seed=2", "training.updates=4"])
    assert found == {"training": {"updates": 4, "seed": 2}}


@pytest.mark.parametrize("name", ["corpus.cldr.train_pairs", "corpus.columns"])
def test_a_later_table_of_names_replaces_an_earlier_one(name: str) -> None:
    later = parse_overrides([f"{name} = {{ de = 1, fr = 2 }}", f"{name}={{ fr = 3 }}"])
    assert later == parse_overrides([f"{name}.fr=3"])
    both = parse_overrides([f"{name}.de=1", f"{name}.fr=2", "training.seed=2"])
    assert both == parse_overrides([f"{name}={{ de = 1, fr = 2 }}", "training.seed=2"])


def test_overrides_are_written_as_they_are_read() -> None:
    overrides = {
        "training": {"updates": 3, "best_by": "low"},
        "evaluation": {"language_sets": {"L.R.": ["az", "be"], '"n" >= 50': ["a=b"]}},
        "model": {"moe": {}},
    }
    assert parse_overrides([*override_texts(overrides)]) == overrides


def test_overrides_come_after_parents_and_overlays() -> None:
    overlay = load_recipe("demo_moe+smoke")
    found = load_recipe("demo_moe+smoke", parse_overrides(["training.updates=21"]))
    assert overlay.training.updates == 20
    assert found.training == overlay.training.model_copy(update={"updates": 21})
    assert found.model == overlay.model
    assert found.name == "demo_moe+smoke"


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("training.updats=3", "there is no setting 'training.updats'. Did you mean 'updates'?"),
        ("trainng.updates=3", "there is no setting 'trainng'. Did you mean 'training'?"),
        ("training.updates=many", 'training.updates is "many". Choose a whole number from 1 to'),
        ("training.updates=2024-01-01", "training.updates is 2024-01-01. Choose"),
        ("training.updates=10", "optimizer.warmup_updates 60 is not below training.updates 10"),
        ("corpus.source=3", "corpus.source is 3"),
        (f"training.seed=0x{'f' * 5000}", "training.seed is a number of 20,000 bits. Choose"),
        (f"decoding.targets=0x{'f' * 5000}", "is a number of 20,000 bits. Write a list, ["),
        ("name.x=3", "'name' is not a section"),
        ("parent.x=3", "'parent' is not a section"),
    ],
)
def test_a_setting_that_does_not_fit_is_refused_with_the_override(text: str, said: str) -> None:
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        load_recipe("demo_dense", parse_overrides([text]))
    shown = text if "many" not in text else 'training.updates="many"'
    assert str(refused.value).startswith(f"Recipe 'demo_dense' with {shown[:38]}")


def test_overrides_without_a_recipe_change_the_defaults() -> None:
    found = load_recipe(None, {"decoding": {"beam_size": 2}})
    assert found.decoding.beam_size == 2
    assert found.training == load_recipe(None).training


def test_what_a_document_states_is_taken_out() -> None:
    overrides = {"training": {"updates": 3, "seed": 2}, "corpus": {"source": "tmx"}}
    document = {"training": {"updates": 20}, "corpus": {"source": "hub"}, "model": {"width": 8}}
    assert without_stated(overrides, document) == {"training": {"seed": 2}}


PARENT = """
[corpus]
source = "cldr"
[corpus.cldr]
valid_phrases = 7
train_pairs = { de = 100, fr = 100, it = 100 }
[evaluation.language_sets]
near = ["de", "nl"]
far = ["ja"]
"""


@pytest.mark.parametrize(
    ("table", "texts", "wanted"),
    [
        ("corpus.cldr.train_pairs", ["={ de = 5, ru = 6 }"], {"de": 5, "ru": 6}),
        ("corpus.cldr.train_pairs", [".de=5", ".ru=6"], {"de": 5, "ru": 6}),
        ("corpus.cldr.train_pairs", ["={}"], {}),
        ("evaluation.language_sets", ["={ far = ['zh'] }"], {"far": ["zh"]}),
    ],
)
def test_a_table_of_names_replaces_that_of_a_parent_whole(
    tmp_path: Path, table: str, texts: list[str], wanted: dict[str, Any]
) -> None:
    overrides = parse_overrides([f"{table}{text}" for text in texts])
    stated = "\n".join(toml_lines(overrides))
    files = {"parent": PARENT, "over": stated, "child": f'parent = "parent.toml"\n{stated}'}
    for name, text in files.items():
        (tmp_path / f"{name}.toml").write_text(text)
    parent, over, child = (str(tmp_path / f"{name}.toml") for name in files)
    section, *names = table.split(".")
    for recipe, laid_over in ((child, {}), (f"{parent}+{over}", {}), (parent, overrides)):
        resolved = load_recipe(recipe, laid_over).model_dump(mode="json")
        assert resolved["corpus"]["cldr"]["valid_phrases"] == 7
        found = resolved[section]
        for name in names:
            found = found[name]
        assert found == wanted


@pytest.mark.parametrize(
    ("recipe", "overrides", "found"),
    [
        ("bytes+wsf+msc", [], {"front": {"kind": "msc", "layer": 0}}),
        ("bytes+wsf", ["model.front.kind=subwords"], {"front": {"kind": "subwords"}}),
        ("bytes+ada_msha", ["model.front={kind='wsf'}"], {"front": {"kind": "wsf", "layers": 4}}),
        (
            "dense_iwslt14+lms_fd",
            ["model.language_modules.kind=language_experts"],
            {"language_modules": {"kind": "language_experts", "shared": True}},
        ),
    ],
)
def test_another_kind_of_model_inherits_the_settings_that_it_has(
    recipe: str, overrides: list[str], found: dict[str, Any]
) -> None:
    model = load_recipe(recipe, parse_overrides(overrides)).model.model_dump(mode="json")
    for table, settings in found.items():
        assert {name: model[table][name] for name in settings} == settings


def test_a_setting_that_no_kind_of_model_has_is_refused_in_a_parent_too(tmp_path: Path) -> None:
    (tmp_path / "parent.toml").write_text("[model.front]\nkind = 'wsf'\nlayer = 1\nlayerz = 2\n")
    child = tmp_path / "child.toml"
    child.write_text("parent = 'parent.toml'\n[model.front]\nkind = 'msc'\nlayers = 3\n")
    with pytest.raises(ConfigError, match=r"layerz'. .*'model.front.layers'"):
        load_recipe(str(child))


def test_a_table_of_names_of_a_plan_gives_way_whole_in_the_order_of_its_layers(
    tmp_path: Path,
) -> None:
    def pairs(plan: str, overlay: str = "", **overrides: int) -> dict[str, int]:
        (tmp_path / "plan.toml").write_text(plan)
        laid = {"corpus": {"cldr": {"train_pairs": overrides}}} if overrides else {}
        loaded = load_plan(str(tmp_path / "plan.toml"))
        (task,) = resolve_plan(loaded, overlay=overlay, overrides=laid).tasks
        sent = parse_overrides([*override_texts(task.overrides)])  # as the stage reads them
        found = load_recipe(task.recipe, sent).corpus.cldr.train_pairs
        assert task.config["corpus"]["cldr"]["train_pairs"] == found
        return dict(found)

    (tmp_path / "parent.toml").write_text(PARENT)
    over = tmp_path / "over.toml"
    over.write_text("[corpus.cldr]\ntrain_pairs = { uk = 4 }\n")
    plan = '[defaults]\nrecipe = "parent.toml"\nset.corpus.cldr.train_pairs = { de = 1, es = 1 }\n'
    plan += '[stages.corpus]\nrun = "import_corpus"\n'
    assert pairs(plan) == {"de": 1, "es": 1}
    assert pairs(plan + "set.corpus.cldr.train_pairs = { es = 2 }\n") == {"es": 2}
    assert pairs(plan, str(over)) == {"uk": 4}
    assert pairs(plan, str(over), ru=3) == {"ru": 3}


@pytest.mark.parametrize(
    ("kind", "found"),
    [
        ("msc", {"kind": "msc", "layer": 1}),
        ("msha", {"kind": "msha", "layer": 1, "scales": [0, 0, 2, 2, 3, 3, 4, 4]}),
    ],
)
def test_another_kind_of_model_replaces_that_of_a_plan(
    tmp_path: Path, kind: str, found: dict[str, Any]
) -> None:
    """In a stage's own settings, an overlay or the settings of a command."""
    (tmp_path / "over.toml").write_text(f"model.front.kind = '{kind}'\n")
    plan = "[defaults]\nrecipe = 'bytes'\n[defaults.set.model.front]\nkind = 'ada_msha'\n"
    plan += "layer = 1\nmax_scale = 6\n[stages.corpus]\nrun = 'import_corpus'\n"
    own, laid = f"set.model.front.kind = '{kind}'\n", {"model": {"front": {"kind": kind}}}
    for stated, overlay, overrides in (
        (own, "", {}),
        ("", str(tmp_path / "over.toml"), {}),
        ("", "", laid),
    ):
        (tmp_path / "plan.toml").write_text(plan + stated)
        loaded = load_plan(str(tmp_path / "plan.toml"))
        (task,) = resolve_plan(loaded, overlay=overlay, overrides=overrides).tasks
        sent = parse_overrides([*override_texts(task.overrides)])  # as the stage reads them
        front = load_recipe(task.recipe, sent).model.front.model_dump(mode="json")
        assert {name: front[name] for name in found} == found


def test_describe_shows_the_settings_that_are_set(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--set", "training.updates=301", "--set", "training.seed=7"]
    assert cli.main(["describe", "--recipe", "demo_dense", *options]) == 0
    said = capsys.readouterr().out
    assert said.startswith("# --set training.updates=301\n# --set training.seed=7\n# demo_dense\n")
    described = tomllib.loads(said)
    assert (described["training"]["updates"], described["training"]["seed"]) == (301, 7)


@pytest.mark.slow
def test_the_manifest_has_what_was_set_and_another_value_is_another_result(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[corpus]\nsource = "cldr"\n[corpus.cldr]\ntrain_pairs = { de = 20 }\n')
    command = ["import_corpus", "--recipe", str(recipe), "--out", str(tmp_path / "corpus")]
    few = ["--set", "corpus.max_train_lines=7"]
    assert cli.main([*command, *few]) == 0
    manifest = read_manifest(tmp_path / "corpus")
    assert manifest is not None
    assert manifest.config["corpus"]["max_train_lines"] == 7
    assert cli.main([*command, *few]) == 0
    assert cli.main(command) == 2
    assert "corpus.max_train_lines: 7 → " in capsys.readouterr().err
    assert names_in(tmp_path) == ["corpus", "recipe.toml"]


def test_describe_says_where_every_setting_comes_from(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "base.toml").write_text(
        "[training]\nupdates = 9000\nseed = 3\ndropout = 0.2\n[model.moe]\nnum_experts = 4\n"
    )
    (tmp_path / "own.toml").write_text(
        f"parent = '{tmp_path}/base.toml'\n[training]\nseed = 4\nresource_thresholds = [1, 2]\n"
        "[batches]\nmicro_batches = 2\n"
    )
    (tmp_path / "over.toml").write_text("[training]\ndropout = 0.1\n[model.moe]\nevery = 1\n")
    recipe = f"{tmp_path}/own.toml+{tmp_path}/over.toml"
    command = ["describe", "--recipe", recipe, "--set", "batches.micro_batches=6", "--settings"]

    assert cli.main([*command, "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    expected = {
        "training.updates": (9000, f"parent recipe {tmp_path}/base.toml"),
        "training.seed": (4, f"recipe {tmp_path}/own.toml"),
        "training.resource_thresholds": ([1, 2], f"recipe {tmp_path}/own.toml"),
        "training.dropout": (0.1, f"overlay {tmp_path}/over.toml"),
        "model.moe.num_experts": (4, f"parent recipe {tmp_path}/base.toml"),
        "model.moe.every": (1, f"overlay {tmp_path}/over.toml"),
        "batches.micro_batches": (6, "--set"),
    }
    stated = {name: (one["value"], one["from"]) for name, one in found.items()}
    assert {name: one for name, one in stated.items() if one[1] != "default"} == expected
    assert stated["training.moe_dropout"] == (None, "default")
    assert stated["model.moe.top_k"][1] == "default"

    assert cli.main(command) == 0
    lines = {
        line.split()[0]: line.split(maxsplit=1)[1]
        for line in capsys.readouterr().out.split("\n")
        if line
    }
    assert lines["batches.micro_batches"].split() == ["--set", "6"]
    assert lines["training.moe_dropout"].split() == ["default", "not", "set"]


def test_thresholds_that_are_not_inherited_are_at_their_default(tmp_path: Path) -> None:
    (tmp_path / "base.toml").write_text(
        "[corpus]\nsource = 'tmx'\n[training]\nresource_thresholds = [1, 2]\n"
    )
    (tmp_path / "own.toml").write_text(
        f"parent = '{tmp_path}/base.toml'\n[corpus]\nsource = 'tsv'\n"
    )
    recipe = f"{tmp_path}/own.toml"
    assert setting_origins(recipe) == {"corpus.source": f"recipe {recipe}"}
    assert load_recipe(recipe).training.resource_thresholds == (200_000, 500_000)
