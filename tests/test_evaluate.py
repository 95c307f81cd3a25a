"""The evaluate stage, from translations artifacts to scores and reports."""

import re
import shutil
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import sacrebleu
from support.corpora import make_corpus, writing
from support.example_evaluation import place_flores_model
from support.recorded_runs import training_run
from support.stage_runs import run_stage

from pipeline.artifacts.artifact import MANIFEST_NAME, Artifact, open_artifact, to_json
from pipeline.artifacts.corpus import (
    Direction,
    Hypothesis,
    directions,
    hypotheses_name,
    pair_name,
    read_lines,
    text_name,
    write_hypotheses,
)
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.config.recipe import Recipe
from pipeline.errors import ArtifactError, ConfigError
from pipeline.evaluation import comet
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf, PlainChrf
from pipeline.evaluation.scores import Column
from pipeline.evaluation.settings import EvaluationConfig, ScoreName
from pipeline.jobs.freshness import why_not_done
from pipeline.registry import STAGES
from pipeline.stage import StageCall
from pipeline.stages import evaluate
from pipeline.training.settings import TrainingConfig

WHERE = "Where is the station?"
TEST_LINES: Mapping[str, Mapping[str, list[str]]] = {
    "de-en": {
        "de": ["Die Kinder spielen im Garten.", "Er liest ein altes Buch.", "Wo ist der Bahnhof?"],
        "en": ["The children play in the garden.", "He reads an old book.", WHERE],
    },
    "en-fr": {
        "en": ["The bread is on the table.", "We are going home now."],
        "fr": ["Le pain est sur la table.", "Nous rentrons à la maison maintenant."],
    },
    "de-fr": {"de": ["Das Wasser ist kalt."], "fr": ["L'eau est froide."]},
}
TRAINING_LINES = {"de-en": 50, "en-fr": 5, "de-fr": 0}
WITHOUT_LANGUAGES = EvaluationConfig(language_accuracy=False)
"""Most tests leave out the identification of languages, which takes 90 ms for the fewest lines."""


