"""Wait for other ranks while they work; name the rank that is lost, and end a run that hangs.

A collective gives up after minutes, while a rank may rightly hash, read or copy for an hour before
the others can go on. Therefore ranks *meet* before they exchange anything outside the training
step: :meth:`Peers.meet` waits until all ranks are there, or until a rank has said that it ends.

A rank that hangs says nothing, and one that waits on its device or in a collective handles no
signal. So a thread of every rank watches the progress of all ranks (``process.advance``). If no
rank has advanced for ``Watch.silence_seconds``, the first rank that notices raises an alarm. Every
rank that can answer writes the stacks of its threads next to the run and says where it is. The rank
that raised the alarm names the ranks that are silent, or that are elsewhere than the others, and
all end with ``EXIT_RUN_AGAIN``. If rank 0, which serves the store, does not answer, each rank ends
by itself and names rank 0. A rank that has a stuck interpreter runs no thread: the timer of
``faulthandler`` prints its stacks and ends it after twice that time.

The ranks share a store of their own, apart from the process group. Another thread asks it, because
a store that is frozen or cut off blocks whoever asks without a bound.

Invariant: the work per second of rank 0, which serves the store, grows linearly with the number of
ranks. Each rank has one connection and asks one question per poll. A meeting leaves no key behind.
"""

import contextlib
import faulthandler
import os
import socket
import sys
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import TYPE_CHECKING, NoReturn

from pipeline.distributed import process
from pipeline.errors import EXIT_RUN_AGAIN, RankLost

if TYPE_CHECKING:
    from torch.distributed import TCPStore

MET, LOST, ADVANCED, ALARM = "met", "lost", "advanced", "alarm"
"""Keys: number of the last complete meeting; rank that ended early; count of advances; empty, then
``RAISED``, then the cause of the hang."""
RAISED = "raised"
WAITS = "waits"
"""First word about a rank that others hold up."""

CONNECT_SECONDS = 600.0
BEAT_SECONDS = 5.0
ANSWER_BEATS = 4
SHORTEST_ANSWER_SECONDS = 3.0
SHORT_WAIT_SECONDS = 0.05
SHORTEST_POLL_SECONDS = 0.0005
LONGEST_POLL_SECONDS = 0.1
MOST_POLLS_PER_SECOND = 2000.0
"""Questions per second with which the ranks of one meeting together load the store."""
JOIN_SECONDS = 10.0
"""Longest wait at the end, for the threads and on rank 0 for the other ranks: some may be gone."""
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
class News:
    """The last answer of the store."""

    answers: int = 0
    """How often the store has answered."""
    advanced: bytes = b""
    """Changes whenever a rank advances."""
    alarm: bytes = b""
    is_gone: bool = False
    """Whether rank 0 has ended, and the store with it."""


