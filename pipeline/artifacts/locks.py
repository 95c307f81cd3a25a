"""Hold locks: directories with one holder at a time, on any file system.

The lock at ``PATH`` is a directory. Each file in it is called after a *generation* (``1``, ``2``
and so on) and names one process. The highest generation holds the lock and refreshes its file every
few seconds. Two operations decide, both atomic on local and on network file systems: ``mkdir``, and
creating the file of the next generation exclusively. ``flock`` is not used: Lustre has none by
default, other network file systems keep it per machine, and an orphan on a lost node never
releases it.

A process takes the lock over from a holder that

- ran on this machine and has ended: at once;
- is an earlier attempt of the same job (``MMNMT_ATTEMPT``): at once, since the scheduler starts an
  attempt only after it has given up the earlier attempt;
- runs elsewhere and has not refreshed its file for ``STALE_SECONDS`` of the claimer's own clock. No
  time of another machine is read, and time in which the claimer itself was stopped, or waited for
  the file system, does not count: the holder may have been held up as well.

Invariant: whoever finds a higher generation, or no file of its own, has lost the lock and publishes
nothing more (:meth:`Lock.refuse_if_lost`). The generation is thus the fencing token of a run.
"""

import contextlib
import errno
import itertools
import json
import os
import secrets
import socket
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path

from pipeline.distributed.process import Silence, deferred, held_back
from pipeline.errors import ArtifactError, unwritable

ATTEMPT_VARIABLE = "MMNMT_ATTEMPT"
"""Environment variable with the attempt of a job, ``JOB.RESTART``; not set outside of a job."""
BEAT_SECONDS = 10.0
"""Seconds between two refreshes of the holder's file."""
STALE_SECONDS = 60.0
"""Seconds without a refresh after which a holder on another machine counts as ended."""
UNSIGNED_SECONDS = 2.0
"""Seconds that a claimer has to sign the file it created; it takes microseconds."""
LATE_SECONDS = 10.0
"""Seconds in which a network file system shows a lock that another node made."""

_LONGEST_FILE = 4096
_PAUSE_SECONDS = 0.1
_LONGEST_LOOK_SECONDS = 1.0
"""Seconds that count at most between two looks at the holder's file."""
_VANISHED = (errno.ENOENT, errno.ESTALE)
_GONE = "its lock is gone"


@dataclass(frozen=True)
class Owner:
    """Process that made a generation of a lock."""

    process: int
    host: str
    since: str
    token: str
    """Random number that tells apart the runs of one process."""
    machine: str
    """Boot and process namespace: process ids are comparable only within them."""
    started: str
    """Start time of the process since boot, which tells reused process ids apart."""
    attempt: str
    """Attempt of the job, or empty."""

    def __str__(self) -> str:
        attempt = f", attempt {self.attempt}" if self.attempt else ""
        return (
            f"process {self.process} on {self.host} since {self.since} (run {self.token}{attempt})"
        )

    @staticmethod
    def new() -> "Owner":
        """Return an owner for this process, with a token of its own."""
        return Owner(
            process=os.getpid(),
            host=socket.gethostname(),
            since=datetime.now(UTC).isoformat(timespec="seconds"),
            token=secrets.token_hex(4),
            machine=_machine(),
            started=_state_and_start(os.getpid())[1],
            attempt=os.environ.get(ATTEMPT_VARIABLE, ""),
        )

    def is_running(self) -> bool | None:
        """Return whether the process runs, stopped or not; None if this one cannot find out.

        It can where both are on one machine and /proc shows the process.
        """
        if not self.machine or (self.host, self.machine) != (socket.gethostname(), _machine()):
            return None
        try:
            os.kill(self.process, 0)
        except (ProcessLookupError, OverflowError):
            return False
        except PermissionError:  # it runs for another user
            pass
        state, started = _state_and_start(self.process)
        if not started:  # hidden, as with the mount option hidepid, or just ended
            return None
        return state not in ("Z", "X") and started == self.started

    def is_superseded_by(self, other: "Owner") -> bool:
        """Return whether the other is a later attempt of the same job."""
        own, later = _job_and_restart(self.attempt), _job_and_restart(other.attempt)
        return own is not None and later is not None and own[0] == later[0] and own[1] < later[1]


