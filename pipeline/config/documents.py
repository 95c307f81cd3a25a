"""Read and write TOML and JSON, with bounds on size and depth.

A recipe, a plan, a model's shape or a manifest may come from anywhere. A small file can make a
parser take gigabytes, minutes, or the whole of Python's stack; each case ends in one error message
here.
"""

import json
import math
import os
import re
import secrets
import tomllib
from collections.abc import Collection, Iterator, Mapping
from contextlib import suppress
from datetime import date, time
from functools import cache
from importlib import resources
from pathlib import Path
from typing import Any, NoReturn, TypeGuard

from pipeline.errors import ArtifactError, ConfigError, UserError, hint, unreadable

MAX_TOML_BYTES = 2**20
"""Largest recipe or plan; a recipe for a hundred languages has a few KiB."""
MAX_TOML_DOTS = 32
"""Most dots of a key: the time and memory of tomllib (Python 3.11) grow with the square of its
parts, and a key of 16 KiB takes 7 seconds."""
_DOTTED = re.compile(
    rf"""(?<![\w-])(?:(?:[\w-]++|"(?:[^"\\\n]|\\.)*+"|'[^'\n]*+')[ \t]*+\.[ \t]*+)"""
    rf"{{{MAX_TOML_DOTS + 1}}}"
)
"""A key of more parts, in quotes or not; a list of numbers, or of names of files, is none."""
MAX_JSON_BYTES = 2**24
"""Largest JSON file or line; routing statistics of 200 languages and 128 experts have 5 MB."""
MAX_DEPTH = 64
"""Most levels of nested tables; settings nest 4 deep."""
_POINTER = b"version https://git-lfs.github.com/spec/"
_BARE_KEY = re.compile("[A-Za-z0-9_-]+")
RESTORE = "restore it from a copy or run its stage again"
_REMOVE_LINE = "remove that line, or the file"


def read_toml(path: Path, *, fix: str = "name a file that is there") -> dict[str, Any]:
    """Parse a TOML file.

    Raises:
        ConfigError: it cannot be read, is too large or too deep, or is broken; says where.
    """
    content = read_bytes(path, limit=MAX_TOML_BYTES, error=ConfigError, fix=fix)
    try:
        text = content.decode("utf-8-sig")  # some editors begin a file with a byte-order mark
        if _DOTTED.search(text):
            raise ConfigError(
                f"{path} has a key with more than {MAX_TOML_DOTS} dots. Nest tables less deeply."
            )
        document = tomllib.loads(text)
    except RecursionError as error:
        _refuse_depth(path, ConfigError, error)
    except ValueError as error:  # TOMLDecodeError, UnicodeDecodeError, digits beyond int's limit
        fix = "Save it as UTF-8" if isinstance(error, UnicodeDecodeError) else "Correct that line"
        why = _reason(error, content)
        raise ConfigError(f"{path} is not valid TOML ({why}). {fix}.") from error
    check_settings(document, path=path)
    return document


def check_settings(document: object, *, path: Path | str) -> None:
    """Refuse settings that nest too deep, or have the character NUL, which no path can have."""
    check_depth(document, path=path, error=ConfigError)
    if "\0" in _texts(document):
        raise ConfigError(f"{path} has the character NUL (\\u0000) in a text. Leave it out.")


def _texts(value: object) -> str:
    """Return all keys and texts of a document, one after the other."""
    if isinstance(value, dict):
        return "".join(_texts(entry) for pair in value.items() for entry in pair)
    if isinstance(value, list):
        return "".join(map(_texts, value))
    return value if isinstance(value, str) else ""


@cache
def shipped(folder: str) -> dict[str, Path]:
    """Return the TOML files of a folder of this package and of its subfolders, sorted by name.

    A name has no folder: files can move without a change for those who name them. A test holds
    that no two files of a folder have one name.
    """
    found = Path(str(resources.files("pipeline") / folder)).rglob("*.toml")
    return {path.stem: path for path in sorted(found, key=lambda path: path.stem)}


