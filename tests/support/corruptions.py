"""What can be wrong with a file: another's content, a part of its own, garbage, hostile values."""

import json
import random
import struct
from collections.abc import Iterator, Mapping
from typing import Any

import numpy as np
import torch
from safetensors.torch import load, save

HUGE = 2**24 + 2**20
"""Bytes: beyond the limit of every file that is read whole, but for a vocabulary."""

HOSTILE_DOCUMENTS: Mapping[str, bytes] = {
    "empty": b"",
    "a line end": b"\n",
    "null": b"null",
    "a number": b"7",
    "a text": b'"text"',
    "a list": b"[]",
    "an object": b"{}",
    "half an object": b'{"pairs": {"de-en"',
    "deep lists": b"[" * 200_000,
    "deep objects": b'{"a":' * 50_000,
    "closed deep lists": b"[" * 500 + b"]" * 500,
    "a deep TOML list": b"a = " + b"[" * 200_000,
    "a deep TOML key": b"a." * 50_000 + b"a = 1\n",
    "a number of 5,000 digits": b'{"update": ' + b"9" * 5000 + b"}",
    "a TOML number of many bits": b"name = 0x" + b"f" * 100_000,
    "half a surrogate pair": b'{"pairs": {"\\ud800": 1}, "groups": {"\\ud800": 0}}',
    "not UTF-8": b'{"name": "\xff\xfe"}\n',
    "UTF-16": '{"name": "x"}'.encode("utf-16"),
    "NUL bytes": bytes(4096),
    "spaces without end": b" " * HUGE,
    "lists without end": b"[],".join([b"["] + [b""] * (HUGE // 3)),
    "a line without end": b"x" * HUGE,
}

HOSTILE_VALUES: tuple[Any, ...] = (None, "text", -1, 10**9, 2**70, [], {}, True, "1e999")
"""Put in the place of every value of a JSON document; the last one stands for infinity."""

INFINITY = '"1e999"'


def foreign(name: str, shelf_files: Mapping[str, bytes]) -> Iterator[tuple[str, bytes]]:
    """The contents of every other file there is, one of each kind."""
    for other, content in shelf_files.items():
        if other != name:
            yield f"content of {other}", content


def partial(content: bytes) -> Iterator[tuple[str, bytes]]:
    """A file cut off at several points, or with something added."""
    for cut in sorted({1, 8, len(content) // 3, len(content) // 2, len(content) - 1}):
        if 0 < cut < len(content):
            yield f"its first {cut} bytes", content[:cut]
    yield "its content twice", content * 2
    noise = random.Random(len(content)).randbytes(max(len(content), 64))
    yield "noise", noise
    for place in (0, len(content) // 4, len(content) // 2):
        changed = content[:place] + noise[:16] + content[place + 16 :]
        yield f"noise at byte {place}", changed


def hostile(name: str, content: bytes, *, below: str) -> Iterator[tuple[str, bytes]]:
    """Contents that are wrong in a way that only this kind of file can be.

    Of a manifest the values ``below`` a key are replaced ("": all).
    """
    yield from HOSTILE_DOCUMENTS.items()
    if name == "manifest.json":
        yield from json_values(content, below=below, most=12 if below else 3)
    elif name.endswith(".json"):
        yield from json_values(content)
    if name.endswith(".jsonl"):
        first = content.splitlines()[0]
        for label, line in json_values(first):
            yield f"first line: {label}", line + b"\n" + content[len(first) + 1 :]
    if name.endswith(".safetensors"):
        yield from tensors(content)
    if name.endswith(".npy"):
        yield from offsets(content)
    if name.endswith(".tokens"):
        yield "ids beyond the vocabulary", b"\xff" * len(content)


def json_values(content: bytes, *, below: str = "", most: int = 24) -> Iterator[tuple[str, bytes]]:
    """The document with every value in turn replaced or left out, ``most`` of every table."""
    document = json.loads(content)
    for path in paths(document, most=most):
        if not str(path[0]).startswith(below):
            continue
        for value in HOSTILE_VALUES:
            yield f"{path} = {value!r}", _json(replaced(document, path, value))
        yield f"without {path}", _json(replaced(document, path, ...))


def paths(
    value: object, prefix: tuple[str | int, ...] = (), *, most: int
) -> Iterator[tuple[str | int, ...]]:
    """Where values lie, down to a depth of three; of a list the first entry stands for all."""
    entries: list[tuple[str | int, object]] = []
    if isinstance(value, dict):
        entries = list(value.items())[: most if prefix else None]
    elif isinstance(value, list):
        entries = [(0, value[0])] if value else []
    for key, entry in entries:
        yield (*prefix, key)
        if len(prefix) < 2:
            yield from paths(entry, (*prefix, key), most=most)


def replaced(document: Any, path: tuple[str | int, ...], value: object) -> Any:
    copy = json.loads(json.dumps(document))
    inner = copy
    for part in path[:-1]:
        inner = inner[part]
    if value is ...:
        del inner[path[-1]]
    else:
        inner[path[-1]] = value
    return copy


def _json(document: Any) -> bytes:
    return json.dumps(document).replace(INFINITY, "1e999").encode()


def tensors(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Weights of other values, types, shapes and names, and headers that say what is not so."""
    weights = load(content)
    name = sorted(weights)[0]
    value = weights[name]
    others = {
        "not a number": torch.full_like(value, torch.nan),
        "an infinity": torch.cat([value.flatten()[:-1], torch.tensor([torch.inf])]).view_as(value),
        "enormous": torch.full_like(value, 3e38),
        "whole numbers": torch.ones_like(value, dtype=torch.int64),
        "truth values": torch.ones_like(value, dtype=torch.bool),
        "complex": torch.ones_like(value, dtype=torch.complex64),
        "8 bits": value.to(torch.float8_e4m3fn),
        "half": value.half(),
        "flat": value.flatten().clone(),
        "a scalar": torch.tensor(1.0),
        "without values": torch.empty(0),
        "one row": value[:1].clone(),
    }
    for label, other in others.items():
        yield f"{name}: {label}", save({**weights, name: other})
    yield "one tensor less", save({key: weights[key] for key in weights if key != name})
    yield "one tensor more", save({**weights, "decoder.layers.0.more:0": value.clone()})
    yield "a name that is none", save({**weights, "::": value.clone()})
    yield "a piece without a place", save({**weights, f"{name}:x": value.clone()})
    yield "a piece far away", save({**weights, f"master:{name}:{10**18}": torch.ones(1)})
    yield "no tensors", save({})
    yield from _headers(content)


def _headers(content: bytes) -> Iterator[tuple[str, bytes]]:
    length = struct.unpack("<Q", content[:8])[0]
    header, values = json.loads(content[8 : 8 + length]), content[8 + length :]
    name = next(key for key in sorted(header) if key != "__metadata__")
    yield "a header without end", struct.pack("<Q", 2**60) + content[8:]
    yield "a negative header", struct.pack("<q", -1) + content[8:]
    for label, text in (
        ("deep", b"[" * 100_000),
        ("a list", b"[]"),
        ("a number", b"1"),
        ("not UTF-8", b'{"\xff": 1}'),
    ):
        yield f"header: {label}", struct.pack("<Q", len(text)) + text + values
    for key, value in (
        ("shape", [10**9, 10**9]),
        ("shape", [-1]),
        ("shape", [2**63]),
        ("shape", "text"),
        ("shape", []),
        ("dtype", "X9"),
        ("dtype", "F8_E8M0"),
        ("dtype", "F4"),
        ("dtype", "I64"),
        ("data_offsets", [0, 2**62]),
        ("data_offsets", [8, 0]),
        ("data_offsets", []),
    ):
        changed = {**header, name: {**header[name], key: value}}
        text = json.dumps(changed).encode()
        yield f"header: {key} = {value}", struct.pack("<Q", len(text)) + text + values


def offsets(content: bytes) -> Iterator[tuple[str, bytes]]:
    """Where sentences begin, said in other ways, and wrongly."""
    values = np.frombuffer(content[128:], dtype="<i8")
    header, last = content[:128], int(values[-1])
    changed = {
        "descending": values[::-1],
        "negative": values - last,
        "beyond the end": np.append(values[:-1], last + 7),
        "enormous": np.append(values[:-1], 2**62),
        "not from 0": np.append([3], values[1:]),
        "back and forth": np.concatenate([values[:2], [0], values[3:]]),
    }
    for label, other in changed.items():
        yield label, header + other.astype("<i8").tobytes()
    yield "one less", content[:-8]
    yield "one more", content + content[-8:]
    for word in (b"<f8", b"|O ", b">i8", b"<i4"):
        yield f"of type {word.decode()}", content.replace(b"<i8", word, 1)
    yield "of two dimensions", content.replace(b"), }", b",1)}", 1)
    yield (
        "a header of Python",
        content[:10] + b"__import__('os')".ljust(117) + b"\n" + content[128:],
    )