@pytest.fixture(scope="module")
def corpus(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("corpus") / "corpus"
    return make_corpus(folder, {"test": TEST_LINES}, trained=TRAINING_LINES)


def corpus_of_many_lines(path: Path) -> Artifact:
    lines = {
        code: [f"line {number} {code} is number {number * 7 % 31}" for number in range(40)]
        for code in ("de", "en")
    }
    return make_corpus(path, {"test": {"de-en": lines}}, trained={"de-en": 50})


Translate = Callable[[Direction, list[str], list[str]], list[Hypothesis]]


def perfect(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in references]


def copied(_: Direction, sources: list[str], __: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in sources]


def shuffled(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(" ".join(reversed(text.split()))) for text in references]


def translations(
    path: Path,
    corpus: Artifact,
    translate: Translate,
    inputs: Mapping[str, Artifact] | None = None,
    statistics: Mapping[str, object] | None = None,
) -> Artifact:
    given = {"corpus": corpus, **(inputs or {})}
    with writing(path, "translations", "translate", given) as writer:
        writer.statistics.update(statistics or {})
        for direction in directions(corpus, "test"):
            found = translate(
                direction,
                read_lines(corpus, "test", direction.pair, direction.source),
                read_lines(corpus, "test", direction.pair, direction.target),
            )
            if found:
                write_hypotheses(writer.path(hypotheses_name(direction)), found)

    return open_artifact(path, kind="translations")


def stage_call(
    out_dir: Path,
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    *,
    processes: int = 1,
    settings: EvaluationConfig = WITHOUT_LANGUAGES,
    comet: Path | None = None,
    more: Mapping[str, Artifact] | None = None,
) -> StageCall:
    """Call the stage; ``more`` has further inputs by name."""
    stage = STAGES["evaluate"]
    training = TrainingConfig(resource_thresholds=(10, 40))
    recipe = Recipe(name="test", training=training, evaluation=settings)
    inputs = {"corpus": corpus, **{f"systems/{name}": one for name, one in systems.items()}}
    inputs |= more or {}
    raw = {} if comet is None else {"comet": RawInput((comet,))}
    of_raw = {} if comet is None else raw["comet"].records("comet")
    return StageCall(
        stage=stage,
        recipe=recipe,
        artifacts=inputs,
        raw=raw,
        out_dir=out_dir,
        records={**{name: one.as_input for name, one in inputs.items()}, **of_raw},
        config=recipe.sections(stage.sections),
        processes=processes,
    )


def evaluated(call: StageCall) -> Artifact:
    evaluate.run(call)
    return open_artifact(call.out_dir, kind="evaluation")


def scored(
    folder: Path,
    corpus: Artifact,
    answers: Mapping[str, Translate],
    *,
    more: Mapping[str, Artifact] | None = None,
    **settings: Any,
) -> Artifact:
    """Evaluate systems that answer so; the identification of languages is left out by default."""
    systems = {
        name: translations(folder / f"system {index}", corpus, answer)
        for index, (name, answer) in enumerate(answers.items())
    }
    chosen = EvaluationConfig.model_validate({"language_accuracy": "scores" in settings} | settings)
    return evaluated(stage_call(folder / "out", corpus, systems, settings=chosen, more=more))


def report_of(evaluation: Artifact) -> str:
    return evaluation.file("report.md").read_text(encoding="utf-8")


def system_scores(evaluation: Artifact, name: str) -> Any:
    systems = evaluation.read_json("scores.json")["systems"]
    return next(one for one in systems if one["name"] == name)


# Scores


def test_references_score_100_and_three_lines_have_no_intervals(
    tmp_path: Path, corpus: Artifact
) -> None:
    made = scored(tmp_path, corpus, {"perfect": perfect, "shuffled": shuffled})
    assert made.manifest.summary == (
        "2 systems scored on 12 test lines in 6 directions (2 Any → En, 2 En → Any, 2 Zero-shot)",
    )
    averages = system_scores(made, "perfect")["averages"]
    assert averages["into_pivot"]["all"]["bleu"] == pytest.approx(100.0)
    assert averages["zero_shot"]["all"]["chrf"] == pytest.approx(100.0)
    tests = made.read_json("scores.json")["significance"]["directions"]
    assert [*tests.values()] == [{}] * 6
    assert "**" not in report_of(made)


@pytest.mark.parametrize("names", [["bleu", "spbleu", "chrf", "plain_chrf"], ["spbleu"]])
def test_every_score_is_sacrebleus(
    tmp_path: Path, corpus: Artifact, monkeypatch: pytest.MonkeyPatch, names: list[str]
) -> None:
    lines = [text for pair in TEST_LINES.values() for side in pair.values() for text in side]
    place_flores_model(tmp_path, lines, "flores200", monkeypatch)
    made = scored(tmp_path, corpus, {"shuffled": shuffled}, scores=names)
    for name, found in system_scores(made, "shuffled")["directions"].items():
        source, target = name.split("-")
        references = TEST_LINES[Direction(source, target).pair][target]
        texts = [" ".join(reversed(line.split())) for line in references]
        expected = {
            "bleu": sacrebleu.corpus_bleu(texts, [references]).score,
            "spbleu": sacrebleu.corpus_bleu(texts, [references], tokenize="flores200").score,
            "chrf": sacrebleu.corpus_chrf(texts, [references], word_order=2).score,
            "plain_chrf": sacrebleu.corpus_chrf(texts, [references]).score,
        }
        assert found["scores"] == {one: expected[one] for one in names}
        assert found["quality"]["bleu"] == expected["bleu"]


def test_copied_sources_are_in_the_wrong_language_as_the_statistics_of_their_lines_say(
    tmp_path: Path, corpus: Artifact
) -> None:
    answers = {"copied": copied, "perfect": perfect, "both@1": copied, "both@2": perfect}
    made = scored(tmp_path, corpus, answers, language_accuracy=True)
    copies = system_scores(made, "copied")["averages"]
    assert copies["zero_shot"]["all"]["language_restricted"] == 0.0
    perfects = system_scores(made, "perfect")["averages"]
    assert perfects["into_pivot"]["all"]["language_restricted"] == 100.0
    confusion = made.read_json("scores.json")["confusion"]["language_restricted"]
    assert confusion["copied"]["zero_shot"] == {"de": {"fr": 1}, "fr": {"de": 1}}
    assert confusion["perfect"]["into_pivot"] == {"en": {"en": 5}}
    both = system_scores(made, "both")["directions"]["de-fr"]
    assert both["outcomes"]["language_restricted"] == {"de": 1, "fr": 1}
    for name, found in system_scores(made, "copied")["directions"].items():
        with np.load(made.file(f"sentences/copied/{name}.npz"), allow_pickle=False) as arrays:
            assert len(arrays["bleu"]) == len(arrays["language"]) == found["lines"]
            assert Bleu("13a", {}).of_corpus(arrays["bleu"]) == found["scores"]["bleu"]
            assert Chrf().of_corpus(arrays["chrf"]) == found["scores"]["chrf"]
            for name in ("language", "language_restricted"):
                assert 100 * arrays[name].mean() == found["scores"][name]


KNOWN_TO_BOTH = {"de": "Der Rat hat gestern beschlossen, die Schule neu zu bauen."}
UNKNOWN_TO_LANGDETECT = {
    "yi": "דער ראַט פֿון דער קהילה האָט נעכטן באַשלאָסן צו בויען די שול.",
    "gl": "O concello decidiu onte reconstruír a escola que caeu co terremoto.",
}
UNKNOWN_TO_BOTH = {"rw": "Inama njyanama yafashe icyemezo cyo kongera kubaka ishuri."}


def test_each_identifier_scores_the_languages_it_knows_and_names_the_others(tmp_path: Path) -> None:
    lines = KNOWN_TO_BOTH | UNKNOWN_TO_LANGDETECT | UNKNOWN_TO_BOTH
    english = "The council decided yesterday to build the school anew."
    sides = {pair_name("en", code): {code: [line], "en": [english]} for code, line in lines.items()}
    corpus = make_corpus(tmp_path / "corpus", {"test": sides}, trained=dict.fromkeys(sides, 0))
    made = scored(tmp_path, corpus, {"perfect": perfect}, language_accuracy=True)
    found = system_scores(made, "perfect")["directions"]
    for code in lines:
        expected = {"language", "language_restricted"} if code in KNOWN_TO_BOTH else set()
        if code not in UNKNOWN_TO_BOTH:
            expected.add("language_lid176")
        measured = found[f"en-{code}"]["scores"]
        assert {name for name in measured if "language" in name} == expected
        assert all(measured[name] == 100.0 for name in expected)
    assert made.read_json("scores.json")["undetectable"] == {
        "langdetect": ["gl", "rw", "yi"],
        "lid.176": ["rw"],
    }
    text = report_of(made)
    assert "- langdetect does not know these target languages, which its accuracy leaves" in text
    unknown = "No identifier knows these target languages, which have no language accuracy: rw."
    assert unknown in text
    assert "### lid.176, %" in text


@pytest.mark.slow
def test_scores_follow_from_test_lines_and_translations_whatever_the_number_of_workers(
    tmp_path: Path,
) -> None:
    """What a study keeps is elsewhere, without the training text and without the models."""
    corpus = corpus_of_many_lines(tmp_path / "study" / "corpus")
    for code in ("de", "en"):
        path = corpus.directory / text_name("train", "de-en", code)
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(code, encoding="utf-8")
    answers = {"second@1": shuffled, "second@2": copied, "first": copied}
    for name, answer in answers.items():
        translations(tmp_path / "study" / name, corpus, answer)
    shutil.copytree(tmp_path / "study", tmp_path / "kept", ignore=lambda *_: ["train"])
    found = []
    for processes, folder in enumerate((tmp_path / "study", tmp_path / "kept"), start=1):
        systems = {name: open_artifact(folder / name, kind="translations") for name in answers}
        corpus = open_artifact(folder / "corpus", kind="corpus")
        call = stage_call(
            folder / "out", corpus, systems, processes=processes, settings=EvaluationConfig()
        )
        found.append(evaluated(call))
    alone, together = (
        {name: one for name, one in made.manifest.files.items() if not name.startswith("report.")}
        for made in found
    )
    assert alone == together
    names = [one["name"] for one in found[0].read_json("scores.json")["systems"]]
    assert names == ["second", "first"]


@pytest.mark.parametrize(
    "names", [["language", "chrf"], ["language_restricted"], ["language_lid176", "bleu"]]
)
def test_the_recipe_chooses_the_scores(tmp_path: Path, corpus: Artifact, names: list[str]) -> None:
    made = scored(tmp_path, corpus, {"copied": copied}, scores=names)
    found = system_scores(made, "copied")["directions"]["de-en"]
    assert found["scores"].keys() == {*names}
    with np.load(made.file("sentences/copied/de-en.npz"), allow_pickle=False) as arrays:
        assert arrays.files == names
    text, page = report_of(made), made.file("report.html").read_text(encoding="utf-8")
    for name, title in (
        *(("bleu", "BLEU"), ("chrf", "chrF++"), ("language", "langdetect as it is")),
        ("language_lid176", "lid.176"),
    ):
        assert (f"\n### {title}" in text) == (f"<h3>{title}" in page) == (name in names)


def test_every_system_is_compared_with_the_named_baseline(tmp_path: Path) -> None:
    texts = {
        pair: {code: lines * 20 for code, lines in sides.items()}
        for pair, sides in TEST_LINES.items()
    }
    corpus = make_corpus(tmp_path / "corpus", {"test": texts}, trained=TRAINING_LINES)
    answers = {"copied": copied, "perfect": perfect}
    made = scored(tmp_path, corpus, answers, scores=("bleu",), baseline="perfect")
    document = made.read_json("scores.json")
    assert document["verdicts"]["baseline"] == "perfect"
    assert document["wins"]["copied"]["zero_shot"]["all"]["bleu"] == 0.0
    differences = document["significance"]["directions"]["de-en"]["bleu"]["differences"]
    assert differences.keys() == {"copied"}
    assert differences["copied"]["value"] < -90
    assert differences["copied"]["p_value_holm"] < 0.05
    assert "## Comparison with the baseline perfect" in report_of(made)


@pytest.mark.parametrize("slow", ["comet", "nearest neighbor"])
def test_an_unknown_baseline_is_refused_before_what_takes_long(
    slow: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    corpus = make_corpus(tmp_path / "corpus", {"test": TEST_LINES}, trained=TRAINING_LINES)
    systems = {"copied": translations(tmp_path / "system", corpus, copied)}
    (tmp_path / "model").mkdir()
    monkeypatch.setattr("pipeline.evaluation.scoring.ask_comet", None)
    monkeypatch.setattr(evaluate, "retrieve_all", None)
    with pytest.raises(ConfigError, match=r"names 'copy', which is none of the systems copied"):
        evaluate.run(
            stage_call(
                tmp_path / "out",
                corpus,
                systems,
                settings=EvaluationConfig(
                    scores=("comet",) if slow == "comet" else ("bleu",),
                    nearest_neighbor=slow != "comet",
                    baseline="copy",
                ),
                comet=tmp_path / "model" if slow == "comet" else None,
            )
        )


def corpus_of_parallel_lines(path: Path, *, shared: bool = True) -> Artifact:
    """Thirty sentences in three languages; or, in every pair, thirty others."""

    def lines(pair: str, code: str) -> list[str]:
        of_pair = "" if shared else f" of {pair}"
        return [f"sentence {number} in {code}{of_pair}" for number in range(30)]

    trained = {"de-en": 50, "de-fr": 0, "en-fr": 50}
    texts = {pair: {code: lines(pair, code) for code in pair.split("-")} for pair in trained}
    return make_corpus(path, {"test": texts}, trained=trained)


def with_gaps(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    """Every third line is not translated, in every direction."""
    return [Hypothesis("" if number % 3 == 0 else text) for number, text in enumerate(references)]


@pytest.mark.parametrize("order", ["bac", "acb"])
def test_systems_in_another_order_are_another_evaluation(
    tmp_path: Path, corpus: Artifact, order: str
) -> None:
    """The first is the baseline, and tables have the order; earlier versions noted none."""
    answers = {"a": perfect, "b": copied, "c": shuffled}
    systems = {name: translations(tmp_path / name, corpus, answers[name]) for name in answers}

    def why_not(names: str) -> str | None:
        call = stage_call(tmp_path / "out", corpus, {name: systems[name] for name in names})
        digests = {name: record.digest for name, record in call.records.items()}
        return why_not_done(call.out_dir, stage=call.stage, config=call.config, digests=digests)

    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    assert why_not("abc") is None
    assert why_not(order) == "the systems are in another order"
    manifest = made.manifest.model_dump()
    del manifest["statistics"]["order"]
    (made.directory / MANIFEST_NAME).write_text(to_json(manifest), encoding="utf-8")
    assert why_not(order) is None


def test_lines_of_parallel_test_sets_are_resampled_together(tmp_path: Path) -> None:
    """The directions agree on every line, so that their average is as uncertain as each of them."""
    widths, reports = {}, {}
    for name, shared in (("shared", True), ("apart", False)):
        corpus = corpus_of_parallel_lines(tmp_path / name / "corpus", shared=shared)
        made = scored(tmp_path / name, corpus, {"gaps": with_gaps}, scores=("chrf",))
        found = made.read_json("scores.json")["significance"]
        of_average = found["averages"]["into_pivot"]["all"]["chrf"]["intervals"]["gaps"]
        of_direction = found["directions"]["de-en"]["chrf"]["intervals"]["gaps"]
        widths[name] = [one["high"] - one["low"] for one in (of_average, of_direction)]
        reports[name] = report_of(made), found["shared_lines"]
    assert widths["shared"][0] == pytest.approx(widths["shared"][1])
    assert widths["apart"][0] < 0.85 * widths["apart"][1]
    assert reports["shared"][1] == {"de-en, de-fr, en-fr": 30}
    assert reports["apart"][1] == {}
    said = "directions of pairs with parallel test sets"
    assert said in reports["shared"][0]
    assert "3 pairs with 30 sentences" in reports["shared"][0]
    assert said not in reports["apart"][0]
    assert "no two pairs have half of their test lines in common" in reports["apart"][0]


def test_the_nearest_neighbor_is_a_system_where_the_recipe_asks_for_it(tmp_path: Path) -> None:
    """The one training line answers all test lines with a trigram of it; others are copied."""
    tests = corpus_of_tests(tmp_path / "tests")
    more = {"training": corpus_of_training(tmp_path / "trained")}
    asked = {"nearest_neighbor": True, "baseline": "nearest neighbor"}
    made = scored(tmp_path, tests, {"copied": copied}, more=more, **asked)
    assert made.read_json("scores.json")["verdicts"]["baseline"] == "nearest neighbor"
    names = [one["name"] for one in made.read_json("scores.json")["systems"]]
    assert names == ["copied", "nearest neighbor"]
    families = {one["family"] for one in made.read_json("scores.json")["directions"]}
    assert families == {"into_pivot", "out_of_pivot", "zero_shot"}, "of the training corpus"
    assert made.has("sentences/nearest neighbor/de-en.npz")
    assert "| nearest neighbor | no training |" in report_of(made)
    assert "or of a direction without any, stays as it is." in report_of(made)
    answers = ["Die Kinder spielen im Garten.", "Where is the", "Where is the"]
    expected = sacrebleu.corpus_chrf(answers, [TEST_LINES["de-en"]["en"]], word_order=2).score
    found = system_scores(made, "nearest neighbor")["directions"]["de-en"]["scores"]["chrf"]
    assert found == pytest.approx(expected)
    taken = {"nearest neighbor": copied}
    with pytest.raises(ConfigError, match="Rename the system"):
        scored(tmp_path / "other", tests, taken, nearest_neighbor=True)


def damaged_by(seed: int) -> Translate:
    """Translations by a run: other words are lost with every seed."""

    def translate(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
        generator = np.random.default_rng(seed)
        return [
            Hypothesis(" ".join(word for word in text.split() if generator.random() < 0.8))
            for text in references
        ]

    return translate


def test_a_run_that_is_named_as_two_seeds_is_warned_of(tmp_path: Path) -> None:
    """Its spread over seeds would be 0, whether it is named twice or a copy of it."""
    corpus = corpus_of_parallel_lines(tmp_path / "corpus")
    one, copy = (translations(tmp_path / name, corpus, damaged_by(2)) for name in ("a", "b"))
    other = translations(tmp_path / "c", corpus, damaged_by(3))
    systems = {"x@1": one, "x@2": other, "x@3": copy, "y": one, "z": one}
    settings = EvaluationConfig(scores=("bleu",))
    made = evaluated(stage_call(tmp_path / "out", corpus, systems, settings=settings))
    warnings = made.read_json("scores.json")["warnings"]
    same = [warning for warning in warnings if "have the same translations" in warning]
    assert len(same) == 2
    assert same[0].startswith("x@1 and x@3 have the same translations, so that intervals")
    assert same[1] == "y and z have the same translations. Was another path meant?"


def test_runs_with_different_seeds_are_one_system(tmp_path: Path) -> None:
    corpus = corpus_of_parallel_lines(tmp_path / "corpus")
    dense = training_run(tmp_path / "dense", [3.0] * 4)
    tuned = {
        name: training_run(tmp_path / name, [2.0] * 3, {"checkpoint": dense}, stage="finetune")
        for name in ("tuned1", "tuned2")
    }
    made_by = {"dense": dense, "tuned@1": tuned["tuned1"], "tuned@2": tuned["tuned2"]}
    systems = {
        name: translations(
            tmp_path / f"by {name}", corpus, damaged_by(seed), {"checkpoint": checkpoint}
        )
        for seed, (name, checkpoint) in enumerate(made_by.items(), start=1)
    }
    settings = EvaluationConfig(scores=("bleu",), word_accuracy="target")
    more = {"training": corpus_of_training(tmp_path / "trained"), "given/dense": dense}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems, settings=settings, more=more))
    document = made.read_json("scores.json")
    assert [one["name"] for one in document["systems"]] == ["dense", "tuned"]
    runs = document["systems"][1]["runs"]
    of_runs = [one["averages"]["into_pivot"]["all"]["bleu"] for one in runs]
    mean = system_scores(made, "tuned")["averages"]["into_pivot"]["all"]["bleu"]
    assert mean == pytest.approx(np.mean(of_runs))
    alone = evaluated(stage_call(tmp_path / "alone", corpus, {"x": systems["tuned@2"]}))
    assert of_runs[1] == system_scores(alone, "x")["averages"]["into_pivot"]["all"]["bleu"]
    interval = document["significance"]["averages"]["into_pivot"]["all"]["bleu"]["intervals"]
    assert interval["tuned"]["low"] < min(of_runs) < max(of_runs) < interval["tuned"]["high"]
    assert made.has("sentences/tuned@2/de-en.npz")
    assert made.statistics["systems"].keys() == {"dense", "tuned"}
    words = document["words"]["families"]["into_pivot"]["length"]["1–3"]
    assert words.keys() == {"dense", "tuned"}
    text = report_of(made)
    for said in (
        *("| tuned (2 runs) | 7 updates (1.8 ×), 3 new |", "Systems with one run have intervals"),
        "### New cost, where dense existed already",
        "Systems with several runs are shown by their first run.",
        "With two or three seeds, hardly any direction can be significant by itself",
    ):
        assert said in text
    dense = system_scores(made, "dense")["averages"]["into_pivot"]["all"]["bleu"]
    shown = document["significance"]["averages"]["into_pivot"]["all"]["bleu"]["differences"]
    low, high = shown["tuned"]["low"], shown["tuned"]["high"]
    section = text.split("### BLEU: difference to dense")[1]
    assert f"| tuned | {mean - dense:+.1f} ({low:+.1f} to {high:+.1f}) |" in section


def scored_by_overlap(_: object, samples: list[dict[str, str]]) -> list[float]:
    """In place of a model: a tenth where a translation is its reference, less elsewhere."""
    assert all(one.keys() == {"src", "mt", "ref"} for one in samples)
    return [0.1 if one["mt"] == one["ref"] else -0.25 for one in samples]


def test_comet_stands_beside_the_other_scores_with_its_models_digest(
    tmp_path: Path, corpus: Artifact, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(comet, "load_model", lambda _: None)
    monkeypatch.setattr(comet, "scores_of", scored_by_overlap)
    monkeypatch.setattr(comet, "version", lambda _: "9.9")
    answers = {"copied": copied, "perfect": perfect}
    systems = {name: translations(tmp_path / name, corpus, answers[name]) for name in answers}
    model = tmp_path / "wmt-da"
    model.mkdir()
    (model / "hparams.yaml").write_text("class_identifier: x", encoding="utf-8")
    settings = EvaluationConfig(scores=("comet", "bleu"))
    call = stage_call(tmp_path / "out", corpus, systems, settings=settings, comet=model)
    made = evaluated(call)
    found = system_scores(made, "perfect")["directions"]["de-en"]
    assert found["scores"]["comet"] == pytest.approx(10.0)
    digest = call.records["comet"].digest[:12]
    assert found["signatures"]["comet"] == f"model:wmt-da|digest:{digest}|version:9.9"
    assert system_scores(made, "copied")["averages"]["zero_shot"]["all"]["comet"] == -25.0
    assert f"COMET|model:wmt-da|digest:{digest}|version:9.9" in report_of(made)
    assert made.manifest.inputs["comet"].digest == call.records["comet"].digest


def corpus_of_training(path: Path) -> Artifact:
    lines = {
        "de-en": {"de": ["Wo ist das?"], "en": ["Where is the"]},
        "en-fr": {"en": ["The end"], "fr": ["La fin"]},
    }
    return make_corpus(path, {"train": lines})


def test_word_accuracy_stands_in_both_reports_by_every_trait_that_is_known(
    tmp_path: Path, corpus: Artifact
) -> None:
    with writing(tmp_path / "tokenizer", "tokenizer") as writer:
        description = TokenizerDescription(
            kind="bytes", languages=("de", "en", "fr"), language_token_scheme="angle"
        )
        TokenizerFiles(description).write(writer.directory)
    more = {
        "training": corpus_of_training(tmp_path / "trained"),
        "tokenizer": open_artifact(tmp_path / "tokenizer", kind="tokenizer"),
    }
    answers = {"shuffled": shuffled, "copied": copied}
    made = scored(tmp_path, corpus, answers, more=more, word_accuracy="target", scores=("bleu",))
    words = made.read_json("scores.json")["words"]
    assert words["training_lines"] == {"de": 1, "en": 2, "fr": 1}
    assert words["families"].keys() == {"into_pivot", "zero_shot", "out_of_pivot"}
    of_english = words["directions"]["de-en"]
    assert of_english.keys() == {"seen", "frequency", "fertility", "length"}
    english = " ".join(TEST_LINES["de-en"]["en"]).replace(".", " .").replace("?", " ?").split()
    seen = sum(word in {"Where", "is", "the", "The", "end"} for word in english)
    assert of_english["seen"]["seen"]["copied"]["reference"] == seen
    assert of_english["seen"]["unseen"]["copied"]["shared"] == 3, "the marks that end the lines"
    short = sum(len(word) < 4 for word in english)
    assert of_english["length"]["1–3"]["shuffled"]["reference"] == short
    three = sum(len(word.encode()) == 3 for word in english)
    assert of_english["fertility"]["3"]["copied"]["reference"] == three
    section = report_of(made).split("## Word accuracy")[1]
    assert "1 to 2 per language" in section
    for title in ("occurrence in the training", "frequency", "number of subwords", "characters"):
        assert title in section
    assert "<h2>Word accuracy</h2>" in made.file("report.html").read_text(encoding="utf-8")
    # A plan may give inputs of word accuracy where a recipe asks for none.
    plain = scored(tmp_path / "plain", corpus, answers, more=more, scores=("bleu",))
    assert "Word accuracy" not in report_of(plain)


def test_source_words_are_grouped_where_the_recipe_asks_for_them(
    tmp_path: Path, corpus: Artifact
) -> None:
    """Translations equal to the references have all their aligned source words right."""
    settings = {"word_accuracy": "source", "scores": ("bleu",)}
    more = {"training": corpus_of_training(tmp_path / "trained")}
    made = scored(tmp_path, corpus, {"perfect": perfect}, more=more, **settings)
    words = made.read_json("scores.json")["words"]
    assert words["side"] == "source"
    assert words["directions"]["de-en"].keys() == {"seen", "frequency", "length"}
    counts = [one["perfect"] for one in words["directions"]["de-en"]["length"].values()]
    assert sum(one["reference"] for one in counts) > 0
    assert all(one["shared"] == one["reference"] == one["hypothesis"] for one in counts)
    assert "of words of the source language" in report_of(made)


@pytest.mark.parametrize(
    ("settings", "given", "finding"),
    [
        ({}, "comet", "scores does not list comet. Add it there, or leave"),
        ({"scores": ["comet"]}, None, "no model is given. Name its directory with --comet"),
        ({"language_sets": {"Long": ("myanmar",)}}, None, "'myanmar' is no language code"),
    ],
)
def test_settings_and_inputs_that_do_not_belong_together_are_refused(
    tmp_path: Path, corpus: Artifact, settings: dict[str, Any], given: str | None, finding: str
) -> None:
    systems = {"perfect": translations(tmp_path / "a", corpus, perfect)}
    (tmp_path / "model").mkdir()
    call = stage_call(
        tmp_path / "out",
        corpus,
        systems,
        settings=EvaluationConfig.model_validate(settings),
        comet=tmp_path / "model" if given == "comet" else None,
    )
    with pytest.raises(ConfigError, match=finding):
        evaluate.run(call)
    assert not call.out_dir.exists()


@pytest.mark.parametrize(
    ("scores", "column", "told"),
    [
        (("chrf", "bleu", "plain_chrf"), Column("chrf", "Own"), "'chrf' and 'plain_chrf' both"),
        (("plain_chrf", "comet"), Column("comet", "Own"), "'comet' and 'plain_chrf' both"),
        (("comet", "chrf", "plain_chrf"), Column("chrf", "Own"), "'chrf' and 'plain_chrf' both"),
        (("plain_chrf",), Column("own", "Own", decimals=-2), "score 'plain_chrf' has -2 decimals"),
        (("chrf", "plain_chrf"), Column("own", "Own", decimals=200), "has 200 decimals"),
    ],
)
def test_columns_that_no_table_can_show_are_refused_before_anything_is_scored(
    scores: tuple[ScoreName, ...],
    column: Column,
    told: str,
    tmp_path: Path,
    corpus: Artifact,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(PlainChrf, "column", column)
    for name in ("score_direction", "ask_comet"):
        monkeypatch.setattr(f"pipeline.evaluation.scoring.{name}", None)
    systems = {"perfect": translations(tmp_path / "a", corpus, perfect)}
    model = tmp_path / "model"
    model.mkdir()
    settings = EvaluationConfig(scores=scores)
    given = model if "comet" in scores else None
    call = stage_call(tmp_path / "out", corpus, systems, settings=settings, comet=given)
    with pytest.raises(ConfigError, match=told):
        evaluate.run(call)
    assert not call.out_dir.exists()


def test_a_report_without_bleu_is_judged_by_bleu_all_the_same(tmp_path: Path) -> None:
    """Copies of the source have next to none, and are beaten by nobody."""
    corpus = corpus_of_many_lines(tmp_path / "corpus")
    answers = {"copied": shouted, "perfect": perfect}
    made = scored(tmp_path, corpus, answers, scores=("chrf",))
    document = made.read_json("scores.json")
    judged = document["verdicts"]["directions"]["de-en"]
    english = read_lines(corpus, "test", "de-en", "en")
    assert judged["perfect"] == {
        "bleu": pytest.approx(100.0),
        "distinct": 100.0,
        "translates": True,
    }
    copies = [text.upper() for text in read_lines(corpus, "test", "de-en", "de")]
    assert judged["copied"]["bleu"] == sacrebleu.corpus_bleu(copies, [english]).score < 5
    assert document["significance"]["directions"]["de-en"]["chrf"]["best"] is None
    for compared in document["significance"]["directions"].values():
        assert compared["chrf"]["differences"]["perfect"]["p_value_holm"] is None
    text = report_of(made)
    assert "**" not in text
    assert "Not decided: copied does not translate in any direction." in text
    named = scored(tmp_path / "named", corpus, answers, scores=("chrf",), baseline="perfect")
    assert "| copied | 0 | 2 | 0 | 0 |" in report_of(named)


@pytest.mark.parametrize("code", ["th", "km"])
def test_spbleu_judges_translations_into_languages_without_spaces(
    tmp_path: Path, code: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """For BLEU a line is one word, and wrong if one letter of it is."""
    letters, generator = {"th": "กขคงจฉชซ", "km": "កខគឃងចឆជ"}[code], np.random.default_rng(1)
    texts = ["".join(generator.choice([*letters], size=20)) for _ in range(30)]
    sides = {code: texts, "en": [f"line {number} of these" for number in range(30)]}
    corpus = make_corpus(tmp_path / "corpus", {"test": {f"en-{code}": sides}})
    place_flores_model(tmp_path, texts, "flores200", monkeypatch)

    def shortened(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
        return [Hypothesis(text[:-1] + str(n)) for n, text in enumerate(references)]

    answers = {"shortened": shortened, "perfect": perfect}
    made = scored(tmp_path, corpus, answers, scores=["bleu", "spbleu"])
    found = system_scores(made, "shortened")["directions"][f"en-{code}"]
    assert found["scores"]["bleu"] == 0.0
    assert found["quality"]["bleu"] == found["scores"]["spbleu"] > 5
    assert "Not decided" not in report_of(made)
    into_english = system_scores(made, "shortened")["directions"][f"{code}-en"]
    assert into_english["quality"]["bleu"] == into_english["scores"]["bleu"]


def shouted(_: Direction, sources: list[str], __: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text.upper()) for text in sources]


@pytest.mark.parametrize(
    ("settings", "finding"),
    [
        ({"scores": ["bleu", "bleu"]}, "scores names 'bleu' more than once: name it once"),
        ({"scores": []}, "scores leaves nothing to compute: name at least one score"),
        ({"scores": ["language"], "language_accuracy": False}, "leaves nothing to compute"),
    ],
)
def test_scores_that_cannot_be_chosen_are_refused(settings: dict[str, Any], finding: str) -> None:
    with pytest.raises(ValueError, match=finding):
        EvaluationConfig.model_validate(settings)


def test_means_are_printed_in_lines_that_fit_with_the_path_of_the_report(
    tmp_path: Path,
    corpus: Artifact,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Markdown tables of up to 350 columns were printed."""
    monkeypatch.setenv("COLUMNS", "60")
    name = "perfect, " * 8 + "of a long name"
    made = scored(tmp_path, corpus, {name: perfect})
    summary = capsys.readouterr().out.strip().split("\n")
    assert max(map(len, summary[:-1])) <= 60
    assert summary[0].split()[0] == "BLEU"
    # Without its middle: names of runs differ at their ends.
    assert re.fullmatch(r"perfect, p.*….*long name( +100\.0)+", summary[2])
    assert summary[-1].endswith(f"the report is {tmp_path / 'out' / 'report.html'}")
    covers = f"Covers the test lines of {corpus.directory}; systems in {tmp_path}."
    assert covers in report_of(made).replace("\\", "")
    page = made.file("report.html").read_text(encoding="utf-8")
    assert "L&#39;eau est froide." in page


# Findings and refusals


def test_defects_of_translations_are_counted_by_direction_and_warned_of(
    tmp_path: Path, corpus: Artifact
) -> None:
    def flawed(direction: Direction, _: list[str], references: list[str]) -> list[Hypothesis]:
        if str(direction) == "de-en":
            return [Hypothesis("", truncated=True), Hypothesis(" \u200b"), Hypothesis("x")]
        return [Hypothesis(text, invalid=2 * (direction.target == "de")) for text in references]

    made = scored(tmp_path, corpus, {"flawed": flawed})
    found = system_scores(made, "flawed")["directions"]
    numbers = ("truncated", "empty", "lines", "invalid", "invalid_sequences")
    assert [found["de-en"][name] for name in numbers] == [1, 2, 3, 0, 0]
    assert [found["en-de"][name] for name in numbers] == [0, 0, 3, 3, 6]
    expected = (
        "flawed: of 12 translations, 1 has a source cut to the model's maximum length and "
        "2 have no text and 4 have lost bytes that are not valid UTF-8."
    )
    assert expected in report_of(made)


@pytest.mark.slow
def test_translations_of_another_corpus_are_pointed_out(tmp_path: Path, corpus: Artifact) -> None:
    other = make_corpus(tmp_path / "other", {})
    made = translations(tmp_path / "a", corpus, perfect)
    stale = translations(tmp_path / "b", corpus, perfect, {"corpus": other})
    evaluation = evaluated(stage_call(tmp_path / "out", corpus, {"a": made, "b": stale}))
    assert evaluation.read_json("scores.json")["warnings"] == [
        "b: translated from other, which differs from this corpus."
    ]


def into_english(direction: Direction, _: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in references] if direction.target == "en" else []


def shortened(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
    return [Hypothesis(text) for text in (references[1:] or references)]


EVERY_DIRECTION = ["de-en", "de-fr", "en-de", "en-fr", "fr-de", "fr-en"]


@pytest.mark.parametrize(
    ("translate", "skipped", "finding"),
    [
        (into_english, [], r"'given' .* has no translations for de-fr, en-de, en-fr, fr-de\. "),
        (shortened, [], r"'given' has 2 .* 3 test lines"),
        (lambda *_: [], EVERY_DIRECTION, r"No direction of .* by all of the systems given"),
    ],
)
def test_translations_of_another_text_are_refused(
    tmp_path: Path, corpus: Artifact, translate: Translate, skipped: list[str], finding: str
) -> None:
    statistics = {"skipped_directions": skipped}
    systems = {"given": translations(tmp_path / "a", corpus, translate, statistics=statistics)}
    with pytest.raises((ArtifactError, ConfigError), match=finding):
        evaluate.run(stage_call(tmp_path / "out", corpus, systems))
    assert not (tmp_path / "out").exists()


@pytest.mark.parametrize(
    ("names", "finding"),
    [
        (["a/../b"], "'a/../b', which leads out of the folder"),
        (["a\nb"], "which has a backslash or a control character"),
        (["MoE", "moe"], "'moe' and 'MoE', which are the same where names ignore case"),
    ],
)
def test_unusable_names_of_systems_are_refused(
    tmp_path: Path, corpus: Artifact, names: list[str], finding: str
) -> None:
    made = translations(tmp_path / "a", corpus, perfect)
    with pytest.raises(ConfigError, match=finding):
        evaluate.run(stage_call(tmp_path / "out", corpus, dict.fromkeys(names, made)))


# A corpus with test lines alone, and models that know some of its languages


def test_without_it_nothing_is_called_zero_shot_and_a_warning_says_what_to_name(
    tmp_path: Path,
) -> None:
    outside = corpus_of_tests(tmp_path / "outside")
    made = scored(tmp_path, outside, {"perfect": perfect})
    text = report_of(made)
    assert "Zero-shot" not in text
    assert "Training data unknown (6 directions)" in text
    (warning,) = made.read_json("scores.json")["warnings"]
    assert "input 'training'" in warning


def corpus_of_tests(path: Path) -> Artifact:
    return make_corpus(path, {"test": TEST_LINES}, trained=dict.fromkeys(TEST_LINES, 0))


def without_french(direction: Direction, _: list[str], references: list[str]) -> list[Hypothesis]:
    knows = "fr" not in (direction.source, direction.target)
    return [Hypothesis(text) for text in references] if knows else []


@pytest.mark.parametrize("elsewhere", [[], ["en-fi", "fi-en"]])
def test_directions_that_a_model_does_not_know_are_left_out_for_all_systems(
    tmp_path: Path, corpus: Artifact, elsewhere: list[str]
) -> None:
    """``elsewhere``: skipped directions of another corpus."""
    small = translations(
        tmp_path / "a",
        corpus,
        without_french,
        statistics={"skipped_directions": ["de-fr", "en-fr", "fr-de", "fr-en", *elsewhere]},
    )
    systems = {"small": small, "perfect": translations(tmp_path / "b", corpus, perfect)}
    made = evaluated(stage_call(tmp_path / "out", corpus, systems))
    assert list(system_scores(made, "perfect")["directions"]) == ["de-en", "en-de"]
    assert made.read_json("scores.json")["warnings"] == [
        "4 of 6 directions are left out, because not every system translates them: "
        "de-fr, en-fr, fr-de, fr-en."
    ]


# Intervals


@pytest.mark.slow
def test_intervals_depend_on_the_seed_and_bold_follows_them(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    corpus = corpus_of_many_lines(tmp_path / "corpus")

    def worse(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
        return [Hypothesis(text.replace("3", "three of")) for text in references]

    answers = {"better": perfect, "worse": worse}
    made = scored(tmp_path, corpus, answers)
    significance = made.read_json("scores.json")["significance"]
    compared = significance["directions"]["de-en"]["bleu"]
    assert compared["best"] == "better"
    score = system_scores(made, "worse")["directions"]["de-en"]["scores"]["bleu"]
    interval = compared["intervals"]["worse"]
    assert interval["low"] < score < interval["high"]
    assert "| better | no training | **100.0** (100.0–100.0)" in report_of(made)
    monkeypatch.setattr(EvaluationConfig, "seed", 2)
    other = scored(tmp_path / "other", corpus, answers)
    assert other.read_json("scores.json")["significance"] != significance


@pytest.mark.slow
def test_hypotheses_that_no_encoding_can_hold_do_not_break_the_reports(
    tmp_path: Path, corpus: Artifact
) -> None:
    def broken(_: Direction, __: list[str], references: list[str]) -> list[Hypothesis]:
        return [Hypothesis("\x00 </main> \x1b[31m | `") for _ in references]

    made = scored(tmp_path, corpus, {"x": broken})
    page = made.file("report.html").read_text(encoding="utf-8")
    assert page.count("</main>") == 1
    assert not re.search(r"[\x00-\x08\x1b]", page + report_of(made))


# Analyses and sets of languages


def test_analyses_stand_in_both_reports_and_their_pictures_on_the_page(
    tmp_path: Path, corpus: Artifact
) -> None:
    lengths = run_stage("analyze_lengths", tmp_path / "lengths", {"corpus": corpus})
    made = scored(tmp_path, corpus, {"copied": copied}, more={"analyses/<opus>": lengths})
    markdown = report_of(made)
    page = made.file("report.html").read_text("utf-8")
    assert "## Lengths in bytes: &lt;opus&gt;" in markdown
    assert "<h2>Lengths in bytes: &lt;opus&gt;</h2>" in page
    lengths_part = page[page.index("<h2>Lengths in bytes") :]
    assert lengths_part.count('<rect class="fill') == 3
    assert "<rect" not in markdown


def test_what_is_no_analysis_is_refused_before_anything_is_scored(
    tmp_path: Path, corpus: Artifact
) -> None:
    with writing(tmp_path / "strange", "analysis", "analyze_scales") as writer:
        writer.write_json("scales.json", {"directions": {}})
        writer.statistics["analysis"] = "scales"
    strange = open_artifact(tmp_path / "strange", kind="analysis")
    with pytest.raises(ArtifactError, match="holds no analysis that reports can show"):
        scored(tmp_path, corpus, {"copied": copied}, more={"analyses/x": strange})
    assert not (tmp_path / "out").exists()


def test_directions_are_averaged_over_the_sets_of_languages_that_a_recipe_names(
    tmp_path: Path, corpus: Artifact
) -> None:
    sets = {"Both": ("deu", "fr"), "French": ("fr_CA",), "Nobody": ("my",)}
    made = scored(tmp_path, corpus, {"shuffled": shuffled}, language_sets=sets)
    counts = {
        (one["name"], one["family"]): one["directions"]
        for one in made.read_json("scores.json")["set_averages"]
    }
    families = ("into_pivot", "out_of_pivot", "zero_shot")
    assert counts == {
        **{("Both", family): 2 for family in families},
        **{("French", family): 1 for family in families},
    }
    assert "BLEU by set" in report_of(made)
    (warning,) = [
        one for one in made.read_json("scores.json")["warnings"] if "language_sets" in one
    ]
    assert "No direction belongs to the sets Nobody of" in warning
