"""A model of ours in CTranslate2, and the search of ``decode.py`` by it.

It searches in a process of its own: two libraries with threads in one process have more threads
than processors, and OpenMP then lets threads sleep between products, which slows both down.

The environment chooses one of its two libraries for matrix products: CT2_USE_MKL=1 or 0.
"""

import os
import sys
from collections.abc import Callable
from concurrent.futures import ProcessPoolExecutor
from functools import cache, lru_cache, partial
from multiprocessing import get_context
from multiprocessing.util import Finalize
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any, cast
from unittest import mock

import ctranslate2
from support.tiny_models import EOS_ID
from torch import Tensor

from pipeline.batching.batch import Example
from pipeline.checkpoints.checkpoint import ModelSource
from pipeline.checkpoints.foreign.export_to_ctranslate2 import filled_specification
from pipeline.model.parameters import named_slices
from pipeline.model.transformer import Transformer

Sequences = list[tuple[int, ...]]
LIBRARIES = {"1": "with MKL", "0": "without MKL"}


def library() -> str:
    """Return which library multiplies matrices; without a choice, the processor decides."""
    return LIBRARIES.get(os.environ.get("CT2_USE_MKL", ""), "as it chooses")


def write_model(directory: Path, model: Transformer) -> None:
    """As ``mmnmt export --to ctranslate2`` does, without a tokenizer: pieces are called by id."""
    tensors: dict[str, Tensor] = {one.name: one.value.cpu() for one in named_slices(model)}
    of_model = SimpleNamespace(read=tensors.__getitem__, names=lambda: [*tensors])
    source = SimpleNamespace(spec=model.spec, tensors=of_model)
    spec = filled_specification(ctranslate2, cast(ModelSource, source))
    names = [str(index) for index in range(model.spec.vocabulary_size)]
    spec.register_source_vocabulary([*names])
    spec.register_target_vocabulary([*names])
    spec.config.eos_token = spec.config.decoder_start_token = str(EOS_ID)
    spec.config.bos_token = spec.config.unk_token = names[-1]
    spec.validate()
    spec.optimize()
    directory.mkdir()
    spec.save(str(directory))


def ctranslate2_search(
    directory: Path,
    examples: list[Example],
    *,
    compute_type: str,
    threads: int,
    beams: int,
    new_tokens: int,
    at_once: int,
    device: str = "cpu",
) -> Callable[[], Sequences]:
    """A search that returns the tokens after the prompt, ``at_once`` sentences at a time."""
    settings: dict[str, str | int] = {"device": device, "compute_type": compute_type}
    settings |= {"inter_threads": 1, "intra_threads": threads}
    sources = [[*map(str, (*one.source_prefix, *one.source, EOS_ID))] for one in examples]
    prefixes = [[*map(str, one.decoder_prompt[1:])] for one in examples]
    length = new_tokens + len(prefixes[0])
    limits = {"beam_size": beams, "min_decoding_length": length, "max_decoding_length": length}
    batches = [slice(start, start + at_once) for start in range(0, len(sources), at_once)]
    given = [(sources[one], prefixes[one]) for one in batches]
    work = partial(_search, str(directory), settings, given, limits)
    return lambda: _process().submit(work).result()


@cache
def _process() -> ProcessPoolExecutor:
    """Return the peer's process, which ends with this one."""
    pool = ProcessPoolExecutor(1, get_context("spawn"))
    # Before multiprocessing closes the pool's queues and waits for its process. The pool's own exit
    # handler is one of threads, which a process does not call that ``leave`` or a fork ends.
    Finalize(None, pool.shutdown, exitpriority=100)
    with mock.patch.dict(sys.modules, {"__main__": ModuleType("__main__")}):
        pool.submit(abs, 0).result()  # else the process would load the whole benchmark, too
    return pool


@lru_cache(maxsize=1)
def _translator(directory: str, **settings: Any) -> Any:
    return ctranslate2.Translator(directory, **settings)


def _search(
    directory: str,
    settings: dict[str, Any],
    batches: list[tuple[list[list[str]], list[list[str]]]],
    limits: dict[str, int],
) -> Sequences:
    translator, found = _translator(directory, **settings), Sequences()
    for sources, prefixes in batches:
        results = translator.translate_batch(sources, target_prefix=prefixes, **limits)
        skipped = len(prefixes[0])
        found += [tuple(map(int, one.hypotheses[0][skipped:])) for one in results]
    return found
