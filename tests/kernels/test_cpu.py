"""The threads that a process takes on its CPU."""

import os
import signal
import sys
import time
from collections import Counter
from collections.abc import Callable, Iterator
from threading import Barrier, current_thread, main_thread

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from support.forked import started_code

from pipeline.kernels import cpu
from pipeline.kernels.cpu import side_by_side, threads_worth


@pytest.fixture
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(cpu, "WORTH_OTHER_THREADS", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


def on_every_thread(work: Callable[[], None]) -> Callable[[int], None]:
    """Pieces, three of them, that wait for each other: no thread can do two."""
    meeting = Barrier(3)

    def piece(_: int) -> None:
        meeting.wait(timeout=30)
        work()

    return piece


@pytest.mark.usefixtures("three_threads")
@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_every_piece_with_a_cost_is_done_once(costs: list[int]) -> None:
    done: list[int] = []
    side_by_side(done.append, costs)
    assert Counter(done) == Counter(i for i, cost in enumerate(costs) if cost > 0)


@pytest.mark.usefixtures("three_threads")
def test_small_pieces_are_spread_over_all_threads() -> None:
    seen: list[str] = []
    side_by_side(on_every_thread(lambda: seen.append(current_thread().name)), [1, 1, 1])
    assert len(seen) == 3
    assert Counter(seen)[main_thread().name] == 1


@pytest.mark.usefixtures("three_threads")
def test_a_small_piece_has_one_thread_and_a_large_one_has_all() -> None:
    seen: dict[int, int] = {}
    side_by_side(lambda i: seen.update({i: torch.get_num_threads()}), [1, 1, 1, 1, 50])
    assert seen == {0: 1, 1: 1, 2: 1, 3: 1, 4: 3}
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
def test_pieces_too_small_to_share_stay_on_the_callers_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(cpu, "WORTH_OTHER_THREADS", 100)
    seen: list[int] = []
    side_by_side(lambda _: seen.append(torch.get_num_threads()), [1, 1, 1])
    assert seen == [3, 3, 3]


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize(("cost", "threads"), [(99, 1), (100, 3)])
def test_work_below_the_least_cost_has_one_thread_until_it_ends(cost: int, threads: int) -> None:
    with pytest.raises(ValueError, match="work"), threads_worth(cost, least=100):
        assert torch.get_num_threads() == threads
        raise ValueError("work")
    assert torch.get_num_threads() == 3


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("failing", [[2], [0, 1, 2, 3]])
def test_what_a_piece_raises_is_raised_and_the_threads_are_as_before(failing: list[int]) -> None:
    def work(i: int) -> None:
        if i in failing:
            raise ValueError(f"piece {i}")

    with pytest.raises(ValueError, match="piece"):
        side_by_side(work, [1, 1, 1, 1])
    assert torch.get_num_threads() == 3
    done: list[int] = []
    side_by_side(done.append, [1, 1, 1, 1])
    assert len(done) == 4


@pytest.mark.usefixtures("three_threads")
def test_what_a_helper_raises_is_raised() -> None:
    def work() -> None:
        if current_thread() is not main_thread():
            raise ValueError("on a helper")

    with pytest.raises(ValueError, match="on a helper"):
        side_by_side(on_every_thread(work), [1, 1, 1])


@pytest.mark.usefixtures("three_threads")
def test_after_an_interruption_the_next_call_waits_for_its_own_pieces() -> None:
    def slow_on_helpers() -> None:
        if current_thread() is not main_thread():
            time.sleep(0.5)

    def interrupt(_number: int, _frame: object) -> None:
        raise KeyboardInterrupt

    before = signal.signal(signal.SIGALRM, interrupt)
    try:
        signal.setitimer(signal.ITIMER_REAL, 0.1)
        with pytest.raises(KeyboardInterrupt):
            side_by_side(on_every_thread(slow_on_helpers), [1, 1, 1])
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)
        signal.signal(signal.SIGALRM, before)
    done: list[None] = []

    def note() -> None:
        slow_on_helpers()
        done.append(None)

    side_by_side(on_every_thread(note), [1, 1, 1])
    assert len(done) == 3


@pytest.mark.usefixtures("three_threads")
@pytest.mark.parametrize("is_inference", [False, True])
def test_pieces_run_without_autograd_and_in_the_callers_mode(is_inference: bool) -> None:
    seen: list[tuple[bool, bool]] = []
    with torch.inference_mode(is_inference):
        side_by_side(
            on_every_thread(
                lambda: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled()))
            ),
            [1, 1, 1],
        )
    assert len(seen) == 3
    assert {mode for _, mode in seen} == {is_inference}
    assert not any(grad for grad, _ in seen)


MANY_SHAPES = """
import ctypes
import torch
from pipeline.kernels.products import linear
dtype = torch.bfloat16
weights = [torch.randn(shape, dtype=dtype) for shape in ((64, 64), (256, 64), (64, 256))]
with torch.no_grad():
    for rows in range(16, 616):
        for weight in weights:
            linear(torch.ones(rows, weight.shape[1], dtype=dtype), weight, None)
        if rows in (215, 615):
            ctypes.CDLL(None).malloc_trim(0)  # what is free counts for nobody
            pages = int(open("/proc/self/statm").read().split()[1])
            print(pages * 4096 // 2**20)
"""


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="reads /proc")
@pytest.mark.skipif(not torch.backends.mkldnn.is_available(), reason="a build without oneDNN")
def test_memory_does_not_grow_with_every_new_number_of_rows() -> None:
    """After 200 numbers of rows, 400 others take no more memory: few shapes are kept."""
    with started_code(MANY_SHAPES, [], environment=os.environ) as started:
        started.process.join(600)
        code, out, error = started.end()
    assert code == 0, error
    warm, end = map(int, out.split())
    assert end - warm < 10  # with PyTorch's 1,024 shapes it is 25
