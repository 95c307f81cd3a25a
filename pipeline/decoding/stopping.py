"""When a sentence is done, and what counts as the length of a hypothesis.

A new rule is a class like those below, a name in ``config.DecodingConfig`` and a case of
:func:`stopping_rule`.
"""

from typing import Protocol

from pipeline.config import DecodingConfig


class StoppingRule(Protocol):
    """Asked at every step about hypotheses of ``beam_size`` beams."""

    forces_end_at_limit: bool
    """At the longest length allowed a hypothesis must end; otherwise it is taken as it is."""

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        """The length a score is divided by, of ``length`` tokens with end-of-sentence.

        ``prompt_length`` counts the forced prompt, the token that decoders start from included.
        """

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        """Whether a sentence with ``beam_size`` ended hypotheses is done.

        ``best_running`` is the score of the best unfinished one, were it to end now.
        """


class FairseqRule:
    """Done as soon as ``beam_size`` hypotheses have ended; the prompt does not count.

    As in fairseq's ``sequence_generator.py``.
    """

    forces_end_at_limit = True

    def counted_length(self, length: int, *, prompt_length: int) -> int:  # noqa: ARG002
        return length

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:  # noqa: ARG002
        return True


class HuggingFaceRule:
    """Done when no running hypothesis can still overtake the worst of those kept.

    The forced tag counts as generated. As in transformers' beam search with
    ``early_stopping = False`` (``generation/utils.py``).
    """

    forces_end_at_limit = False

    def counted_length(self, length: int, *, prompt_length: int) -> int:
        return length + prompt_length - 1

    def is_done(self, *, worst_ended: float, best_running: float) -> bool:
        return worst_ended >= best_running


def stopping_rule(config: DecodingConfig) -> StoppingRule:
    """The rule a recipe names."""
    match config.stopping:
        case "fairseq":
            return FairseqRule()
        case "huggingface":
            return HuggingFaceRule()
