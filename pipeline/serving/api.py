"""Listen on a port, and answer requests with the API of LibreTranslate.

A text is translated line by line, as by ``mmnmt translate``, and keeps its lines. Every
answer that is not a success is a JSON object with one sentence, ``{"error": …}``. A request takes
one of the server's places from when its body has been read until it is answered, its client hangs
up or its time is over.
"""

import asyncio
import socket
import sys
import traceback
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import contextmanager, suppress
from functools import partial
from itertools import count
from pathlib import Path
from signal import SIGTERM
from time import perf_counter
from typing import Any

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram, generate_latest
from prometheus_client.exposition import CONTENT_TYPE_LATEST
from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import HTMLResponse, JSONResponse, Response
from starlette.routing import Route

from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.artifacts.spelling import is_blank
from pipeline.config.settings import shown
from pipeline.decoding.line_filter import written_record
from pipeline.decoding.text_input import without_line_breaks
from pipeline.distributed.process import handled_by
from pipeline.errors import ConfigError
from pipeline.evaluation.language_detector import LanguageDetector
from pipeline.languages import find_code
from pipeline.serving.requests import Fields, Refused, ServerLimits, limited_server, read_fields
from pipeline.serving.worker import System, Systems, Worker
from pipeline.terminal import listed

AUTO = "auto"
"""Source language of a request that asks for detection."""
UNKNOWN = "en"
"""Language of a text of which nothing is known, if there is this language."""
PAGE = Path(__file__).with_name("page.html")
PAGE_HEADERS = {
    "Content-Security-Policy": "default-src 'none'; script-src 'unsafe-inline'; style-src "
    "'unsafe-inline'; connect-src 'self'; img-src data:; frame-ancestors 'none'; base-uri 'none'; "
    "form-action 'none'",
    "X-Content-Type-Options": "nosniff",
}

Handler = Callable[[Request], Awaitable[Response]]


