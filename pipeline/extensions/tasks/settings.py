"""Settings of the tasks on an XLM-R: the section ``[tasks]`` of a recipe."""

from typing import Annotated, Self

from pydantic import model_validator

from pipeline.config.settings import Settings, whole


class TasksConfig(Settings):
    """Tasks on an XLM-R by the stage finetune_task."""

    languages: tuple[str, ...] = ()
    """Languages of the training text; empty: all that have any."""
    max_tokens: Annotated[int, whole(16, 2**20)] = 384
    """Tokens of an input, specials included: longer sentences are cut between words, longer
    passages into windows."""
    stride: Annotated[int, whole(0, 2**20)] = 128
    """Tokens that neighboring windows of a passage share."""
    max_question_tokens: Annotated[int, whole(1, 2**20)] = 64
    """Tokens that are read of a question, from its beginning."""
    max_answer_tokens: Annotated[int, whole(1, 2**20)] = 30
    """Tokens of the longest answer."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [code for code in self.languages if self.languages.count(code) > 1]
        if twice:
            raise ValueError(f"languages names {twice[0]!r} more than once. Name it once")
        return self
