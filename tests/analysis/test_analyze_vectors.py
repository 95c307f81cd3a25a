"""Wrong language vectors: translations are those of a model that has no other vector."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
import sacrebleu
from routed_models import routed_checkpoint
from support.corpora import make_corpus
from support.fronted_models import fronted_byte_spec
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import EXIT_USER_ERROR, ConfigError
from pipeline.extensions.analysis import analyze_vectors

LINES = ["Ein kurzer Satz.", "Haus", "Grüße aus Köln"]
REFERENCES = ["A short sentence.", "house", "Greetings from Cologne"]
DECODING = DecodingConfig(beam_size=2, max_length_ratio=0.5, max_extra_length=6)
RECIPE = "[decoding]\nbeam_size = 2\nmax_length_ratio = 0.5\nmax_extra_length = 6\n"


def translations(checkpoint: Artifact, *, router: str = "") -> list[str]:
    translator = Translator(checkpoint, DECODING.model_copy(update={"router_language": router}))
    jobs = [Job(Direction("de", "en"), line, text) for line, text in enumerate(LINES)]
    return [found.text for found in translator.translate(jobs)]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    return routed_checkpoint(tmp_path_factory.mktemp("model"))


@pytest.fixture(scope="module")
def analysed(model: Artifact, tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    folder = tmp_path_factory.mktemp("vectors")
    corpus = make_corpus(folder / "corpus", {"test": {"de-en": {"de": LINES, "en": REFERENCES}}})
    plain = routed_checkpoint(folder / "plain", language_vector=False)
    recipe = folder / "recipe.toml"
    recipe.write_text(RECIPE + '[analysis]\ndirections = ["deu-en_Latn"]\n', encoding="utf-8")
    named = {"checkpoint": model.directory, "without": plain.directory, "corpus": corpus.directory}
    inputs = [part for name, path in named.items() for part in (f"--{name}", str(path))]
    command = ["analyze", "vectors", "--recipe", str(recipe), *inputs, "--out", str(folder / "out")]
    assert cli.main(command) == 0
    return open_artifact(folder / "out", kind="analysis")


def test_the_router_sees_another_language_and_nothing_else_does(
    model: Artifact, tmp_path: Path
) -> None:
    """As a model whose languages all have the token of Russian, for the router alone."""
    spec = json.loads((model.directory / "model.json").read_text("utf-8"))
    russian = spec["language_token_ids"][spec["languages"].index("ru")]
    one_token = routed_checkpoint(tmp_path, tokens=(russian,) * 4)
    assert translations(model, router="ru") == translations(one_token)
    assert translations(model, router="rus") == translations(one_token), "in any usual spelling"
    assert translations(model, router="ru") != translations(model)
    assert translations(model, router="de") == translations(model)


def test_the_right_vector_comes_back(model: Artifact) -> None:
    translator = Translator(model, DECODING)
    jobs = [Job(Direction("de", "en"), line, text) for line, text in enumerate(LINES)]
    before = translator.translate(jobs)
    translator.show_router("ru")
    assert translator.translate(jobs) != before
    translator.show_router("fr")
    translator.show_router(None)
    assert translator.translate(jobs) == before


def test_every_language_is_scored_as_sacrebleu_does(model: Artifact, analysed: Artifact) -> None:
    found = analysed.read_json("vectors.json")["directions"]["de-en"]
    assert list(found["wrong"]) == ["en", "fr", "ru"]
    right = translations(model)
    for language, one in {"": found["right"], **found["wrong"]}.items():
        texts = translations(model, router=language)
        chrf = sacrebleu.corpus_chrf(texts, [REFERENCES], word_order=2).score
        assert one["chrf"] == pytest.approx(chrf)
        assert one["bleu"] == pytest.approx(sacrebleu.corpus_bleu(texts, [REFERENCES]).score)
        assert one["changed"] == sum(a != b for a, b in zip(texts, right, strict=True))
    assert found["without"] is not None
    root = ElementTree.parse(analysed.file("vectors-de-en.svg")).getroot()
    assert sum(one.get("class", "").startswith("fill") for one in root.iter()) == 5


@pytest.mark.parametrize("kept", [("de", "en"), ("de", "en", "ru")], ids=len)
def test_a_model_with_modules_of_some_languages_is_shown_those(
    kept: tuple[str, ...], tmp_path: Path
) -> None:
    front = {"kind": "ada_msha", "language_vector": True}
    modules = {"kind": "low_rank", "rank": 2, "languages": kept}
    spec = fronted_byte_spec(front, model={"language_modules": modules})
    checkpoint = make_checkpoint(tmp_path / "checkpoint", tiny_model(spec))
    corpus = make_corpus(tmp_path / "corpus", {"test": {"de-en": {"de": ["Ja"], "en": ["Yes"]}}})
    inputs = ["--checkpoint", str(checkpoint), "--corpus", str(corpus.directory)]
    command = ["analyze", "vectors", *inputs, "--set", "decoding.max_length_ratio=0.5"]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == 0
    found = open_artifact(tmp_path / "out", kind="analysis").read_json("vectors.json")
    shown = {way: list(scores["wrong"]) for way, scores in found["directions"].items()}
    assert shown == {"de-en": [*kept[1:]], "en-de": ["de", *kept[2:]]}


@pytest.mark.parametrize(("wrong", "said"), [(40.0, "10.00 less"), (52.0, "2.00 more")])
def test_the_summary_says_whether_the_worst_vector_is_worse(
    wrong: float, said: str, model: Artifact, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    scores = {"bleu": 1.0, "chrf": 50.0, "changed": 0}
    found = {"right": scores, "wrong": {"fr": scores | {"chrf": wrong}}}
    monkeypatch.setattr(analyze_vectors, "score_vectors", lambda *_, **__: found)
    lines = {"de": LINES[:1], "en": REFERENCES[:1]}
    corpus, out = make_corpus(tmp_path / "corpus", {"test": {"de-en": lines}}), tmp_path / "out"
    inputs = ["--checkpoint", str(model.directory), "--corpus", str(corpus.directory)]
    command = ["analyze", "vectors", *inputs, "--set", 'analysis.directions=["de-en"]']
    assert cli.main([*command, "--out", str(out)]) == 0
    [line] = open_artifact(out, kind="analysis").manifest.summary
    assert line == (
        f"de-en: chrF++ 50.0 with the vector of de, {said} with the vector of fr, the worst of 1"
    )


def test_a_model_without_such_vectors_and_what_is_no_language_are_refused(
    model: Artifact, tmp_path: Path
) -> None:
    plain = routed_checkpoint(tmp_path, language_vector=False)
    subwords = make_checkpoint(tmp_path / "subwords", tiny_model(byte_spec()))
    for checkpoint in (plain, open_artifact(subwords, kind="checkpoint")):
        with pytest.raises(ConfigError, match="router of this model sees no language"):
            translations(checkpoint, router="ru")
    with pytest.raises(ConfigError, match="does not know the language 'zu'"):
        translations(model, router="zu")


@pytest.mark.parametrize(
    ("analysis", "said"),
    [
        ('directions = ["de-fr"]', "names 'de-fr', for which"),
        ('directions = ["de-eng"]\nrouter_languages = ["deu"]', "names only de"),
        ('[decoding]\nrouter_language = "fr"', "shows one language to the router always"),
    ],
)
def test_a_choice_that_leaves_nothing_to_compare_is_refused_in_one_sentence(
    model: Artifact,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    analysis: str,
    said: str,
) -> None:
    corpus = make_corpus(tmp_path / "corpus", {"test": {"de-en": {"de": ["Ja"], "en": ["Yes"]}}})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(f"[analysis]\n{analysis}\n", encoding="utf-8")
    inputs = ["--checkpoint", str(model.directory), "--corpus", str(corpus.directory)]
    command = ["analyze", "vectors", "--recipe", str(recipe), *inputs]
    assert cli.main([*command, "--out", str(tmp_path / "out")]) == EXIT_USER_ERROR
    assert said in capsys.readouterr().err
