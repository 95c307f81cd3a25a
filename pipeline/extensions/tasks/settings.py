"""Settings of the tasks on an XLM-R: the section ``[tasks]`` of a recipe."""

from typing import Annotated, ClassVar, Self

from pydantic import model_validator

from pipeline.config.settings import Settings, whole


class TasksConfig(Settings):
    """Tasks on an XLM-R by the stage finetune_task."""

    removed: ClassVar = {
        "max_answer_tokens": (30,),
        "max_question_tokens": (64,),
        "stride": (128,),
    }
    languages: tuple[str, ...] = ()
    """Languages of the training text; empty: all that have any."""
    max_tokens: Annotated[int, whole(16, 2**20)] = 384
    """Tokens of an input, specials included: longer sentences are cut between words, longer
    passages into windows."""

    @model_validator(mode="after")
    def _check(self) -> Self:
        twice = [code for code in self.languages if self.languages.count(code) > 1]
        if twice:
            raise ValueError(f"languages names {twice[0]!r} more than once. Name it once")
        return self
