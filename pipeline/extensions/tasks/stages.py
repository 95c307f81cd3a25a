"""Declare the stages of the tasks on an XLM-R."""

from pipeline.config.recorded import DECIDE_NOTHING
from pipeline.stages.stage import Input, Stage

_SECTIONS = (
    *("tasks", "model.language_modules", "mixture.sampling_temperature"),
    *("batches", "optimizer", "loss", "training"),
)
_INPUTS = {"pretrained": Input("raw", "XLM-R as Hugging Face's save_pretrained writes it")}

STAGES = (
    Stage(
        name="finetune_tagger",
        command="finetune_task tagger",
        module="pipeline.extensions.tasks.finetune_task",
        makes="task_model",
        help="train an XLM-R to find named entities",
        sections=_SECTIONS,
        inputs={
            **_INPUTS,
            "data": Input("raw", "LANGUAGE/train and dev, as WikiANN or Universal NER"),
        },
        parallel="ranks",
        trains=True,
        undeciding=DECIDE_NOTHING,
    ),
    Stage(
        name="finetune_reader",
        command="finetune_task reader",
        module="pipeline.extensions.tasks.finetune_task",
        makes="task_model",
        help="train an XLM-R to find answers in passages",
        sections=_SECTIONS,
        inputs={
            **_INPUTS,
            "data": Input("raw", "NAME.LANGUAGE.train.json and dev, as SQuAD v1.1"),
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
            "data": Input("raw", "test files, beside the training files or alone"),
            "systems": Input(
                "task_model", "NAME=DIR; NAME@RUN=DIR of several runs of one", many=True
            ),
        },
    ),
)
