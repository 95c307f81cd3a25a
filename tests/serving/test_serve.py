"""Tests of ``mmnmt serve`` from the outside: clients, load, hostility, its end, its page."""

import http.client
import json
import os
import random
import re
import resource
import signal
import socket
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator, Sequence
from functools import partial
from pathlib import Path
from typing import Any
from urllib.parse import urlencode

import pytest
from libretranslatepy import LibreTranslateAPI
from support.forked import run_command
from support.searched_models import TOKEN_MOE
from support.served import (
    JSON,
    SECONDS,
    SET,
    Served,
    answer_to,
    body_of,
    free_port,
    make_model,
    serving,
)
from support.tiny_models import EVERYWHERE

from pipeline import cli
from pipeline.decoding.text_input import without_line_breaks
from pipeline.errors import EXIT_USER_ERROR
from pipeline.serving.api import listen
from pipeline.serving.requests import SLOW_CONNECTIONS

pytestmark = pytest.mark.slow

FORM = "application/x-www-form-urlencoded"
PARTS = "multipart/form-data; boundary=x"
GERMAN = "Das ist ein Satz, der auf Deutsch geschrieben wurde, und niemand zweifelt daran."
FRENCH = "Ceci est une phrase écrite en français, et personne ne le met en doute aujourd'hui."
MANY_LINES = "ja\n" * 1500


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> str:
    return make_model(tmp_path_factory.mktemp("model") / "checkpoint")


def translated(checkpoint: str, lines: Sequence[str], *settings: str) -> list[str]:
    """Translate lines from German into English by ``mmnmt translate``."""
    command = ["translate", "--checkpoint", checkpoint, *SET, "--from", "de", "--to", "en"]
    command += [f"--set=decoding.{setting}" for setting in settings]
    done = run_command(command, given="".join(f"{line}\n" for line in lines))
    assert done.returncode == 0, done.stderr
    return done.stdout.split("\n")[:-1]


@pytest.fixture(scope="module")
def offline(checkpoint: str) -> Callable[..., list[str]]:
    return partial(translated, checkpoint)


