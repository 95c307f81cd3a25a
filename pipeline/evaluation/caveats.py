"""What a reader of an evaluation should be warned of."""

from collections.abc import Sequence
from pathlib import Path

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import listed_names
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.score_slot import Score
from pipeline.evaluation.scores import SystemScores, Verdicts
from pipeline.evaluation.verdicts import RULE
from pipeline.stages.registry import StageCall

NAMED_DIRECTIONS = 8
"""So many of a list of directions are named in a sentence."""


def caveats(
    systems: Sequence[SystemScores],
    *,
    scores: Sequence[Score],
    profiles: Sequence[DirectionProfile],
    left_out: int,
    call: StageCall,
) -> list[str]:
    """All of them, in sentences.

    Args:
        left_out: number of directions that not every system's model knows.
    """
    return [
        *_of_directions(call, profiles=profiles, left_out=left_out),
        *(warning for system in systems for warning in _of_lines(system)),
        *_of_corpora(call),
        *(warning for score in scores for warning in score.caveats()),
    ]


def _of_directions(
    call: StageCall, *, profiles: Sequence[DirectionProfile], left_out: int
) -> list[str]:
    found = []
    if left_out:
        named = sorted(
            {code for one in call.many("systems").values() for code in skipped_directions(one)}
        )
        found.append(
            f"{left_out} of {left_out + len(profiles)} directions are left out, which not every "
            f"system translates: {_listed(named)}."
        )
    if any(profile.family == "unknown" for profile in profiles):
        found.append(
            "This corpus has no training lines, so that it is not known which directions were "
            "trained: name the corpus the systems were trained on as the input 'training'."
        )
    return found


def _listed(names: Sequence[str]) -> str:
    more = len(names) - NAMED_DIRECTIONS
    return ", ".join(names[:NAMED_DIRECTIONS]) + (f" and {more} more" if more > 0 else "")


def _of_lines(system: SystemScores) -> list[str]:
    scored = system.directions.values()
    counts = {
        "of a source that was cut to what the model takes": sum(one.truncated for one in scored),
        "empty": sum(one.empty for one in scored),
        "without bytes that are no UTF-8": sum(one.invalid for one in scored),
    }
    if not any(counts.values()):
        return []
    lines = sum(one.lines for one in scored)
    verbs = {what: "is" if count == 1 else "are" for what, count in counts.items()}
    findings = " and ".join(
        f"{count:,} {verbs[what]} {what}" for what, count in counts.items() if count
    )
    return [f"{system.name}: of {lines:,} translations {findings}."]


def undecided(verdicts: Verdicts) -> list[str]:
    """Return a warning where the baseline of several systems does not translate."""
    names = [name for name in verdicts.directions if not verdicts.decides(name)]
    if not names or all(len(found) == 1 for found in verdicts.directions.values()):
        return []
    return [
        f"Not decided in {len(names)} of {len(verdicts.directions)} directions, since the baseline "
        f"{verdicts.baseline} does not translate there: {_listed(names)}. {RULE}"
    ]


def _of_corpora(call: StageCall) -> list[str]:
    found = []
    for name, translations in call.many("systems").items():
        record = translations.manifest.inputs.get("corpus")
        if record is not None and record.digest != call.artifacts["corpus"].digest:
            found.append(
                f"{name}: translated from {Path(record.path).name}, whose contents differ from "
                "this corpus."
            )
    return found


def skipped_directions(translations: Artifact) -> set[str]:
    """Directions that translate left out, since the model does not know their languages."""
    return listed_names(translations, "skipped_directions")
