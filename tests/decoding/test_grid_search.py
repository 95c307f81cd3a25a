"""Tests of pipeline/decoding/grid_search.py, and of the search that it repeats."""

import random
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scripted_search import ScriptedModel, ScriptedStates, plain_search
from support.searched_models import Kind, model_of, rounded
from support.tiny_models import EOS_ID, PAD_ID, random_examples, source_of
from torch.utils._python_dispatch import TorchDispatchMode

from pipeline.decoding import beam_search
from pipeline.decoding import grid_search as on_grids
from pipeline.decoding.beam_search import beam_search_n_best
from pipeline.decoding.grid_search import MOST_GRIDS, Grids, GridSearch, suits_grids
from pipeline.decoding.hypotheses import Source, Translation
from pipeline.decoding.settings import DecodingConfig
from pipeline.errors import CheckpointError
from pipeline.kernels.cpu import sparing_loops
from pipeline.kernels.launching import HostWaits, recorded
from pipeline.model.transformer import Transformer


@torch.inference_mode()
def grid_search(
    model: Transformer,
    sources: Sequence[Source],
    config: DecodingConfig,
    *,
    grids: Grids | None = None,
) -> list[list[Translation]]:
    return GridSearch(model, sources, config, eos_id=EOS_ID, grids=grids or Grids()).run()


CASES = 25


def random_config(chosen: random.Random) -> DecodingConfig:
    beams = chosen.randint(1, 8)
    return DecodingConfig(
        beam_size=beams,
        n_best=chosen.randint(1, beams),
        stopping=chosen.choice(["fairseq", "huggingface"]),
        length_penalty=chosen.choice([0.0, 0.6, 1.0, 1.7, -0.5]),
        max_length_ratio=chosen.choice([0.0, 1.0, 2.5]),
        max_extra_length=chosen.choice([1, 3, 12, 40]),
    )


def random_sources(chosen: random.Random, *, vocabulary: int) -> list[Source]:
    prompt = (EOS_ID, 4)[: chosen.randint(1, 2)]
    lengths = [chosen.randint(1, 9) for _ in range(chosen.randint(1, 20))]
    return [
        Source([chosen.randrange(vocabulary) for _ in range(length)], prompt, 0, 1)
        for length in lengths
    ]


def scripted_model(chosen: random.Random, *, twins: bool = False) -> ScriptedModel:
    """Return random logits in which end-of-sentence is likely early, late or hardly ever."""
    vocabulary, hashes = chosen.choice([4, 6, 20, 90]), 997
    generator = torch.Generator().manual_seed(chosen.randrange(10**6))
    logits_HV = 3 * torch.randn(hashes, vocabulary, generator=generator)
    logits_HV[:, EOS_ID] += chosen.choice([-6.0, -1.0, 1.0, 3.0])
    if twins:  # tokens in pairs, from 4 on
        logits_HV[:, 5::2] = logits_HV[:, 4 : vocabulary - 1 : 2]
    return ScriptedModel(logits_HV, factor=0 if twins else 31)


@pytest.fixture
def scripted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(beam_search, "DecoderStates", ScriptedStates)


@pytest.mark.usefixtures("scripted")
@pytest.mark.parametrize(
    ("twins", "seed"),
    [*((False, seed) for seed in range(8)), *((True, seed) for seed in range(4))],
)
def test_random_searches_find_what_a_search_in_plain_python_finds(twins: bool, seed: int) -> None:
    """Of equally likely tokens either may be found; the scores are the same."""
    chosen = random.Random(seed)
    for _ in range(CASES):
        model, config = scripted_model(chosen, twins=twins), random_config(chosen)
        sources = random_sources(chosen, vocabulary=model.logits_HV.shape[1])
        expected = [plain_search(model, source, config) for source in sources]
        for found in (
            beam_search_n_best(model, sources, config, eos_id=EOS_ID),  # type: ignore[arg-type]
            grid_search(model, sources, config),  # type: ignore[arg-type]
        ):
            for of_source, other in zip(found, expected, strict=True):
                scores = [one.score for one in of_source]
                assert scores == pytest.approx([one.score for one in other], rel=1e-6, abs=1e-6)
                tokens = [one.tokens for one in of_source]
                assert len({*tokens}) == len(tokens)
                assert twins or tokens == [one.tokens for one in other]


