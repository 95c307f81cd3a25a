"""Whatever a file or a request holds, the answer is a result or one sentence, and nothing else.

Hypothesis edits files that are in order, one of every form that is read, and requests to a server.
``--every-case`` tries 200 edits per reader instead of 25, ``--hypothesis-seed N`` other edits.
"""

import contextlib
import gzip
import http.client
import json
import os
import resource
import socket
import struct
import sys
import time
import zlib
from collections import Counter
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import h11
import pytest
from hypothesis import HealthCheck, Phase, given, settings
from hypothesis import strategies as st
from support.corruptions import HOSTILE_VALUES, paths, replaced
from support.foreign_models import m2m100_folder
from support.readable_artifacts import LINES, READERS, Reader, Shelf, build_shelf, import_from
from support.readers_sweep import MEMORY, SLOW_SECONDS, broken_copy, outcome, targets
from support.served import JSON, SECONDS, Served, answer_to, body_of, make_model, serving

from pipeline.checkpoints.importing import import_checkpoint

pytestmark = [pytest.mark.slow, pytest.mark.timeout(7200)]

SECRET = "secret.txt"
"""Lies beside the folder that a reader is given."""
PIECES = (
    *(b"", b"\0", b"\xff\xfe", b"\xed\xa0\x80", b"\r", b"\n", b"\t", b'"', b"\\ud800", b"\\u0000"),
    *("\u2028\u0085\x0b".encode(), b"</s>", b"__de__", b"</tu>", b"<seg>", b"<!DOCTYPE", b"]]>"),
    *(b"&#0;", b"&lt;", b'<!ENTITY a "b">', b"<?xml version='1.0' encoding='utf-7'?>"),
    *(b"../../" + SECRET.encode(), b"/etc/passwd", b"$(touch made)", b"`touch made`", b"; touch a"),
    *(b"__import__('os').system('touch made')", b"cos\nsystem\n(S'touch made'\ntR.", b"\x80\x05."),
    *(b"null", b"NaN", b"-1", b"1e999", b"9" * 30, b"9" * 5000, b"[" * 5000, b'{"a":' * 5000),
    *(b"x" * 70_000, b"\n" * 70_000, b"\xff" * 8, bytes(8), struct.pack("<Q", 2**62)),
)
"""What edits put in, in addition to any bytes."""
VALUES = st.recursive(
    st.sampled_from(HOSTILE_VALUES) | st.integers() | st.floats() | st.text(max_size=9),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=9), inner),
    max_leaves=6,
)


@st.composite
def edited(draw: st.DrawFn, content: bytes) -> bytes:
    """The content with up to four parts replaced by pieces, bytes, or other parts of it."""
    for _ in range(draw(st.integers(1, 4))):
        begin = draw(st.integers(0, len(content)))
        length = draw(st.sampled_from((0, 1, 2, 8, 100, len(content))))
        other = draw(st.integers(0, len(content)))
        part = st.just(content[other : other + max(length, 1)])
        piece = draw(st.sampled_from(PIECES) | st.binary(max_size=12) | part)
        content = content[:begin] + piece + content[begin + length :]
    return content


@st.composite
def edited_file(draw: st.DrawFn, name: str, content: bytes) -> bytes:
    """An edited file: its bytes, a value of its JSON, or what it holds packed."""
    if name.endswith((".gz", ".zst")) and draw(st.booleans()):
        return packing(name)(draw(edited(unpacked(name, content))))
    is_tensors = name.endswith(".safetensors")
    if draw(st.booleans()) and (is_tensors or name.endswith((".json", ".jsonl"))):
        head, tail = parts_of(content) if is_tensors else content.partition(b"\n")[::2]
        document = json.loads(head if head.strip() != b"{" else content)
        if places := list(paths(document, most=30)):
            text = json.dumps(replaced(document, draw(st.sampled_from(places)), draw(VALUES)))
            changed = text.encode(errors="surrogatepass")
            if is_tensors:
                return struct.pack("<Q", len(changed)) + changed + tail
            return changed + b"\n" + (tail if name.endswith("l") else b"")
    return draw(edited(content))


def parts_of(tensors: bytes) -> tuple[bytes, bytes]:
    """Header and values of safetensors."""
    length = struct.unpack("<Q", tensors[:8])[0]
    return tensors[8 : 8 + length], tensors[8 + length :]


