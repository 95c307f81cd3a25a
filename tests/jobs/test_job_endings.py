"""Tests of pipeline/jobs/job_endings.py: what follows from how the ranks of a job ended."""

import json
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pipeline.jobs.job_endings import (
    LONGEST_CAUSE,
    MAX_FRUITLESS,
    TOLD_TO_END,
    Asked,
    End,
    RankEnd,
    Start,
    Verdict,
    causes_to_print,
    described_ranks,
    ended_starts,
    judge,
    one_line,
    read_ends,
    recorded_starts,
    start_dir,
    verdicts,
    write_end,
    write_start,
    write_verdict,
)

NODES = ("node1", "node1", "node2", "node2")
START = Start("7.0", "2026-01-01T00:00:00+00:00", NODES, saved=("states/update-2",))
ENDED = "2026-01-01T01:00:00+00:00"
PREEMPTED, UNSAVED = "preempted or requeued", "ended before all ranks had saved"
NO_ARTIFACT = "ended without an error but left no finished artifact"
SILENT = "no rank on node1, node2 reported how it ended"
KILLED = "ended without a word: killed, out of memory, or its node crashed"


def end(rank: int, kind: End, cause: str = "", update: int | None = None) -> RankEnd:
    return RankEnd(rank, len(NODES), NODES[rank], kind, cause, update, "pretrain")


def judged(*ends: RankEnd, **facts: Any) -> Verdict:
    given: dict[str, Any] = {"start": START, "code": 1, "asked": None, "saved": START.saved}
    given |= {"history": (), "is_finished": False, "ended": ENDED} | facts
    return judge(ends, **given)


def everyone(kind: End, cause: str = "", update: int | None = None) -> list[RankEnd]:
    return [end(rank, kind, cause, update) for rank in range(len(NODES))]


def lost(rank: int, cause: str = "gloo") -> RankEnd:
    return end(rank, "lost", cause)


def case(
    verdict: str, cause: str, *ends: RankEnd, **facts: Any
) -> tuple[str, str, tuple[RankEnd, ...], dict[str, Any]]:
    return verdict, cause, ends, facts


@pytest.mark.parametrize(
    ("verdict", "cause", "ends", "facts"),
    [
        case("done", "", *everyone("done"), is_finished=True, code=0),
        case("failed", NO_ARTIFACT, *everyone("done"), code=0),
        # A rank that is late to leave is killed after all have met: nothing changes.
        case("done", "", end(0, "done"), is_finished=True, code=143),
        case("again", "saved", end(0, "again", "saved"), code=143),
        case("again", "saved", *everyone("again", "saved")[:3], lost(3, "SIGTERM"), code=143),
        # The cause counts, and not what the other ranks saw of it.
        case("failed", "rank 2 on node2: no", lost(0), lost(1), end(2, "failed", "no"), code=75),
        case("failed", "ranks 2-3 on node2: no", end(0, "again"), *everyone("failed", "no")[2:]),
        case("failed", "no recipe", *everyone("failed", "no recipe")),
        case("again", "rank 3 on node2: No", lost(0), end(3, "crashed", "No"), lost(1)),
        case("again", f"rank 2 on node2: {KILLED}", lost(0), lost(1), lost(3, "SIG"), code=137),
        case(
            *("again", f"rank 1 on node1: {KILLED}"),
            *(lost(0, TOLD_TO_END), lost(2), lost(3, TOLD_TO_END)),
            code=137,
        ),
        case(
            *("again", "ranks 2-3 on node2: gloo"),
            *(lost(0, TOLD_TO_END), lost(1, TOLD_TO_END), lost(2), lost(3)),
            code=143,
        ),
        case("again", "Rank 2 is silent", *everyone("lost", "Rank 2 is silent")),
        case("again", f"{SILENT} (srun: exit code 127)", code=127),
        case("again", f"{SILENT} (the job's first node was lost, or could not write)", code=None),
        case("again", f"{PREEMPTED}: {UNSAVED}", asked=PREEMPTED),
        # SLURM gave up node2 and requeued the job; the ranks there may run on.
        case(
            *("again", f"{PREEMPTED}: {UNSAVED}; ranks 2-3 on node2 reported nothing"),
            *(lost(0), lost(1, TOLD_TO_END)),
            asked=PREEMPTED,
        ),
        case("again", "time limit: saved", *everyone("again", "saved"), asked="time limit"),
        # The folder of reports was unreadable on every node, and the artifact is there.
        case("done", "", code=0, is_finished=True),
    ],
)
def test_a_verdict_names_the_cause_with_its_ranks_and_nodes(
    verdict: str, cause: str, ends: tuple[RankEnd, ...], facts: dict[str, Any]
) -> None:
    found = judged(*ends, **facts)
    assert (found.verdict, found.cause) == (verdict, cause)


