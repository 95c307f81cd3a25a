"""Bytes of languages on parallel lines, counted by hand."""

import xml.etree.ElementTree as ElementTree
from pathlib import Path

import pytest
from support.corpora import make_corpus

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.errors import EXIT_USER_ERROR
from pipeline.extensions.analysis.analyze_lengths import measure_lengths
from pipeline.extensions.analysis.report import analysis_sections

PARALLEL = {
    "de-en": {"de": ["Grüße", "Wasser", "Haus"], "en": ["greetings", "water", "house"]},
    "en-zh": {"en": ["water", "house", "water"], "zh": [" 水 ", "房子", "水水水水"]},
}


def test_means_are_over_the_lines_that_all_pairs_have(tmp_path: Path) -> None:
    found = measure_lengths(make_corpus(tmp_path / "corpus", {"test": PARALLEL}))
    assert (found["pivot"], found["parallel_lines"]) == ("en", 2)
    assert found["mean_bytes"] == {"de": (6 + 4) / 2, "en": (5 + 5) / 2, "zh": (3 + 6) / 2}
    assert found["ratio_to_pivot"]["de"] == (7 + 6 + 4) / (9 + 5 + 5)
    assert found["ratio_to_pivot"]["zh"] == (3 + 6 + 12) / 15
    assert found["order"] == ["de", "en", "zh"]


@pytest.mark.parametrize(("code", "blank"), [("de", ""), ("zh", " \u200b")])
def test_a_line_without_text_on_a_side_counts_nowhere(
    code: str, blank: str, tmp_path: Path
) -> None:
    pair = "-".join(sorted([code, "en"]))
    of_pair = {
        one: [*lines, {code: blank, "en": "bread"}[one]] for one, lines in PARALLEL[pair].items()
    }
    other = next(name for name in PARALLEL if name != pair)
    of_other = {one: [*lines, "bread"] for one, lines in PARALLEL[other].items()}
    lines = {pair: of_pair, other: of_other, "en-km": {"en": ["water"], "km": [""]}}
    found = measure_lengths(make_corpus(tmp_path / "corpus", {"test": lines}))
    plain = measure_lengths(make_corpus(tmp_path / "plain", {"test": PARALLEL}))
    assert (found["parallel_lines"], found["mean_bytes"]) == (2, plain["mean_bytes"])
    assert found["ratio_to_pivot"][code] == plain["ratio_to_pivot"][code]
    assert "km" not in found["ratio_to_pivot"]


def test_without_a_common_line_the_ratios_of_each_pair_stand_alone(tmp_path: Path) -> None:
    lines = {**PARALLEL, "en-zh": {"en": ["other"], "zh": ["别的"]}}
    found = measure_lengths(make_corpus(tmp_path / "corpus", {"test": lines}))
    assert (found["parallel_lines"], found["mean_bytes"]) == (0, {})
    assert found["order"] == ["zh", "en", "de"]


def test_the_stage_writes_data_and_picture(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "corpus", {"test": PARALLEL})
    command = ["analyze", "lengths", "--corpus", str(corpus.directory), "--out"]
    assert cli.main([*command, str(tmp_path / "out")]) == 0
    assert "de is the longest, zh the most concise" in capsys.readouterr().out
    made = open_artifact(tmp_path / "out", kind="analysis")
    document = made.read_json("lengths.json")
    assert document["order"] == ["de", "en", "zh"]
    root = ElementTree.parse(made.file("lengths.svg")).getroot()
    bars = [one for one in root.iter() if one.get("class", "").startswith("fill")]
    widths = [float(one.get("width", "0")) for one in bars]
    lengths = [document["mean_bytes"][code] for code in document["order"]]
    assert [width / widths[0] for width in widths] == pytest.approx(
        [length / lengths[0] for length in lengths], abs=0.01
    )


def test_a_corpus_without_test_lines_is_refused_in_one_sentence(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    corpus = make_corpus(tmp_path / "corpus", {"train": PARALLEL})
    command = ["analyze", "lengths", "--corpus", str(corpus.directory), "--out"]
    assert cli.main([*command, str(tmp_path / "x")]) == EXIT_USER_ERROR
    assert "has no test lines" in capsys.readouterr().err


def test_pieces_and_unknown_ones_are_counted_word_by_word(tmp_path: Path) -> None:
    """Characters of the one language as pieces: by hand, a space is none and ``ə`` is unknown."""
    known = {"en-tr": {"tr": ["on al", "el"], "en": ["ten", "hand"]}}
    related = {"az-en": {"az": ["əl on", "ə"], "en": ["ten", "hand"]}}
    corpus = make_corpus(tmp_path / "corpus", {"train": known, "test": known | related})
    recipe = tmp_path / "recipe.toml"
    recipe.write_text('[tokenizer]\nkind = "characters"\nvocabulary_size = 100\n')
    paths = {name: str(tmp_path / name) for name in ("tokenizer", "out")}
    options = ["--corpus", str(corpus.directory)]
    command = ["train_tokenizer", "--recipe", str(recipe), *options, "--out", paths["tokenizer"]]
    assert cli.main(command) == 0
    command = ["analyze", "lengths", *options, "--tokenizer", paths["tokenizer"]]
    assert cli.main([*command, "--out", paths["out"]]) == 0
    made = open_artifact(tmp_path / "out", kind="analysis")
    found = made.read_json("lengths.json")["segmentation"]
    assert found["tr"] == {
        **{"words": 3, "pieces": 6, "unknown": 0},
        **{"fertility": 2.0, "unknown_share": 0.0},
    }
    assert found["az"] == {
        **{"words": 3, "pieces": 5, "unknown": 2},
        **{"fertility": 5 / 3, "unknown_share": 0.4},
    }
    assert "unknown pieces: az 40.00%" in made.manifest.summary
    [section] = analysis_sections({"lengths": made})
    assert section.tables[-1].rows[0].texts == ("az", "3", "1.67", "40.00")
