"""A small evaluation of two systems, the runs behind it and a sample; names may be hostile."""

from collections.abc import Mapping

from pipeline.corpus import Direction
from pipeline.metrics import (
    DirectionProfile,
    DirectionScores,
    Evaluation,
    LanguageAccuracy,
    ReferenceAccuracy,
    Scores,
    SystemScores,
    average_accuracy,
    average_scores,
)
from pipeline.report import Curve, CurvePoint, History, StageRun
from pipeline.report_html import Sample

HOSTILE = "<script>alert(\"1\")</script> | & 'x'"

PROFILES = (
    DirectionProfile(Direction("de", "en"), "into_pivot", "high", 900, 10),
    DirectionProfile(Direction("de", "fr"), "zero_shot", None, 0, 10),
    DirectionProfile(Direction("en", "de"), "out_of_pivot", "high", 900, 10),
    DirectionProfile(Direction("en", "fr"), "out_of_pivot", "low", 20, 10),
)
NAMES = {"de": "German", "en": "English", "fr": "French"}


def system(name: str, bleu: Mapping[str, float]) -> SystemScores:
    scores = {
        direction: Scores(value, 2 * value, LanguageAccuracy(90.0, 95.0))
        for direction, value in bleu.items()
    }
    return SystemScores(
        name=name,
        directions={
            direction: DirectionScores(one, 10, 0, 0, "tok:13a|version:x", "nc:6|nw:2")
            for direction, one in scores.items()
        },
        averages=average_scores(scores, profiles=PROFILES),
    )


def evaluation(*, second: str = "experts") -> Evaluation:
    references = {str(one.direction): LanguageAccuracy(97.1, 98.2) for one in PROFILES}
    return Evaluation(
        pivot="en",
        thresholds=(100, 500),
        directions=PROFILES,
        language_names=NAMES,
        tokenizers={"de": "13a", "en": "13a", "fr": "13a"},
        systems=(
            system("dense", {"de-en": 30.0, "de-fr": 5.0, "en-de": 20.0, "en-fr": 11.0}),
            system(second, {"de-en": 31.0, "de-fr": 4.0, "en-de": 22.0, "en-fr": 11.04}),
        ),
        references=ReferenceAccuracy(references, average_accuracy(references, profiles=PROFILES)),
        undetectable=("mg",),
        warnings=(f"{second}: 3 translations are empty.",),
    )


def history(system_name: str) -> History:
    points = tuple(
        CurvePoint(update, 1.5 * update, 9.0 / update, {"high": 8.0 / update, "low": 10.0 / update})
        for update in range(1, 9)
    )
    return History(
        stages=(
            StageRun("clean", "clean", 4.0, ("dense", system_name)),
            StageRun("pretrain", HOSTILE, 7200.0, (system_name,)),
        ),
        curves=(Curve(system_name, points, points), Curve("dense", points[:1], ())),
        missing=("shards",),
    )


def sample(system_name: str) -> Sample:
    return Sample(
        direction=Direction("de", "fr"),
        family="zero_shot",
        line=7,
        source=HOSTILE,
        reference="réf",
        translations={"dense": "", system_name: HOSTILE},
    )
