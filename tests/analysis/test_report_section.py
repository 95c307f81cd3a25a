"""Analyses in reports: their figures are shown, and a strange document is refused in a sentence."""

import json
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from support.corpora import writing
from support.corruptions import json_values

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.errors import ArtifactError
from pipeline.extensions.analysis.report import analysis_sections

FIGURES = {
    **{"share": [0.25, 0.75], "mean": 0.75},
    **{"weighted_share": [0.5, 0.5], "weighted_mean": 0.5},
}
COUNTS = {"lines": 1, "tokens": 1}
SCORES = {"bleu": 12.5, "chrf": 30.25, "changed": 1}
DOCUMENTS: dict[str, dict[str, Any]] = {
    "scales": {
        "analysis": "scales",
        "directions": {"de-en": {**COUNTS, **FIGURES}, "en-de": {**COUNTS, **FIGURES}},
        "pairs": {"de-en": {"divergence": 0.125, "length_ratio": 1.5}},
    },
    "vectors": {
        "analysis": "vectors",
        "directions": {"de-en": {"right": SCORES, "wrong": {"fr": SCORES}, "without": SCORES}},
    },
    "lengths": {
        "analysis": "lengths",
        "order": ["de", "en"],
        "pivot": "en",
        "parallel_lines": 3,
        "mean_bytes": {"de": 7.5, "en": 5.0},
        "ratio_to_pivot": {"de": 1.5, "en": 1.0},
    },
    "languages": {
        "analysis": "languages",
        "pivot": "en",
        "layers": ["encoder.layers.1", "decoder.layers.1"],
        "directions": {
            "de-en": {"family": "into_pivot", "lines": 2, "routed": [[9, 9], [3, 1]]},
            "fr-en": {"family": "into_pivot", "lines": 2, "routed": [[9, 9], [1, 3]]},
            "en-fr": {"family": "out_of_pivot", "lines": 2, "routed": [[9, 9], [0, 5]]},
            "de-fr": {"family": "zero_shot", "lines": 2, "routed": [[9, 9], [1, 9]]},
        },
        "parallel_lines": 2,
        "encoded": {"de": "de-en", "en": "en-de", "fr": "fr-en"},
        "pairs": {
            "de-en": {"same": 0.5, "different": 0.25, "retrieved": 1.0},
            "de-fr": {"same": 0.75, "different": None, "retrieved": 0.5},
        },
        "points": {"de": [[0.0, 1.0], [2.0, 3.0]], "en": [[4.0, 5.0]]},
        "outlines": {"de": [[[[0.0, 1.0], [2.0, 1.0]], [[2.0, 1.0], [0.0, 1.0]]], []], "en": []},
    },
}
FIGURES_OF = {"languages": 4}


def stored(directory: Path, name: str) -> Artifact:
    with writing(directory, "analysis", f"analyze_{name}") as writer:
        writer.write_json(f"{name}.json", DOCUMENTS[name])
        writer.statistics["analysis"] = name
    return open_artifact(directory, kind="analysis")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_its_figures_stand_in_tables_and_its_pictures_are_sound(tmp_path: Path, name: str) -> None:
    (shown,) = analysis_sections({"mine": stored(tmp_path / "a", name)})
    assert "mine" in shown.title
    rows = {
        (table.title, row.texts[0]): row.texts[1:] for table in shown.tables for row in table.rows
    }
    match name:
        case "scales":
            assert rows["By direction", "de-en"] == ("0.750", "0.500", "25.0", "75.0")
            assert rows["Both directions of a pair", "de-en"] == ("0.12500", "1.500")
        case "vectors":
            assert rows["By language shown", "de-en, fr"] == ("12.50", "30.25", "1")
            assert ("By language shown", "de-en, no vector at all") in rows
        case "languages":
            states = "Encoder states of translations"
            assert rows[states, "de"] == ("0.625", "0.250", "75.0")
            assert rows[states, "fr"] == ("0.750", "", "50.0")
            shared = "Routes that zero-shot directions share with trained ones, %"
            assert rows[shared, "fr"] == ("60.0", "90.0")
        case _:
            assert rows["From the longest to the most concise", "de"] == ("7.5", "1.500")
    assert len(shown.figures) == FIGURES_OF.get(name, 1)
    for figure in shown.figures:
        ElementTree.fromstring(f"<figure>{figure.svg}</figure>")


@pytest.mark.parametrize("name", DOCUMENTS)
def test_whatever_stands_in_a_document_is_shown_or_refused_in_one_sentence(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    artifact = stored(tmp_path / "a", name)
    given: list[Any] = []
    monkeypatch.setattr(Artifact, "read_json", lambda *_: given[-1])
    refused: list[str] = []
    for label, content in json_values(json.dumps(DOCUMENTS[name]).encode()):
        given.append(json.loads(content))
        try:
            analysis_sections({"mine": artifact})
        except ArtifactError as error:
            refused.append(f"{error} ({label})")
    assert all("holds no analysis that reports can show" in text for text in refused)
    assert len(given) / 4 < len(refused) < len(given)


def test_an_analysis_of_no_known_kind_is_refused(tmp_path: Path) -> None:
    with writing(tmp_path / "new", "analysis", "analyze_it") as writer:
        writer.statistics["analysis"] = "of tomorrow"
    with pytest.raises(ArtifactError, match="Run stage 'analyze_it' again"):
        analysis_sections({"x": open_artifact(tmp_path / "new", kind="analysis")})