class Peers:
    """All ranks of a run, as a store on rank 0 shows them; with a ``watch``, a watchdog as well.

    Args:
        rank: Rank of this process.
        size: Number of ranks.
        address: Address of rank 0.
        port: Port of the store.
        server: The store, on rank 0; elsewhere, None.
        watch: When the run counts as hanging; None: never.
    """

    def __init__(
        self,
        *,
        rank: int,
        size: int,
        address: str,
        port: int,
        server: "TCPStore | None" = None,
        watch: Watch | None = None,
    ) -> None:
        self._rank, self._size = rank, size
        # A client locks itself, so all threads share it; rank 0 uses the server's own.
        self._store = server or _connect(address, port)
        self._store.set(f"node/{rank}", socket.gethostname())
        self._name_of_zero = _named(0, self._store.get("node/0"))
        self._beat_seconds = watch.beat_seconds if watch else BEAT_SECONDS
        self._longest_poll = max(LONGEST_POLL_SECONDS, size / MOST_POLLS_PER_SECOND)
        self._meetings = 0
        self._count = process.steps()
        self._news = News()
        self._ended = threading.Event()
        self._threads = [threading.Thread(target=self._ask, name="ask store", daemon=True)]
        if watch is not None:
            look = threading.Thread(target=self._look, args=(watch,), name="watchdog", daemon=True)
            self._threads.append(look)
        for thread in self._threads:
            thread.start()

    # ------------------------------------------------------------ meeting

    def meet(self) -> None:
        """Wait until every rank has called this as often as this rank.

        Raises:
            RankLost: A rank has ended.
        """
        self._meetings += 1
        try:
            self._meet(self._meetings)
        except RuntimeError as error:  # rank 0 has ended, and the store with it
            raise _lost(self._name_of_zero) from error

    def _meet(self, number: int) -> None:
        here = f"here/{number}"
        if self._store.add(here, 1) == self._size:
            self._store.set(MET, str(number))
            self._store.delete_key(here)
            return
        pause = SHORTEST_POLL_SECONDS
        while True:
            met, lost = self._store.multi_get([MET, LOST])
            if int(met) >= number:  # asked first: a rank may end as soon as all have met
                return
            if lost:
                raise _lost(lost.decode())
            time.sleep(pause)
            pause = min(2 * pause, self._longest_poll)

    def leave(self) -> None:
        """End after all ranks have met for the last time; rank 0, which has the store, is last."""
        if not self._stop():
            return
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            number = self._store.add("left", 1)
            deadline = time.monotonic() + JOIN_SECONDS
            while self._rank == 0 and number < self._size and time.monotonic() < deadline:
                time.sleep(SHORTEST_POLL_SECONDS)
                number = self._store.add("left", 0)

    def end(self) -> None:
        """End early, and tell the ranks that still wait for this one."""
        if not self._stop():
            return
        with contextlib.suppress(RuntimeError):  # rank 0 has ended, and the store with it
            # The rank that was lost first is the cause, and stays.
            name = _named(self._rank, socket.gethostname().encode())
            self._store.compare_set(LOST, "", name)

    def _stop(self) -> bool:
        """End the threads; return whether the store answers, or is known to be gone."""
        self._ended.set()
        for thread in self._threads:
            thread.join(JOIN_SECONDS)
        return not self._threads[0].is_alive()

    # ------------------------------------------------------------ watching

    def _ask(self) -> None:
        """Tell the store whether this rank advances, and note what it tells of the others."""
        while True:
            try:
                self._beat()
            except RuntimeError:  # rank 0 has ended, and the store with it
                self._news = replace(self._news, is_gone=True)
            if self._ended.wait(self._beat_seconds):
                return

    def _beat(self) -> None:
        if self._count != process.steps():
            self._count = process.steps()
            self._store.add(ADVANCED, 1)
        advanced, alarm = self._store.multi_get([ADVANCED, ALARM])
        self._news = News(self._news.answers + 1, advanced, alarm)

    def _look(self, watch: Watch) -> None:
        """End this process when no rank advances, or when another rank has raised the alarm."""
        ranks, store = (process.Silence(longest_step=2 * watch.beat_seconds) for _ in range(2))
        while True:
            watch.arm()
            news = self._news
            silent = ranks.since_change_of((news.advanced, process.steps()))
            silent_store = store.since_change_of(news.answers)
            is_late = silent > watch.silence_seconds
            if news.is_gone or silent_store > watch.answer_seconds:
                if is_late:
                    self._write(watch, lambda: self._write_stacks(watch))
                    how = "has ended" if news.is_gone else "does not answer"
                    self._end_process(
                        watch,
                        f"{self._name_of_zero} {how}, and this rank has waited for {silent:.0f} s. "
                        "Look at what its node says, and run the same command again.",
                    )
            elif news.alarm or is_late:
                try:
                    cause = self._answer(watch, silent)
                except RuntimeError:  # rank 0 has ended, and the store with it
                    cause = f"The run hangs, and {self._name_of_zero} has ended."
                    self._end_process(watch, cause)
                self._end_process(watch, cause, is_printed=True)
            if self._ended.wait(watch.beat_seconds):
                return

    def _answer(self, watch: Watch, silent_seconds: float) -> str:
        """Say where this rank is, write its stacks, and return the cause of the alarm."""
        is_first = self._store.add("alarms", 1) == 1
        if is_first:
            self._store.set(ALARM, RAISED)
        self._store.set(f"where/{self._rank}", _whereabouts())
        self._write(watch, lambda: self._write_stacks(watch))
        if is_first:
            cause = self._find_cause(watch, silent_seconds)
            self._store.set(ALARM, cause)
            _print(cause)
        else:
            unknown = (b"", RAISED.encode())
            until(lambda: self._store.get(ALARM) not in unknown, seconds=3 * watch.answer_seconds)
            alarm = self._store.get(ALARM)
            cause = "The run hangs." if alarm in unknown else alarm.decode()
        self._store.add("informed", 1)
        if self._rank == 0:  # the store ends with this rank
            until(
                lambda: self._store.add("informed", 0) >= self._size, seconds=watch.answer_seconds
            )
        return cause

    def _find_cause(self, watch: Watch, silent_seconds: float) -> str:
        """Wait for the answers of the ranks, and say which of them hold the others up."""
        keys = [f"where/{rank}" for rank in range(self._size)]
        until(lambda: all(self._store.multi_get(keys)), seconds=watch.answer_seconds)
        nodes = self._store.multi_get([f"node/{rank}" for rank in range(self._size)])
        places = zip(nodes, self._store.multi_get(keys), strict=True)
        answers = {_named(rank, node): place.decode() for rank, (node, place) in enumerate(places)}
        return (
            f"No rank has advanced for {silent_seconds:.0f} s: {who_holds_up(answers)}. The stacks "
            f"of the ranks are in {watch.stacks_dir}. Run the same command again."
        )

    def _write(self, watch: Watch, action: Callable[[], object]) -> None:
        """Write files; a file system that hangs does not hold this up."""
        writer = threading.Thread(target=action, name="last words", daemon=True)
        writer.start()
        writer.join(watch.answer_seconds)

    def _write_stacks(self, watch: Watch) -> None:
        with contextlib.suppress(OSError):
            watch.stacks_dir.mkdir(parents=True, exist_ok=True)
            path = watch.stacks_dir / f"rank-{self._rank}.txt"
            with path.open("w", encoding="utf-8") as stream:
                faulthandler.dump_traceback(stream)

    def _end_process(self, watch: Watch, cause: str, *, is_printed: bool = False) -> NoReturn:
        """Record the cause, or print it where nobody records it, and end this process."""
        known = [is_printed]

        def record_all() -> None:
            for record in BEFORE_END:
                with contextlib.suppress(Exception):
                    known.append(record(cause))

        self._write(watch, record_all)
        if not any(known):
            _print(cause)
        os._exit(EXIT_RUN_AGAIN)


