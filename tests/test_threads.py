"""Work on several threads: every piece once, failures and modes of autograd carried over."""

from collections import Counter
from collections.abc import Iterator

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from pipeline.model import threads
from pipeline.model.threads import side_by_side


@pytest.fixture(autouse=True)
def three_threads(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(threads, "WORTH_OTHER_THREADS", 1)
    torch.set_num_threads(3)
    yield
    torch.set_num_threads(1)


@settings(deadline=None)
@given(st.lists(st.integers(0, 9), max_size=12))
def test_every_piece_with_a_cost_is_done_once(costs: list[int]) -> None:
    done: list[int] = []
    side_by_side(done.append, costs)
    assert Counter(done) == Counter(i for i, cost in enumerate(costs) if cost > 0)


def test_a_small_piece_has_one_thread_and_a_large_one_has_all() -> None:
    seen: dict[int, int] = {}
    side_by_side(lambda i: seen.update({i: torch.get_num_threads()}), [1, 1, 1, 1, 50])
    assert seen == {0: 1, 1: 1, 2: 1, 3: 1, 4: 3}
    assert torch.get_num_threads() == 3


def test_pieces_too_small_to_share_stay_on_the_callers_threads(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(threads, "WORTH_OTHER_THREADS", 100)
    seen: list[int] = []
    side_by_side(lambda _: seen.append(torch.get_num_threads()), [1, 1, 1])
    assert seen == [3, 3, 3]


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


@pytest.mark.parametrize("is_inference", [False, True])
def test_pieces_run_without_autograd_and_in_the_callers_mode(is_inference: bool) -> None:
    seen: list[tuple[bool, bool]] = []
    with torch.inference_mode(is_inference):
        side_by_side(
            lambda _: seen.append((torch.is_grad_enabled(), torch.is_inference_mode_enabled())),
            [1] * 6,
        )
    assert {mode for _, mode in seen} == {is_inference}
    assert not any(grad for grad, _ in seen)