def _machine() -> str:
    """Return what identifies the boot and the process namespace; empty where there is no /proc."""
    try:
        boot = Path("/proc/sys/kernel/random/boot_id").read_text(encoding="ascii").strip()
        return f"{boot} {Path('/proc/self/ns/pid').readlink()}"
    except OSError:
        return ""


def _state_and_start(process: int) -> tuple[str, str]:
    """Return state and start time of a process; empty where /proc does not show it."""
    try:
        status = Path(f"/proc/{process}/stat").read_bytes()
    except OSError:
        return "", ""
    fields = status.rpartition(b")")[2].split()  # the name before may contain anything
    return fields[0].decode(), fields[19].decode()


def _job_and_restart(attempt: str) -> tuple[str, int] | None:
    job, _, restart = attempt.rpartition(".")
    return (job, int(restart)) if job and restart.isdecimal() else None


# ---------------------------------------------------------------- holding


@dataclass(frozen=True)
class _Record:
    """File of the highest generation, as it was read."""

    generation: int
    text: bytes

    @property
    def owner(self) -> Owner | None:
        """Owner of the file; None while it is not signed."""
        try:
            return Owner(**json.loads(self.text.partition(b"\n")[0]))
        except (ValueError, TypeError):
            return None


class _ForeignError(Exception):
    """The directory holds files that no lock consists of."""


@contextmanager
def _opened(path: Path) -> Iterator[int]:
    """Open the directory itself: nothing is then created in a later directory of the same name."""
    descriptor = os.open(path, os.O_RDONLY | os.O_DIRECTORY | os.O_NOFOLLOW)
    try:
        yield descriptor
    finally:
        os.close(descriptor)


def _generations(folder: int) -> list[int]:
    """Return the generations in a lock's directory, in order."""
    # NFS keeps a file that was removed while it was open under such a name.
    names = [name for name in os.listdir(folder) if not name.startswith(".nfs")]
    if not all(name.isascii() and name.isdecimal() for name in names):
        raise _ForeignError
    return sorted(map(int, names))


def _read(folder: int, generation: int) -> _Record:
    descriptor = os.open(str(generation), os.O_RDONLY | os.O_NOFOLLOW, dir_fd=folder)
    try:
        return _Record(generation, os.read(descriptor, _LONGEST_FILE))
    finally:
        os.close(descriptor)


def _highest(folder: int) -> _Record | None:
    """Return the highest generation; None if there is none."""
    generations = _generations(folder)
    return _read(folder, generations[-1]) if generations else None


@dataclass(frozen=True)
class Lock:
    """Lock that a process holds. Its other ranks get a copy, to check that it still does."""

    path: Path
    generation: int
    owner: Owner
    what: str

    def refuse_if_lost(self) -> None:
        """Stop if the lock is gone or another process has taken it; the ArtifactError names it."""
        loss = self.loss()
        if loss is not None:
            other = "Wait for the other one, or stop it, then run again."
            raise ArtifactError(
                f"{self.what}: {loss}. This run stops, because two would damage each other's "
                f"files. {f'{self.path} was removed: run again.' if loss == _GONE else other}"
            )

    def loss(self) -> str | None:
        """Return how the lock was lost, to follow the name of what it protects; None if held.

        A lock that is missing is looked for again, since network file systems show it late.
        """
        give_up = time.monotonic() + LATE_SECONDS
        before: Owner | None = None
        while True:
            owner, problem = self._look()
            if owner == self.owner:
                return None
            # A claimer that finds out that it came too late withdraws at once.
            if (owner is not None and owner == before) or time.monotonic() >= give_up:
                return problem
            before = owner
            time.sleep(_PAUSE_SECONDS)

    def _look(self) -> tuple[Owner | None, str]:
        """Return the present owner, and the fault if that is not this process."""
        try:
            with _opened(self.path) as folder:
                holder = _highest(folder)
        except _ForeignError:
            holder = None
        except OSError as error:
            if error.errno not in _VANISHED:
                return None, f"its lock cannot be read ({error.strerror or error})"
            holder = None
        if holder is None:
            return None, _GONE
        return holder.owner, f"it is being written by {holder.owner or 'another process'}"

    def beat(self, number: int) -> None:
        """Refresh the file of this generation, if it is there."""
        descriptor = os.open(self.path / str(self.generation), os.O_RDWR | os.O_NOFOLLOW)
        try:
            record = _Record(self.generation, os.pread(descriptor, _LONGEST_FILE, 0))
            if record.owner == self.owner:
                os.pwrite(descriptor, b"beat %010d\n" % number, record.text.index(b"\n") + 1)
        finally:
            os.close(descriptor)  # on NFS this writes to the server

    def beat_until(self, ended: threading.Event) -> None:
        """Refresh the lock every few seconds, and say when it is lost."""
        said: str | None = None
        for number in itertools.count(1):
            if ended.wait(BEAT_SECONDS):
                return
            with contextlib.suppress(OSError):  # a full disk, say: the next one may succeed
                self.beat(number)
            loss = self.loss()
            if loss not in (None, said) and not ended.is_set():
                _say(f"{self.what}: {loss}. This run saves nothing without it.")
            said = loss

    def release(self) -> None:
        """Remove the lock if it is this process's. A forked child has its parent's, and does not.

        Only this process's file is removed, and a directory only when it is empty: a lock that
        another process takes meanwhile stays.
        """
        if os.getpid() != self.owner.process:
            return
        owner, _ = self._look()
        with contextlib.suppress(OSError):
            if owner == self.owner:
                (self.path / str(self.generation)).unlink()
            self.path.rmdir()