class Api:
    """The endpoints of a server, and the requests that are open.

    Args:
        systems: the models.
        limits: the largest load.
        key: key that requests must have; None: they need none.
    """

    def __init__(self, systems: Systems, *, limits: ServerLimits, key: str | None = None) -> None:
        self._systems, self._limits, self._key = systems, limits, key
        self._metrics = _Metrics(open_requests=lambda: self._open)
        self._open = 0
        """Number of requests that have a place."""
        self.worker = Worker(self._metrics.count_batch)
        self._detecting = ThreadPoolExecutor(1, "detect")
        self._detectors: dict[str | None, LanguageDetector] = {}
        """System, or None for all → detector of its languages."""
        self.app = Starlette(
            routes=[
                *self._routes("GET", {"/": self._page, "/health": self._health}),
                *self._routes("GET", {"/languages": self._languages, "/metrics": self._scrape}),
                *self._routes("GET", {"/frontend/settings": self._settings}),
                *self._routes("POST", {"/translate": self._translate, "/detect": self._detect}),
            ],
            exception_handlers={HTTPException: _no_such_endpoint},
        )

    def close(self) -> None:
        """End the threads; nothing may be open any more."""
        self.worker.close()
        self._detecting.shutdown()

    def _routes(self, method: str, handlers: dict[str, Handler]) -> list[Route]:
        return [
            Route(path, partial(self._answer, path, handler), methods=[method])
            for path, handler in handlers.items()
        ]

    async def _answer(self, path: str, handler: Handler, request: Request) -> Response:
        """Answer a request within its time, in one sentence if anything is wrong."""
        start = perf_counter()
        try:
            async with asyncio.timeout(self._limits.seconds):
                response = await handler(request)
        except Refused as refused:
            response = _error(refused.status, str(refused), refused.headers)
        except ConfigError as error:
            response = _error(400, str(error))
        except TimeoutError:
            limit = f"{self._limits.seconds:,} seconds"
            response = _error(504, f"The request took more than {limit}. Send less text.")
        except asyncio.CancelledError:  # Ctrl-C, and the server had been asked to end before
            response = _error(503, "The server was stopped. Send the request again later.")
        except ClientDisconnect:
            response = _error(499, "The client has hung up.")
        except Exception:
            with suppress(OSError):  # the log may be on a full disk
                traceback.print_exc()  # a bug, only for the server's log
            response = _error(500, "The server has failed. Its log says why.")
        self._metrics.count_answer(path, response.status_code, perf_counter() - start)
        return response

    async def _translate(self, request: Request) -> Response:
        fields = await self._read(request)
        with self._place():
            texts = fields.texts(most_characters=self._limits.characters)
            source, target = fields.required("source"), fields.required("target")
            detected = await self._detected(texts, fields.system) if source == AUTO else []
            sources = [one["language"] for one in detected] or [source] * len(texts)
            pieces = []
            for text, code in zip(texts, sources, strict=True):
                system, direction = self._systems.choose(fields.system, code, target)
                if problem := system.translator.phrases_problem(fields.phrases):
                    sentence = f"'phrases' asks for a translation that {problem}. Change it."
                    raise Refused(400, sentence)
                system = system.with_words if fields.details else system
                pieces.append(_Text(text, system, direction))
            places = count()
            results = [
                result
                for piece in pieces
                for result in piece.submit(self.worker, fields.phrases, places)
            ]
            await self._finish(request, results)
            answer: dict[str, list[Any]] = {"translatedText": [one.variant(0) for one in pieces]}
            if detected:
                answer["detectedLanguage"] = detected
            if most := fields.alternatives:
                answer["alternatives"] = [piece.alternatives(most) for piece in pieces]
            if fields.details:
                answer["details"] = [piece.details() for piece in pieces]
            is_list = isinstance(fields.q, list)
            return JSONResponse(answer if is_list else {name: of[0] for name, of in answer.items()})

    async def _detect(self, request: Request) -> Response:
        fields = await self._read(request)
        with self._place():
            texts = fields.texts(most_characters=self._limits.characters)
            return JSONResponse(await self._ranked(texts, fields.system))

    async def _languages(self, _: Request) -> Response:
        return JSONResponse(self._systems.languages)

    async def _settings(self, _: Request) -> Response:
        known = {language["code"]: language for language in self._systems.languages}
        targets = [code for code in known if any(code in of["targets"] for of in known.values())]
        target = known[find_code(UNKNOWN, targets) or targets[0]]
        source = next((language for language in known.values() if language is not target), target)
        return JSONResponse(
            {
                "apiKeys": self._key is not None,
                "charLimit": self._limits.characters,
                "filesTranslation": False,
                "frontendTimeout": 500,
                "keyRequired": self._key is not None,
                "language": {
                    "source": {"code": source["code"], "name": source["name"]},
                    "target": {"code": target["code"], "name": target["name"]},
                },
                "suggestions": False,
                "pivots": self._systems.pivots,
                "supportedFilesFormat": [],
                "systems": self._systems.names,
            }
        )

    async def _health(self, _: Request) -> Response:
        if not self.worker.is_alive:
            return _error(503, "The thread that translates has ended. Restart the server.")
        return JSONResponse({"status": "ok"})

    async def _scrape(self, _: Request) -> Response:
        return Response(self._metrics.text(), media_type=CONTENT_TYPE_LATEST)

    async def _page(self, _: Request) -> Response:
        return HTMLResponse(PAGE.read_text(encoding="utf-8"), headers=PAGE_HEADERS)

    async def _read(self, request: Request) -> Fields:
        """Read the body of a request that may use the server."""
        return await read_fields(request, most_characters=self._limits.characters, key=self._key)

    @contextmanager
    def _place(self) -> Iterator[None]:
        """Take a place of the server for the time of the block."""
        if self._open >= self._limits.requests:
            busy = f"{self._open:,} requests are waiting already. Send this one again later."
            raise Refused(429, busy, {"Retry-After": "1"})
        self._open += 1
        try:
            yield
        finally:
            self._open -= 1

    async def _finish(self, request: Request, results: Sequence[Future[Hypothesis]]) -> None:
        """Wait for translations; cancel those that are missing if the client does not wait."""
        finished = asyncio.ensure_future(_all(results))
        hung_up = asyncio.ensure_future(_hang_up(request))
        try:
            await asyncio.wait((finished, hung_up), return_when=asyncio.FIRST_COMPLETED)
            if not finished.done():
                raise ClientDisconnect
            await finished
        finally:
            finished.cancel()
            hung_up.cancel()
            for result in results:
                result.cancel()

    async def _detected(self, texts: Sequence[str], system: str | None) -> list[dict[str, Any]]:
        """Return the language of each text; the language of all together if a text tells none."""
        together = await self._ranked(texts, system)
        if len(texts) == 1:
            return together[:1]
        ranked = [await self._ranked([text], system) for text in texts]
        return [(own if own[0]["confidence"] else together)[0] for own in ranked]

    async def _ranked(self, texts: Sequence[str], system: str | None) -> list[dict[str, Any]]:
        """Return the probable languages of all texts together, as LibreTranslate lists them."""
        loop = asyncio.get_running_loop()
        return await loop.run_in_executor(self._detecting, self._rank, "\n".join(texts), system)

    def _rank(self, text: str, system: str | None) -> list[dict[str, Any]]:
        codes = self._systems.sources(system)
        if system not in self._detectors:
            try:
                self._detectors[system] = LanguageDetector(codes, seed=1)
            except ConfigError as error:
                problem = "None of the languages can be detected. Name the source."
                raise Refused(400, problem) from error
        ranked = self._detectors[system].ranked(text)
        if not ranked:  # digits, for example: clients of LibreTranslate expect English
            code = find_code(UNKNOWN, codes) or codes[0]
            return [{"confidence": 0.0, "language": code}]
        return [
            {"confidence": round(100 * probability, 1), "language": code}
            for code, probability in ranked
        ]


