"""Sees every call of Python code that changes something below a folder, before it does.

Libraries in C or Rust that write files themselves are not seen. The stages use none: SentencePiece
and safetensors hand their bytes to Python.
"""

import builtins
import io
import os
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

See = Callable[[str, str, Callable[[], object]], None]
"""Gets the name of a call, the path, and what does half of it, which is nothing but for writes."""

TAKING_ROOM = ("mkdir", "rename", "fsync", "write", "pwrite", "replace", "link", "sendfile")
"""Functions of ``os`` for which a full disk has no room; opening a new file is always seen."""
CHANGING = (*TAKING_ROOM, "unlink", "remove", "rmdir", "truncate", "ftruncate")
"""Functions of ``os`` that change the state of a file system."""
_NEW_NAME = {"rename": 1, "replace": 1, "link": 1}
"""Function → which of its arguments names the place that changes, if not the first."""


def nothing() -> None:
    """Half of a call that is done or not."""


class _File(io.FileIO):
    """A file whose writes are seen."""

    see: See

    def write(self, data: Any) -> int:
        given = memoryview(data).cast("B")
        self.see("write", str(self.name), lambda: io.FileIO.write(self, given[: len(given) // 2]))
        return super().write(data)

    def truncate(self, size: int | None = None, /) -> int:
        self.see("truncate", str(self.name), nothing)
        return super().truncate(size)


@contextmanager
def seeing(root: Path, see: See, *, calls: Sequence[str] = CHANGING) -> Iterator[None]:
    """Let ``see`` know of all changes below a folder within the block."""
    below = f"{root}{os.sep}"

    def see_below(name: str, path: object, half: Callable[[], object] = nothing) -> None:
        if str(path).startswith(below) or str(path) == str(root):
            see(name, str(path), half)

    with ExitStack() as stack:
        for module in (io, builtins):
            opened = _opened(module.open, see_below)
            stack.enter_context(mock.patch.object(module, "open", opened))
        stack.enter_context(mock.patch.object(os, "open", _opened_by_number(os.open, see_below)))
        for name in calls:
            function = _seen(name, getattr(os, name), see_below)
            stack.enter_context(mock.patch.object(os, name, function))
        yield


def _opened(original: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    def call(
        file: Any,
        mode: str = "r",
        buffering: int = -1,
        encoding: str | None = None,
        errors: str | None = None,
        newline: str | None = None,
        **options: Any,
    ) -> Any:
        if not isinstance(file, str | Path) or not set(mode) & set("wax+"):
            return original(file, mode, buffering, encoding, errors, newline, **options)
        see("open", file)
        kind = mode.replace("b", "").replace("t", "")
        raw = _File(str(file), kind, opener=options.get("opener"))  # of a file without name
        raw.see = see
        buffered = (io.BufferedRandom if "+" in mode else io.BufferedWriter)(raw)
        if "b" in mode:
            return buffered
        return io.TextIOWrapper(buffered, encoding, errors, newline)

    return call


def _opened_by_number(original: Callable[..., int], see: Callable[..., None]) -> Callable[..., int]:
    def call(path: Any, flags: int, *rest: Any, **options: Any) -> int:
        if flags & (os.O_CREAT | os.O_TRUNC):
            see("open", _path(path, options.get("dir_fd")))
        return original(path, flags, *rest, **options)

    return call


def _seen(name: str, original: Callable[..., Any], see: Callable[..., None]) -> Callable[..., Any]:
    def call(*arguments: Any, **options: Any) -> Any:
        place, *rest = arguments[_NEW_NAME.get(name, 0) :]
        half: Callable[[], object] = nothing
        if name in ("write", "pwrite"):
            half = lambda: original(place, rest[0][: len(rest[0]) // 2], *rest[1:])  # noqa: E731
        see(name, _path(place, options.get("dir_fd")), half)
        return original(*arguments, **options)

    return call


def _path(place: Any, folder: int | None) -> str:
    """Return the path of an open file's number, or of a name within an open folder."""
    if isinstance(place, int):
        return os.readlink(f"/proc/self/fd/{place}")  # noqa: PTH115
    if folder is not None:
        return os.path.join(os.readlink(f"/proc/self/fd/{folder}"), place)  # noqa: PTH115, PTH118
    return str(place)
