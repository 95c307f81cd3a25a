"""finetune_tagger: train an XLM-R to find named entities.

Reads a Hugging Face folder with an XLM-R, and text with named entities by
language; makes a task model.
"""

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

from pipeline.distributed.world import leave
from pipeline.extensions.tasks.training import finetune
from pipeline.stages.stage import StageCall


def run(call: StageCall) -> None:
    """Train a tagger."""
    finetune(call, "tagger")


if __name__ == "__main__":
    from pipeline.cli import stage_main

    leave(stage_main("finetune_tagger"))
