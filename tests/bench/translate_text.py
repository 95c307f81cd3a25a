"""``mmnmt translate_text`` beside the search of the same batches in memory, and its memory.

The model is that of ``serve.py``: the shape of the demo's mixture of experts, over bytes, with
initial weights. The command reads a file of one chunk, loads and checks the model, translates, and
publishes its result; the peer is the search alone, in the same process and with the same threads.
Both find the same translations. Memory is the process's own, mapped files not counted, of a tiny
model on one chunk of lines and on ten.

    python tests/bench/translate_text.py [--quick] [--rounds N] [--json FILE]
"""

import os
import subprocess
import sys
import tempfile
import time
from contextlib import redirect_stdout
from io import StringIO
from pathlib import Path

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from ratios import Options, Row, beside, compare, interleaved, parse_options, report
from serve import ROOT, SEARCH, sentences, write_model
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model
from upcycle import MEBIBYTE, own_bytes

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.artifacts.translated_text import text_name
from pipeline.decoding.incoming_lines import without_line_breaks
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.text_files import CHUNK_LINES
from pipeline.decoding.translator import Job, Translator

CASES = {
    r"translate_text of 16,384 lines, against search in memory": "milliseconds",
    r"peak memory of 163,840 lines, against 16,384": "mebibytes",
}
QUICK_LINES, TIMES = 64, 10
TARGET = 0.9
MEMORY_TARGET = 0.95
DIRECTION = Direction("de", "en")
NAME = "lines.txt"


class Text:
    """A file of lines, and what translates it."""

    def __init__(self, folder: Path, checkpoint: Path, lines: list[str]) -> None:
        folder.mkdir()
        self.folder, self.checkpoint, self.lines = folder, checkpoint, lines
        (folder / NAME).write_text("".join(f"{line}\n" for line in lines), encoding="utf-8")

    @property
    def command(self) -> list[str]:
        """The arguments of ``mmnmt``."""
        settings: dict[str, object] = {**SEARCH, "targets": [DIRECTION.target]}
        changes = [f"decoding.{name}={value}".replace("'", '"') for name, value in settings.items()]
        return [
            *("translate_text", "--checkpoint", str(self.checkpoint), "--overwrite"),
            *("--text", str(self.folder / NAME), "--out", str(self.folder / "out")),
            *(
                word
                for one in (f"text.source={DIRECTION.source}", *changes)
                for word in ("--set", one)
            ),
        ]

    def translate(self) -> None:
        """Run the command in this process."""
        with redirect_stdout(StringIO()):
            code = cli.main(self.command)
        if code:
            raise SystemExit("mmnmt translate_text did not succeed")

    @property
    def translations(self) -> list[str]:
        found = open_artifact(self.folder / "out", kind="translated_text")
        text = found.file(text_name(DIRECTION.target, NAME)).read_bytes().decode()
        return text.split("\n")[:-1]

    def search(self, translator: Translator) -> list[str]:
        """Translate the same batches in memory."""
        jobs = [Job(DIRECTION, number, line) for number, line in enumerate(self.lines)]
        found: dict[int, Hypothesis] = {}
        for batch in translator.cut(jobs):
            found |= zip((job.line for job in batch), translator.translate(batch), strict=True)
        return [without_line_breaks(found[number].text) for number in range(len(jobs))]

    def peak_bytes(self, *, threads: int) -> int:
        """Run the command in a process of its own; return the most memory that it had."""
        environment = {**os.environ, "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": str(threads)}
        peak = 0
        with subprocess.Popen(
            [sys.executable, "-m", "pipeline", *self.command],
            env=environment,
            stdout=subprocess.DEVNULL,
        ) as process:
            while process.poll() is None:
                peak = max(peak, own_bytes(process.pid))
                time.sleep(0.02)
        if process.returncode:
            raise SystemExit("mmnmt translate_text did not succeed")
        return peak


def speed_rows(text: Text, options: Options) -> list[Row]:
    checkpoint = open_artifact(text.checkpoint, kind="checkpoint")
    translator = Translator(checkpoint, DecodingConfig.model_validate(SEARCH))
    text.translate()
    assert text.translations == text.search(translator)
    seconds = interleaved(
        {"ours": text.translate, "search in memory": lambda: text.search(translator)},
        rounds=options.rounds,
        warm_up=1,
    )
    return compare(seconds, case=f"translate_text of {len(text.lines):,} lines", target=TARGET)


def memory_row(folder: Path, options: Options, *, lines: int) -> Row:
    checkpoint = make_checkpoint(folder / "tiny", tiny_model(byte_spec()))
    fewer, more = (
        Text(folder / str(number), checkpoint, sentences(number)).peak_bytes(
            threads=options.threads
        )
        // MEBIBYTE
        for number in (lines, TIMES * lines)
    )
    case = f"peak memory of {TIMES * lines:,} lines, against {lines:,}"
    return beside(case, "mebibytes", more, fewer, target=MEMORY_TARGET)


def main() -> None:
    options = parse_options("translate_text, against the search in memory.", rounds=5)
    lines = QUICK_LINES if options.quick else CHUNK_LINES
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        text = Text(folder / "text", write_model(folder / "model"), sentences(lines))
        rows = [*speed_rows(text, options), memory_row(folder, options, lines=lines)]
    report(
        rows, options, shapes="the demo's mixture of experts, over bytes; phrases of 1 to 3 words"
    )


if __name__ == "__main__":
    main()
