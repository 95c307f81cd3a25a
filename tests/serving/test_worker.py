"""Tests of pipeline/serving/worker.py: order, failures, cancelled lines, its end, who asks it."""

import asyncio
import gc
import json
import threading
import weakref
from collections.abc import MutableMapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from support.served import make_model
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.decoding import grid_search
from pipeline.decoding.beam_search import Search
from pipeline.decoding.hypotheses import Translation
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Stream, Translator
from pipeline.errors import ConfigError
from pipeline.kernels.cpu import sparing_loops
from pipeline.serving.api import Api
from pipeline.serving.requests import ServerLimits
from pipeline.serving.worker import STEPS, System, Systems, Worker

DECODING = DecodingConfig(beam_size=2, max_length_ratio=0.3, max_extra_length=6)

SECONDS = 60.0
"""Time limit of a test's wait."""


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    model = tiny_model(byte_spec(max_positions=40))
    made = make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", model)
    return open_artifact(made, kind="checkpoint")


@pytest.fixture(scope="module")
def system(checkpoint: Artifact) -> System:
    return System.load("one", checkpoint, decoding=DECODING)


def test_a_choice_by_minimum_bayes_risk_is_among_as_many_as_the_recipe_says(
    checkpoint: Artifact,
) -> None:
    decoding = DecodingConfig(beam_size=6, n_best=2, choose="mbr", max_extra_length=6)
    served = System.load("one", checkpoint, decoding=decoding).translator
    jobs = [Job(Direction("de", "en"), line, "Haus " * line) for line in range(8)]
    assert served.translate(jobs) == Translator(checkpoint, decoding).translate(jobs)