@pytest.mark.parametrize(
    ("asked", "saved", "before", "fruitless", "verdict"),
    [
        (None, ["states/update-4"], MAX_FRUITLESS, 0, "again"),
        (None, START.saved, 0, 1, "again"),
        (None, START.saved, MAX_FRUITLESS - 1, MAX_FRUITLESS, "again"),
        (None, START.saved, MAX_FRUITLESS, MAX_FRUITLESS + 1, "failed"),
        (None, [], MAX_FRUITLESS, MAX_FRUITLESS + 1, "failed"),  # an older state was removed
        ("preempted or requeued", START.saved, MAX_FRUITLESS, MAX_FRUITLESS, "again"),
        ("canceled", START.saved, MAX_FRUITLESS, MAX_FRUITLESS, "again"),
        ("time limit", START.saved, MAX_FRUITLESS, MAX_FRUITLESS + 1, "failed"),
        ("time limit", ["states/update-4"], MAX_FRUITLESS, 0, "again"),
    ],
)
@pytest.mark.parametrize("kind", ["again", "crashed"])
def test_starts_that_save_nothing_new_are_bounded_and_preemptions_do_not_count(
    kind: End, asked: Asked | None, saved: list[str], before: int, fruitless: int, verdict: str
) -> None:
    history = [replace(judged(*everyone("crashed", "x")), fruitless=before)] if before else []
    found = judged(*everyone(kind, "x"), asked=asked, saved=saved, history=history)
    assert (found.verdict, found.fruitless) == (verdict, fruitless)
    assert found.progress == (fruitless == 0)
    failed = replace(judged(*everyone("crashed", "x")), verdict="failed", fruitless=4)
    assert judged(*everyone("crashed", "x"), history=[failed]).fruitless == 1, "a new run"
    if verdict == "failed":
        assert "4 starts in a row saved nothing new" in found.cause


def test_equal_errors_are_merged_and_consequences_left_out() -> None:
    ends = [
        end(0, "lost", "gloo", 11),
        end(1, "failed", "no recipe", 12),
        end(2, "crashed", "MemoryError"),
        end(3, "failed", "no recipe"),
    ]
    assert judged(*ends).update == 12, "the last update of any rank"
    lines = [cause.line(size=len(NODES)) for cause in causes_to_print(ends)]
    assert lines == ["ranks 1, 3 on node1, node2: no recipe", "rank 2 on node2: MemoryError"]
    assert [cause.text for cause in causes_to_print(ends[:1])] == ["gloo"]


def test_ranks_are_described_by_their_runs() -> None:
    assert described_ranks([3]) == "rank 3"
    assert described_ranks([9, 8, 10, 2]) == "ranks 2, 8-10"


def test_a_cause_is_one_line_of_bounded_length() -> None:
    assert one_line("a\n  b\tc") == "a b c"
    assert len(one_line("x" * 10_000)) == LONGEST_CAUSE


