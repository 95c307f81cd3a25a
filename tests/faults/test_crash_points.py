"""A plan that is ended at any call that changes its folder goes on to the same artifacts."""

import random
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

import pytest
from support.crash_points import Point, Sweep
from support.short_plan import STAGES

pytestmark = [pytest.mark.slow, pytest.mark.timeout(0)]

SAMPLE = 150
"""Points that run unless every case is asked for."""
RANKS = [Point("tuned", None, rank) for rank in (0, 1)]
BEGINNINGS = [
    *(Point(stage, None) for stage in STAGES),
    *(Point(stage, None, how="in place") for stage in ("clean", "assembled")),
    Point("dense", None, how="asked to stop"),
    *RANKS,
]


@pytest.fixture(scope="module")
def sweep(tmp_path_factory: pytest.TempPathFactory) -> Sweep:
    return Sweep(tmp_path_factory.mktemp("crash_points"))


@pytest.mark.parametrize("first", BEGINNINGS, ids=lambda p: f"{p.stage} {p.how} {p.rank}")
def test_a_stage_that_is_killed_at_any_call_goes_on_to_the_same_artifact_and_leaves_nothing(
    sweep: Sweep, first: Point, request: pytest.FixtureRequest
) -> None:
    numbers: Sequence[int] = range(sweep.undisturbed(first))
    assert len(numbers) > 20
    if not request.config.getoption("--every-case"):
        numbers = sorted(random.Random(str(first)).sample(numbers, SAMPLE // len(BEGINNINGS)))
    problems: list[str] = []
    ends = 0
    for number in numbers:
        is_ended, wrong = sweep.end_and_go_on(replace(first, number=number))
        ends, problems = ends + is_ended, problems + wrong
    assert not problems, "\n".join(problems)
    # What a thread writes is counted with the rest, so that the last calls may not be reached.
    assert ends >= 0.9 * len(numbers)


def test_what_differs_or_is_left_is_found(sweep: Sweep) -> None:
    """The comparison itself can fail."""
    point = Point("corpus", None)
    sweep.undisturbed(point)
    sweep.restore_before(Point("clean", None))
    assert sweep.wrong_after(point) == []
    out_dir: Path = sweep.out_dir
    (out_dir / ".corpus.lock").mkdir()
    assert "left {'.corpus.lock'}" in sweep.wrong_after(point)[0]
    (out_dir / ".corpus.lock").rmdir()
    text = next(path for path in (out_dir / "corpus").rglob("*") if path.suffix in (".de", ".txt"))
    text.write_text("another line\n")
    assert "differs" in sweep.wrong_after(point)[0]
