"""Scores that an evaluation computes: the recipe's choice, with one ``case`` per score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comet import Comet, CometScores
from pipeline.evaluation.failed_outputs import (
    Copies,
    EmptyOutputs,
    InvalidOutputs,
    LengthRatio,
    Loops,
)
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.score_slot import Score
from pipeline.evaluation.settings import EvaluationConfig, ScoreName


@dataclass(frozen=True)
class Scored:
    """Properties of the data on which the choice of scores depends."""

    targets: Sequence[str]
    """Target languages of the directions, sorted."""
    languages: Sequence[str]
    """All languages of the corpus and of the training corpus."""
    comet: CometScores | None = None
    """Scores of a COMET model; None: no model was given."""


def chosen_scores(settings: EvaluationConfig, *, scored: Scored) -> tuple[Score, ...]:
    """Return the scores of a recipe in their order.

    Raises:
        ConfigError: a score cannot be computed here.
    """
    return tuple(_score(name, settings, scored) for name in settings.computed_scores)


def _score(name: ScoreName, settings: EvaluationConfig, scored: Scored) -> Score:
    match name:
        case "bleu":
            return Bleu.into(scored.targets, option=settings.bleu_tokenizer)
        case "chrf":
            return Chrf()
        case "comet":
            assert scored.comet is not None, "check_inputs asks for the model"
            return Comet(scored.comet)
        case "language":
            return LanguageAccuracy.plain(scored.languages, seed=settings.seed)
        case "language_restricted":
            return LanguageAccuracy.restricted(scored.languages, seed=settings.seed)
        case "length_ratio":
            return LengthRatio()
        case "copies":
            return Copies()
        case "empty":
            return EmptyOutputs()
        case "invalid":
            return InvalidOutputs()
        case "loops":
            return Loops()


def bleu_tokenizers(scores: Sequence[Score]) -> Mapping[str, str]:
    """Return the tokenizer of BLEU for every target language, if BLEU is among the scores."""
    return next((one.tokenizers for one in scores if isinstance(one, Bleu)), {})


def undetectable(scores: Sequence[Score], targets: Sequence[str]) -> list[str]:
    """Return the target languages that language accuracy leaves out, if it is computed."""
    detecting = [one for one in scores if isinstance(one, LanguageAccuracy)]
    return [code for code in targets if any(not one.detects(code) for one in detecting)]
