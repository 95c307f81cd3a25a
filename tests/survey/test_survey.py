"""The survey of a corpus: figures of its artifacts, on a page that is sound and self-contained."""

import re
import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest

from data_prep import clean, make_shards, mix, train_tokenizer
from pipeline import cli
from pipeline.artifacts.artifact import Artifact, new_artifact, open_artifact
from pipeline.artifacts.corpus import text_name
from pipeline.artifacts.settings import CleanConfig, TokenizerConfig
from pipeline.artifacts.tokenizer import load_tokenizer
from pipeline.config.recipe import Recipe
from pipeline.errors import EXIT_USER_ERROR
from pipeline.stages.registry import STAGES
from pipeline.stages.stage import StageCall
from pipeline.survey.page import survey_page
from pipeline.survey.survey import survey_corpus

HOSTILE = "<script>alert('x')</script> & \"quoted\""
RECIPE = Recipe(
    name="test", clean=CleanConfig(max_characters=200), tokenizer=TokenizerConfig(kind="bytes")
)
MODULES = {
    "clean": clean,
    "train_tokenizer": train_tokenizer,
    "make_shards": make_shards,
    "mix": mix,
}


def imported(directory: Path) -> Artifact:
    """Three pairs: two with training lines, one for zero-shot translation."""
    lines = [(f"Satz {number} hier", f"sentence {number} here") for number in range(40)]
    texts = {
        ("train", "de-en"): [*lines, (HOSTILE, HOSTILE), ("Probe", "a trial"), ("", "x")],
        ("test", "de-en"): [("Probe", "trial")],
        ("train", "en-zh"): [(f"number {number}", f"第{number}") for number in range(10)],
        ("valid", "en-zh"): [("one", "一")],
        ("test", "de-zh"): [("Satz 3 hier", "三")],
    }
    with new_artifact(directory, kind="corpus", stage="test", config={}, inputs={}) as writer:
        pairs: dict[str, dict[str, int]] = {}
        for (split, pair), both in texts.items():
            pairs.setdefault(pair, {})[split] = len(both)
            for side, code in enumerate(pair.split("-")):
                text = "".join(line[side] + "\n" for line in both)
                writer.path(text_name(split, pair, code)).write_text(text, "utf-8")  # type: ignore[arg-type]
        writer.statistics["pairs"] = pairs
    return open_artifact(directory, kind="corpus")


def made(stage: str, out_dir: Path, **inputs: Artifact) -> Artifact:
    MODULES[stage].run(
        StageCall(
            stage=STAGES[stage],
            recipe=RECIPE,
            artifacts=inputs,
            raw={},
            out_dir=out_dir,
            records={name: artifact.as_input for name, artifact in inputs.items()},
            config=RECIPE.sections(STAGES[stage].sections),
        )
    )
    return open_artifact(out_dir, kind=STAGES[stage].makes)


@pytest.fixture(scope="module")
def made_of(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Artifact]:
    folder = tmp_path_factory.mktemp("survey")
    corpus = made("clean", folder / "clean", corpus=imported(folder / "corpus"))
    tokenizer = made("train_tokenizer", folder / "tokenizer", corpus=corpus)
    shards = made("make_shards", folder / "shards", corpus=corpus, tokenizer=tokenizer)
    mixture = made("mix", folder / "mixture", shards=shards)
    return {"corpus": corpus, "tokenizer": tokenizer, "shards": shards, "mixture": mixture}


def body(text: str) -> ElementTree.Element:
    start, end = text.index("<main>"), text.index("</main>") + len("</main>")
    return ElementTree.fromstring(text[start:end])


def whole_page(made_of: dict[str, Artifact]) -> str:
    found = survey_corpus(made_of["corpus"], shards=made_of["shards"], mixture=made_of["mixture"])
    return survey_page(found)


