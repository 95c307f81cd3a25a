"""``mmnmt serve`` under eight clients: latency beside limits, throughput and memory.

The model has the shape of the demo's mixture of experts, over bytes, with initial weights: a
translation ends at its length limit, as many tokens as its source. Each of the clients sends a
sentence when it has the translation of its last one; for the throughput, each sends lists of
sentences. Offline search translates the same sentences in this process with the same threads. A
second server, whose lines join at the next batch and not in the next steps, answers the same
clients in turn with the first. Memory is that of a server of a tiny model, after a tenth of its
requests and after all.

    python tests/bench/serve.py [--quick] [--rounds N] [--json FILE]
"""

import http.client
import json
import os
import random
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Options, Row, beside, compare, interleaved, parse_options, report
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.model.settings import MoEConfig

ROOT = Path(__file__).resolve().parents[2]
CASES = {
    r"p(50|95) of a sentence, 8 clients(, against joining at the next batch)?": "milliseconds",
    r"2048 sentences at saturation, against (offline search|joining at the next batch)": (
        "milliseconds"
    ),
    r"memory after 100,000 requests, against after a tenth of them": "MiB",
}
CLIENTS = 8
LIST = 32
"""Sentences of a request that measures throughput."""
SENTENCES, QUICK_SENTENCES = 2048, 64
LIMITS = {"p50": 150.0, "p95": 400.0}
"""Largest latencies of a sentence, in milliseconds."""
THROUGHPUT_TARGET = 0.85
REQUESTS, QUICK_REQUESTS = 100_000, 100
"""Requests after which a server's memory is measured; the peer is its memory after a tenth."""
MEMORY_TARGET = 0.95
AT_NEXT_BATCH = """
from pipeline.machine import prepare_process
prepare_process()  # before torch is loaded
from pipeline.cli import command
from pipeline.decoding.translator import Stream
Stream._joins = lambda *_: False
command()
"""
"""The program, in which no line joins a running search."""
SEARCH = {"beam_size": 4, "tokens": 6000, "max_length_ratio": 1.0, "max_extra_length": 0}
WORDS = "in zwei Tagen vor drei Tagen am Montag um acht und heute".split()


def sentences(number: int) -> list[str]:
    """Phrases of 1 to 3 words: about as many bytes as the demo's have pieces of words."""
    dice = random.Random(1)
    return [" ".join(dice.choices(WORDS, k=dice.randint(1, 3))) for _ in range(number)]


def write_model(directory: Path) -> Path:
    """The shape of the demo's mixture of experts."""
    spec = byte_spec(
        moe=MoEConfig(num_experts=8, top_k=2, every=2),
        width=128,
        feed_forward_width=512,
        num_heads=4,
        max_positions=256,
    )
    return make_checkpoint(directory, tiny_model(spec))


@contextmanager
def server(
    checkpoint: Path, options: Options, *, program: Sequence[str] = ("-m", "pipeline")
) -> Iterator[tuple[int, int]]:
    """Run the command; yield its port and its process once it listens and its model is loaded."""
    with socket.create_server(("127.0.0.1", 0)) as free:
        port: int = free.getsockname()[1]
    settings = [
        word for name, value in SEARCH.items() for word in ("--set", f"decoding.{name}={value}")
    ]
    process = subprocess.Popen(
        [sys.executable, *program, "serve", checkpoint, *settings, "--port", str(port)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(options.threads)},
        stdout=subprocess.DEVNULL,
    )
    try:
        while True:
            try:
                translate(port, [["in"]])
                break
            except ConnectionRefusedError:
                assert process.poll() is None, "The server has ended."
                time.sleep(0.05)
        yield port, process.pid
    finally:
        process.terminate()
        process.wait()


def translate(port: int, texts: Sequence[str | list[str]]) -> list[float]:
    """Send one request after the other on one connection; return their seconds."""
    connection = http.client.HTTPConnection("127.0.0.1", port)
    seconds = []
    for text in texts:
        started = time.perf_counter()
        body = json.dumps({"q": text, "source": "de", "target": "en"})
        connection.request("POST", "/translate", body, {"Content-Type": "application/json"})
        answer = connection.getresponse()
        assert answer.status == 200, answer.read()
        answer.read()
        seconds.append(time.perf_counter() - started)
    connection.close()
    return seconds


