"""A small evaluation of three systems, the runs behind it and a sample; names may be hostile.

``dense`` is trained by itself; the second system is assembled from it and from ``routed`` and
trained on; ``baseline`` is not trained.
"""

from collections.abc import Mapping, Sequence
from pathlib import Path

import pytest
import sacrebleu.tokenizers.tokenizer_spm as sacrebleu_models

from pipeline.artifacts.corpus import Direction
from pipeline.evaluation.averages import assess, by_group, quality, system_scores
from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.history import Curve, CurvePoint, History, Spent, SystemTraining
from pipeline.evaluation.language_detector import PLAIN, RESTRICTED
from pipeline.evaluation.scores import (
    Comparison,
    Difference,
    DirectionProfile,
    DirectionScores,
    Evaluation,
    Interval,
    Scores,
    Significance,
    SystemScores,
)
from pipeline.evaluation.tables import Table, headings, row
from support.pieces import train_pieces

HOSTILE = "<script>alert(\"1\")</script> | & 'x'"
MADE = "2024-02-29 12:30 UTC, mmnmt 1.2.3"

PROFILES = (
    DirectionProfile(Direction("de", "en"), "into_pivot", "high", 900, 30),
    DirectionProfile(Direction("de", "fr"), "zero_shot", None, 0, 30),
    DirectionProfile(Direction("de", "mg"), "zero_shot", None, 0, 30),
    DirectionProfile(Direction("en", "de"), "out_of_pivot", "high", 900, 30),
    DirectionProfile(Direction("en", "fr"), "out_of_pivot", "low", 20, 30),
)
NAMES = {"de": "German", "en": "English", "fr": "French", "mg": "Malagasy"}

BLEU: Mapping[str, Mapping[str, float]] = {
    "dense": {"de-en": 30.0, "de-fr": 5.0, "de-mg": 1.0, "en-de": 20.0, "en-fr": 11.0},
    "second": {"de-en": 31.0, "de-fr": 4.0, "de-mg": 2.0, "en-de": 22.0, "en-fr": 11.04},
    "baseline": {"de-en": 3.0, "de-fr": 1.0, "de-mg": 0.5, "en-de": 2.0, "en-fr": 1.04},
}
DISTINCT = {"dense": 97.0, "baseline": 20.0}
"""Of every direction; of the second system, 90."""
SEPARATED = {"de-en", "en-de"}
"""Directions where the second system leads beyond chance; so do the averages over these alone."""


def accuracies(plain: float, restricted: float) -> dict[str, float]:
    return {"language": plain, "language_restricted": restricted}


def scores_of(bleu: Mapping[str, float]) -> dict[str, Scores]:
    """chrF++ is twice BLEU; langdetect does not know Malagasy, which lid.176 does."""
    return {
        direction: {"bleu": value, "chrf": 2 * value}
        | ({} if direction == "de-mg" else accuracies(90.0, 95.0))
        for direction, value in bleu.items()
    }


def system(name: str, bleu: Mapping[str, float]) -> SystemScores:
    scores = scores_of(bleu)
    return system_scores(
        name,
        {
            direction: DirectionScores(
                one,
                30,
                0,
                0,
                {"bleu": "tok:13a|version:x", "chrf": "nc:6|nw:2"},
                quality(bleu=bleu[direction], distinct=DISTINCT.get(name, 90.0)),
            )
            for direction, one in scores.items()
        },
        profiles=PROFILES,
    )


def comparison(names: Mapping[str, str], values: Mapping[str, float], *, clear: bool) -> Comparison:
    return Comparison(
        intervals={names[key]: Interval(value - 0.5, value + 0.5) for key, value in values.items()},
        best=names["second"] if clear else None,
        differences={
            names[key]: Difference(value - 1.0, value + 1.0, value, 0.5)
            for key, value in values.items()
            if key != "dense"
        },
    )


def significance(names: Mapping[str, str]) -> Significance:
    def compared(directions: list[str]) -> dict[str, Comparison]:
        clear = set(directions) <= SEPARATED
        means = {
            key: sum(bleu[name] for name in directions) / len(directions)
            for key, bleu in BLEU.items()
        }
        double = {key: 2 * value for key, value in means.items()}
        return {
            "bleu": comparison(names, means, clear=clear),
            "chrf": comparison(names, double, clear=clear),
        }

    members = by_group(
        {str(one.direction): str(one.direction) for one in PROFILES}, profiles=PROFILES
    )
    return Significance(
        resamples=1000,
        directions={str(one.direction): compared([str(one.direction)]) for one in PROFILES},
        averages={
            family: {group: compared(found) for group, found in groups.items()}
            for family, groups in members.items()
        },
    )


def evaluation(*, second: str = "experts") -> Evaluation:
    names = {"dense": "dense", "second": second, "baseline": "baseline"}
    systems = [system(names[key], bleu) for key, bleu in BLEU.items()]
    return Evaluation(
        columns=(Bleu.column, Chrf.column, PLAIN, RESTRICTED),
        pivot="en",
        thresholds=(100, 500),
        directions=PROFILES,
        language_names=NAMES,
        systems=tuple(systems),
        undetectable={"langdetect": ("mg",), "lid.176": ()},
        warnings=(f"{second}: 3 translations are empty.",),
        verdicts=assess(systems, baseline="dense", profiles=PROFILES),
        significance=significance(names),
    )


DENSE = SystemTraining("dense", Spent(8, 900, 800, 4.8e6, 120.0), ("dense",))


def history(system_name: str) -> History:
    points = tuple(
        CurvePoint(update, {"all": 9.0 / update, "high": 8.0 / update, "low": 10.0 / update})
        for update in range(1, 9)
    )
    total = Spent(24, 2700, 2400, 24e6, 500.0)
    assembled = SystemTraining(
        system_name, total, ("dense", "routed", "tuned"), parameters=(40_000, 2_000)
    )
    return History(
        curves=(Curve(system_name, points, before=16), Curve("dense", points[:1])),
        missing=("shards",),
        trainings=(DENSE, assembled, SystemTraining("baseline")),
    )


def sample(system_name: str) -> Table:
    texts = {"source": HOSTILE, "reference": "réf", "dense": "(empty)", system_name: HOSTILE}
    rows = (row("German → French, line 7", *one) for one in [*texts.items(), ("baseline", "x")])
    titles = ("Line", "Version", "Text")
    return Table("Zero-shot", headings(*titles, words=titles), tuple(rows))


def place_flores_model(
    folder: Path, texts: Sequence[str], option: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Put a model of pieces of some texts where sacreBLEU keeps the one that it fetches."""
    stored = folder / "models" / Path(sacrebleu_models.SPM_MODELS[option]["url"]).name
    stored.parent.mkdir()
    stored.write_bytes(train_pieces(texts, size=60, character_coverage=0.9995))
    monkeypatch.setattr(sacrebleu_models, "SACREBLEU_DIR", str(folder))
    monkeypatch.setattr(sacrebleu_models, "download_file", None)