def test_lines_that_are_translated_on_grids_are_translated_as_by_lists(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    jobs = [Job(Direction("de", "en"), line, "Haus " * (1 + line % 7)) for line in range(20)]
    expected = system.translator.translate(jobs)
    monkeypatch.setattr(grid_search, "suits_grids", lambda *_: True)  # as on a GPU
    with sparing_loops():
        stream, found = Stream(system.translator), dict[int, Hypothesis]()
        waiting = jobs
        while waiting or stream.is_busy:
            chosen = stream.choose(waiting, system.translator.lengths(waiting))
            stream.add([waiting[index] for index in chosen])
            waiting = [job for index, job in enumerate(waiting) if index not in chosen]
            found |= {job.line: hypothesis for job, hypothesis in stream.step()}
    assert [found[job.line].text for job in jobs] == [one.text for one in expected]
    assert [found[job.line].score for job in jobs] == pytest.approx(
        [one.score for one in expected], abs=2e-4
    )


def test_lines_that_are_served_through_a_pivot_are_those_of_the_translator(
    checkpoint: Artifact,
) -> None:
    pivot, *others = ("de", "en", "fr")
    decoding = DECODING.model_copy(update={"pivot": pivot})
    served = System.load("one", checkpoint, decoding=decoding)
    texts = ["Haus", "", "Haus und Hof"]
    jobs = [Job(Direction(*others), line, text) for line, text in enumerate(texts)]
    expected = served.translator.translate(jobs)
    assert expected != Translator(checkpoint, DECODING).translate(jobs)
    stream = Stream(served.translator)
    for job in jobs:
        stream.add([job])
    assert [hypothesis.text for _, hypothesis in stream.step()] == [one.text for one in expected]


@pytest.mark.parametrize("asked", ["en", "fra"])
def test_a_server_translates_into_the_targets_of_the_recipe_only(
    checkpoint: Artifact, asked: str
) -> None:
    decoding = DECODING.model_copy(update={"targets": (asked,)})
    served = System.load("one", checkpoint, decoding=decoding)
    (target,) = served.targets
    assert target == {"en": "en", "fra": "fr"}[asked]
    assert served.direction("de", asked).target == target
    with pytest.raises(ConfigError, match=f"one does not translate into de: .* names {asked}"):
        served.direction(target, "de")


@pytest.mark.parametrize("asked", ["my", "xx"])
def test_targets_that_a_served_model_does_not_have_are_refused(
    checkpoint: Artifact, asked: str
) -> None:
    decoding = DECODING.model_copy(update={"targets": (asked,)})
    with pytest.raises(ConfigError, match=f"decoding.targets names '{asked}', and one has no such"):
        System.load("one", checkpoint, decoding=decoding)


def test_a_line_that_fails_leaves_the_others_of_its_batch(system: System) -> None:
    sizes: list[int] = []
    worker = Worker(lambda _, lines: sizes.append(lines))
    known, unknown = Direction("de", "en"), Direction("de", "xx")
    results = [worker.submit(system, one, "Haus") for one in (known, unknown, known) * 5]
    for number, result in enumerate(results):
        if number % 3 == 1:
            with pytest.raises(ConfigError):
                result.result()
        else:
            assert result.result() == results[0].result()
    worker.close()
    assert sum(sizes) == 10


def test_a_line_that_cannot_be_tokenized_leaves_the_others(system: System) -> None:
    worker = Worker(lambda *_: None)
    direction = Direction("de", "en")
    texts = ["Haus " * 50, "Haus", "\ud800", "Haus"]
    _, first, broken, last = (worker.submit(system, direction, text) for text in texts)
    with pytest.raises(UnicodeError):
        broken.result(SECONDS)
    assert first.result(SECONDS).text == last.result(SECONDS).text
    worker.close()


def test_lines_that_were_cancelled_are_not_translated(system: System) -> None:
    sizes: list[int] = []
    joined, cancelled = threading.Event(), threading.Event()

    def on_batch(_: object, lines: int) -> None:
        sizes.append(lines)
        joined.set()
        cancelled.wait(SECONDS)

    worker = Worker(on_batch)
    direction = Direction("de", "en")
    first = worker.submit(system, direction, "Haus")
    joined.wait(SECONDS)
    assert all(worker.submit(system, direction, "Haus").cancel() for _ in range(500))
    cancelled.set()
    assert worker.submit(system, direction, "Ja").result(SECONDS).text
    assert first.result(SECONDS).text
    worker.close()
    assert sum(sizes) == 2


@pytest.fixture
def searched(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Number of sentences of every step of a search."""
    counts: list[int] = []
    step = Search.step

    def counted(search: Search) -> dict[int, list[Translation]]:
        counts.append(len(search.active))
        return step(search)

    monkeypatch.setattr(Search, "step", counted)
    return counts


@pytest.mark.parametrize("phrases", [(), ("qx",)], ids=["joining", "in batches"])
def test_lines_that_are_cancelled_while_they_run_leave_the_search(
    system: System, searched: list[int], phrases: tuple[str, ...]
) -> None:
    direction, text = Direction("de", "en"), "Ja " * 12
    (alone,) = system.translator.translate([Job(direction, 0, text, required=phrases)])
    searched.clear()
    joined, submitted = threading.Event(), threading.Event()
    results: list[Future[Hypothesis]] = []

    def on_batch(_: object, lines: int) -> None:
        joined.set()
        submitted.wait(SECONDS)
        for result in results[:-1] if lines == 7 else ():
            assert result.cancel()

    worker = Worker(on_batch)
    first = worker.submit(system, direction, "Haus", phrases=phrases)
    joined.wait(SECONDS)
    results += [worker.submit(system, direction, text, phrases=phrases) for _ in range(7)]
    submitted.set()
    assert first.result(SECONDS).text
    assert results[-1].result(SECONDS).text == alone.text
    worker.close()
    assert max(searched) >= 7
    assert sum(count > 2 for count in searched) <= 1 + STEPS
    assert searched[-1] == 1


def test_a_search_that_cannot_drop_lines_leaves_the_others(
    system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    direction, text = Direction("de", "en"), "Ja " * 12
    (alone,) = system.translator.translate([Job(direction, 0, text)])
    joined, cancelled = threading.Event(), threading.Event()

    def out_of_memory(_: Stream, numbers: set[int]) -> None:
        if numbers:
            raise MemoryError

    def on_batch(*_: object) -> None:
        joined.set()
        cancelled.wait(SECONDS)

    monkeypatch.setattr(Stream, "drop", out_of_memory)
    worker = Worker(on_batch)
    with worker._changed:  # so that both join together
        results = [worker.submit(system, direction, text) for _ in range(2)]
    joined.wait(SECONDS)
    assert results[0].cancel()
    cancelled.set()
    assert results[1].result(SECONDS).text == alone.text
    assert worker.submit(system, direction, text).result(SECONDS).text == alone.text
    assert worker.is_alive
    worker.close()


@pytest.mark.parametrize("failing", [1, 3])  # the step with which lines join, and a later one
def test_the_memory_of_a_search_that_fails_is_free_for_its_lines(
    failing: int, system: System, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It may be most of a GPU's, and garbage is collected after many searches only."""
    direction, text = Direction("de", "en"), "Ja " * 12
    (alone,) = system.translator.translate([Job(direction, 0, text)])
    made, held, step = weakref.WeakSet[Search](), list[int](), Search.step

    def fails_once(search: Search) -> dict[int, list[Translation]]:
        made.add(search)
        held.append(len(made))
        if len(held) == failing:
            raise torch.OutOfMemoryError
        return step(search)

    monkeypatch.setattr(Search, "step", fails_once)
    worker = Worker(lambda *_: None)
    gc.disable()
    try:
        with worker._changed:  # so that both join together
            results = [worker.submit(system, direction, text) for _ in range(2)]
        assert [one.result(SECONDS).text for one in results] == [alone.text] * 2
    finally:
        gc.enable()
        worker.close()
    assert {*held} == {1}


def test_the_end_of_a_worker_cancels_what_waits(system: System) -> None:
    worker = Worker(lambda *_: None)
    results = [worker.submit(system, Direction("de", "en"), "Haus " * 50) for _ in range(2000)]
    worker.close()
    assert all(result.done() for result in results)
    assert results[-1].cancelled()


def test_lines_that_join_a_running_search_are_translated_as_alone(system: System) -> None:
    directions = Direction("de", "en"), Direction("en", "fr")
    words = "Haus Baum Wald ja".split()
    texts = [" ".join(words[: 1 + n % 4]) * (1 + n % 3) for n in range(25)]
    texts[5] = "Ein Satz, der zu lang ist. " * 4
    texts[24] = texts[5] * 20
    jobs = [Job(directions[n % 2], n, text) for n, text in enumerate(texts)]
    stream, found, joined = Stream(system.translator), dict[int, Hypothesis](), 0
    for start in range(0, 24, 3):
        joined += stream.is_busy
        stream.add(jobs[start : start + 3])
        found |= {job.line: hypothesis for job, hypothesis in stream.step()}
    assert joined == 7
    assert stream.choose(jobs[:1], [DECODING.tokens]) == []
    while stream.is_busy:
        found |= {job.line: hypothesis for job, hypothesis in stream.step()}
    stream.add(jobs[24:])  # too long for the budget of a search
    found |= {job.line: hypothesis for job, hypothesis in stream.step()}
    for job in jobs:
        (alone,) = system.translator.translate([job])
        assert found[job.line].text == alone.text
        assert found[job.line].split == alone.split
    assert found[5].split > 1
    assert found[24].split > 20


def test_a_long_request_takes_turns_with_others(system: System) -> None:
    began, gate, ended = threading.Event(), threading.Event(), list[int]()

    def wait(*_: object) -> None:
        began.set()
        gate.wait(SECONDS)

    worker = Worker(wait)
    direction = Direction("de", "en")
    first = worker.submit(system, direction, "Haus")
    assert began.wait(SECONDS)  # else the worker may take lines of turns before "ja" waits
    results = [worker.submit(system, direction, "Haus", place=place) for place in range(400)]
    results.append(worker.submit(system, direction, "ja"))
    for result in results:
        result.add_done_callback(lambda done: ended.append(results.index(done)))
    gate.set()
    first.result(SECONDS)
    results[399].result(SECONDS)
    worker.close()
    assert ended.index(400) < 300  # last if each request waited for those before


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("zh", "zh_TW", ("two", "zh-zh_Hant")),
        ("pt_BR", "en", ("two", "pt_BR-en")),
        ("en", "pt", ("one", "en-pt")),
        ("de", "pt-BR", ("one", "de-pt")),
    ],
)
def test_a_system_that_tells_scripts_and_regions_apart_goes_before_one_that_does_not(
    source: str, target: str, expected: tuple[str, str], tmp_path: Path
) -> None:
    codes = {"one": ["de", "en", "pt", "zh"], "two": ["en", "pt", "pt_BR", "zh", "zh_Hant"]}
    systems = [
        System.load(name, open_artifact(Path(path), kind="checkpoint"), decoding=DECODING)
        for name, path in ((one, make_model(tmp_path / one, codes=codes[one])) for one in codes)
    ]
    found, direction = Systems(systems).choose(None, source, target)
    assert (found.name, str(direction)) == expected


