"""A new score is one new file, one name in the recipe and one ``case``.

The additions are made, as text, to a copy of the packages, and the stage is run from there.
"""

import json
from pathlib import Path

import numpy as np
import pytest
from support.added_variants import Variant, copy_with, run_in
from support.corpora import make_corpus, make_translations

pytestmark = pytest.mark.slow

SOURCE_RATIO = '''"""Characters of the translations per hundred of their sources."""

from dataclasses import dataclass

import numpy as np

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.scores import (
    Column,
    Floats,
    LineCount,
    LineStatistics,
    Score,
    TranslatedLines,
)


@dataclass(frozen=True)
class SourceRatio(Score):
    """In percent; not into French, so that there is a direction it does not cover."""

    column = Column("source_ratio", "Source ratio", larger_is_better=False, decimals=2)

    def covers(self, direction: Direction) -> bool:
        return direction.target != "fr"

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        pairs = zip(lines.hypotheses, lines.sources, strict=True)
        return LineStatistics(np.array([[len(text), len(source)] for text, source in pairs]))

    def of_sums(self, sums: Floats, *, lines: LineCount) -> Floats:
        return 100.0 * sums[:, 0] / sums[:, 1]
'''
VARIANT = Variant(
    {"pipeline/evaluation/source_ratio.py": SOURCE_RATIO},
    {
        "pipeline/evaluation/settings.py": [
            (
                'ScoreName = Literal[\n    "bleu",',
                'ScoreName = Literal[\n    "source_ratio",\n    "bleu",',
            )
        ],
        "pipeline/evaluation/scoring.py": [
            (
                "from pipeline.evaluation.scores import",
                "from pipeline.evaluation.source_ratio import SourceRatio\n"
                "from pipeline.evaluation.scores import",
            ),
            (
                '            case "chrf":\n',
                '            case "source_ratio":\n                return SourceRatio()\n'
                '            case "chrf":\n',
            ),
        ],
    },
)

RECIPE = 'name = "test"\n[evaluation]\nscores = ["bleu", "source_ratio", "chrf"]\n'
WORDS = {"de": "Haus", "en": "house by the sea", "fr": "maison"}
TRAINING_LINES = {"de-en": 50, "de-fr": 0, "en-fr": 50}
LINES = 24


@pytest.fixture
def copied(tmp_path: Path) -> Path:
    """A copy of the packages that has one more score."""
    return copy_with(tmp_path / "copy", [VARIANT])


def lines_of(code: str) -> list[str]:
    return [f"{WORDS[code]} {number * number}." for number in range(LINES)]


def write_translations(path: Path, *, perfect: bool) -> Path:
    """The references, or these without their first words."""
    ways = [way for pair in TRAINING_LINES for way in (pair, "-".join(reversed(pair.split("-"))))]
    texts = {way: lines_of(way.partition("-")[2]) for way in ways}
    if not perfect:
        texts = {way: [*map(shortened, lines)] for way, lines in texts.items()}
    return make_translations(path, texts).directory


def shortened(text: str) -> str:
    return text.split(" ", 1)[1]


def evaluate(copied: Path, folder: Path) -> Path:
    """An evaluation of two systems by the extended pipeline."""
    sides = {pair: {code: lines_of(code) for code in pair.split("-")} for pair in TRAINING_LINES}
    make_corpus(folder / "corpus", {"test": sides}, trained=TRAINING_LINES)
    short = write_translations(folder / "a", perfect=False)
    perfect = write_translations(folder / "b", perfect=True)
    (folder / "recipe.toml").write_text(RECIPE, encoding="utf-8")
    arguments = [
        *("--recipe", "recipe.toml", "--corpus", str(folder / "corpus")),
        *("--systems", f"short={short}", f"perfect={perfect}", "--out", str(folder / "out")),
    ]
    run_in(copied, ["-m", "pipeline", "evaluate", *arguments], cwd=folder)
    return folder / "out"


def expected_ratio(source: str, target: str) -> float:
    """Of the references."""
    return 100 * len("".join(lines_of(target))) / len("".join(lines_of(source)))


def test_an_added_score_reaches_every_report(copied: Path, tmp_path: Path) -> None:
    out = evaluate(copied, tmp_path)

    document = json.loads((out / "scores.json").read_text("utf-8"))
    short, perfect = document["systems"]
    ratios = {way: one["scores"].get("source_ratio") for way, one in perfect["directions"].items()}
    assert ratios["de-en"] == pytest.approx(expected_ratio("de", "en")), "of the sources"
    assert ratios["de-fr"] is None
    length = sum(len(shortened(text)) for text in lines_of("en"))
    assert short["directions"]["de-en"]["scores"]["source_ratio"] == pytest.approx(
        100 * length / len("".join(lines_of("de")))
    )
    with np.load(out / "sentences/perfect/de-en.npz", allow_pickle=False) as arrays:
        assert arrays.files == ["bleu", "source_ratio", "chrf"]

    mean = perfect["averages"]["into_pivot"]["all"]["source_ratio"]
    assert mean == pytest.approx((ratios["de-en"] + ratios["fr-en"]) / 2)
    compared = document["significance"]["directions"]["de-en"]["source_ratio"]
    assert compared["best"] == "short", "less is better"
    interval = compared["intervals"]["perfect"]
    assert interval["low"] < ratios["de-en"] < interval["high"]

    report = (out / "report.md").read_text("utf-8")
    table = report.split("### Source ratio (less is better)\n")[1]
    assert f"| perfect | no training | {mean:.2f} (" in table
    assert "Zero-shot (1 direction, not decided)" in table.split("chrF++")[0], (
        "one of the two is into French"
    )
    page = (out / "report.html").read_text("utf-8")
    assert "<h3>Source ratio (less is better)</h3>" in page
    assert "Mean chrF++ and BLEU over" in page, "what is not out of 100 makes no bar"
