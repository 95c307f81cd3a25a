"""Which scores an evaluation computes: the recipe's choice, one ``case`` per score."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from pipeline.evaluation.bleu import Bleu
from pipeline.evaluation.chrf import Chrf
from pipeline.evaluation.comet_score import Comet, CometScores
from pipeline.evaluation.failed_outputs import Copies, EmptyOutputs, InvalidOutputs, Loops
from pipeline.evaluation.language_accuracy import LanguageAccuracy
from pipeline.evaluation.length_ratio import LengthRatio
from pipeline.evaluation.score_slot import Score
from pipeline.evaluation.settings import EvaluationConfig, ScoreName


@dataclass(frozen=True)
class Scored:
    """What is to be scored, as far as scores depend on it."""

    targets: Sequence[str]
    """Target languages of the directions, sorted."""
    languages: Sequence[str]
    """All languages of the corpus and of the one that was trained on."""
    comet: CometScores | None = None
    """What a COMET model gave to the lines; None: no model was named."""


def chosen_scores(settings: EvaluationConfig, *, scored: Scored) -> tuple[Score, ...]:
    """The scores of a recipe in their order.

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
            assert scored.comet is not None, "checked before anything is scored"
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
    """Target language → tokenizer of BLEU, if that is among the scores."""
    return next((one.tokenizers for one in scores if isinstance(one, Bleu)), {})


def undetectable(scores: Sequence[Score], targets: Sequence[str]) -> list[str]:
    """The target languages that language accuracy, if it is among the scores, leaves out."""
    detecting = [one for one in scores if isinstance(one, LanguageAccuracy)]
    return [code for code in targets if any(not one.detects(code) for one in detecting)]
