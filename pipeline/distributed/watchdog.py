"""End an attempt that hangs, and say where.

A rank that waits on its device or in a collective handles no signal and raises no error, and one
that hangs in native code may still give signs of life. So a thread of every rank watches the
progress of all (``progress.advance``), of which :mod:`~pipeline.distributed.heartbeat` hears. When
no rank has advanced for ``Watch.silence_seconds``, the first that notices raises an alarm over the
store. Every rank that can answer writes the stacks of its threads beside the run and says where it
is. The rank that raised the alarm names those that are silent or elsewhere than the others, and
all end with ``EXIT_RUN_AGAIN``. If the store does not answer, each rank ends by itself and names
rank 0, which serves it.

A rank whose interpreter is stuck runs no thread. The timer of ``faulthandler``, which needs no
interpreter, prints its stacks and ends it after twice that time.
"""

import contextlib
import faulthandler
import os
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pipeline.distributed import progress
from pipeline.errors import EXIT_RUN_AGAIN

if TYPE_CHECKING:
    from torch.distributed import TCPStore

ALARM = "alarm"
"""Key: empty, then RAISED, then what was found."""
RAISED = "raised"

WAITS = "waits"
"""First word about a rank that others hold up."""

BEAT_SECONDS = 5.0
ANSWER_BEATS = 4
SHORTEST_ANSWER_SECONDS = 3.0
SHORT_WAIT_SECONDS = 0.05
MOST_NAMED = 3
_STANDARD_ERROR = 2
_OF_THREADS = ("threading", "concurrent.futures")

BEFORE_END: list[Callable[[str], bool]] = []
"""Called with the cause before a watchdog ends this process; return whether they recorded it."""


@dataclass(frozen=True)
class Watch:
    """How long all ranks may stand still, and where their stacks are written."""

    silence_seconds: float
    stacks_dir: Path

    @property
    def beat_seconds(self) -> float:
        """How often each rank looks."""
        return min(BEAT_SECONDS, self.silence_seconds / 10)

    @property
    def answer_seconds(self) -> float:
        """How long a rank may take to write its stacks, or to answer."""
        return max(ANSWER_BEATS * self.beat_seconds, SHORTEST_ANSWER_SECONDS)

    def arm(self) -> None:
        """Start the timer that ends this process unless this is called again before."""
        seconds = 2 * self.silence_seconds + 4 * self.answer_seconds
        faulthandler.dump_traceback_later(seconds, exit=True, file=_STANDARD_ERROR)

    @contextlib.contextmanager
    def armed(self) -> Iterator[None]:
        """Let the timer run within the block, also before the ranks have found each other."""
        self.arm()
        try:
            yield
        finally:
            faulthandler.cancel_dump_traceback_later()


@dataclass(frozen=True)
class Heard:
    """The last news of the others that a rank had from the store."""

    answers: int = 0
    """How often the store has answered."""
    advanced: bytes = b""
    """Changes whenever a rank advances."""
    alarm: bytes = b""
    """The value of ``ALARM``."""
    is_gone: bool = False
    """Whether rank 0 has ended, and the store with it."""


class Silence:
    """Adds up the time for which a value stays the same.

    Time in which this process itself was stopped (by a scheduler that suspends jobs) does not
    count: a step counts as ``longest_step`` seconds at most. The time-out of collectives and the
    timer of :class:`Watch` count it, so that a run survives a stop that is shorter than both.
    """

    def __init__(self, *, longest_step: float) -> None:
        self._longest_step = longest_step
        self._value: object = None
        self._seconds = 0.0
        self._clock = time.monotonic()

    def since_change_of(self, value: object) -> float:
        """Return the seconds since the value changed."""
        now = time.monotonic()
        step = min(now - self._clock, self._longest_step)
        self._clock = now
        self._seconds = self._seconds + step if value == self._value else 0.0
        self._value = value
        return self._seconds