def toml_path(name: str, *, folder: str, what: str) -> Path:
    """Return the file of ``NAME`` (one that ships in ``folder``) or ``PATH.toml``.

    ``what`` is a file of the folder in words, for example ``recipe`` in ``recipes``.
    """
    if name.endswith(".toml"):
        return Path(name)
    if name in shipped(folder):
        return shipped(folder)[name]
    if Path(f"{name}.toml").is_file():
        raise ConfigError(f"There is no {what} {name!r}. Did you mean '{name}.toml'?")
    choices = hint(name, [*shipped(folder)], otherwise="or give the path of a .toml file")
    other = "plan" if folder == "recipes" else "recipe"
    if name in shipped(f"{other}s"):
        choices = f", but a {other} of that name. Name a {what}, or use a command for a {other}."
    raise ConfigError(f"There is no {what} {name!r}{choices}")


def beside(name: str, path: Path) -> str:
    """Return a name, or a path of TOML or JSON as seen from the file that names it."""
    return str(path.parent / name) if name.endswith((".toml", ".json")) else name


def read_json(path: Path, *, error: type[UserError] = ArtifactError, fix: str = RESTORE) -> Any:
    """Parse a JSON file; the error has the given type."""
    content = read_bytes(path, error=error, fix=fix)
    return parse_json(content, what=str(path), error=error, fix=fix)


def read_json_lines(path: Path) -> Iterator[dict[str, Any]]:
    """Yield the objects of a file with one JSON object per line."""
    for number, line in enumerate(byte_lines(path, fix=RESTORE), start=1):
        yield json_object(line, what=f"Line {number} of {path}")


def json_object(content: bytes, *, what: str, fix: str = RESTORE) -> dict[str, Any]:
    """Parse one JSON object; ArtifactError begins with ``what``."""
    record = parse_json(content, what=what, error=ArtifactError, fix=fix)
    if not isinstance(record, dict):
        raise ArtifactError(f"{what} is no JSON object. {_sentence(fix)}")
    return record


def read_bytes(
    path: Path,
    *,
    limit: int = MAX_JSON_BYTES,
    error: type[UserError] = ArtifactError,
    fix: str = RESTORE,
) -> bytes:
    """Return the content of a file of at most ``limit`` bytes; the error has the given type."""
    refuse_pipe(path, error=error)
    try:
        with path.open("rb") as stream:
            content = stream.read(limit + 1)
    except OSError as problem:
        raise error(unreadable(path, problem, _sentence(fix))) from problem
    if content.startswith(_POINTER):
        refuse_pointer(path, error=error)
    if len(content) > limit:
        raise error(
            f"{path} is larger than {limit:,} bytes, which no such file is. {_sentence(fix)}"
        )
    return content


def refuse_pipe(path: Path, *, error: type[UserError]) -> None:
    """Refuse a pipe or a device, from which a read could wait for somebody to write."""
    if path.exists() and not (path.is_file() or path.is_dir()):
        raise error(
            f"{path} is a pipe or a device, and is read more than once. Copy its content to a file."
        )


def refuse_pointer(path: Path, *, error: type[UserError]) -> None:
    """Refuse a small file that a clone without Git LFS has in place of a large one."""
    with suppress(OSError), path.open("rb") as stream:
        if stream.read(len(_POINTER)) == _POINTER:
            raise error(f"{path} is only a pointer of Git LFS. Run git lfs pull in its folder.")


def parse_json(
    content: bytes, *, what: str, error: type[UserError], fix: str, unique: bool = False
) -> Any:
    """Parse JSON; refuse NaN and infinities, which JSON does not have.

    ``unique`` also refuses an object with a key twice, of which the last would be kept. The error
    has the given type, and begins with ``what``.
    """
    try:
        hook = as_object if unique else None
        document = json.loads(content, parse_constant=_refuse_constant, object_pairs_hook=hook)
        if b"\\ud" in content.lower():  # half a surrogate pair can be neither printed nor stored
            json.dumps(document, ensure_ascii=False).encode()
    except RecursionError as problem:
        _refuse_depth(what, error, problem)
    except ValueError as problem:  # JSONDecodeError, UnicodeError, digits beyond int's limit
        why = _reason(problem, content)
        raise error(f"{what} is not valid JSON ({why}). {_sentence(fix)}") from problem
    check_depth(document, path=what, error=error)
    return document


