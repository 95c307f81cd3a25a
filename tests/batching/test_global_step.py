"""Which sentences each update sees: shares, epochs, directions, budgets and seeds."""

import math
import threading
from collections import Counter, defaultdict
from collections.abc import Generator, Iterator, Mapping
from dataclasses import replace
from itertools import islice, pairwise
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.artifacts.shards import Mixture, Phase
from pipeline.batching.global_step import (
    PHASE_WINDOWS,
    GlobalStep,
    MicroBatch,
    PairOffsets,
    Planner,
    cut,
    evaluation_batches,
    fill_up,
    read_ahead,
    shuffled,
)
from pipeline.batching.settings import BatchesConfig
from pipeline.errors import ConfigError
from pipeline.temperature_sampling import temperature_probabilities

SIZES = {"de-en": 700, "en-fr": 90, "el-en": 7}
Sentence = tuple[int, int, int]
"""Pair, direction and line."""


class PairLengths(NamedTuple):
    """Token counts of both sides of a pair."""

    first: npt.NDArray[np.int32]
    second: npt.NDArray[np.int32]


def offsets_of(lengths: Mapping[str, PairLengths]) -> dict[str, PairOffsets]:
    return {
        name: PairOffsets(*(np.concatenate([[0], np.cumsum(side)]) for side in sides))
        for name, sides in lengths.items()
    }


def pair_lengths(sizes: Mapping[str, int], *, longest: int = 30) -> dict[str, PairLengths]:
    generator = np.random.default_rng(3)
    return {
        name: PairLengths(
            generator.integers(1, longest, size, dtype=np.int32),
            generator.integers(1, longest, size, dtype=np.int32),
        )
        for name, size in sizes.items()
    }


def make_planner(
    sizes: Mapping[str, int] = SIZES,
    *,
    mixture: Mixture | None = None,
    sampling_temperature: float = 5.0,
    seed: int = 1,
    **settings: Any,
) -> Planner:
    config = BatchesConfig(**{"micro_batches": 4, "tokens": 150, "window_steps": 5} | settings)
    probabilities = temperature_probabilities(sizes, sampling_temperature=sampling_temperature)
    mixture = mixture or Mixture.constant(probabilities)
    return Planner(offsets_of(pair_lengths(sizes)), mixture, config, seed=seed)


def sentences(batches: list[MicroBatch]) -> list[Sentence]:
    return [
        (int(pair), int(reverse), int(line))
        for batch in batches
        for pair, reverse, line in zip(batch.pair_B, batch.reverse_B, batch.line_B, strict=True)
    ]


def as_plain(steps: Iterator[GlobalStep], count: int) -> list[object]:
    """Steps as values that can be compared."""
    return [
        ([sentences([batch]) for batch in step.micro_batches], step.num_labels, step.next_cursor)
        for step in islice(steps, count)
    ]


@pytest.mark.parametrize("sampling_temperature", [1.0, 2.0, 5.0, math.inf])
def test_every_pair_has_its_exact_share_after_every_window(sampling_temperature: float) -> None:
    planner = make_planner(sampling_temperature=sampling_temperature)
    shares = temperature_probabilities(SIZES, sampling_temperature=sampling_temperature)
    drawn: Counter[int] = Counter()
    for window in range(6):
        drawn.update(pair for pair, _, _ in sentences(planner.window(window)))
        total = (window + 1) * planner.window_sentences
        for index, name in enumerate(planner.names):
            assert abs(drawn[index] - total * shares[name]) < 1


def test_every_line_comes_once_per_epoch() -> None:
    planner = make_planner()
    seen: dict[int, Counter[int]] = defaultdict(Counter)
    for window in range(8):
        for pair, _, line in sentences(planner.window(window)):
            seen[pair][line] += 1
        for pair, counts in seen.items():
            size = SIZES[planner.names[pair]]
            epochs, rest = divmod(counts.total(), size)
            expected = Counter({epochs + 1: rest, epochs: size - rest})
            found = Counter(counts[line] for line in range(size))
            assert found == +expected
    assert seen[planner.names.index("el-en")].total() > 5 * SIZES["el-en"]


def test_a_window_does_not_depend_on_those_before_it() -> None:
    planner = make_planner()
    in_order = [sentences(planner.window(window)) for window in range(6)]
    for window in (5, 0, 3):
        assert sentences(make_planner().window(window)) == in_order[window]
    assert len({tuple(window) for window in in_order}) == 6