class _Text:
    """A text of a request: its lines, the translations that it waits for, its alternatives."""

    def __init__(self, text: str, system: System, direction: Direction) -> None:
        self._lines = [line.removesuffix("\r") for line in text.split("\n")]
        self._system, self._direction = system, direction
        self._results: dict[int, Future[Hypothesis]] = {}

    def submit(
        self, worker: Worker, phrases: tuple[str, ...], places: Iterator[int]
    ) -> list[Future[Hypothesis]]:
        """Let the lines wait that have to be translated; return what they wait for.

        Args:
            worker: translates them.
            phrases: what the translation of every line must contain.
            places: numbers of the lines in their request.
        """
        if self._direction.source == self._direction.target:
            return []
        self._results = {
            number: worker.submit(
                self._system,
                self._direction,
                without_line_breaks(line),
                phrases=phrases,
                place=next(places),
            )
            for number, line in enumerate(self._lines)
            if not is_blank(line)
        }
        return list(self._results.values())

    def variant(self, rank: int) -> str:
        """Return the translation, or the text of the hypotheses of another rank."""
        lines = ["" if is_blank(line) else line for line in self._lines]
        for number, result in self._results.items():
            lines[number] = without_line_breaks(_of_rank(result.result(), rank))
        return "\n".join(lines)

    def alternatives(self, most: int) -> list[str]:
        """Return up to so many further translations that differ, the best first."""
        kept = self._system.translator.config.n_best
        variants = dict.fromkeys(self.variant(rank) for rank in range(kept))
        return list(variants)[1 : most + 1]

    def details(self) -> list[dict[str, Any] | None]:
        """Return for each line what ``mmnmt translate`` writes; None if it was not translated."""
        found: list[dict[str, Any] | None] = [None] * len(self._lines)
        for number, result in self._results.items():
            found[number] = written_record(result.result())
        return found


def _of_rank(hypothesis: Hypothesis, rank: int) -> str:
    """Return the text of a hypothesis's rank, or of the last if there are fewer."""
    found = hypothesis.details.n_best if hypothesis.details else ()
    return found[min(rank, len(found) - 1)].text if rank and found else hypothesis.text


