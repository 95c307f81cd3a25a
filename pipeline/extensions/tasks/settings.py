"""Settings of the tasks on an XLM-R: the section ``[tasks]`` of a recipe."""

from typing import Annotated, Self

from pydantic import model_validator

from pipeline.config.settings import Settings, whole


class TasksConfig(Settings):
    """finetune_tagger and finetune_reader: tasks other than translation, on an XLM-R."""

    languages: tuple[str, ...] = ()
    """Train on these; empty: on all that have training text."""
    max_tokens: Annotated[int, whole(16, 2**20)] = 384
    """Longer sentences are cut between words, longer passages into windows; specials included."""
    stride: Annotated[int, whole(0, 2**20)] = 128
    """Tokens that two neighbouring windows of a passage have in common."""
    max_question_tokens: Annotated[int, whole(1, 2**20)] = 64
    """Of a longer question the beginning is read."""
    max_answer_tokens: Annotated[int, whole(1, 2**20)] = 30
    """A longer answer is never given."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [code for code in self.languages if self.languages.count(code) > 1]
        if twice:
            raise ValueError(f"languages names {twice[0]!r} more than once: name it once")
        return self