def test_fertility_is_the_tokens_of_the_text_by_its_words_and_characters(
    made_of: dict[str, Artifact],
) -> None:
    found = survey_corpus(made_of["corpus"], shards=made_of["shards"], mixture=None)
    tokenizer = load_tokenizer(made_of["tokenizer"].directory)
    corpus = made_of["corpus"].directory
    for code, pairs in {"de": ["de-en"], "en": ["de-en", "en-zh"], "zh": ["en-zh"]}.items():
        text = [
            line
            for pair in pairs
            for line in (corpus / f"train/{pair}/{code}.txt").read_text("utf-8").splitlines()
        ]
        tokens = sum(map(len, tokenizer.encode_batch(text)))
        assert found.fertility[code].per_word == pytest.approx(
            tokens / sum(len(line.split()) for line in text)
        )
        assert found.fertility[code].per_character == pytest.approx(tokens / len("".join(text)))


def test_the_page_shows_every_pair_with_its_sizes_and_the_epochs_of_the_mixture(
    made_of: dict[str, Artifact],
) -> None:
    root = body(whole_page(made_of))
    rows = {
        row[0].text: ["".join(cell.itertext()) for cell in row[1:]]
        for row in root.iter("tr")
        if len(row) == 10
    }
    epochs = made_of["mixture"].statistics["expected_epochs"]
    assert list(rows)[1:] == ["de-en", "en-zh", "de-zh"]
    # 43 lines came in; one was empty, one a copy, one held out in de-en and one in de-zh.
    assert rows["de-en"][:5] == ["39", "43", "9.3%", "0", "1"]
    assert rows["de-en"][-1] == f"{epochs['de-en']:.3g}"
    assert rows["de-zh"] == ["0", "0", "–", "0", "1", "–", "–", "–", "–"]
    text = " ".join(root.itertext())
    assert "at T = 5 in" in text
    assert "1 pair without training text" in text


def test_machine_translations_are_counted_apart(tmp_path: Path) -> None:
    lines = {"de-en": 40, "de+back-en": 700}
    with new_artifact(
        tmp_path / "both", kind="corpus", stage="clean", config={}, inputs={}
    ) as writer:
        for pair, count in lines.items():
            for code in pair.split("-"):
                text = "".join(f"{code} {number}\n" for number in range(count))
                writer.path(text_name("train", pair, code)).write_text(text, "utf-8")
        writer.statistics["pairs"] = {pair: {"train": count} for pair, count in lines.items()}
        writer.statistics["dropped"] = {
            "de-en": {"copy": 10, "empty": 0},
            "de+back-en": {"copy": 0, "empty": 300},
        }
    corpus = open_artifact(tmp_path / "both", kind="corpus")
    root = body(survey_page(survey_corpus(corpus, shards=None, mixture=None)))
    text = " ".join(root.itertext())
    assert "1 natural pair" in text
    assert "40 training lines" in text
    assert "700 synthetic training lines of 1 pair" in text
    assert "740 training lines" not in text
    rows = {
        row[0].text: ["".join(cell.itertext()) for cell in row[1:]]
        for row in root.iter("tr")
        if len(row) == 5
    }
    assert rows["copy"] == ["10", "20.00%", "0", "0.00%"]
    assert rows["empty"] == ["0", "0.00%", "300", "30.00%"]


def test_the_page_is_self_contained_and_text_from_outside_stays_text(
    made_of: dict[str, Artifact],
) -> None:
    text = whole_page(made_of)
    assert not re.search(r"<(script|link|img|iframe|object|embed|base|form)\b", text)
    assert not re.search(r"(src|href|srcset|action)\s*=|url\(|@import|https?:", text)
    assert "prefers-color-scheme:dark" in text
    assert HOSTILE in "".join(body(text).itertext())
    assert [one.text for one in body(text).iter("h2")] == [
        "Sizes",
        "Lengths",
        "Languages",
        "Lines dropped by cleaning",
        "Samples of dropped lines",
        "Held-out lines in training text",
        "Notes",
    ]