class Watchdog:
    """Ends this process when no rank advances; one thread uses it."""

    def __init__(self, store: "TCPStore", watch: Watch, *, rank: int, size: int) -> None:
        self._store, self._watch = store, watch
        self._rank, self._size = rank, size
        self._silence, self._silence_of_store = (
            Silence(longest_step=2 * watch.beat_seconds) for _ in range(2)
        )

    def look(self, heard: Heard, *, server: str) -> None:
        """Notice whether anybody has advanced or raised an alarm.

        Args:
            heard: what the store told last.
            server: the name of the rank that serves the store.
        """
        self._watch.arm()
        silent_seconds = self._silence.since_change_of((heard.advanced, progress.count()))
        silent_store = self._silence_of_store.since_change_of(heard.answers)
        is_late = silent_seconds > self._watch.silence_seconds
        if heard.is_gone or silent_store > self._watch.answer_seconds:
            if is_late:
                self._dump()
                how = "has ended" if heard.is_gone else "does not answer"
                self._end(
                    f"{server} {how}, and this rank has waited for {silent_seconds:.0f} s. Look at "
                    "what its node says, and run the same command again."
                )
        elif heard.alarm or is_late:
            try:
                cause = self._answer(silent_seconds)
            except RuntimeError:  # rank 0 has ended, and the store with it
                self._end(f"The run hangs, and {server} has ended.")
            self._end(cause, is_printed=True)

    def _answer(self, silent_seconds: float) -> str:
        """Say where this rank is, write its stacks, and return what the alarm has found."""
        is_first = self._store.add("alarms", 1) == 1
        if is_first:
            self._store.set(ALARM, RAISED)
        self._store.set(f"where/{self._rank}", _whereabouts())
        self._dump()
        if is_first:
            cause = self._find(silent_seconds)
            self._store.set(ALARM, cause)
            _print(cause)
        else:
            cause = self._found()
        self._store.add("told", 1)
        if self._rank == 0:  # the store ends with this rank
            self._until(lambda: self._store.add("told", 0) >= self._size)
        return cause

    def _find(self, silent_seconds: float) -> str:
        """Wait for the answers of the ranks, and say which of them hold the others up."""
        places = [f"where/{rank}" for rank in range(self._size)]
        self._until(lambda: all(self._store.multi_get(places)))
        nodes = self._store.multi_get([f"node/{rank}" for rank in range(self._size)])
        answers = {
            named(rank, node): place.decode()
            for rank, (node, place) in enumerate(
                zip(nodes, self._store.multi_get(places), strict=True)
            )
        }
        return (
            f"No rank has advanced for {silent_seconds:.0f} s: {who_holds_up(answers)}. The stacks "
            f"of the ranks are in {self._watch.stacks_dir}. Run the same command again."
        )

    def _found(self) -> str:
        """Wait for what the rank that raised the alarm finds."""
        unknown = (b"", RAISED.encode())
        self._until(lambda: self._store.get(ALARM) not in unknown, times=3)
        cause = self._store.get(ALARM)
        return "The run hangs." if cause in unknown else cause.decode()

    def _until(self, is_so: Callable[[], bool], *, times: int = 1) -> None:
        """Wait until something is so, or until an answer is overdue so many times."""
        deadline = time.monotonic() + times * self._watch.answer_seconds
        while not is_so() and time.monotonic() < deadline:
            time.sleep(SHORT_WAIT_SECONDS)

    def _dump(self) -> None:
        """Write the stacks of all threads."""
        self._write(self._write_stacks)

    def _write(self, action: Callable[[], object]) -> None:
        """Write files; a file system that hangs does not hold this up."""
        writer = threading.Thread(target=action, name="last words", daemon=True)
        writer.start()
        writer.join(self._watch.answer_seconds)

    def _write_stacks(self) -> None:
        folder = self._watch.stacks_dir
        with contextlib.suppress(OSError):
            folder.mkdir(parents=True, exist_ok=True)
            with (folder / f"rank-{self._rank}.txt").open("w", encoding="utf-8") as stream:
                faulthandler.dump_traceback(stream)
            recorded = _flight_record()
            if recorded is not None:
                Path(f"{flight_prefix(folder)}{self._rank}").write_bytes(recorded)

    def _end(self, cause: str, *, is_printed: bool = False) -> NoReturn:
        """Record the cause, or print it where nobody records it, and end this process."""
        known = [is_printed]

        def tell() -> None:
            for record in BEFORE_END:
                with contextlib.suppress(Exception):
                    known.append(record(cause))

        self._write(tell)
        if not any(known):
            _print(cause)
        os._exit(EXIT_RUN_AGAIN)


def _print(cause: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(_STANDARD_ERROR, f"mmnmt: {cause}\n".encode())


def named(rank: int, node: bytes) -> str:
    """Return the name of a rank in messages: ``Rank 3 on node2``."""
    return f"Rank {rank} on {node.decode()}" if node else f"Rank {rank}"


def who_holds_up(answers: Mapping[str, str]) -> str:
    """Say which ranks hold up the others, from where each rank is, by name; empty: no answer.

    Ranks that wait for others are held up. If none or all of them do, those at the place where the
    fewest are differ from the others.
    """
    silent = [name for name, place in answers.items() if not place]
    working = [name for name, place in answers.items() if place and not place.startswith(WAITS)]
    if silent:
        return f"{_listed(silent)} {'does' if len(silent) == 1 else 'do'} not answer"
    places = Counter(answers[name] for name in working or answers)
    place, number = places.most_common()[-1]
    if number == len(answers):
        return f"all ranks: {place}"
    return f"{_listed([name for name in answers if answers[name] == place])}: {place}"


def _listed(names: Sequence[str]) -> str:
    more = f" and {len(names) - MOST_NAMED} more" if len(names) > MOST_NAMED else ""
    return ", ".join(names[:MOST_NAMED]) + more


def _whereabouts() -> str:
    """Say where the main thread is: the function it is in, or the collective it waits in."""
    frame: FrameType | None = sys._current_frames().get(threading.main_thread().ident or 0)
    if frame is None:
        return "has ended"
    if _module(frame) == "pipeline.distributed.heartbeat":
        return f"{WAITS} for the others"
    while frame.f_back is not None and _module(frame).startswith(_OF_THREADS):
        frame = frame.f_back  # the rank waits for a thread of its own: say what for
    entered = None
    while frame is not None and _module(frame).startswith("torch.distributed"):
        entered = frame.f_code.co_name if frame.f_code.co_name != "wrapper" else entered
        frame = frame.f_back
    if entered is not None:
        return f"{WAITS} in {entered}"
    assert frame is not None
    return f"in {frame.f_code.co_name} ({Path(frame.f_code.co_filename).name}:{frame.f_lineno})"


def _module(frame: FrameType) -> str:
    name: str = frame.f_globals.get("__name__") or ""
    return name


def flight_prefix(stacks_dir: Path) -> Path:
    """Return the beginning of the names of NCCL's flight records; the rank's number follows."""
    return stacks_dir / "nccl-rank-"


def _flight_record() -> bytes | None:
    """Return NCCL's flight record of this rank, as ``torchfrtrace`` reads it; None without NCCL.

    The function is the one that torch's tutorial on flight records names. Not yet run on a GPU.
    """
    import torch

    dump: Callable[[], bytes] | None = getattr(torch._C._distributed_c10d, "_dump_nccl_trace", None)
    return dump() if dump is not None and torch.cuda.is_initialized() else None
