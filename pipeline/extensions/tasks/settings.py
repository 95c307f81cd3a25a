"""Settings of the tasks on an XLM-R: the section ``[tasks]`` of a recipe."""

from typing import Annotated, Self

from pydantic import model_validator

from pipeline.config.settings import Settings, whole


class TasksConfig(Settings):
    """Tasks other than translation on an XLM-R, for finetune_tagger and finetune_reader."""

    languages: tuple[str, ...] = ()
    """Languages to train on; empty: all that have training text."""
    max_tokens: Annotated[int, whole(16, 2**20)] = 384
    """Most tokens of an example, specials included. Longer sentences are cut between words, longer
    passages into windows."""
    stride: Annotated[int, whole(0, 2**20)] = 128
    """Tokens that neighboring windows of a passage share."""
    max_question_tokens: Annotated[int, whole(1, 2**20)] = 64
    """Most tokens of a question; longer ones are truncated."""
    max_answer_tokens: Annotated[int, whole(1, 2**20)] = 30
    """Most tokens of a predicted answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [code for code in self.languages if self.languages.count(code) > 1]
        if twice:
            raise ValueError(f"languages names {twice[0]!r} more than once. Name it once")
        return self