def as_object(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
    """Return the object of parsed JSON; ValueError if a key is there twice."""
    found = dict(pairs)
    if len(found) < len(pairs):
        names = [name for name, _ in pairs]
        twice = next(name for name in names if names.count(name) > 1)
        raise ValueError(f"an object has the key {twice!r} twice")
    return found


def is_count(value: object) -> TypeGuard[int]:
    """Return whether a value of JSON is a whole number from 0 that fits 64 bits."""
    return isinstance(value, int) and not isinstance(value, bool) and 0 <= value < 2**63


def unfinished_path(path: Path) -> Path:
    """Return the path at which a file or directory is written until it is complete."""
    return path.parent / f".{path.name}.unfinished"


def write_whole(path: Path, text: str) -> None:
    """Replace a file in one step, on disk, also where several processes or threads write it.

    Raises:
        OSError: It cannot be written; nothing is left behind.
    """
    temporary = unfinished_path(path.with_name(f"{path.name}.{secrets.token_hex(4)}"))
    try:
        with temporary.open("w", encoding="utf-8") as stream:
            stream.write(text)
            stream.flush()
            os.fsync(stream.fileno())  # else a crash of this machine can leave an empty file
        temporary.replace(path)
    except OSError as error:
        error.filename = str(path)  # a full disk names no file
        with suppress(OSError):
            temporary.unlink()
        raise


def byte_lines(path: Path, *, fix: str = RESTORE) -> Iterator[bytes]:
    r"""Yield lines of at most ``MAX_JSON_BYTES``, each with the ``\n`` that ends it."""
    try:
        with path.open("rb") as stream:
            while line := stream.readline(MAX_JSON_BYTES + 1):
                if len(line) > MAX_JSON_BYTES:
                    raise ArtifactError(
                        f"{path} has a line of more than {MAX_JSON_BYTES:,} bytes. {_sentence(fix)}"
                    )
                yield line
    except OSError as problem:
        raise ArtifactError(unreadable(path, problem, _sentence(fix))) from problem


def toml_lines(document: Mapping[str, Any], *, table: str = "") -> Iterator[str]:
    """Yield the lines of a document as TOML; leave out None, since TOML has no null.

    ``table`` is the dotted name of the table that the document is.
    """
    tables = {name: value for name, value in document.items() if isinstance(value, Mapping)}
    for name, value in document.items():
        if name not in tables and value is not None:
            yield f"{toml_key(name)} = {toml_value(value)}"
    for name, value in tables.items():
        path = f"{table}.{toml_key(name)}".removeprefix(".")
        yield from ("", f"[{path}]")
        yield from toml_lines(value, table=path)


def toml_key(name: str) -> str:
    """Return a key as TOML writes it: bare where possible, else in quotes."""
    return name if _BARE_KEY.fullmatch(name) else toml_value(name)


def toml_value(value: Any) -> str:
    """Return a value as TOML on one line; leave out entries of a table that are None."""
    match value:
        case Mapping():
            entries = {name: entry for name, entry in value.items() if entry is not None}
            inside = (f"{toml_key(name)} = {toml_value(one)}" for name, one in entries.items())
            return f"{{ {', '.join(inside)} }}" if entries else "{}"
        case list() | tuple():
            return f"[{', '.join(map(toml_value, value))}]"
        case date() | time():  # no setting has one: for the error message
            return value.isoformat()
        case int() if value.bit_length() > 128:  # Python prints no 5,000 digits
            return hex(value)
        case float() if math.isinf(value):
            return "inf" if value > 0 else "-inf"
    # TOML has JSON's escapes, but does not take DEL as it is
    return json.dumps(value, ensure_ascii=False).replace("\x7f", "\\u007f")


def merge(
    base: dict[str, Any],
    difference: Mapping[str, Any],
    *,
    values: Collection[str] = (),
    table: str = "",
) -> dict[str, Any]:
    """Merge ``difference`` into ``base``, table by table; lists and values replace.

    Tables with a dotted name in ``values`` are values. The documents are the table ``table``.
    """
    merged = dict(base)
    for key, value in difference.items():
        old, name = merged.get(key), f"{table}.{key}".removeprefix(".")
        if isinstance(old, dict) and isinstance(value, dict) and name not in values:
            value = merge(old, value, values=values, table=name)
        merged[key] = value
    return merged


def _sentence(fix: str) -> str:
    return f"{fix[:1].upper()}{fix[1:]}."


def _reason(problem: ValueError, content: bytes) -> str:
    if "integer string conversion" not in str(problem):
        return str(problem)
    # Python's own text advises programmers to raise the limit, and names no line.
    lines = re.split(rb"\d{4301}", content.replace(b"_", b""))[0].split(b"\n")
    return f"line {len(lines)} has a number of more than 4,300 digits"


def _refuse_constant(name: str) -> NoReturn:
    raise ValueError(f"{name} is no number of JSON")


def check_depth(document: object, *, path: Path | str, error: type[UserError]) -> None:
    """Refuse a document that nests too deep.

    It walks level by level, because recursion would fail on exactly these documents.
    """
    level = [document]
    for _ in range(MAX_DEPTH):
        level = [
            entry
            for value in level
            if isinstance(value, dict | list)
            for entry in (value.values() if isinstance(value, dict) else value)
        ]
        if not level:
            return
    _refuse_depth(path, error, None)


def _refuse_depth(path: Path | str, error: type[UserError], problem: Exception | None) -> NoReturn:
    raise error(
        f"{path} nests more than {MAX_DEPTH} levels deep. Write it without such nesting."
    ) from problem


class JsonLines:
    """A file of JSON objects, one per line; each call of ``write`` is on disk before the next."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def write(self, *records: Mapping[str, object]) -> None:
        """Append records; numbers that are not finite become null, which JSON can hold."""
        lines = [
            json.dumps(_finite(record), ensure_ascii=False, allow_nan=False) for record in records
        ]
        self.path.parent.mkdir(parents=True, exist_ok=True)
        with self.path.open("a", encoding="utf-8", newline="\n") as stream:
            stream.writelines(f"{line}\n" for line in lines)

    def truncate_after(self, update: int, **of_kind: int) -> None:
        """Drop records of later updates, which a resumed run will write again.

        A last line that a killed run left incomplete goes too. The file is replaced in one step.

        Args:
            update: the last update to keep.
            of_kind: another last update, for records of a kind.
        """
        if not self.path.is_file():
            return
        temporary = unfinished_path(self.path)
        with temporary.open("wb") as stream:
            for line, record in self._complete():
                if _update_of(record) <= of_kind.get(str(record.get("kind")), update):
                    stream.write(line)
            stream.flush()
            os.fsync(stream.fileno())
        temporary.replace(self.path)

    def read(self) -> Iterator[dict[str, Any]]:
        """Yield the records, without a last line that a killed run left incomplete."""
        return (record for _, record in self._complete())

    def _complete(self) -> Iterator[tuple[bytes, dict[str, Any]]]:
        for number, line in enumerate(byte_lines(self.path, fix=_REMOVE_LINE), start=1):
            if line.endswith(b"\n"):
                what = f"Line {number} of {self.path}"
                yield line, json_object(line, what=what, fix=_REMOVE_LINE)


def _update_of(record: Mapping[str, Any]) -> float:
    """Return the record's update; -∞ if it has none: the record is always kept."""
    update = record.get("update")
    return update if isinstance(update, int) else -math.inf


def _finite(value: Any) -> Any:
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if isinstance(value, Mapping):
        return {str(name): _finite(entry) for name, entry in value.items()}
    if isinstance(value, list | tuple):
        return [_finite(entry) for entry in value]
    return value