def packing(name: str) -> Callable[[bytes], bytes]:
    if name.endswith(".gz"):
        return lambda content: gzip.compress(content, mtime=0)
    return pytest.importorskip("zstandard").ZstdCompressor().compress  # type: ignore[no-any-return]


def unpacked(name: str, content: bytes) -> bytes:
    if name.endswith(".gz"):
        return zlib.decompress(content, wbits=31)
    return bytes(pytest.importorskip("zstandard").ZstdDecompressor().decompress(content))


# ---------------------------------------------------------------- files


def _import_model(_: Shelf, directory: Path, scratch: Path) -> None:
    import_checkpoint(directory, out_dir=scratch / "out")


FURTHER = (
    Reader("import_corpus of zstandard", "zstandard", import_from("tree"), files="de-en/train.de"),
    Reader("import_corpus of Parquet", "parquet", import_from("columns")),
    Reader("import_checkpoint", "foreign", _import_model),
)


def write_further(shelf: Shelf, name: str) -> None:
    """Make the folder of a reader that needs a package of an extra, or a foreign library."""
    folder = shelf.path(name)
    if folder.exists() or name not in {reader.of for reader in FURTHER}:
        return
    if name == "foreign":
        m2m100_folder(folder)
    elif name == "zstandard":
        for path in shelf.path("raw").rglob("*.*"):
            target = folder / path.parent.name / f"{path.name}.zst"
            content = packing(target.name)(path.read_bytes())
            target.parent.mkdir(parents=True, exist_ok=True)
            target.write_bytes(content)
    else:
        # pyarrow 26 raises ImportError with numpy 1.
        why = "pyarrow is not installed, or does not fit the installed numpy"
        arrow = pytest.importorskip("pyarrow", reason=why, exc_type=ImportError)
        parquet = pytest.importorskip("pyarrow.parquet", reason=why, exc_type=ImportError)
        (folder / "de-en").mkdir(parents=True)
        sides = dict(zip(("de", "en"), zip(*LINES["de-en"], strict=True), strict=True))
        parquet.write_table(arrow.table(sides), folder / "de-en" / "train.parquet")


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Shelf]:
    """Artifacts in order, in a process that may not take much more memory than it has."""
    made = build_shelf(tmp_path_factory.mktemp("fuzz") / "shelf")
    (made.folder.parent / SECRET).write_text("a secret\n", encoding="utf-8")
    soft, hard = resource.getrlimit(resource.RLIMIT_AS)
    used = int(Path("/proc/self/statm").read_text().split()[0]) * resource.getpagesize()
    resource.setrlimit(resource.RLIMIT_AS, (used + MEMORY, hard))
    yield made
    resource.setrlimit(resource.RLIMIT_AS, (soft, hard))


class Guard:
    """Notes what no reader may do: start a program, connect, write elsewhere, read the secret."""

    PROGRAMS = ("os.system", "os.exec", "os.posix_spawn", "subprocess.Popen", "socket.connect")
    CHANGES = ("os.remove", "os.rename", "os.mkdir", "os.rmdir", "os.link", "os.symlink")
    WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT
    OTHERS = ("/dev/", "/proc/", "__pycache__", "/.cache/")
    """Places that libraries write to for themselves."""

    def __init__(self) -> None:
        self.place: Path | None = None
        self.seen: list[str] = []
        sys.addaudithook(self._note)

    @contextlib.contextmanager
    def watching(self, place: Path) -> Iterator[list[str]]:
        self.place, self.seen = place, []
        try:
            yield self.seen
        finally:
            self.place = None

    def _note(self, event: str, given: tuple[Any, ...]) -> None:
        if self.place is None or event not in {"open", *self.PROGRAMS, *self.CHANGES}:
            return
        # A relative path is one within a folder that rmtree has opened.
        touched = [os.path.normpath(path) for path in given[:2] if str(path).startswith("/")]
        if event == "open":
            written = touched[:1] if given[2] & self.WRITES else []
            read = [path for path in touched[:1] if path.endswith((SECRET, "/passwd"))]
        else:
            written, read = touched if event in self.CHANGES else [], []
            written = written[1:] if event == "os.symlink" else written
        outside = [
            path
            for path in written
            if not path.startswith(str(self.place)) and not any(of in path for of in self.OTHERS)
        ]
        if event in self.PROGRAMS or outside or read:
            self.seen.append(f"{event} {given}"[:200])


