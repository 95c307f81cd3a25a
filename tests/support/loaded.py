"""Loads what takes seconds to load, for processes that are forked from one that has it."""

# ruff: noqa: E402, F401, I001 — the engine says how DeepSpeed is imported, and so comes first
from pipeline.machine import prepare_process

prepare_process()

import gc

import support.unsynced
import pipeline.stages.evaluate
import pipeline.extensions.tasks.finetune_task
import pipeline.stages.pretrain
import pipeline.stages.translate
import pipeline.stages.upcycle

# Loaded on first use, by torch.optim, DeepSpeed and numba's compiler.
import deepspeed.module_inject.auto_ep_layer
import deepspeed.runtime.zero.muon.muon_optimizer
import numba
import torch._refs


@numba.njit
def _nothing() -> int:
    return 0


_nothing()  # type: ignore[call-arg]

# A training collects garbage twice, which takes half of a tiny training's time where it visits
# the half a million objects that were just loaded.
gc.collect()
gc.freeze()