def test_no_system_is_made_of_a_name_that_is_misspelled(system: System) -> None:
    with pytest.raises(ConfigError, match=r"no system 'on'\. Did you mean 'one'"):
        Systems([system]).choose("on", "de", "en")


Message = MutableMapping[str, Any]


async def ask(api: Api, path: str, *messages: Message) -> tuple[int, bytes]:
    """Ask for an endpoint; return the status of its answer, and its body.

    The client waits once the messages are sent.
    """
    given, sent = iter(messages), list[Message]()

    async def receive() -> Message:
        for message in given:
            return message
        forever: asyncio.Future[Message] = asyncio.Future()
        return await forever

    async def send(message: Message) -> None:
        sent.append(message)

    headers = [(b"content-type", b"application/json")]
    method = "POST" if messages else "GET"
    await api.app(
        {"type": "http", "method": method, "path": path, "headers": headers}, receive, send
    )
    return int(sent[0]["status"]), sent[1]["body"]


@pytest.mark.parametrize(
    ("languages", "text", "own", "of_all"),
    [("de en", "Danke", "de", "da"), ("de en", "Hello", "en", "fi"), ("de fr", "12", "de", "en")],
)
def test_the_language_of_a_text_is_one_of_the_named_system(
    languages: str, text: str, own: str, of_all: str, tmp_path: Path
) -> None:
    codes = {"narrow": languages.split(), "wide": ["da", "de", "en", "fi", "no"]}
    systems = [
        System.load(name, open_artifact(Path(path), kind="checkpoint"), decoding=DECODING)
        for name, path in ((one, make_model(tmp_path / one, codes=codes[one])) for one in codes)
    ]
    api = Api(Systems(systems), limits=ServerLimits(9000, 9, 60))
    for system, expected in (("narrow", own), (None, of_all)):
        told = {"q": text, "source": "auto", "target": "de", "system": system}
        message = {"type": "http.request", "body": json.dumps(told).encode()}
        status, body = asyncio.run(ask(api, "/translate", message))
        assert (status, json.loads(body)["detectedLanguage"]["language"]) == (200, expected)
    for path in ("/translate", "/detect"):
        told = {"q": text, "source": "auto", "target": "de", "system": "narow"}
        message = {"type": "http.request", "body": json.dumps(told).encode()}
        status, body = asyncio.run(ask(api, path, message))
        assert (status, "'narrow'" in body.decode()) == (400, True)
    api.close()