_HELD: dict[str, Lock] = {}
"""Absolute path → lock that this process holds."""


def _say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def held_lock(path: Path) -> Lock | None:
    """Return the lock that this process holds at a path, or None."""
    return _HELD.get(os.path.abspath(path))  # noqa: PTH100


def refuse_if_lost(path: Path) -> None:
    """Stop if this process held the lock at a path and lost it; where it held none, go on."""
    lock = held_lock(path)
    if lock is not None:
        lock.refuse_if_lost()


def is_abandoned(path: Path) -> bool:
    """Return whether a lock is certainly what a process of this machine left when it was killed."""
    try:
        with _opened(path) as folder:
            holder = _highest(folder)
    except (OSError, _ForeignError):
        return False
    return holder is None or (holder.owner is not None and holder.owner.is_running() is False)


@contextmanager
def exclusive(path: Path, *, what: str) -> Iterator[Lock]:
    """Hold the lock ``path`` of the folder ``what`` within the block.

    Missing parent folders are made, and removed again if the block leaves them empty: a refused
    command leaves nothing.

    Raises:
        ArtifactError: Another process holds the lock, or it cannot be made.
    """
    claim = _Claim(path, what=what)
    made = [folder for folder in path.parents if not os.path.lexists(folder)]
    try:
        try:
            lock = claim.wait()
        except OSError as error:
            raise unwritable(what, error, "choose another folder") from error
        ended = threading.Event()
        heartbeat = threading.Thread(
            target=lock.beat_until, args=(ended,), name=f"lock {path}", daemon=True
        )
        # A signal that the thread received would reach the main thread even where that blocks it.
        with held_back():
            heartbeat.start()
        key = os.path.abspath(path)  # noqa: PTH100
        _HELD[key] = lock
        try:
            yield lock
        finally:
            if os.getpid() == lock.owner.process:
                _HELD.pop(key, None)
                ended.set()
                heartbeat.join()
    finally:
        if claim.lock is not None:
            try:
                claim.lock.release()
            except BaseException:  # a signal that arrives here
                claim.lock.release()
                raise
        with contextlib.suppress(OSError):
            for folder in made:
                folder.rmdir()


def lock_path(out_dir: Path) -> Path:
    """Return the lock of an output."""
    return out_dir.parent / f".{out_dir.name}.lock"


def sole_writer(out_dir: Path) -> AbstractContextManager[Lock]:
    """Hold the lock of an output: no other process makes it meanwhile."""
    return exclusive(lock_path(out_dir), what=str(out_dir))


# ---------------------------------------------------------------- claiming