async def _all(results: Sequence[Future[Hypothesis]]) -> None:
    """Wait for all results; unlike a cancelled ``gather``, it logs no exception of its own."""
    for result in results:
        await asyncio.wrap_future(result)


async def _hang_up(request: Request) -> None:
    """Wait until the client has closed the connection; its body has been read."""
    while (await request.receive())["type"] != "http.disconnect":
        pass


def _error(status: int, sentence: str, headers: Mapping[str, str] | None = None) -> JSONResponse:
    return JSONResponse({"error": sentence}, status_code=status, headers=headers)


async def _no_such_endpoint(request: Request, error: Exception) -> Response:
    assert isinstance(error, HTTPException)
    sentence = f"{error.detail}: the page of this server is at /."
    if error.status_code == 405:
        allowed = (error.headers or {})["Allow"]
        sentence = f"{request.url.path} does not take {shown(request.method)}. Send {allowed}."
    return _error(error.status_code, sentence, error.headers)


class _Metrics:
    """Counts of a server, for Prometheus."""

    def __init__(self, open_requests: Callable[[], float]) -> None:
        registry = self._registry = CollectorRegistry()
        self._answers = Counter(
            "mmnmt_answers", "Answered requests.", ["path", "status"], registry=registry
        )
        self._seconds = Histogram(
            "mmnmt_answer_seconds", "Time to answer.", ["path"], registry=registry
        )
        self._lines = Counter(
            "mmnmt_lines", "Lines whose search has begun.", ["system"], registry=registry
        )
        self._batches = Counter(
            "mmnmt_batches", "Groups of lines that joined together.", ["system"], registry=registry
        )
        waiting = Gauge("mmnmt_open_requests", "Requests that have a place.", registry=registry)
        waiting.set_function(open_requests)

    def count_answer(self, path: str, status: int, seconds: float) -> None:
        self._answers.labels(path, str(status)).inc()
        self._seconds.labels(path).observe(seconds)

    def count_batch(self, system: System, lines: int) -> None:
        self._lines.labels(system.name).inc(lines)
        self._batches.labels(system.name).inc()

    def text(self) -> bytes:
        return generate_latest(self._registry)


# ---------------------------------------------------------------- serving


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens on a port, or on any free one for port 0.

    Raises:
        ConfigError: the address cannot be used.
    """
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    try:
        if not host:  # which would mean every address of this machine
            raise TypeError
        return socket.create_server((host, port), family=family)
    except (OSError, TypeError) as error:  # the latter of a name that DNS cannot have
        reason = error.strerror or str(error) if isinstance(error, OSError) else "it is no address"
        reason = reason.partition(" (")[0]  # without the address again
        raise ConfigError(
            f"Port {port} of {host or repr('')} cannot be used ({reason}). Name another --port or "
            "--host."
        ) from error


def serve(
    listener: socket.socket,
    systems: Sequence[System],
    *,
    limits: ServerLimits,
    key: str | None,
    say: Callable[[str], None],
) -> None:
    """Answer requests until SIGTERM or Ctrl-C, then those that are still open.

    Args:
        listener: from :func:`listen`.
        systems: the models.
        limits: the largest load.
        key: key that requests must have; None: they need none.
        say: receives the address.
    """
    api = Api(Systems(systems), limits=limits, key=key)
    server = limited_server(api.app, limits)
    if sys.platform == "linux":  # close the connections of clients that do not read
        milliseconds = 1000 * limits.seconds
        listener.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, milliseconds)
    host, port = listener.getsockname()[:2]
    address = f"[{host}]" if ":" in host else host
    with suppress(OSError):  # a log on a full disk keeps no request from its answer
        say(f"http://{address}:{port} serves {listed(system.name for system in systems)}.")
    try:
        # uvicorn raises the signal again when it has ended.
        with handled_by(lambda _: None, signals=(SIGTERM,)):
            server.run(sockets=[listener])
    finally:
        api.close()