@pytest.mark.parametrize("kind", ["dense", "moe-lgr"])
@pytest.mark.parametrize("stopping", ["fairseq", "huggingface"])
def test_a_model_translates_on_grids_as_by_lists(stopping: str, kind: Kind) -> None:
    model = model_of(kind)
    examples = random_examples(model.spec, sentences=21, seed=4, shortest=1, longest=20)
    config = DecodingConfig.model_validate({"beam_size": 3, "n_best": 2, "stopping": stopping})
    sources, grids = [source_of(one) for one in examples], Grids()
    expected = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    assert max(len(of[0].tokens) for of in expected) > 16  # the grids have grown
    for order in (sources, sources[::-1], sources[:3]):  # later ones on the grids of the first
        with sparing_loops():  # the loops keep entries in lists
            found = grid_search(model, order, config, grids=grids)
        by_source = zip(order, found, strict=True)
        for source, of_source in by_source:
            other = expected[sources.index(source)]
            assert [one.tokens for one in of_source] == [one.tokens for one in other]
            assert [one.score for one in of_source] == [rounded(one.score) for one in other]


def running_search(model: Transformer, *, sentences: int, limit: int) -> GridSearch:
    """A search in which no sentence ends before its limit, after its first steps."""
    examples = random_examples(model.spec, sentences=sentences, seed=4, shortest=5, longest=9)
    config = DecodingConfig(
        beam_size=3, max_length_ratio=0, max_extra_length=limit, stopping="huggingface"
    )
    sources = [source_of(one) for one in examples]
    search = GridSearch(model, sources, config, eos_id=PAD_ID, grids=Grids())
    search.step()
    return search


READS = ("_local_scalar_dense", "item", "is_nonzero", "nonzero", "masked_select", "equal")


class _Reads(TorchDispatchMode):
    """Collects operators that read a value on the host, or for which the host needs a shape."""

    def __init__(self) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self.found: list[str] = []

    def __torch_dispatch__(
        self, func: Any, types: Any, args: Sequence[Any] = (), kwargs: Any = None
    ) -> Any:
        name = func.overloadpacket.__name__
        indices = args[1] if name.startswith("index") and isinstance(args[1], list) else []
        if name in READS or any(
            index is not None and index.dtype == torch.bool for index in indices
        ):
            self.found.append(name)
        return func(*args, **(kwargs or {}))


@torch.inference_mode()
def test_a_step_on_a_grid_reads_no_value_and_leaves_every_tensor_in_its_place() -> None:
    model = model_of("dense")
    with sparing_loops():
        search = running_search(model, sentences=5, limit=40)
        grid = search.grid
        assert grid is not None
        assert grid.shape == (8, 16)
        tensors = [*grid.beams, *grid.states.tensors()]
        places = [(x.data_ptr(), x.shape, x.stride()) for x in tensors]
        with _Reads() as reads:
            grid.step()
        assert not reads.found
        now = [*grid.beams, *grid.states.tensors()]
        assert all(x is y for x, y in zip(now, tensors, strict=True))
        assert [(x.data_ptr(), x.shape, x.stride()) for x in now] == places
        grid.extend.reads = True  # as of a search that stays on the CPU
        with _Reads() as reads:
            grid.step()
        assert reads.found


@torch.inference_mode()
def test_sentences_move_to_a_smaller_grid_when_a_quarter_is_done() -> None:
    with sparing_loops():
        search = running_search(model_of("dense"), sentences=17, limit=40)
        assert search.grid is not None
        assert search.grid.sentences == 24
        search.drop({0})
        assert search.grid.sentences == 24  # a sentence of 17
        search.drop({1, 2, 3, 99})
        assert search.grid.sentences == 24  # 13 of 17 are left
        search.drop({4})
        assert search.grid.sentences == 16
        assert search.active == [*range(5, 17)]
        search.drop(range(17))
    assert search.active == []
    assert search.grid is None


@torch.inference_mode()
def test_what_is_dropped_changes_no_other_sentence() -> None:
    model = model_of("dense")
    with sparing_loops():
        whole = running_search(model, sentences=17, limit=30).run
        search = running_search(model, sentences=17, limit=30)
        search.step()
        search.drop(range(1, 17, 2))
        found: dict[int, list[Translation]] = {}
        while search.active:
            found |= search.step()
        expected = whole()
    assert [*found] == [*range(0, 17, 2)]
    for index, of_source in found.items():
        assert [one.tokens for one in of_source] == [one.tokens for one in expected[index]]