def test_a_line_alternates_its_direction_from_epoch_to_epoch() -> None:
    planner = make_planner()
    balance: dict[tuple[int, int], list[int]] = defaultdict(list)
    for window in range(30):
        for pair, reverse, line in sentences(planner.window(window)):
            balance[pair, line].append(1 if reverse else -1)
        assert all(abs(sum(directions)) <= 1 for directions in balance.values())
    alternating = balance[planner.names.index("de-en"), 0]
    assert len(alternating) > 1
    assert all(first == -second for first, second in pairwise(alternating))


@pytest.mark.parametrize("one_direction", [True, False])
def test_no_micro_batch_exceeds_the_budget_on_either_side(one_direction: bool) -> None:
    planner = make_planner(one_direction=one_direction)
    lengths = pair_lengths(SIZES)
    fullest = 0
    for batch in planner.window(0) + planner.window(1):
        sides: tuple[list[int], list[int]] = ([], [])
        for pair, reverse, line in sentences([batch]):
            both = lengths[planner.names[pair]]
            first, second = int(both.first[line]), int(both.second[line])
            sides[0].append(second if reverse else first)
            sides[1].append(first if reverse else second)
        for side in sides:
            padded = (max(side) + 2) * len(side)
            assert padded <= 150
            fullest = max(fullest, padded)
        assert batch.num_labels == sum(length + 1 for length in sides[1])
        assert batch.num_tokens == sum(length + 1 for side in sides for length in side)
    assert fullest > 140


@pytest.mark.parametrize("micro_batches", [1, 3, 8])
def test_the_micro_batches_of_a_window_fill_its_updates(micro_batches: int) -> None:
    planner = make_planner(micro_batches=micro_batches)
    for window in range(4):
        batches = planner.window(window)
        assert batches
        assert len(batches) % micro_batches == 0
        assert all(len(batch.line_B) for batch in batches)


def test_one_direction_keeps_a_micro_batch_to_it() -> None:
    def directions(batch: MicroBatch) -> int:
        return len({(pair, reverse) for pair, reverse, _ in sentences([batch])})

    kept = make_planner(one_direction=True).window(0)
    mixed = make_planner().window(0)
    assert {directions(batch) for batch in kept} == {1}
    assert max(directions(batch) for batch in mixed) > 1
    assert sorted(sentences(kept)) == sorted(sentences(mixed))


def test_the_same_seed_gives_the_same_plan_and_another_seed_another() -> None:
    planners = [make_planner({"de-en": 700}, seed=seed) for seed in (1, 1, 2)]
    first, again, other = (as_plain(planner.steps((0, 0)), 7) for planner in planners)
    assert first == again
    assert first != other
    lines, _, others = ({line for _, _, line in sentences(p.window(0))} for p in planners)
    assert len(lines - others) > len(lines) / 2


def test_the_order_in_which_pairs_are_given_does_not_matter() -> None:
    config = BatchesConfig(micro_batches=4, tokens=150, window_steps=5)
    lengths = pair_lengths(SIZES)
    shares = temperature_probabilities(SIZES, sampling_temperature=5)
    turned = {name: lengths[name] for name in reversed(lengths)}
    planners = [
        Planner(offsets_of(pairs), Mixture.constant(shares), config, seed=1)
        for pairs in (lengths, turned)
    ]
    assert planners[0].names == planners[1].names == ("de-en", "el-en", "en-fr")
    plans = [as_plain(planner.steps((0, 0)), 3) for planner in planners]
    assert plans[0] == plans[1]


