"""Progress of loops: a bar on a terminal, a line per interval in a log."""

import io

import pytest

from pipeline.distributed.process import Progress, progress_line, track


class _Clock:
    """Stands in for time.monotonic."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class _Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> _Clock:
    clock = _Clock()
    monkeypatch.setattr("time.monotonic", clock)
    return clock


def test_a_log_gets_one_line_per_interval_with_rate_and_time_left(clock: _Clock) -> None:
    stream = io.StringIO()
    with Progress("train", total=100, initial=10, interval_seconds=15, stream=stream) as bar:
        for _ in range(20):
            clock.now += 2
            bar.advance(note="loss 3.1")
    assert stream.getvalue().split("\n") == [
        "train: 18/100 (18 %), 0.5/s, 2:44 left, loss 3.1",
        "train: 26/100 (26 %), 0.5/s, 2:28 left, loss 3.1",
        "train: 30/100 (30 %), 0.5/s, 2:20 left, loss 3.1",
        "",
    ]


def test_a_loop_that_ends_within_the_first_interval_leaves_no_line(clock: _Clock) -> None:
    stream = io.StringIO()
    with Progress("short", total=3, stream=stream) as bar:
        clock.now += 14
        bar.advance(3)
    assert stream.getvalue() == ""


def test_a_rank_that_is_not_enabled_writes_nothing(clock: _Clock) -> None:
    for stream in (io.StringIO(), _Terminal()):
        with Progress("quiet", total=2, enabled=False, stream=stream) as bar:
            clock.now += 100
            bar.advance(2)
        assert stream.getvalue() == ""


def test_a_terminal_gets_a_bar_with_the_label_and_the_note() -> None:
    stream = _Terminal()
    with Progress("decode", total=4, initial=1, stream=stream) as bar:
        bar.advance(3, note="beam 5")
    assert "decode" in stream.getvalue()
    assert "4/4" in stream.getvalue()
    assert "beam 5" in stream.getvalue()


def test_track_yields_every_item_and_takes_its_total_from_the_length(
    clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    seen = []
    for item in track(["a", "b", "c", "d"], label="files"):
        seen.append(item)
        clock.now += 20
    assert seen == ["a", "b", "c", "d"]
    assert capsys.readouterr().err.startswith("files: 1/4 (25 %), 0.05/s, 1:00 left\n")


def test_track_of_an_iterator_shows_what_is_known_without_a_total(
    clock: _Clock, capsys: pytest.CaptureFixture[str]
) -> None:
    for _ in track(iter(range(1)), label="lines"):
        clock.now += 20
    assert capsys.readouterr().err == "lines: 1, 0.05/s\n"


def test_the_line_of_a_loop_that_has_not_moved_has_no_time_left() -> None:
    assert progress_line("x", done=0, total=0, rate=0.0) == "x: 0/0 (0 %), 0/s"
    assert progress_line("x", done=9, total=9, rate=1234.5) == "x: 9/9 (100 %), 1,234/s, 0:00 left"
    assert progress_line("x", done=9, total=None, rate=2e6) == "x: 9, 2,000,000/s"
