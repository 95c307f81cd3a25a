"""Defaults and matrices of plans: what they expand to, and how wrong ones are refused."""

import re
from pathlib import Path

import pytest

from pipeline.errors import ConfigError
from pipeline.jobs.plan import Plan, PlanStage, load_plan, resolve_plan
from pipeline.jobs.runner import stage_arguments

PLAN = """
[inputs]
text = "a tree"

[defaults]
recipe = "phrases_bytes"
processes = 2
threads = 3
ds_config = "cpu_fp32"
[defaults.pretrain]
inputs = { shards = "shards", mixture = "mixture" }
set = { training.updates = 100 }
[defaults.translate]
inputs = { corpus = "corpus" }

[matrix.systems]
values = { suffix = "" }
[matrix.systems.rows]
plain = { label = "Plain" }
lms = { recipe = "+lms", set = { model.language_modules.rank = 4 }, label = "LMS", suffix = ", 4" }

[matrix.seeds]
order = "rows"
[matrix.seeds.rows]
2 = { number = 2 }
3 = { number = 3 }

[stages]
corpus = { run = "import_corpus", inputs = { raw = "$text" }, processes = 1 }
tokenizer = { run = "train_tokenizer", inputs = { corpus = "corpus" } }
shards = { run = "make_shards", inputs = { corpus = "corpus", tokenizer = "tokenizer" } }
mixture = { run = "mix", inputs = { shards = "shards" } }
"{row}" = { matrix = "systems", run = "pretrain" }
"translate_{row}" = { matrix = "systems", run = "translate", inputs = { checkpoint = "{row}" } }
"seed_{row}" = { matrix = "seeds", run = "pretrain", set = { training.seed = "{number}" } }
"seed_{row}_text" = { matrix = "seeds", run = "translate", inputs = { checkpoint = "seed_{row}" } }
lengths = { run = "analyze_lengths", inputs = { corpus = "corpus" } }

[stages.evaluation]
matrix = "systems"
run = "evaluate"
recipe = "demo_dense"
[stages.evaluation.inputs]
corpus = "corpus"
systems = { "{label}{suffix}" = "translate_{row}", "Seed 2" = "seed_2_text" }
"""

WIDE = {"processes": 2, "threads": 3}
TRAINED = {"run": "pretrain", "ds_config": "cpu_fp32", **WIDE}
LMS = {"model": {"language_modules": {"rank": 4}}}


def load(folder: Path, text: str) -> Plan:
    path = folder / "small.toml"
    path.write_text(text, encoding="utf-8")
    return load_plan(str(path))


def pretrained(recipe: str = "phrases_bytes", **training: int) -> PlanStage:
    settings = {"training": {"updates": 100, **training}}
    inputs = {"shards": "shards", "mixture": "mixture"}
    return PlanStage.model_validate(
        {**TRAINED, "recipe": recipe, "inputs": inputs, "set": settings}
    )


def translated(checkpoint: str, recipe: str = "phrases_bytes", **more: object) -> PlanStage:
    inputs = {"corpus": "corpus", "checkpoint": checkpoint}
    return PlanStage.model_validate(
        {"run": "translate", "recipe": recipe, "inputs": inputs, **WIDE, **more}
    )


def test_a_plan_is_expanded_to_stages_in_full(tmp_path: Path) -> None:
    base = {"recipe": "phrases_bytes"}
    both = {"corpus": "corpus", "tokenizer": "tokenizer"}
    lms = pretrained("phrases_bytes+lms")
    systems = {"Plain": "translate_plain", "LMS, 4": "translate_lms", "Seed 2": "seed_2_text"}
    expected = {
        "corpus": PlanStage(run="import_corpus", inputs={"raw": "$text"}, threads=3, **base),
        "tokenizer": PlanStage(run="train_tokenizer", inputs={"corpus": "corpus"}, **base),
        "shards": PlanStage(run="make_shards", inputs=both, processes=2, threads=3, **base),
        "mixture": PlanStage(run="mix", inputs={"shards": "shards"}, **base),
        "plain": pretrained(),
        "lms": lms.model_copy(update={"set": {**lms.set, **LMS}}),
        "translate_plain": translated("plain"),
        "translate_lms": translated("lms", "phrases_bytes+lms", set=LMS),
        "seed_2": pretrained(seed=2),
        "seed_2_text": translated("seed_2"),
        "seed_3": pretrained(seed=3),
        "seed_3_text": translated("seed_3"),
        "lengths": PlanStage(run="analyze_lengths", inputs={"corpus": "corpus"}),
        "evaluation": PlanStage(
            run="evaluate",
            recipe="demo_dense",
            inputs={"corpus": "corpus", "systems": systems},
            processes=2,
            threads=3,
        ),
    }
    plan = load(tmp_path, PLAN)
    assert plan.stages == expected
    assert [*plan.stages] == [*expected]
    found = plan.stages["evaluation"].inputs["systems"]
    assert isinstance(found, dict)
    assert [*found] == [*systems]