def test_damaged_and_unfinished_records_are_left_out(tmp_path: Path) -> None:
    out_dir = tmp_path / "model"
    folder = write_start(out_dir, START)
    for report in (end(2, "crashed", "a\u2028b"), end(0, "lost", "gloo", 5)):
        write_end(folder, report)
    (folder / "rank-1.json").write_text('{"rank": 1, "si')
    (folder / ".rank-3.json.unfinished").write_text(json.dumps({"rank": 3}))
    assert read_ends(folder) == [end(0, "lost", "gloo", 5), end(2, "crashed", "a\u2028b")]
    verdict = judged(*read_ends(folder))
    write_verdict(out_dir, verdict)
    assert verdicts(out_dir) == [verdict]
    assert ended_starts(out_dir, most=5) == [verdict]
    assert ended_starts(tmp_path / "other", most=5) == []


@pytest.mark.parametrize(
    "starts",
    [
        [("99.0", 0), ("99.2", 2), ("99.10", 3), ("1.0", 4)],  # ids begin anew
        [("99.0", 5), ("99.1", 3), ("99.2", 3), ("100.0", 4)],  # clocks of nodes differ
    ],
)
def test_starts_are_in_order_whatever_their_ids_and_the_clocks_of_their_nodes_say(
    tmp_path: Path, starts: list[tuple[str, int]]
) -> None:
    out_dir = tmp_path / "model"
    for attempt, hour in starts:
        start = replace(START, attempt=attempt, started=f"2026-01-01T0{hour}:00:00+00:00")
        write_start(out_dir, start)
    assert recorded_starts(out_dir) == [attempt for attempt, _ in starts]
    write_start(out_dir, replace(START, attempt="99.0", started="2026-01-01T06:00:00+00:00"))
    assert recorded_starts(out_dir)[-1] == "99.0", "the id is used again"


def test_the_newest_starts_are_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pipeline.jobs.job_endings.KEPT_STARTS", 3)
    out_dir = tmp_path / "model"
    for restart in range(9):
        folder = write_start(out_dir, replace(START, attempt=f"7.{restart}"))
        write_end(folder, end(0, "lost", "gloo"))
        write_verdict(out_dir, judged(start=replace(START, attempt=f"7.{restart}")))
        (folder / "notes").touch() if restart == 1 else None
    assert recorded_starts(out_dir) == ["7.1", "7.6", "7.7", "7.8"], "a file of the user's stays"
    assert [path.name for path in start_dir(out_dir, "7.1").iterdir()] == ["notes"]
    assert len(verdicts(out_dir)) == 3


def test_reports_written_at_once_do_not_damage_each_other(tmp_path: Path) -> None:
    reports = [end(0, "again", "x" * 500), end(0, "lost", "y")]

    def write_many(report: RankEnd) -> None:
        for _ in range(100):
            write_end(tmp_path, report)

    with ThreadPoolExecutor() as pool:
        writers = [pool.submit(write_many, report) for report in reports]
        while not all(writer.done() for writer in writers):
            assert read_ends(tmp_path) in ([], [reports[0]], [reports[1]])
    for writer in writers:
        writer.result()
    assert [path.name for path in tmp_path.iterdir()] == ["rank-0.json"]


RANK = """
import ctypes, os, signal, sys, time
from pathlib import Path
from pipeline.jobs.job_endings import EndReport, RankEnd

mutex, library = ctypes.create_string_buffer(64), ctypes.CDLL(None)
report = EndReport(Path(sys.argv[1]), describe=lambda *end: RankEnd(1, 2, "node2", *end))
with report.noting_sigterm():
"""
IN_NATIVE_CODE = "library.pthread_mutex_lock(mutex); library.pthread_mutex_lock(mutex)"


