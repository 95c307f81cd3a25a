"""A running ``mmnmt serve`` of tiny models, as its clients see it."""

import http.client
import json
import re
import socket
import threading
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from prometheus_client.parser import text_string_to_metric_families

from support.forked import start_command
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import attend_to_source, tiny_model

JSON = "application/json"
SETTINGS = ["decoding.beam_size=3", "decoding.max_length_ratio=0.3", "decoding.max_extra_length=6"]
SET = [word for setting in SETTINGS for word in ("--set", setting)]
CONTINUE = b"HTTP/1.1 100 Continue\r\n\r\n"
SECONDS = 120.0
"""Time limit of a test's connection."""


@dataclass(frozen=True)
class Answer:
    status: int
    headers: http.client.HTTPMessage
    body: bytes

    def json(self) -> Any:
        return json.loads(self.body)

    def refusal(self) -> str:
        """The sentence of an answer that is not a success."""
        assert self.status >= 400
        found = self.json()
        assert set(found) == {"error"}
        assert re.fullmatch(r"[^\n]+[.?]", found["error"])
        assert "Traceback" not in found["error"]
        return str(found["error"])


class Served:
    """A running server, as its clients see it."""

    def __init__(self, port: int) -> None:
        self.port = port

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def ask(
        self,
        path: str,
        body: bytes | Iterator[bytes] | None = None,
        *,
        kind: str = JSON,
        method: str = "",
    ) -> Answer:
        connection = http.client.HTTPConnection("127.0.0.1", self.port, timeout=SECONDS)
        chosen = method or ("GET" if body is None else "POST")
        connection.request(chosen, path, body, {"Content-Type": kind})
        response = connection.getresponse()
        answer = Answer(response.status, response.headers, response.read())
        connection.close()
        return answer

    def post(self, path: str = "/translate", **fields: Any) -> Answer:
        return self.ask(path, body_of(**fields))

    def metrics(self) -> dict[str, float]:
        """Value of every sample, summed over labels."""
        found: dict[str, float] = {}
        for family in text_string_to_metric_families(self.ask("/metrics").body.decode()):
            for sample in family.samples:
                found[sample.name] = found.get(sample.name, 0) + sample.value
        return found

    def wait_for_open_requests(self, number: int) -> None:
        while self.metrics()["mmnmt_open_requests"] != number:
            threading.Event().wait(0.01)

    def begin(self, text: str, *, receives: int | None = None, **fields: Any) -> socket.socket:
        """Send a request and do not read its answer."""
        body = body_of(q=text, **fields)
        client = self.stall(len(body), receives=receives)
        client.sendall(body)
        return client

    def stall(self, length: int, *, receives: int | None = None) -> socket.socket:
        """Send the head of a request; return when the server has read it, and waits for the body.

        Args:
            length: length of the body, in bytes.
            receives: size of the client's buffer, in bytes.
        """
        client = socket.socket()
        client.settimeout(SECONDS)
        if receives is not None:
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receives)
        client.connect(("127.0.0.1", self.port))
        head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
        client.sendall(f"{head}Expect: 100-continue\r\nContent-Length: {length}\r\n\r\n".encode())
        assert client.recv(len(CONTINUE), socket.MSG_WAITALL) == CONTINUE
        return client


def body_of(**fields: Any) -> bytes:
    """Body of a request, from German into English unless the fields say otherwise."""
    return json.dumps({"source": "de", "target": "en"} | fields).encode()


def answer_to(client: socket.socket) -> Answer:
    """Read the answer to the request that a client has sent."""
    response = http.client.HTTPResponse(client)
    response.begin()
    return Answer(response.status, response.headers, response.read())


def free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as listener:
        port: int = listener.getsockname()[1]
        return port


@contextmanager
def serving(*arguments: str) -> Iterator[tuple[Served, Any]]:
    """Run the command; yield its server and its process once the port is taken."""
    port = free_port()
    process = start_command(["serve", *arguments, *SET, "--port", str(port)])
    try:
        while True:
            try:
                socket.create_connection(("127.0.0.1", port)).close()
                break
            except ConnectionRefusedError:
                assert process.is_alive()
                threading.Event().wait(0.05)
        yield Served(port), process
    finally:
        process.terminate()
        process.join(SECONDS)
        process.kill()


def make_model(folder: Path, *, codes: Sequence[str] = (), **settings: Any) -> str:
    """Make a checkpoint; ``codes`` are its languages instead of the usual ones."""
    if codes:
        settings["languages"] = len(codes)
    spec = byte_spec(max_positions=40, **settings)
    model = tiny_model(spec.model_copy(update={"languages": tuple(codes) or spec.languages}))
    attend_to_source(model, factor=6)
    return str(make_checkpoint(folder, model))