def test_steps_hand_out_every_micro_batch_of_a_window_once() -> None:
    planner = make_planner()
    steps = list(islice(planner.steps((0, 0)), len(planner.window(0)) // 4))
    assert steps[-1].next_cursor == (1, 0)
    handed_out = [batch for step in steps for batch in step.micro_batches]
    assert sentences(handed_out) == sentences(planner.window(0))
    assert [len(step.micro_batches) for step in steps] == [4] * len(steps)


def step_of(sizes: list[int]) -> GlobalStep:
    """An update of micro-batches with so many tokens."""
    none = np.zeros(0, dtype=np.int64)
    return GlobalStep(
        tuple(MicroBatch(none, none, none, num_labels=0, num_tokens=size) for size in sizes), (0, 1)
    )


@settings(deadline=None)
@given(st.data(), st.integers(1, 8))
def test_ranks_take_every_micro_batch_once_and_similar_ones_in_the_same_turn(
    data: st.DataObject, ranks: int
) -> None:
    sizes = data.draw(st.lists(st.integers(0, 99), min_size=ranks, max_size=6 * ranks))
    turns = step_of(sizes).turns(ranks)
    assert [len(turn) for turn in turns] == [ranks] * math.ceil(len(sizes) / ranks)
    taken = [[index for index in turn if index is not None] for turn in turns]
    assert sorted(index for turn in taken for index in turn) == list(range(len(sizes)))
    for turn, following in pairwise(taken):
        assert len(turn) == ranks, "only the last turn leaves a rank without"
        assert min(sizes[index] for index in turn) >= max(sizes[index] for index in following)


def test_the_stand_in_of_a_rank_without_a_micro_batch_is_one_sentence_that_counts_nothing() -> None:
    step = next(make_planner().steps((0, 0)))
    sizes = [batch.num_tokens for batch in step.micro_batches]
    smallest = sizes.index(min(sizes))
    found = step.stand_in()
    assert len(found.line_B) == 1
    assert sentences([found])[0] in sentences([step.micro_batches[smallest]])
    assert (found.num_labels, found.num_tokens) == (0, 0)
    other = step.stand_in(without={smallest})
    assert sentences([other])[0] not in sentences([step.micro_batches[smallest]])


def test_ranks_get_nearly_the_same_number_of_tokens() -> None:
    sizes = np.random.default_rng(1).integers(500, 1000, 32).tolist()
    for ranks in (2, 4, 8):
        turns = step_of(sizes).turns(ranks)
        dealt = [[0 if index is None else sizes[index] for index in turn] for turn in turns]
        totals = np.array(dealt).sum(0)
        as_they_come = np.array(sizes).reshape(-1, ranks).sum(0)
        assert np.ptp(totals) < np.ptp(as_they_come) / 2
        assert totals.max() < 1.05 * totals.mean()


def test_tags_that_are_labels_are_counted_and_move_no_sentence() -> None:
    plain, tagged = (
        next(make_planner(tag_is_label=is_label).steps((0, 0))) for is_label in (False, True)
    )
    number = len(sentences([*plain.micro_batches]))
    assert sentences([*tagged.micro_batches]) == sentences([*plain.micro_batches])
    assert tagged.num_labels == plain.num_labels + number


@settings(deadline=None)
@given(st.integers(1, 2000), st.integers(0, 2**62))
def test_shuffled_is_a_permutation(size: int, key: int) -> None:
    found = shuffled(np.arange(size), size=size, key=key)
    assert sorted(found.tolist()) == list(range(size))


@settings(deadline=None)
@given(st.integers(1, 300), st.integers(0, 2**62), st.data())
def test_a_position_of_a_shuffle_does_not_depend_on_the_others_asked_for(
    size: int, key: int, data: st.DataObject
) -> None:
    positions = np.array(data.draw(st.lists(st.integers(0, size - 1), max_size=20)), dtype=np.int64)
    whole = shuffled(np.arange(size), size=size, key=key)
    assert shuffled(positions, size=size, key=key).tolist() == whole[positions].tolist()


@st.composite
def sorted_lengths(draw: st.DrawFn) -> tuple[list[int], list[int], list[int]]:
    count = draw(st.integers(1, 25))
    numbers = st.lists(st.integers(1, 9), min_size=count, max_size=count)
    return draw(numbers), draw(numbers), draw(numbers)


@settings(deadline=None)
@given(sorted_lengths(), st.integers(11, 50))
def test_cuts_are_made_only_where_the_next_sentence_does_not_fit(
    lengths: tuple[list[int], list[int], list[int]], budget: int
) -> None:
    source, target = (np.array(values) for values in lengths[:2])
    direction = np.array(lengths[2]) // 4
    bounds = [0, *cut(source, target, direction, budget=budget), len(source)]

    def fits(start: int, stop: int) -> bool:
        longest = max(source[start:stop].max(), target[start:stop].max()) + 2
        return bool(longest * (stop - start) <= budget) and len({*direction[start:stop]}) == 1

    for start, stop in pairwise(bounds):
        assert fits(start, stop)
        assert stop == len(source) or not fits(start, stop + 1)


@settings(deadline=None)
@given(st.lists(st.integers(1, 12), min_size=1, max_size=6), st.integers(1, 6))
def test_filling_up_halves_the_first_of_the_largest_parts(sizes: list[int], multiple: int) -> None:
    bounds = [0, *np.cumsum(sizes).tolist()]
    needed = -(-len(sizes) // multiple) * multiple
    if needed > sum(sizes):
        with pytest.raises(ConfigError, match=r"Raise batches\.window_steps"):
            fill_up(bounds, multiple=multiple)
        return
    while len(sizes) < needed:
        largest = sizes.index(max(sizes))
        half = sizes[largest] // 2
        sizes[largest : largest + 1] = [half, sizes[largest] - half]
    assert np.diff(fill_up(bounds, multiple=multiple)).tolist() == sizes
    assert min(sizes) >= 1


@settings(deadline=None)
@given(st.lists(st.tuples(st.integers(0, 9), st.integers(0, 9)), max_size=30))
def test_evaluation_reads_every_line_once_within_the_budget(
    lengths: list[tuple[int, int]],
) -> None:
    sides = np.array(lengths, dtype=np.int32).reshape(-1, 2).T
    batches = evaluation_batches(sides[0], sides[1], budget=30)
    assert sorted(line for batch in batches for line in batch.tolist()) == list(range(len(lengths)))
    for batch in batches:
        for side in (0, 1):
            assert len(batch) * (max(lengths[line][side] for line in batch) + 2) <= 30


@pytest.mark.parametrize(
    ("pairs", "reason"),
    [
        (["de-en", "el-en"], "no probability for en-fr"),
        ([*SIZES, "de-yi"], "no training lines of de-yi"),  # drawn too rarely
    ],
)
def test_a_mixture_of_other_pairs_is_refused(pairs: list[str], reason: str) -> None:
    mixture = Mixture.constant(dict.fromkeys(pairs, 1 / len(pairs)))
    with pytest.raises(ConfigError, match=rf"{reason}\. Run mix"):
        Planner(offsets_of(pair_lengths(SIZES)), mixture, BatchesConfig(), seed=1)


def test_a_sentence_beyond_the_budget_is_refused() -> None:
    longest = max(
        int(side.max()) for p in pair_lengths(SIZES).values() for side in (p.first, p.second)
    )
    make_planner(tokens=longest + 2)
    with pytest.raises(ConfigError, match=rf"{longest + 2} tokens .* batches\.tokens is"):
        make_planner(tokens=longest + 1)
    # A shorter sentence has at least one token.
    for tokens, advice in ((1, r"it\.$"), (2, r"it\.$"), (3, "it, or .* to 1 or less")):
        with pytest.raises(ConfigError, match=rf"batches\.tokens is {tokens}\. Raise {advice}"):
            make_planner(tokens=tokens)


def test_the_largest_micro_batch_is_told() -> None:
    planner = make_planner()
    expected = max(planner.window(1), key=lambda batch: batch.num_tokens)
    found = planner.largest((1, 0))
    assert found.num_tokens == expected.num_tokens
    np.testing.assert_array_equal(found.line_B, expected.line_B)


# Directions by their own sizes


WAYS = Mixture(
    (Phase(1, {"de-en": 0.5, "en-fr": 0.3, "el-en": 0.2}, {"de-en": 0.8, "el-en": 0.0}),)
)


@pytest.mark.parametrize("one_direction", [True, False])
def test_a_direction_has_its_exact_share_after_every_window(one_direction: bool) -> None:
    planner = make_planner(mixture=WAYS, one_direction=one_direction)
    de_en, el_en, en_fr = range(3)
    shares = {(de_en, 0): 0.4, (de_en, 1): 0.1, (el_en, 0): 0.0, (el_en, 1): 0.2}
    drawn: Counter[tuple[int, int]] = Counter()
    for window in range(8):
        drawn.update((pair, way) for pair, way, _ in sentences(planner.window(window)))
        total = (window + 1) * planner.window_sentences
        for way, share in shares.items():
            assert abs(drawn[way] - total * share) < 1
        assert abs(drawn[en_fr, 0] + drawn[en_fr, 1] - total * 0.3) < 1
    assert drawn[en_fr, 0] > 0 < drawn[en_fr, 1]


def test_a_direction_draws_every_line_once_per_epoch_whatever_the_other_one_draws() -> None:
    planner = make_planner(mixture=WAYS)
    drawn: dict[tuple[int, int], list[int]] = defaultdict(list)
    for window in range(40):
        for pair, way, line in sentences(planner.window(window)):
            drawn[pair, way].append(line)
    lengths = pair_lengths(SIZES)
    for (pair, _), lines in drawn.items():
        counts = np.bincount(lines, minlength=len(lengths[planner.names[pair]].first))
        if planner.names[pair] != "en-fr":
            assert counts.max() - counts.min() <= 1


# Phases


PHASES = Mixture(
    (
        Phase(1, {"de-en": 0.9, "en-fr": 0.1, "el-en": 0.0}),
        Phase(8, {"de-en": 0.2, "en-fr": 0.4, "el-en": 0.4}),
        Phase(9, {"de-en": 0.0, "en-fr": 1.0, "el-en": 0.0}, {"en-fr": 1.0}),
    )
)


def test_a_phase_begins_at_its_update_and_draws_its_pairs_alone() -> None:
    planner = make_planner(mixture=PHASES)
    drawn = [
        {planner.names[pair] for pair, _, _ in sentences(list(step.micro_batches))}
        for step in islice(planner.steps((0, 0)), 30)
    ]
    assert set().union(*drawn[:7]) == {"de-en", "en-fr"}
    assert drawn[7] == set(SIZES)
    assert set().union(*drawn[8:]) == {"en-fr"}


def test_every_update_of_every_phase_can_be_gone_on_from() -> None:
    planner = make_planner(mixture=PHASES)
    whole = as_plain(planner.steps((0, 0)), 20)
    cursors = [(0, 0), *(step.next_cursor for step in islice(planner.steps((0, 0)), 19))]
    for update in range(20):
        steps = make_planner(mixture=PHASES).steps(cursors[update], update=update)
        assert as_plain(steps, 20 - update) == whole[update:]


def test_a_mixture_that_does_not_change_is_one_phase_whatever_its_updates() -> None:
    """Until its second phase begins; and of a phase that never comes nothing is to be seen."""
    first, later = PHASES.phases[:2]
    alone = as_plain(make_planner(mixture=Mixture((first,))).steps((0, 0)), 12)
    both = Mixture((first, replace(later, from_update=99)))
    followed = as_plain(make_planner(mixture=both).steps((0, 0)), 12)
    assert alone == followed


@pytest.mark.parametrize("forward", [{}, {"de-en": 0.7, "en-fr": 0.2}])
@pytest.mark.parametrize("last", [3, 10, 38])
def test_phases_pass_over_no_line_of_an_epoch(last: int, forward: dict[str, float]) -> None:
    """A window is for more updates than wanted, for batches have padding; phases end amid one."""
    shares = {"de-en": 0.8, "en-fr": 0.2, "el-en": 0.0}
    phases = tuple(Phase(begin, shares, forward) for begin in (1, last + 1, last + 2, last + 9))
    planner = make_planner(mixture=Mixture(phases))
    drawn: dict[tuple[str, int | None], Counter[int]] = defaultdict(Counter)
    for step in planner.steps((0, 0)):
        for pair, way, line in sentences(list(step.micro_batches)):
            drawn[planner.names[pair], way if forward else None][line] += 1
        window, update = step.next_cursor[:2]
        if (window, update) == (3 * PHASE_WINDOWS + 20, 0):
            break
    assert len(drawn) == (4 if forward else 2)
    for (name, _), counts in drawn.items():
        each = [counts[line] for line in range(SIZES[name])]
        assert max(each) - min(each) <= 1 < max(each)


# ---------------------------------------------------------------- reading ahead


SECONDS = 20


@pytest.fixture(autouse=True)
def _no_thread_is_left() -> Iterator[None]:
    before = set(threading.enumerate())
    yield
    assert set(threading.enumerate()) <= before


def counted(taken: threading.Semaphore, *, until: int) -> Generator[int]:
    for number in range(until):
        taken.release()
        yield number


def test_items_come_in_order_up_to_the_last() -> None:
    for until in (0, 1, 2, 7):
        items = read_ahead(counted(threading.Semaphore(0), until=until), depth=3)
        assert list(items) == list(range(until))


def test_as_many_items_as_asked_for_are_taken_ahead_and_no_more() -> None:
    taken = threading.Semaphore(0)
    items = read_ahead(counted(taken, until=100), depth=2)
    assert next(items) == 0
    for _ in range(3):
        assert taken.acquire(timeout=SECONDS)
    items.close()
    assert not taken.acquire(blocking=False)


def test_what_goes_wrong_is_raised_where_the_item_is_asked_for() -> None:
    def failing() -> Generator[int]:
        yield 0
        yield 1
        raise ValueError("no third")

    items = read_ahead(failing(), depth=5)
    assert [next(items), next(items)] == [0, 1]
    with pytest.raises(ValueError, match="no third"):
        next(items)


def test_closing_ends_the_thread_and_closes_the_items() -> None:
    closed = threading.Event()

    def endless() -> Generator[int]:
        try:
            while True:
                yield 1
        finally:
            closed.set()

    items = read_ahead(endless(), depth=2)
    assert next(items) == 1
    items.close()
    assert closed.is_set()
