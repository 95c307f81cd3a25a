"""Tasks other than translation on an XLM-R: named entities and question answering.

``finetune_task`` trains a head on the encoder, ``evaluate_task`` compares systems. Read
``named_entities`` or ``questions`` first: from files to examples, predictions and scores.
"""

from typing import Annotated, Any, ClassVar, Self

from pydantic import model_validator

from pipeline.config.settings import InstalledExtension, Settings, whole


class TasksConfig(Settings):
    """Tasks on an XLM-R by the stage finetune_task."""

    removed: ClassVar = {"max_answer_tokens": (30,), "max_question_tokens": (64,), "stride": (128,)}
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


class _Tasks(InstalledExtension):
    sections: ClassVar = {"tasks": TasksConfig}

    def load_stages(self) -> Any:
        from pipeline.config.recipe import DECIDE_NOTHING
        from pipeline.stage import Input, Stage

        return (
            Stage(
                name="finetune_task",
                module="pipeline.extensions.tasks.finetune_task",
                makes="task_model",
                help="train an XLM-R to find named entities, or answers in passages",
                sections=(
                    *("tasks", "model.language_modules", "mixture.sampling_temperature"),
                    *("batches", "optimizer", "loss", "training"),
                ),
                inputs={
                    "pretrained": Input("raw", "XLM-R as Hugging Face's save_pretrained writes it"),
                    "entities": Input("raw", "LANGUAGE/train and dev, as WikiANN", required=False),
                    "questions": Input(
                        "raw", "NAME.LANGUAGE.train.json and dev, as SQuAD v1.1", required=False
                    ),
                },
                parallel="ranks",
                trains=True,
                undeciding=DECIDE_NOTHING,
            ),
            Stage(
                name="evaluate_task",
                module="pipeline.extensions.tasks.evaluate_task",
                makes="task_evaluation",
                help="score taggers or readers side by side, by language",
                sections=(),
                inputs={
                    "data": Input("raw", "test files, with or without the training files"),
                    "systems": Input(
                        "task_model", "NAME=DIR; NAME@RUN=DIR of several runs of one", many=True
                    ),
                },
            ),
        )


EXTENSION = _Tasks()