def test_a_corpus_as_it_was_imported_has_a_page_without_what_nobody_knows(
    made_of: dict[str, Artifact],
) -> None:
    corpus = open_artifact(made_of["corpus"].directory.with_name("corpus"), kind="corpus")
    text = survey_page(survey_corpus(corpus, shards=None, mixture=None))
    titles = [one.text for one in body(text).iter("h2")]
    assert titles == ["Sizes", "Lengths", "Languages", "Notes"]
    assert "Fertility is left out: it needs the shards." in text


def test_a_corpus_without_training_lines_has_a_page(tmp_path: Path) -> None:
    with new_artifact(
        tmp_path / "tests", kind="corpus", stage="test", config={}, inputs={}
    ) as writer:
        for code in ("de", "en"):
            writer.path(f"test/de-en/{code}.txt").write_text("x\n")
        writer.statistics["pairs"] = {"de-en": {"test": 1}}
    corpus = open_artifact(tmp_path / "tests", kind="corpus")
    text = survey_page(survey_corpus(corpus, shards=None, mixture=None))
    assert [one.text for one in body(text).iter("h2")] == ["Sizes", "Notes"]


def test_the_verb_writes_the_page(
    made_of: dict[str, Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    out = tmp_path / "new" / "survey.html"
    arguments = ["survey", str(made_of["corpus"].directory), "--out", str(out)]
    more = ["--shards", str(made_of["shards"].directory)]
    assert cli.main([*arguments, *more, "--mixture", str(made_of["mixture"].directory)]) == 0
    assert out.read_text("utf-8") == whole_page(made_of)
    assert capsys.readouterr().out == f"{out}: 3 pairs of clean\n"
    assert [path.name for path in out.parent.iterdir()] == ["survey.html"]


def test_artifacts_that_do_not_belong_together_are_refused_in_a_sentence(
    made_of: dict[str, Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    folders = {name: str(artifact.directory) for name, artifact in made_of.items()}
    other = str(made_of["corpus"].directory.with_name("corpus"))
    for arguments, said in [
        ([other, "--shards", folders["shards"]], "was not made of"),
        ([folders["corpus"], "--mixture", folders["mixture"]], "Name them, too"),
        ([folders["shards"]], "shards"),
    ]:
        out = ["--out", str(tmp_path / "page.html")]
        assert cli.main(["survey", *arguments, *out]) == EXIT_USER_ERROR
        assert said in capsys.readouterr().err
    assert cli.main(["survey", folders["corpus"], "--out", str(tmp_path)]) == EXIT_USER_ERROR
    assert "is a folder" in capsys.readouterr().err
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    "kind", ["the corpus's manifest", "a new file in the corpus", "a thesis", "a link"]
)
def test_nothing_but_an_earlier_page_is_replaced(
    made_of: dict[str, Artifact], tmp_path: Path, capsys: pytest.CaptureFixture[str], kind: str
) -> None:
    corpus = made_of["corpus"].directory
    thesis, link = tmp_path / "thesis.html", tmp_path / "link.html"
    thesis.write_text("<!doctype html>\nmine", encoding="utf-8")
    link.symlink_to(thesis)
    out = {
        "the corpus's manifest": corpus / "manifest.json",
        "a new file in the corpus": corpus / "page.html",
        "a thesis": thesis,
        "a link": link,
    }[kind]
    before = {path: path.read_bytes() for path in corpus.rglob("*") if path.is_file()}
    assert cli.main(["survey", str(corpus), "--out", str(out)]) == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert len(said.splitlines()) == 1
    assert str(out) in said
    assert {path: path.read_bytes() for path in corpus.rglob("*") if path.is_file()} == before
    assert thesis.read_text(encoding="utf-8") == "<!doctype html>\nmine"
    assert link.is_symlink()


def test_an_earlier_page_is_replaced(made_of: dict[str, Artifact], tmp_path: Path) -> None:
    out, corpus = tmp_path / "survey.html", str(made_of["corpus"].directory)
    assert cli.main(["survey", corpus, "--out", str(out)]) == 0
    first = out.read_bytes()
    shards = str(made_of["shards"].directory)
    assert cli.main(["survey", corpus, "--shards", shards, "--out", str(out)]) == 0
    assert out.read_bytes() != first