@pytest.mark.parametrize("wait", ["time.sleep(600)", IN_NATIVE_CODE], ids=["python", "native"])
@pytest.mark.parametrize("is_handled", [False, True])
def test_a_rank_told_to_end_says_so(tmp_path: Path, wait: str, is_handled: bool) -> None:
    handler = "signal.signal(signal.SIGTERM, lambda *_: None); " if is_handled else ""
    program = f"{RANK}    {handler}print(flush=True); {wait}"
    command = [sys.executable, "-c", program, str(tmp_path)]
    with subprocess.Popen(command, stdout=subprocess.PIPE) as rank:
        assert rank.stdout is not None
        rank.stdout.readline()
        rank.terminate()
        deadline = time.monotonic() + 60
        try:
            while not read_ends(tmp_path):
                assert time.monotonic() < deadline
            if not is_handled:
                assert rank.wait(timeout=60) == 128 + signal.SIGTERM
        finally:
            rank.kill()
    (found,) = read_ends(tmp_path)
    assert (found.end, found.cause) == ("lost", TOLD_TO_END)


@pytest.mark.parametrize("times", [1, 2])
def test_a_rank_that_has_taken_sigterm_ends_in_its_own_words(tmp_path: Path, times: int) -> None:
    """What cleans up behind the handler's block was killed there, most often under load."""
    program = f"""{RANK}
    from pipeline.distributed.process import interruptible
    from pipeline.errors import Interrupted
    for _ in range({times}):
        try:
            with interruptible():
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(60)
        except Interrupted:
            time.sleep(0.3)
    report.write("again", "in its own words")
"""
    subprocess.run([sys.executable, "-c", program, tmp_path], check=True, timeout=60)
    (found,) = read_ends(tmp_path)
    assert (found.end, found.cause) == ("again", "in its own words")


def test_a_report_stays_where_a_rank_is_told_to_end_after_it(tmp_path: Path) -> None:
    act = "report.write('failed', 'no recipe'); os.kill(os.getpid(), signal.SIGTERM)"
    subprocess.run([sys.executable, "-c", f"{RANK}    {act}", tmp_path], check=True, timeout=60)
    (found,) = read_ends(tmp_path)
    assert (found.end, found.cause) == ("failed", "no recipe")


def test_a_start_without_a_verdict_is_judged_by_its_ranks(tmp_path: Path) -> None:
    out_dir = tmp_path / "model"
    folder = write_start(out_dir, START)
    write_end(folder, end(3, "lost", "gloo", 8))
    assert ended_starts(out_dir, most=5, running="7.0") == []
    assert ended_starts(out_dir, most=5, may_run=True) == []
    (found,) = ended_starts(out_dir, most=5)
    assert (found.verdict, found.update) == ("again", 8)
    assert found.cause == f"ranks 0-2 on node1, node2: {KILLED}"
    assert not (start_dir(out_dir, "7.0") / "verdict.json").exists()


def test_a_node_that_failed_is_named_where_slurm_requeued_the_job_for_it() -> None:
    saved = everyone("again", "stopped after update 5", 5)
    found = judged(*saved, asked="preempted or requeued", code=0, failed_nodes=["node2"])
    assert (found.verdict, found.cause) == ("again", "node2 failed: stopped after update 5")
    assert found.asked == "preempted or requeued"


def test_a_verdict_before_the_end_gives_way_to_later_reports(tmp_path: Path) -> None:
    out_dir = tmp_path / "model"
    folder = write_start(out_dir, START)
    facts = {"asked": "preempted or requeued", "failed_nodes": ["node2"]}
    early = judged(**facts, code=None, is_final=False)
    assert early.cause == "node2 failed: ended before all ranks had saved"
    write_verdict(out_dir, early)
    for report in everyone("again", "stopped after update 5", 5):
        write_end(folder, report)
    (found,) = ended_starts(out_dir, most=5)
    assert (found.cause, found.update) == ("node2 failed: stopped after update 5", 5)
    assert (found.is_final, found.ended) == (True, early.ended)
    assert ended_starts(out_dir, most=5, may_run=True) == [early]