@pytest.fixture(scope="module")
def guard() -> Guard:
    """There is one, since a hook cannot be removed."""
    return Guard()


def limits(config: pytest.Config, *, usually: int, at_most: int) -> settings:
    """How many examples are tried; they are the same ones unless a seed is given."""
    return settings(
        max_examples=at_most if config.getoption("--every-case") else usually,
        derandomize=config.getoption("--hypothesis-seed") is None,
        database=None,
        deadline=None,
        phases=(Phase.generate, Phase.shrink),
        suppress_health_check=list(HealthCheck),
    )


@pytest.mark.parametrize("reader", [*READERS, *FURTHER], ids=lambda reader: reader.name)
def test_an_edited_file_gives_a_result_or_one_sentence(
    reader: Reader, shelf: Shelf, guard: Guard, tmp_path: Path, pytestconfig: pytest.Config
) -> None:
    write_further(shelf, reader.of)
    directory = shelf.path(reader.of)
    names = targets(reader, directory)

    @limits(pytestconfig, usually=25, at_most=200)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        name = data.draw(st.sampled_from(names))
        content = data.draw(edited_file(name, (directory / name).read_bytes()))
        broken = broken_copy(directory, name, "edited", content, place=tmp_path)
        with guard.watching(tmp_path) as seen:
            began = time.process_time()  # another's work does not count
            problem, _ = outcome(reader, shelf, broken, tmp_path / "scratch")
            assert (problem, seen) == (None, [])
            assert time.process_time() - began < SLOW_SECONDS

    holds()


# ---------------------------------------------------------------- requests


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    folder = tmp_path_factory.mktemp("served")
    with serving(make_model(folder / "checkpoint"), "--max-characters", "100") as (running, _):
        yield running


def request(path: str, body: bytes, *, kind: str = JSON) -> bytes:
    head = f"POST {path} HTTP/1.1\r\nHost: x\r\nContent-Type: {kind}\r\nContent-Length: {len(body)}"
    return head.encode() + b"\r\nConnection: close\r\n\r\n" + body


FORM = b'--b\r\nContent-Disposition: form-data; name="q"\r\n\r\nja\r\n--b--\r\n'
REQUESTS = (
    request("/translate", body_of(q="ja", alternatives=1, phrases=["x"], details=True)),
    request("/translate?source=de&target=en", FORM, kind="multipart/form-data; boundary=b"),
    request("/detect", b"q=ja%20ja", kind="application/x-www-form-urlencoded"),
    b"GET /languages HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n",
)


def needs_no_more(sent: bytes) -> bool:
    """Whether a server can answer, or refuse, what it has received so far."""
    reader = h11.Connection(h11.SERVER)
    reader.receive_data(sent)
    with contextlib.suppress(h11.RemoteProtocolError):
        while not isinstance(event := reader.next_event(), h11.EndOfMessage):
            if event is h11.NEED_DATA or isinstance(event, h11.ConnectionClosed):  # of no bytes
                return False
            if event is h11.PAUSED:  # it asks for another protocol
                return True
    return True


def test_an_edited_request_is_answered_or_refused(
    served: Served, pytestconfig: pytest.Config
) -> None:
    answers = Counter[int]()

    @limits(pytestconfig, usually=150, at_most=2000)
    @given(st.data())
    def holds(data: st.DataObject) -> None:
        sent = data.draw(st.sampled_from(REQUESTS))
        if data.draw(st.booleans()):
            _, _, body = sent.partition(b"\r\n\r\n")
            sent = request("/translate", data.draw(edited(body)))
        else:
            sent = data.draw(edited(sent))
        is_whole = needs_no_more(sent)
        with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as client:
            # A server that refuses a request closes the connection while the rest still arrives;
            # what it has answered can be read nevertheless.
            with contextlib.suppress(ConnectionError):
                client.sendall(sent)
            if not is_whole:  # else the server would take it that nobody waits for its answer
                with contextlib.suppress(OSError):
                    client.shutdown(socket.SHUT_WR)
            try:
                answer = answer_to(client)
            except (http.client.RemoteDisconnected, ConnectionResetError):
                assert not is_whole, "it was not answered"
                return
        answers[answer.status] += 1
        assert answer.status < 500
        assert answer.status < 400 or answer.refusal()

    holds()
    assert min(answers[200], answers[400]) > 10, answers
    assert served.ask("/health").status == 200