def by_clients(port: int, texts: Sequence[str | list[str]]) -> list[float]:
    """Let the clients share requests; return the seconds of every request."""
    with ThreadPoolExecutor(CLIENTS) as clients:
        shares = clients.map(lambda n: translate(port, texts[n::CLIENTS]), range(CLIENTS))
        return [second for share in shares for second in share]


def latency_rows(port: int, port_at_next_batch: int, lines: list[str], rounds: int) -> list[Row]:
    """Return latencies beside their limits, and beside those with the next batch."""
    ports = {"next steps": port, "next batch": port_at_next_batch}
    milliseconds: dict[str, list[float]] = {name: [] for name in ports}
    for turn in range(rounds):
        for name, used in ports.items():
            seconds = by_clients(used, lines[turn::rounds])
            milliseconds[name] += [1000 * second for second in seconds]
    found = {name: statistics.quantiles(of, n=20) for name, of in milliseconds.items()}
    rows = []
    for name, place in (("p50", 9), ("p95", 18)):
        case = f"{name} of a sentence, {CLIENTS} clients"
        ours, theirs = (found[joining][place] for joining in ports)
        for what, peer in (("", LIMITS[name]), (", against joining at the next batch", theirs)):
            rows.append(beside(case + what, "milliseconds", ours, peer, target=1.0))
    return rows


def throughput_rows(
    port: int, port_at_next_batch: int, checkpoint: Path, lines: list[str], options: Options
) -> list[Row]:
    translator = Translator(
        open_artifact(checkpoint, kind="checkpoint"), DecodingConfig.model_validate(SEARCH)
    )
    jobs = [Job(Direction("de", "en"), number, line) for number, line in enumerate(lines)]
    lists = [lines[start : start + LIST] for start in range(0, len(lines), LIST)]
    seconds = interleaved(
        {
            "ours": lambda: by_clients(port, lists),
            "offline search": lambda: [
                translator.translate(batch) for batch in translator.cut(jobs)
            ],
            "joining at the next batch": lambda: by_clients(port_at_next_batch, lists),
        },
        rounds=options.rounds,
        warm_up=1,
    )
    case = f"{len(lines)} sentences at saturation"
    rows = []
    for peer, target in (("offline search", THROUGHPUT_TARGET), ("joining at the next batch", 1.0)):
        both = {name: seconds[name] for name in ("ours", peer)}
        rows += compare(both, case=case, target=target)
    return rows


def memory_row(port: int, process: int, requests: int) -> Row:
    texts = sentences(requests)
    mebibytes = []
    for part in (texts[: requests // 10], texts[requests // 10 :]):
        by_clients(port, part)
        status = Path(f"/proc/{process}/status").read_text(encoding="ascii")
        resident = next(line for line in status.splitlines() if line.startswith("VmRSS:"))
        mebibytes.append(int(resident.split()[1]) / 1024)
    before, after = mebibytes
    case = f"memory after {requests:,} requests, against after a tenth of them"
    return beside(case, "MiB", after, before, target=MEMORY_TARGET)


def main() -> None:
    options = parse_options("A server under load, against offline search.", rounds=5)
    lines = sentences(QUICK_SENTENCES if options.quick else SENTENCES)
    with tempfile.TemporaryDirectory() as folder:
        checkpoint = write_model(Path(folder) / "model")
        with (
            server(checkpoint, options) as (port, _),
            server(checkpoint, options, program=("-c", AT_NEXT_BATCH)) as (port_at_next_batch, _),
        ):
            ports = port, port_at_next_batch
            rows = latency_rows(*ports, lines, options.rounds)
            rows += throughput_rows(*ports, checkpoint, lines, options)
        tiny = make_checkpoint(Path(folder) / "tiny", tiny_model(byte_spec()))
        with server(tiny, options) as (port, process):
            rows.append(memory_row(port, process, QUICK_REQUESTS if options.quick else REQUESTS))
    report(rows, options, shapes=f"{CLIENTS} clients; the demo's mixture of experts, over bytes")


if __name__ == "__main__":
    main()