@pytest.fixture(scope="module")
def served(checkpoint: str, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    """A server of two systems, the second of which knows two languages more."""
    wide = make_model(tmp_path_factory.mktemp("wide") / "wide", languages=6)
    with serving(f"narrow={checkpoint}", wide, "--max-characters", "9000") as (running, _):
        yield running


# ---------------------------------------------------------------- clients


def test_the_client_of_libretranslate_works_unchanged(
    served: Served, offline: Callable[[Sequence[str]], list[str]]
) -> None:
    client = LibreTranslateAPI(served.address)
    assert client.translate(GERMAN, "de", "en") == offline([GERMAN])[0]
    assert client.detect(GERMAN)[0]["language"] == "de"
    languages = {one["code"]: one for one in client.languages()}
    assert languages["de"]["name"] == "German"
    assert languages["de"]["nativeName"] == "Deutsch"
    assert "en" in languages["de"]["targets"]


def random_lines(number: int) -> list[str]:
    """Short lines, some of which are too long for the model."""
    dice = random.Random(1)
    words = "Haus Baum, über die Straße. Ein 12 sehr schöner Tag! x 你好".split()
    lengths = [dice.choice([1, 1, 2, 2, 3, 4, 12]) for _ in range(number)]
    return [" ".join(dice.choices(words, k=length)) for length in lengths]


def by_clients(served: Served, lines: Sequence[str]) -> list[str]:
    """Return translations of lines that eight clients ask for at random times."""
    found: dict[int, str] = {}

    def client(number: int) -> None:
        waits = random.Random(number)
        for line in range(number, len(lines), 8):
            threading.Event().wait(waits.random() / 50)
            found[line] = served.post(q=lines[line]).json()["translatedText"]

    threads = [threading.Thread(target=client, args=(number,)) for number in range(8)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return [found[number] for number in range(len(lines))]


def test_translations_are_those_of_the_command_whatever_the_load(
    served: Served, offline: Callable[[Sequence[str]], list[str]]
) -> None:
    lines, before = random_lines(400), served.metrics()
    assert by_clients(served, lines) == offline(lines)
    after = served.metrics()
    lines_per_batch = [
        after[name] - before.get(name, 0) for name in ("mmnmt_lines_total", "mmnmt_batches_total")
    ]
    assert lines_per_batch[0] > lines_per_batch[1]


MODULES = {"kind": "low_rank", "rank": 3, "within": EVERYWHERE}


@pytest.mark.parametrize(
    ("model", "precision"),
    [
        ({"moe": TOKEN_MOE}, "bfloat16"),
        ({"moe": TOKEN_MOE}, "int8"),
        ({"model": {"language_modules": MODULES}}, "float32"),
    ],
    ids=["experts-bfloat16", "experts-int8", "language-modules"],
)
def test_translations_of_other_models_are_those_of_the_command(
    tmp_path: Path, model: dict[str, Any], precision: str
) -> None:
    checkpoint, lines = make_model(tmp_path / "model", **model), random_lines(60)
    setting = f"precision={precision}"
    with serving(checkpoint, "--set", f"decoding.{setting}") as (served, _):
        assert by_clients(served, lines) == translated(checkpoint, lines, setting)


def test_a_text_keeps_its_lines_and_a_list_its_texts(
    served: Served, offline: Callable[[Sequence[str]], list[str]]
) -> None:
    long = "Ein Satz, der viel länger ist, als das Modell erlaubt. Ja!"
    lines = ["Ein Haus.", "", " \u200e\ufeff", long]
    expected = offline(lines)
    assert expected[1:3] == ["", ""]
    answer = served.post(q=["\r\n".join(lines), lines[0]]).json()
    assert answer == {"translatedText": ["\n".join(expected), expected[0]]}


def test_alternatives_differ_and_leave_the_translation_as_it_is(
    served: Served, offline: Callable[[Sequence[str]], list[str]]
) -> None:
    answer = served.post(q="Ein Haus.", alternatives=9).json()
    assert answer["translatedText"] == offline(["Ein Haus."])[0]
    variants = [answer["translatedText"], *answer["alternatives"]]
    assert 2 <= len(variants) == len(set(variants)) <= 3
    assert served.post(q="Ein Haus.", alternatives=1).json()["alternatives"] == variants[1:2]


def test_details_are_those_of_the_command(
    served: Served, offline: Callable[..., list[str]]
) -> None:
    answer = served.post(q=f"Ein Haus.\n\n{GERMAN}", details=True).json()
    first, none, second = answer["details"]
    assert none is None
    texts = [without_line_breaks(line["text"]) for line in (first, second)]
    assert answer["translatedText"] == "\n\n".join(texts)
    found = offline(["Ein Haus.", GERMAN], "alignments=true", "word_scores=true", "n_best=3")
    for ours, line in zip((first, second), found, strict=True):
        theirs = json.loads(line)
        assert ours["words"]
        assert ours["alignment"]
        assert rounded(ours) == rounded(theirs)


def rounded(value: Any) -> Any:
    """A JSON value whose scores are rounded: batches of other sizes round differently."""
    match value:
        case dict():
            return {name: rounded(one) for name, one in value.items()}
        case list():
            return [rounded(one) for one in value]
        case float():
            return pytest.approx(value, abs=2e-4)
    return value


def test_a_translation_has_the_phrases_that_a_request_asks_for(served: Served) -> None:
    plain = served.post(q="Ein Haus.").json()["translatedText"]
    found = served.post(q=["Ein Haus.", "Haus"], phrases=["qx", "Zy"]).json()["translatedText"]
    assert all(phrase in text for text in found for phrase in ("qx", "Zy"))
    assert served.post(q="Ein Haus.").json()["translatedText"] == plain


def test_the_source_language_is_detected_on_request(served: Served) -> None:
    answer = served.post(q=GERMAN, source="auto").json()
    detected = answer.pop("detectedLanguage")
    assert detected["language"] == "de"
    assert 90 < detected["confidence"] <= 100
    assert answer == served.post(q=GERMAN).json()
    assert served.post(q=GERMAN, source="auto", target="de").json()["translatedText"] == GERMAN


def test_a_text_that_tells_no_language_is_english_at_confidence_0(served: Served) -> None:
    for text in ("12345", "…", " "):
        answer = served.post(q=text, source="auto", target="de").json()
        assert answer.pop("detectedLanguage") == {"confidence": 0.0, "language": "en"}
        assert answer == served.post(q=text, source="en", target="de").json()
        ranked = served.ask("/detect", json.dumps({"q": text}).encode(), kind=JSON).json()
        assert ranked == [{"confidence": 0.0, "language": "en"}]


def test_every_text_of_a_list_has_its_own_language(served: Served) -> None:
    texts = [GERMAN, FRENCH, "12"]
    several = served.post(q=texts, source="auto").json()
    codes = [one["language"] for one in several["detectedLanguage"]]
    assert codes[:2] == ["de", "fr"]
    assert several["translatedText"] == [
        served.post(q=text, source=code).json()["translatedText"]
        for text, code in zip(texts, codes, strict=True)
    ]
    several = served.post(q=["12", GERMAN], source="auto").json()
    assert [one["language"] for one in several["detectedLanguage"]] == ["de", "de"]


def test_forms_and_queries_are_answered_as_json_is(served: Served) -> None:
    fields = {"q": "Ein schönes Haus.", "source": "deu", "target": "en", "format": "text"}
    parts = "".join(
        f'--x\r\nContent-Disposition: form-data; name="{name}"\r\n\r\n{value}\r\n'
        for name, value in fields.items()
    )
    expected = served.post(**fields).json()
    for kind in (PARTS, 'multipart/form-data; boundary="x"; charset=utf-8', f"{PARTS};a=b"):
        form = served.ask("/translate", f"{parts}--x--\r\n".encode(), kind=kind)
        assert form.json() == expected
    for given in (urlencode(fields), "&".join(map("=".join, fields.items()))):  # as by curl -d
        assert served.ask("/translate", given.encode(), kind=FORM).json() == expected
    assert served.ask(f"/translate?{urlencode(fields)}", b"", kind="").json() == expected
    query = urlencode({"target": fields.pop("target")})
    both = served.ask(f"/translate?{query}", urlencode(fields).encode(), kind=FORM)
    assert both.json() == expected


def test_detection_tells_the_scripts_of_a_model_apart_and_regions_find_them(tmp_path: Path) -> None:
    codes = ["de", "en", "zh", "zh_Hant"]
    simplified, traditional = "这个国家的经济发展很快。", "這個國家的經濟發展很快。"
    found: dict[str, str] = {}
    with serving(make_model(tmp_path / "model", codes=codes)) as (served, _):
        for text, code, region in ((simplified, "zh", "zh_CN"), (traditional, "zh_Hant", "zh_HK")):
            answer = served.post(q=text, source="auto").json()
            assert answer["detectedLanguage"]["language"] == code
            found[region], found[code] = (
                served.post(q="Ja.", target=target).json()["translatedText"]
                for target in (region, code)
            )
    assert found["zh_CN"] == found["zh"] != found["zh_Hant"] == found["zh_HK"]


def test_the_first_system_with_the_direction_translates_unless_one_is_named(
    served: Served,
) -> None:
    settings = served.ask("/frontend/settings").json()
    assert settings["systems"] == ["narrow", "wide"]
    assert settings["language"]["target"] == {"code": "en", "name": "English"}
    assert settings["language"]["source"] == {"code": "de", "name": "German"}
    codes = {one["code"] for one in served.ask("/languages").json()}
    assert len(codes) == 6
    first, named = (served.post(q="ja", **more).json() for more in ({}, {"system": "narrow"}))
    assert first == named != served.post(q="ja", system="wide").json()
    (further, *_) = sorted(codes - {"de", "en", "fr", "ru"})
    assert served.post(q="ja", target=further).status == 200
    assert served.post(q="ja", target=further, system="narrow").status == 400
    assert "'wide'" in served.post(q="ja", system="wde").refusal()


def test_the_page_asks_no_other_host(served: Served) -> None:
    answer = served.ask("/")
    assert answer.status == 200
    assert "default-src 'none'" in answer.headers["Content-Security-Policy"]
    text = answer.body.decode()
    assert not re.search(r"https?://|@import|\bsrc=", text)
    assert '<div id="mirror" dir="auto"' in text


# ---------------------------------------------------------------- hostility

DISPOSITION = b"Content-Disposition: form-data"
FORM_WITHOUT_TEXT = b"".join(
    b'--x\r\nContent-Disposition: form-data; name="%s"\r\n%s' % part
    for part in [(b"source", b"\r\nde\r\n"), (b"target", b"\r\nen\r\n"), (b"q", b"%s--x--\r\n")]
)
"""A form whose last part has no text, or a longer head than the server reads, in place of %s."""
BAD_TEXTS = (b'"\xff"', b'"\\ud800"', b"1", b"[]")
BAD = (
    *(b'"alternatives": -1', b'"alternatives": true', b'"alternatives": "1_0"'),
    *(b'"format": "html"', b'"details": "perhaps"', b'"phrases": [1]', b'"phrases": [""]'),
    b'"phrases": "%s"' % (b"a" * 90),
)
"""Fields of a request that are not what they may be."""


@pytest.mark.parametrize(
    ("status", "body", "kind"),
    [
        (400, b"", JSON),
        (400, b"{", JSON),
        (400, b"[1]", JSON),
        (400, b"[" * 50_000, JSON),
        *((400, b'{"source": "de", "target": "en", "q": %s}' % q, JSON) for q in BAD_TEXTS),
        (400, b'{"q": "ja", "target": "en"}', JSON),
        (400, b'{"q": "ja", "source": ["de"], "target": "en"}', JSON),
        (400, b'{"q": "ja", "source": "de", "target": "xx"}', JSON),
        (400, b'{"q": "ja", "source": "German", "target": "en"}', JSON),
        *((400, b'{"source": "de", "target": "en", "q": "ja", %s}' % one, JSON) for one in BAD),
        (400, b"q=%ff&source=de&target=en", FORM),
        (400, b"q=\xff&source=de&target=en", FORM),
        (400, b"q=ja&q=nein&source=de&target=en", FORM),
        (413, b'{"q": "%s", "source": "de", "target": "en"}' % (b"a" * 9001), JSON),
        (413, b" " * 200_000, JSON),
        (415, b"ja", "text/plain"),
        (415, b"ja", "application/octet-stream"),
        (400, b"", PARTS),
        (400, b"--x\r\n\r\nja\r\n--x--\r\n", PARTS),
        (400, b"--y\r\n\r\nja\r\n--y--\r\n", PARTS),
        (400, b"--x\r\n" * 5_000, PARTS),
        (400, b"--x\r\n%s; name*\r\n\r\nja\r\n--x--" % DISPOSITION, PARTS),
        (400, b"--x\r\n%s%s\r\n\r\nja\r\n--x--" % (DISPOSITION, b";" * 60_000), PARTS),
        (400, b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\nja\r\n', PARTS),
        (400, FORM_WITHOUT_TEXT % b"", PARTS),
        (400, FORM_WITHOUT_TEXT % (b"X: %s\r\n\r\nja\r\n" % (b"a" * 1024)), PARTS),
        (400, b"ja", "multipart/form-data"),
        (400, b'--x\r\nContent-Disposition: form-data; name="q"\r\n\r\n\xff\r\n--x--', PARTS),
    ],
)
def test_what_cannot_be_translated_is_answered_in_one_sentence(
    served: Served, status: int, body: bytes, kind: str
) -> None:
    answer = served.ask("/translate", body, kind=kind)
    assert answer.status == status
    assert answer.refusal()


@pytest.mark.parametrize("number", [10**9, -1])
def test_a_number_of_alternatives_beyond_the_limits_is_answered_with_them(
    served: Served, number: int
) -> None:
    answer = served.ask("/translate", body_of(q="ja", alternatives=number))
    assert answer.refusal().endswith("Send a whole number from 0 to 999,999,999.")


@pytest.mark.parametrize(
    ("method", "path", "status", "said"),
    [
        ("GET", "/x", 404, "the page of this server is at /"),
        ("PUT", "/translate", 405, "/translate does not take PUT. Send POST"),
        ("DELETE", "/health", 405, "/health does not take DELETE. Send"),
    ],
)
def test_another_endpoint_is_refused_in_one_sentence(
    served: Served, method: str, path: str, status: int, said: str
) -> None:
    answer = served.ask(path, method=method)
    assert answer.status == status
    assert said in answer.refusal()


def test_a_body_in_chunks_is_read_up_to_its_limit(served: Served) -> None:
    answer = served.ask("/translate", iter([b" " * 50_000] * 4))
    assert answer.status == 413
    assert answer.refusal()
    body = body_of(q="ja")
    chunks = iter([body[:9], body[9:]])
    assert served.ask("/translate", chunks).json() == served.post(q="ja").json()


@pytest.mark.parametrize(
    "sent",
    [
        b"ja\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost x\r\n\r\n",
        b"GET /\xff HTTP/1.1\r\nHost: x\r\n\r\n",
        b"POST /detect HTTP/1.1\r\nHost: x\r\nTransfer-Encoding: chunked\r\n\r\nja\r\n",
        b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 5\r\n"
        b"Transfer-Encoding: chunked\r\n\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: x\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\ntransfer-encoding: chunked\r\n"
        b"content-length: 0\r\n\r\n0\r\n\r\n",
        b"GET /health HTTP/1.1\r\nHost: x\r\nX: " + b"x" * 300_000,
        b"ja\r\n\r\n" + b"x" * 1_000_000,
    ],
    ids=[
        *("words", "header", "path", "chunk", "two lengths", "two lengths, the other first"),
        *("long header", "much after words"),
    ],
)
def test_malformed_http_is_answered_in_one_sentence(served: Served, sent: bytes) -> None:
    with socket.create_connection(("127.0.0.1", served.port), timeout=SECONDS) as client:
        client.sendall(sent)
        answer = answer_to(client)
        assert not client.recv(1)  # nothing of what follows is taken for a request
    assert answer.status == 400
    assert answer.refusal()


@pytest.fixture(scope="module")
def small(checkpoint: str) -> Iterator[Served]:
    """A server that takes one request."""
    limits = ["--max-requests", "1", "--max-characters", "9000"]
    with serving(checkpoint, *limits) as (running, _):
        yield running


def test_a_full_server_refuses_until_a_client_hangs_up(small: Served) -> None:
    client = small.begin(MANY_LINES)
    small.wait_for_open_requests(1)
    answer = small.post(q="ja")
    assert answer.status == 429
    assert answer.headers["Retry-After"] == "1"
    assert answer.refusal()
    client.close()
    small.wait_for_open_requests(0)
    assert small.post(q="ja").status == 200
    assert small.metrics()["mmnmt_lines_total"] < MANY_LINES.count("\n")


def test_clients_that_stall_give_way_to_others(small: Served) -> None:
    body = body_of(q="ja")
    clients = [small.stall(len(body)) for _ in range(1 + SLOW_CONNECTIONS + 20)]
    for _ in range(3):
        assert small.post(q="ja").status == 200
    for client in clients[:20]:
        answer = answer_to(client)
        assert answer.status == 503
        assert answer.refusal()
    clients[-1].sendall(body)
    assert answer_to(clients[-1]).status == 200
    for client in clients:
        client.close()


def test_a_client_that_does_not_read_its_answer_keeps_no_place(small: Served) -> None:
    lines = 300
    before = small.metrics().get("mmnmt_lines_total", 0)
    client = small.begin("ja\n" * lines, details=True, receives=4096)
    while small.metrics().get("mmnmt_lines_total", 0) < before + lines:
        threading.Event().wait(0.01)
    small.wait_for_open_requests(0)
    honest = small.post(q="ja").json()["translatedText"]
    found = answer_to(client).json()
    assert found["translatedText"] == f"{honest}\n" * lines
    assert len(found["details"]) == lines + 1
    client.close()


@pytest.fixture(scope="module")
def impatient(checkpoint: str) -> Iterator[Served]:
    """A server that gives a request one second."""
    with serving(checkpoint, "--max-seconds", "1") as (running, _):
        yield running


def test_a_client_that_sends_nothing_is_answered_when_its_time_is_over(impatient: Served) -> None:
    client = socket.create_connection(("127.0.0.1", impatient.port), timeout=SECONDS)
    head = f"POST /translate HTTP/1.1\r\nHost: x\r\nContent-Type: {JSON}\r\n"
    client.sendall(f"{head}Content-Length: 9\r\n\r\n".encode())
    assert client.recv(12) == b"HTTP/1.1 504"
    client.close()


def test_a_client_that_neither_ends_its_request_nor_reads_is_cut_off(impatient: Served) -> None:
    """In its head, in its body, or before its answers."""
    clients = []
    for sent in (
        b"GET / HTTP/1.1\r\nX: ",
        b"POST /detect HTTP/1.1\r\nHost: x\r\nContent-Length: 9000\r\n\r\n",
        b"GET / HTTP/1.1\r\nHost: x\r\n\r\n" * 3000,
    ):
        clients.append(client := socket.socket())
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
        client.connect(("127.0.0.1", impatient.port))
        client.sendall(sent)
    pause = threading.Event()
    for client in clients:
        with pytest.raises(ConnectionError):
            for _ in range(300):
                client.send(b"x")
                pause.wait(0.1)
        client.close()


def test_only_requests_with_the_key_are_translated(checkpoint: str, tmp_path: Path) -> None:
    (tmp_path / "key").write_text("geheim\n", encoding="utf-8-sig")  # as some editors do
    with serving(checkpoint, "--key-file", str(tmp_path / "key")) as (served, _):
        assert served.ask("/frontend/settings").json()["keyRequired"]
        for given in ({}, {"api_key": "geheime"}):
            answer = served.post(q="ja", **given)
            assert answer.status == 403
            assert answer.refusal()
        client = LibreTranslateAPI(served.address, api_key="geheim")
        assert client.translate("ja", "de", "en") == served.post(
            q="ja", api_key="geheim"
        ).json().get("translatedText")


# ---------------------------------------------------------------- its end


def test_sigterm_ends_the_server_after_the_open_requests_and_refuses_others(
    checkpoint: str,
) -> None:
    with serving(checkpoint, "--max-characters", "9000") as (served, process):
        body = body_of(q="ja")
        long, late = served.begin(MANY_LINES), served.stall(len(body))
        served.wait_for_open_requests(1)
        process.terminate()
        pause = threading.Event()
        with pytest.raises(ConnectionRefusedError):
            while True:  # with a pause, so that the late one does not give way to many others
                socket.create_connection(("127.0.0.1", served.port)).close()
                pause.wait(0.1)
        late.sendall(body)
        assert answer_to(late).status == 200
        answer = answer_to(long)
        assert answer.status == 200
        translated = answer.json()["translatedText"]
        assert translated.count("\n") == MANY_LINES.count("\n")
        process.join(SECONDS)
        assert process.exitcode == 0


@pytest.mark.parametrize("first", [signal.SIGINT, signal.SIGTERM])
def test_ctrl_c_while_the_server_ends_answers_the_open_requests_in_one_sentence(
    checkpoint: str, first: signal.Signals
) -> None:
    with serving(checkpoint, "--max-characters", "9000") as (served, process):
        stalled = served.stall(100)
        os.kill(process.pid, first)
        with pytest.raises(ConnectionRefusedError):
            while True:
                socket.create_connection(("127.0.0.1", served.port)).close()
                threading.Event().wait(0.1)
        os.kill(process.pid, signal.SIGINT)
        answer = answer_to(stalled)
        assert (answer.status, answer.refusal()[:22]) == (503, "The server was stopped")
        process.join(SECONDS)
        assert process.exitcode == 130


@pytest.mark.parametrize(("log_name", "rounds"), [("log", 6), ("/dev/full", 1)])
def test_connections_that_are_left_a_full_disk_and_a_kill_leave_each_request_at_most_one_answer(
    checkpoint: str, tmp_path: Path, log_name: str, rounds: int
) -> None:
    """The log says nothing of connections beyond the limit of open files, of which there are few.

    1,680 are opened, and 400 may be open. More than asyncio accepts at once by itself wait while
    the server is stopped.
    """
    port, connections = free_port(), 280
    limits = resource.getrlimit(resource.RLIMIT_NOFILE)
    resource.setrlimit(resource.RLIMIT_NOFILE, (limits[1], limits[1]))
    if limits[1] != resource.RLIM_INFINITY:
        rounds = min(rounds, limits[1] // connections - 2)
    command = [sys.executable, "-m", "pipeline", "serve", checkpoint, *SET, "--port", str(port)]
    with Path("/dev/full").open("w") as full, (tmp_path / log_name).open("w") as log:
        process = subprocess.Popen(command, stdout=full, stderr=log)
    served, left = Served(port), []
    try:
        while True:
            try:
                assert served.ask("/health").status == 200
                break
            except ConnectionRefusedError:
                assert process.poll() is None
                threading.Event().wait(0.05)
        resource.prlimit(process.pid, resource.RLIMIT_NOFILE, (400, 400))
        for _ in range(rounds):
            process.send_signal(signal.SIGSTOP)
            left += [socket.create_connection(("127.0.0.1", port)) for _ in range(connections)]
            process.send_signal(signal.SIGCONT)
            assert served.post(q="ja").status == 200
        assert served.metrics()["mmnmt_lines_total"] == rounds
        long = served.begin("ja\n" * 400)
        served.wait_for_open_requests(1)
    finally:
        process.kill()
        process.wait()
        for client in left:
            client.close()
        resource.setrlimit(resource.RLIMIT_NOFILE, limits)
    with pytest.raises((ConnectionError, http.client.HTTPException)):
        answer_to(long)
    assert log_name == "/dev/full" or (tmp_path / log_name).read_text(encoding="utf-8") == ""


def test_only_this_machine_can_ask_unless_the_command_says_otherwise(served: Served) -> None:
    other = "127.0.0.2"  # leads to whatever listens on all addresses
    with listen("0.0.0.0", 0) as open_to_all:
        socket.create_connection((other, open_to_all.getsockname()[1])).close()
    with pytest.raises(ConnectionRefusedError):
        socket.create_connection((other, served.port))


def test_what_no_server_can_use_is_refused_before_any_request(
    checkpoint: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    with socket.create_server(("127.0.0.1", 0)) as other:
        port = other.getsockname()[1]
        assert cli.main(["serve", checkpoint, "--port", str(port)]) == EXIT_USER_ERROR
    assert capsys.readouterr().err == (
        f"mmnmt serve: Port {port} of 127.0.0.1 cannot be used (Address already in use). Name "
        "another --port or --host.\n"
    )
    for host in ("", "ü..b", "ü" * 64):
        assert cli.main(["serve", checkpoint, "--port", "0", "--host", host]) == EXIT_USER_ERROR
        said = capsys.readouterr().err
        assert said.endswith("cannot be used (it is no address). Name another --port or --host.\n")
    layer = ["--set", "decoding.alignment_layer=9", "--port", "0"]
    assert cli.main(["serve", checkpoint, *layer]) == EXIT_USER_ERROR
    assert "decoding.alignment_layer is 9, and the model has" in capsys.readouterr().err
    for text in ("", " \n", "a\nb", "a" * 201, None):
        path = tmp_path / "key"
        path.write_text(text or "", encoding="utf-8")
        key = "/dev/full" if text is None else str(path)  # a device has no end
        assert cli.main(["serve", checkpoint, "--key-file", key]) == EXIT_USER_ERROR
        assert "does not have one line of at most 200 characters" in capsys.readouterr().err


def test_a_missing_package_is_named_with_its_extra(
    checkpoint: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.delitem(sys.modules, "pipeline.serving.requests", raising=False)
    monkeypatch.setitem(sys.modules, "uvicorn", None)  # as Python marks what cannot be imported
    assert cli.main(["serve", checkpoint]) == EXIT_USER_ERROR
    assert capsys.readouterr().err.endswith("Run pip install 'mmnmt[serve]'.\n")
