"""Declare the stages of the tasks on an XLM-R."""

from pipeline.config.recipe import DECIDE_NOTHING
from pipeline.stage import Input, Stage

STAGES = (
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