def test_a_search_uses_the_grids_of_an_earlier_one_and_few_are_kept() -> None:
    model, grids = model_of("dense"), Grids()
    made: list[set[int]] = []
    for _ in range(2):
        examples = random_examples(model.spec, sentences=9, seed=4, shortest=5, longest=9)
        config = DecodingConfig(beam_size=2, max_length_ratio=0, max_extra_length=30)
        with sparing_loops():
            grid_search(model, [source_of(one) for one in examples], config, grids=grids)
        made.append({id(grid) for grid in grids._free})
    assert made[0] == made[1]
    for _ in range(2 * MOST_GRIDS):
        grids.give(grids._free[0])
    assert len(grids._free) == MOST_GRIDS


@torch.inference_mode()
@pytest.mark.parametrize("dropped", [(), (1, 2)])
def test_a_model_whose_steps_wait_for_values_is_searched_without_grids(
    monkeypatch: pytest.MonkeyPatch, dropped: tuple[int, ...]
) -> None:
    model, grids, tries = model_of("moe-lgr"), Grids(), list[torch.device]()

    def refuse(_: Callable[[], None], device: torch.device) -> None:
        tries.append(device)
        raise HostWaits

    monkeypatch.setattr(on_grids, "recorded", refuse)
    examples = random_examples(model.spec, sentences=5, seed=4, shortest=5, longest=9)
    sources, config = [source_of(one) for one in examples], DecodingConfig(beam_size=3)
    expected = beam_search_n_best(model, sources, config, eos_id=EOS_ID)
    for _ in range(2):
        with sparing_loops():
            search = GridSearch(model, sources, config, eos_id=EOS_ID, grids=grids)
            found = search.step()
            search.drop(dropped)
            while search.active:
                found |= search.step()
        assert [*sorted(found)] == [index for index in range(5) if index not in dropped]
        for index, of_source in found.items():
            assert [one.tokens for one in of_source] == [one.tokens for one in expected[index]]
    assert len(tries) == 1


class _Cuda:
    """Stands for ``torch.cuda`` where steps make what a graph cannot repeat."""

    def __init__(self, error: str) -> None:
        self.error, self.modes, self.steps = error, ["default"], 0

    def step(self) -> None:
        self.steps += 1
        if self.modes[-1] == "error" and self.error:
            raise RuntimeError(self.error)

    def use(self, patch: pytest.MonkeyPatch) -> None:
        stream = SimpleNamespace(wait_stream=lambda _: None)
        graph = type("Graph", (), {"replay": self.step, "pool": lambda _: (0, 0)})
        for name, value in {
            "Stream": lambda _: stream,
            "current_stream": lambda _: stream,
            "stream": nullcontext,
            "CUDAGraph": graph,
            "graph": lambda *_, **__: nullcontext(),
            "set_sync_debug_mode": self.modes.append,
        }.items():
            patch.setattr(torch.cuda, name, value)


@pytest.mark.parametrize(
    ("error", "raised"),
    [
        ("", None),
        ("called a synchronizing CUDA operation", HostWaits),
        ("CUDA error: an illegal memory access was encountered", RuntimeError),
    ],
)
def test_a_step_is_recorded_unless_the_host_waits_in_it(
    monkeypatch: pytest.MonkeyPatch, error: str, raised: type[Exception] | None
) -> None:
    cuda = _Cuda(error)
    cuda.use(monkeypatch)
    if raised is None:
        repeat = recorded(cuda.step, torch.device("cuda"))
        assert cuda.steps == 3  # for libraries, for waits, for the graph
        repeat()
        assert cuda.steps == 4
    else:
        with pytest.raises(raised) as found:
            recorded(cuda.step, torch.device("cuda"))
        assert found.type is raised
    assert cuda.modes == ["default", "error", "default"]


def test_scores_that_are_no_numbers_are_refused_on_grids() -> None:
    model = model_of("dense")
    with torch.no_grad():
        next(iter(model.decoder_layers())).feed_forward_norm.weight.fill_(torch.inf)
    examples = random_examples(model.spec, sentences=3, seed=4)
    with sparing_loops(), pytest.raises(CheckpointError, match="scores are not numbers"):
        grid_search(model, [source_of(one) for one in examples], DecodingConfig())


def test_a_cpu_keeps_the_search_by_lists() -> None:
    (example,) = random_examples(model_of("dense").spec, sentences=1, seed=4)
    assert not suits_grids(model_of("dense"), [source_of(example)])