def test_a_stage_is_told_what_the_plan_sets(tmp_path: Path) -> None:
    resolved = resolve_plan(load(tmp_path, PLAN), out_dir=tmp_path / "out")
    tasks = {task.name: task for task in resolved.tasks}
    assert tasks["lms"].config["training"]["updates"] == 100
    assert tasks["lms"].config["model"]["language_modules"]["rank"] == 4
    arguments = stage_arguments(resolved, tasks["lms"])
    assert "--recipe=phrases_bytes+lms" in arguments
    settings = [one for one in arguments if one.startswith("--set=")]
    assert settings == ["--set=training.updates=100", "--set=model.language_modules.rank=4"]
    assert not any(one.startswith("--set=") for one in stage_arguments(resolved, tasks["lengths"]))


def test_overlays_and_settings_of_the_command_come_last(tmp_path: Path) -> None:
    plan = load(tmp_path, PLAN)
    resolved = resolve_plan(plan, out_dir=tmp_path / "out", overlay="smoke")
    seed = next(task for task in resolved.tasks if task.name == "seed_2")
    assert (seed.config["training"]["updates"], seed.config["training"]["seed"]) == (20, 2)
    overrides = {"training": {"seed": 9}}
    resolved = resolve_plan(plan, out_dir=tmp_path / "out", overlay="smoke", overrides=overrides)
    seed = next(task for task in resolved.tasks if task.name == "seed_2")
    assert (seed.config["training"]["updates"], seed.config["training"]["seed"]) == (20, 9)


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        ("processes = 2\nthreads", "proceses = 2\nthreads", "no stage, 'proceses'"),
        ("[defaults.translate]", "[defaults.tranlsate]", "Did you mean 'translate'?"),
        ("[defaults.translate]", "[defaults.upcycle]", "[defaults.upcycle]: no stage runs"),
        ("ds_config =", "inputs = {}\nds_config =", "no stage, 'inputs'"),
        ("set = { tr", "sets = { tr", "[defaults.pretrain]: there is no setting of stages 'sets'"),
        ('matrix = "seeds"', 'matrix = "sed"', "no matrix 'sed'"),
        ('matrix = "seeds"', 'matrix = ["seeds"]', "no matrix \"['seeds']\". Did you mean"),
        ('run = "analyze_lengths"', 'run = ["a"]', "run is ['a']. Write text"),
        ('run = "analyze_lengths"', "run = { a = 1 }", "run is {'a': 1}. Write text in quotes"),
        ('"{number}"', '"{numbr}"', "row '2': the row has no value 'numbr'"),
        ('"{label}{suffix}"', '"{name}"', "row 'plain': the row has no value"),
        ('"seed_{row}_text" =', '"seed_{number}" =', "two stages are named 'seed_2'"),
        ('order = "rows"', 'order = "row"', "[matrix.seeds]: order is row"),
        ('order = "rows"', 'ordr = "rows"', "[matrix.seeds]: there is no setting 'ordr'"),
        ("[matrix.seeds.rows]", "[matrix.seeds.row]", "[matrix.seeds]: rows is missing"),
        ("{ number = 2 }", "{ number = 2, sett.training.seed = 2 }", "the value 'sett'. Did you"),
        ("values = {", "values = { updates = 9,", "[matrix.systems]: no stage reads the value 'up"),
        ("[matrix.seeds]\n", "[matrix.more.rows.a]\n[matrix.seeds]\n", 'has matrix = "more"'),
        *(
            ("[matrix.systems]\n", f'[matrix.systems]\ntimes = "{name}"\n', said)
            for name, said in (
                ("sed", "[matrix.systems], times: there is no matrix 'sed'. Did you mean 'seeds'?"),
                ("systems", "times is not allowed twice: 'systems'"),
            )
        ),
        ("[matrix.seeds]\n", "[matrix.more]\nrows = {}\n[matrix.seeds]\n", "[matrix.more]: rows"),
        (PLAN, '[matrix.a.rows]\n[stages."{row}"]\nmatrix = "a"\nrun = "mix"\n', "rows is empty."),
        (PLAN, "[stages]\n", "stages is empty. Add an entry."),
        (PLAN, 'defaults = 3\n[stages]\nmixture = { run = "mix" }\n', "[defaults] is not a table"),
        (PLAN, 'matrix = 3\n[stages]\nmixture = { run = "mix" }\n', "matrix is not a table"),
        (
            "[matrix.seeds]\n",
            '[matrix.one]\ntimes = "two"\nrows = { a = {} }\n'
            '[matrix.two]\ntimes = "seeds"\nrows = { b = {} }\n[matrix.seeds]\n',
            "[matrix.one], times: times is not allowed twice: 'two'",
        ),
        (
            "[matrix.seeds]\n",
            '[matrix.one]\ntimes = "two"\nrows = { a = {}, a_b = {} }\n'
            "[matrix.two]\nrows = { c = {}, b_c = {} }\n[matrix.seeds]\n",
            "[matrix.one], times: two rows would be named 'a_b_c'",
        ),
        ('label = "LMS", suffix = ", 4"', 'label = "Plain"', "'lms': another row also gives an"),
        (
            'run = "analyze_lengths",',
            'run = "analyze_lengths", set = { training.seed = 2 },',
            "set",
        ),
    ],
)
def test_wrong_matrices_are_refused(tmp_path: Path, old: str, new: str, said: str) -> None:
    assert old in PLAN
    with pytest.raises(ConfigError, match=re.escape(said)) as refused:
        load(tmp_path, PLAN.replace(old, new, 1))
    assert "\n" not in str(refused.value)


