"""Checks of an evaluation's inputs: errors that stop it, and warnings for the report."""

from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import hypotheses_name, iterate_lines, listed_names
from pipeline.errors import ArtifactError, ConfigError
from pipeline.evaluation.averages import RULE, group_runs
from pipeline.evaluation.directions import DirectionProfile
from pipeline.evaluation.scores import Score, SystemScores, Verdicts
from pipeline.languages import parse_tag
from pipeline.stage import StageCall
from pipeline.terminal import counted, listed

MAX_NAME_BYTES = 200  # of the name of a system, which becomes the name of a directory


# Refusals


def check_inputs(call: StageCall) -> None:
    """Check that settings and inputs of the stage belong together.

    Raises:
        ConfigError: a model or tokenizer is given but not used, or needed but not given; a set of
            languages contains an unknown language; or a system is named with and without a seed.
    """
    settings = call.recipe.evaluation
    has_comet, asks_comet = "comet" in call.raw, "comet" in settings.computed_scores
    if has_comet != asks_comet:
        raise ConfigError(
            "--comet names a model, but evaluation.scores does not list comet. Add it there, or "
            "leave the option out."
            if has_comet
            else "evaluation.scores lists comet, but no model is given. Name its directory with "
            "--comet, or leave comet out."
        )
    if "tokenizer" in call.artifacts and not settings.word_accuracy:
        raise ConfigError(
            "--tokenizer is used only for word accuracy, and evaluation.word_accuracy is false. "
            "Set it to true, or leave the option out."
        )
    for code in (code for codes in settings.language_sets.values() for code in codes):
        parse_tag(code)
    group_runs(call.many("systems"))


def shared_directions(
    systems: Mapping[str, Artifact], *, corpus: Artifact, profiles: Sequence[DirectionProfile]
) -> list[DirectionProfile]:
    """Return the directions with languages that the models of all systems know.

    Raises:
        ArtifactError: a system did not translate every line, or the corpus has no test lines.
        ConfigError: there is no system, a name is unusable, or no direction is left.
    """
    if not systems:
        raise ConfigError("evaluate has no systems. Name at least one, as NAME=DIR.")
    if not profiles:
        raise ArtifactError(
            f"{corpus.directory} has no test lines. Evaluate with a corpus that has test sets."
        )
    _check_names(list(systems))
    unknown: set[str] = set()
    for name, translations in systems.items():
        skipped = listed_names(translations, "skipped_directions")
        lacking = [
            profile
            for profile in profiles
            if not translations.has(hypotheses_name(profile.direction))
        ]
        missing = [way for way in (str(one.direction) for one in lacking) if way not in skipped]
        if missing:
            raise ArtifactError(
                f"System {name!r} ({translations.directory}) has no translations for "
                f"{', '.join(missing)}. Translate the whole corpus with it."
            )
        unknown |= skipped
    shared = [profile for profile in profiles if str(profile.direction) not in unknown]
    if not shared:
        raise ConfigError(
            f"No direction of {corpus.directory} was translated by all of the systems "
            f"{', '.join(systems)}. Evaluate systems separately if they know other languages."
        )
    for name, translations in systems.items():
        for profile in shared:
            path = translations.file(hypotheses_name(profile.direction))
            lines = sum(1 for _ in iterate_lines(path))
            if lines != profile.test_lines:
                raise ArtifactError(
                    f"System {name!r} has {counted(lines, 'translation')} in {path} where the "
                    f"corpus has {counted(profile.test_lines, 'test line')}. Translate this "
                    "corpus with it again."
                )
    return shared


def _check_names(names: Sequence[str]) -> None:
    """Check that every name can be a directory, on any file system."""
    taken: dict[str, str] = {}
    for name in names:
        fits = name.isprintable() and 0 < len(name.encode("utf-8", "replace")) <= MAX_NAME_BYTES
        if not fits or {"/", "\\"} & {*name} or name in {".", ".."}:
            raise ConfigError(
                f"System name {name!r} cannot be the name of a directory. Choose another name."
            )
        if name.casefold() in taken:
            raise ConfigError(
                f"System names {taken[name.casefold()]!r} and {name!r} differ only in case, which "
                "some file systems ignore. Choose another name."
            )
        taken[name.casefold()] = name


# Warnings


def caveats(
    systems: Sequence[SystemScores],
    *,
    scores: Sequence[Score],
    profiles: Sequence[DirectionProfile],
    left_out: int,
    call: StageCall,
) -> list[str]:
    """Return the warnings of the report, in sentences."""
    found, translated = [], call.many("systems")
    if left_out:
        skipped = (listed_names(one, "skipped_directions") for one in translated.values())
        named = sorted(set().union(*skipped))
        found.append(
            f"{left_out} of {left_out + len(profiles)} directions are left out, because not every "
            f"system translates them: {listed(named)}."
        )
    if any(profile.family == "unknown" for profile in profiles):
        found.append(
            "This corpus has no training lines, so it is not known which directions were trained. "
            "Name the training corpus of the systems as the input 'training'."
        )
    for system in systems:
        ways = system.directions.values()
        defects = {
            "a source cut to the model's maximum length": sum(way.truncated for way in ways),
            "no text": sum(way.empty for way in ways),
            "lost bytes that are not valid UTF-8": sum(way.invalid for way in ways),
        }
        counts = ((defect, count) for defect, count in defects.items() if count)
        parts = [f"{count:,} {'has' if count == 1 else 'have'} {what}" for what, count in counts]
        if parts:
            lines = sum(way.lines for way in ways)
            found.append(f"{system.name}: of {lines:,} translations, {' and '.join(parts)}.")
    for runs in group_runs(translated).values():
        first: dict[str, str] = {}
        for run in runs:
            other = first.setdefault(translated[run].digest, run)
            if other != run:
                found.append(
                    f"{other} and {run} have the same translations, so that intervals over seeds "
                    "are too narrow. Name each run once, and train each with a seed of its own."
                )
    for name, translations in translated.items():
        record = translations.manifest.inputs.get("corpus")
        if record is not None and record.digest != call.artifacts["corpus"].digest:
            found.append(
                f"{name}: translated from {Path(record.path).name}, which differs from this corpus."
            )
    return [*found, *(warning for score in scores for warning in score.caveats())]


def undecided(verdicts: Verdicts) -> list[str]:
    """Return a warning if the baseline of several systems does not translate somewhere."""
    names = [name for name in verdicts.directions if not verdicts.decides(name)]
    warning = (
        f"Not decided in {len(names)} of {len(verdicts.directions)} directions, since the baseline "
        f"{verdicts.baseline} does not translate there: {listed(names)}. {RULE}"
    )
    return [warning] if names else []