@dataclass
class _Claim:
    """Attempt of this process to get a lock."""

    path: Path
    what: str
    lock: Lock | None = None
    _owner: Owner = field(default_factory=Owner.new)
    _seen: _Record | None = None
    _silence: Silence = field(default_factory=lambda: Silence(longest_step=_LONGEST_LOOK_SECONDS))
    _has_beaten: bool = False
    _has_said: bool = False

    def wait(self) -> Lock:
        """Return the lock as soon as this process holds it; ArtifactError if another keeps it."""
        vanished = 0
        while True:
            try:
                with deferred():  # a file that is created is signed, and then ours to remove
                    self.lock = self._try()
                vanished = 0
            except _ForeignError:
                raise ArtifactError(
                    f"{self.path} should be the lock of {self.what}, but it is another file. Move "
                    "it away."
                ) from None
            except OSError as error:
                vanished += 1
                if error.errno not in _VANISHED or vanished * _PAUSE_SECONDS > LATE_SECONDS:
                    raise
            if self.lock is not None:
                return self.lock
            time.sleep(_PAUSE_SECONDS)

    def _try(self) -> Lock | None:
        """Return the lock if it is free or can be taken over; None to try again."""
        is_new = True
        try:
            self.path.mkdir(parents=True)  # another process may remove a parent that it had made
        except FileExistsError:
            is_new = False
            if self.path.is_symlink() or self.path.is_file():
                raise _ForeignError from None
        try:
            with _opened(self.path) as folder:
                holder = _highest(folder)
                reason = self._why_to_follow(holder) if holder else ""
                return None if reason is None else self._follow(folder, holder, reason)
        except BaseException:
            if is_new:
                with contextlib.suppress(OSError):  # another process uses it
                    self.path.rmdir()
            raise

    def _why_to_follow(self, holder: _Record) -> str | None:
        """Return why this process may take over, empty if nobody need know; None if it is early.

        Raises:
            ArtifactError: The holder is alive.
        """
        owner, silent_seconds = holder.owner, self._watch(holder)
        if owner is None:  # being signed, or never
            return "" if silent_seconds >= UNSIGNED_SECONDS else None
        if owner.is_superseded_by(self._owner):
            return "an earlier attempt of this job"
        is_running = owner.is_running()
        if is_running is False:
            return ""
        if is_running is None:
            if silent_seconds >= STALE_SECONDS:
                return f"which has shown no sign of life for {STALE_SECONDS:.0f} s"
            if not self._has_beaten:
                if not self._has_said:
                    _say(
                        f"{self.what} may be in use by {owner}, on another machine: waiting up to "
                        f"{STALE_SECONDS:.0f} s for a sign of life."
                    )
                self._has_said = True
                return None
        raise ArtifactError(
            f"{self.what} is being written by {owner}. Wait for it or stop it, then run again."
        )

    def _watch(self, holder: _Record) -> float:
        """Return for how long, on this machine's clock, the holder's file has been as it is."""
        before, self._seen = self._seen, holder
        if holder != before:
            self._has_beaten = before is not None and before.owner == holder.owner is not None
        return self._silence.since_change_of(holder)

    def _follow(self, folder: int, holder: _Record | None, reason: str) -> Lock | None:
        """Create the next generation; return the lock, or None if another process was faster."""
        generation = holder.generation + 1 if holder else 1
        flags = os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_NOFOLLOW
        try:
            descriptor = os.open(str(generation), flags, 0o644, dir_fd=folder)
        except FileExistsError:
            return None
        lock = Lock(self.path, generation, self._owner, self.what)
        try:
            text = json.dumps(asdict(self._owner)).encode() + b"\nbeat %010d\n" % 0
            try:
                if os.write(descriptor, text) < len(text):
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(self.path))
            finally:
                os.close(descriptor)
            if not self._is_first(folder, holder):
                _withdraw(folder, generation)
                return None
        except BaseException:
            _withdraw(folder, generation)
            raise
        with contextlib.suppress(OSError, _ForeignError):  # lower generations do no harm
            for lower in _generations(folder):
                if lower < generation:
                    _withdraw(folder, lower)
        if reason and holder:
            _say(f"{self.what}: taken over from {holder.owner}, {reason}.")
        return lock

    def _is_first(self, folder: int, holder: _Record | None) -> bool:
        """Return whether the new generation is the highest, and at the path.

        The one before must not have been signed meanwhile: its claimer may hold the lock then.

        Raises:
            OSError: It cannot be read, for example with too many open files.
        """
        with _opened(self.path) as there:
            highest = _highest(there)
        if highest is None or highest.owner != self._owner:
            return False
        if holder is None:
            return True
        try:
            return _read(folder, holder.generation).owner == holder.owner
        except FileNotFoundError:
            return True


def _withdraw(folder: int, generation: int) -> None:
    with contextlib.suppress(FileNotFoundError):
        os.unlink(str(generation), dir_fd=folder)