PRODUCT = """
[matrix.systems]
times = "seeds"
values = { suffix = "" }
[matrix.systems.rows]
plain = { label = "Plain", number = 0 }
lms = { recipe = "+lms", set = { model.language_modules.rank = 4 }, label = "LMS", suffix = ", 4" }

[matrix.seeds]
values = { recipe = "bible8_dense", number = 1 }
[matrix.seeds.rows]
2 = { set = { training.seed = 2 } }
3 = { set = { training.seed = 3 }, number = 3 }
"""
WRITTEN_OUT = """
[matrix.systems]
values = { suffix = "", recipe = "bible8_dense", set = { training.seed = 2 }, number = 0 }
[matrix.systems.rows.plain_2]
label = "Plain"
of = "plain of 2"
[matrix.systems.rows.lms_2]
label = "LMS"
of = "lms of 2"
number = 1
suffix = ", 4"
recipe = "bible8_dense+lms"
set = { training.seed = 2, model.language_modules.rank = 4 }
[matrix.systems.rows.plain_3]
label = "Plain"
of = "plain of 3"
set = { training.seed = 3 }
[matrix.systems.rows.lms_3]
label = "LMS"
of = "lms of 3"
number = 3
suffix = ", 4"
recipe = "bible8_dense+lms"
set = { training.seed = 3, model.language_modules.rank = 4 }
"""
TWICE = """
[inputs]
data = "anything"
[stages."{row}"]
matrix = "systems"
run = "pretrain"
inputs = { shards = "$data", mixture = "$data" }
[stages."translate_{row}"]
matrix = "systems"
run = "translate"
inputs = { corpus = "$data", checkpoint = "{row}" }
[stages.evaluation]
matrix = "systems"
run = "evaluate"
recipe = "bible8_dense"
[stages.evaluation.inputs]
corpus = "$data"
systems = { "{label}{suffix}@{number}, {systems} of {seeds}" = "translate_{row}" }
"""


def test_a_matrix_times_another_is_the_product_written_out(tmp_path: Path) -> None:
    found = load(tmp_path, PRODUCT + TWICE).stages
    expected = load(tmp_path, WRITTEN_OUT + TWICE.replace("{systems} of {seeds}", "{of}")).stages
    assert found == expected
    assert [*found] == [*expected]
    assert [*found][:4] == ["plain_2", "lms_2", "plain_3", "lms_3"]
    systems = found["evaluation"].inputs["systems"]
    assert isinstance(systems, dict)
    assert [*systems] == [
        *("Plain@0, plain of 2", "LMS, 4@1, lms of 2"),
        *("Plain@0, plain of 3", "LMS, 4@3, lms of 3"),
    ]


def test_settings_of_a_stage_are_merged_into_those_of_its_row(tmp_path: Path) -> None:
    of_row = "set = { training.dropout = 0.2 }"
    text = PLAN.replace("2 = { number = 2 }", f"2 = {{ number = 2, {of_row} }}")
    stages = load(tmp_path, text).stages
    assert stages["seed_2"].set == {"training": {"updates": 100, "dropout": 0.2, "seed": 2}}
    assert stages["seed_3"].set == {"training": {"updates": 100, "seed": 3}}


def test_an_overlay_leaves_the_settings_of_a_stage_without_a_recipe_alone(tmp_path: Path) -> None:
    (tmp_path / "other.toml").write_text('[tests]\nlanguages = ["fr", "en"]\n', encoding="utf-8")
    plan = """
    [inputs]
    text = "a tree"
    [stages]
    tests = { run = "import_tests", inputs = { raw = "$text" }, set = { tests.languages = ["de"] } }
    """
    overlay = str(tmp_path / "other.toml")
    resolved = resolve_plan(load(tmp_path, plan), out_dir=tmp_path / "out", overlay=overlay)
    assert resolved.tasks[0].config["tests"]["languages"] == ["de"]