def until(is_so: Callable[[], bool], *, seconds: float) -> bool:
    """Wait until something is so, at most for some seconds; return whether it is."""
    deadline = time.monotonic() + seconds
    while not (became_so := is_so()) and time.monotonic() < deadline:
        time.sleep(SHORT_WAIT_SECONDS)
    return became_so


def _print(cause: str) -> None:
    with contextlib.suppress(OSError):  # nobody reads it
        os.write(_STANDARD_ERROR, f"mmnmt: {cause}\n".encode())


def _lost(name: str) -> RankLost:
    """Return the error about a rank that ended."""
    return RankLost(
        f"{name} has ended while others wait for it. Look at what it says, and run the same "
        "command again."
    )


def _named(rank: int, node: bytes) -> str:
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
    if _module(frame) == __name__:
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


# ---------------------------------------------------------------- the store


def open_store(address: str, *, size: int) -> "TCPStore":
    """Open the store of ``size`` ranks, on rank 0; the others connect to its ``port``.

    Every key that is ever read exists from here on, since a client waits for one that does not.
    """
    from torch.distributed import TCPStore

    store = TCPStore(address, 0, is_master=True, wait_for_workers=False)
    rank_keys = [f"{kind}/{rank}" for kind in ("node", "where") for rank in range(size)]
    values = {MET: "0", LOST: "", ADVANCED: "0", ALARM: "", **dict.fromkeys(rank_keys, "")}
    values["node/0"] = socket.gethostname()  # others ask for it before rank 0 has joined
    for key, value in values.items():
        store.set(key, value)
    return store


def _connect(address: str, port: int) -> "TCPStore":
    from torch.distributed import TCPStore

    return TCPStore(address, port, is_master=False, timeout=timedelta(seconds=CONNECT_SECONDS))