def request_to_translate(text: str) -> Message:
    body = json.dumps({"q": text, "source": "de", "target": "en"}).encode()
    return {"type": "http.request", "body": body}


@pytest.mark.parametrize("phrases", ["qx", ["ab", "cd"]])
def test_phrases_that_no_sampling_finds_are_refused(checkpoint: Artifact, phrases: Any) -> None:
    decoding = DECODING.model_copy(update={"search": "sampling"})
    sampled = System.load("one", checkpoint, decoding=decoding)
    api = Api(Systems([sampled]), limits=ServerLimits(9000, 9, 60))
    told = {"q": "Haus", "source": "de", "target": "en", "phrases": phrases}
    message = {"type": "http.request", "body": json.dumps(told).encode()}
    status, body = asyncio.run(ask(api, "/translate", message))
    assert (status, json.loads(body)) == (
        400,
        {
            "error": "'phrases' asks for a translation that must have phrases, which only beam "
            "search finds. Change it."
        },
    )
    assert asyncio.run(ask(api, "/translate", request_to_translate("Haus")))[0] == 200
    api.close()


def test_a_client_that_hangs_up_leaves_nothing_in_the_log(system: System) -> None:
    api = Api(Systems([system]), limits=ServerLimits(9000, 9, 60))
    noise: list[str] = []

    async def hang_up() -> int:
        asyncio.get_running_loop().set_exception_handler(
            lambda _, found: noise.append(found["message"])
        )
        messages = request_to_translate("Haus\n" * 900), {"type": "http.disconnect"}
        status, _ = await ask(api, "/translate", *messages)
        await asyncio.sleep(0)
        gc.collect()
        return status

    assert asyncio.run(hang_up()) == 499
    gc.collect()
    api.close()
    assert noise == []


def test_a_server_whose_thread_has_ended_is_not_healthy(system: System) -> None:
    api = Api(Systems([system]), limits=ServerLimits(9, 9, 60))
    assert asyncio.run(ask(api, "/health"))[0] == 200
    api.worker.close()
    assert asyncio.run(ask(api, "/health"))[0] == 503
    api.close()


def test_a_request_whose_time_ends_during_its_translation_leaves_the_search(
    system: System, searched: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    answered, step = threading.Event(), Search.step

    def wait(search: Search) -> dict[int, list[Translation]]:
        answered.wait(SECONDS)
        return step(search)

    monkeypatch.setattr(Search, "step", wait)
    api = Api(Systems([system]), limits=ServerLimits(9000, 9, 1))
    text = "Ja " * 12
    status, body = asyncio.run(ask(api, "/translate", request_to_translate(f"{text}\n" * 9)))
    assert status == 504
    assert json.loads(body) == {"error": "The request took more than 1 seconds. Send less text."}
    other = api.worker.submit(system, Direction("de", "en"), text)
    answered.set()
    assert other.result(SECONDS).text
    api.close()
    assert set(searched[1 + STEPS :]) == {1}


def test_an_exception_during_a_translation_is_one_sentence_and_a_traceback_of_the_log(
    system: System, monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise RuntimeError("a secret of the server")

    api = Api(Systems([system]), limits=ServerLimits(9000, 9, 60))
    with monkeypatch.context() as patched:
        patched.setattr(Search, "step", fail)
        status, body = asyncio.run(ask(api, "/translate", request_to_translate("Haus\nJa")))
    assert status == 500
    assert json.loads(body) == {"error": "The server has failed. Its log says why."}
    assert "RuntimeError: a secret of the server" in capfd.readouterr().err
    assert asyncio.run(ask(api, "/translate", request_to_translate("Haus")))[0] == 200
    api.close()
