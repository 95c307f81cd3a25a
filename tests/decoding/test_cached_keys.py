"""Tests of pipeline/decoding/cached_keys.py."""

import gc
import weakref
from contextlib import nullcontext
from typing import Any

import pytest
import torch
from support.searched_models import Kind, model_of, rounded, translate
from support.tiny_models import EOS_ID, random_examples

from pipeline.batching.batch import Packing
from pipeline.decoding import cached_keys as module
from pipeline.decoding.beam_search import Search
from pipeline.decoding.cached_keys import CachedKeys, GridKeys, ListedKeys, cached_keys
from pipeline.decoding.hypotheses import Source
from pipeline.decoding.sampling import sample
from pipeline.decoding.settings import DecodingConfig
from pipeline.kernels.cpu import sparing_loops


@pytest.mark.parametrize(
    ("beams", "kind"), [(1, "dense"), (4, "dense"), (4, "moe-lgr"), (1, "moe-capacity")]
)
def test_a_search_by_operators_finds_what_one_by_compiled_loops_finds(
    beams: int, kind: Kind
) -> None:
    model = model_of(kind, seed=3)
    examples = random_examples(model.spec, sentences=9, seed=4, shortest=1, longest=20)
    by_lists = translate(model, examples, beam_size=beams, limit=40)
    with sparing_loops():
        by_grid = translate(model, examples, beam_size=beams, limit=40)
    assert max(len(found.tokens) for found in by_lists) > 16  # both have grown
    assert [found.tokens for found in by_grid] == [found.tokens for found in by_lists]
    assert [found.score for found in by_grid] == [rounded(found.score) for found in by_lists]


def test_samples_are_the_same_by_grid_and_lists() -> None:
    model = model_of("dense", seed=3)
    sources = [Source([5, 6, 7, EOS_ID], (2, 4), 0, 1), Source([8, EOS_ID], (2, 4), 1, 0)]
    config = DecodingConfig(search="sampling", n_best=3)
    by_lists = sample(model, sources, config, eos_id=EOS_ID)
    with sparing_loops():
        by_grid = sample(model, sources, config, eos_id=EOS_ID)
    assert [[one.tokens for one in of] for of in by_grid] == [
        [one.tokens for one in of] for of in by_lists
    ]


def test_states_that_loops_do_not_read_are_kept_in_a_grid() -> None:
    model = model_of("dense")
    layers = list(model.decoder_layers())
    packing = Packing.from_lengths([2, 1])
    tokens = model.tokens_of(packing, *torch.zeros(2, 2, dtype=torch.int64))
    states_ND = torch.zeros(3, model.spec.model.width)
    assert isinstance(cached_keys(layers, states_ND, packing, tokens), ListedKeys)
    with sparing_loops():
        assert isinstance(cached_keys(layers, states_ND, packing, tokens), GridKeys)
    model.double()
    assert isinstance(cached_keys(layers, states_ND.double(), packing, tokens), GridKeys)


@pytest.mark.parametrize("kind", [ListedKeys, GridKeys])
def test_the_memory_of_a_search_is_free_at_its_end(
    kind: type[ListedKeys] | type[GridKeys], monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be most of a GPU's, and garbage is collected after many searches only."""
    model, made = model_of("dense"), weakref.WeakSet[CachedKeys]()
    source = Source([5, 6, 7, EOS_ID], (2, 4), 0, 1)

    def noted(*given: Any) -> CachedKeys:
        keys = cached_keys(*given)
        made.add(keys)
        return keys

    monkeypatch.setattr(module, "cached_keys", noted)
    with nullcontext() if kind is ListedKeys else sparing_loops(), torch.inference_mode():
        gc.disable()
        try:
            search = Search(model, [source, source], DecodingConfig(), eos_id=EOS_ID)
            assert [type(keys) for keys in made] == [kind]
            search.run()
            del search
            assert not made
        finally:
            gc.enable()
