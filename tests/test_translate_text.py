"""The stage translate_text: files and folders, line by line, over interruptions and ranks."""

import gzip
import json
import os
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import islice
from pathlib import Path

import pytest
from support.forked import started_code
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import attend_to_source, tiny_model

from pipeline import cli
from pipeline.artifacts.artifact import Artifact, open_artifact
from pipeline.artifacts.corpus import Direction, Hypothesis
from pipeline.artifacts.raw_input import RawInput
from pipeline.decoding import text_input
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.text_input import without_line_breaks
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR, DataError

MAX_POSITIONS = 40
DECODING: Mapping[str, int | float] = {
    **{"beam_size": 2, "max_extra_length": 6, "tokens": 60},
    "max_length_ratio": 0.3,
}
LINES = ["Ein kurzer Satz.", "", "Ja", "  ", "Der zweite Satz ist länger.", "x" * 100, "letzter"]
TARGETS = 'decoding.targets=["en", "fr"]'


@dataclass(frozen=True)
class Bench:
    """A checkpoint, and a folder for texts and outputs."""

    directory: Path
    checkpoint: Path

    def write(self, files: Mapping[str, bytes]) -> Path:
        """Write files of text; return their folder."""
        for name, content in files.items():
            path = self.directory / "texts" / name
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_bytes(content)
        return self.directory / "texts"

    def command(self, out: str, *more: str, text: str = "texts", source: str = "de") -> list[str]:
        """Return the arguments of ``mmnmt`` that translate the text; later ones prevail."""
        values = [f"decoding.{name}={value}" for name, value in DECODING.items()]
        settings = [TARGETS, f"text.source={source}", *values]
        return [
            *("translate_text", "--checkpoint", str(self.checkpoint)),
            *("--text", str(self.directory / text), "--out", str(self.directory / out)),
            *(part for setting in settings for part in ("--set", setting)),
            *more,
        ]

    def run(self, out: str, *more: str, text: str = "texts", source: str = "de") -> int:
        return cli.main(self.command(out, *more, text=text, source=source))

    def made(self, out: str) -> Artifact:
        artifact = open_artifact(self.directory / out, kind="translated_text")
        artifact.check()
        return artifact

    def lines(self, out: str, name: str) -> list[str]:
        """Return the lines of a file of the output."""
        content = self.made(out).file(name).read_bytes().decode()
        assert not content or content.endswith("\n")
        return content.split("\n")[:-1]


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = tiny_model(byte_spec(max_positions=MAX_POSITIONS))
    attend_to_source(model, factor=6)
    return make_checkpoint(tmp_path_factory.mktemp("model") / "checkpoint", model)


@pytest.fixture
def bench(checkpoint: Path, tmp_path: Path) -> Bench:
    return Bench(tmp_path, checkpoint)


@pytest.fixture
def small_chunks(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(text_input, "CHUNK_LINES", 8)


def as_text(lines: Sequence[str], *, end: str = "\n") -> bytes:
    return end.join(lines).encode()


def as_records(lines: Sequence[str | None]) -> bytes:
    return b"".join(json.dumps({"id": 1, "text": line}).encode() + b"\n" for line in lines)


@pytest.mark.parametrize("wrong", ["text.field=txt", "text.field=id"])
def test_a_corrected_command_goes_on_after_one_that_was_refused_before_it_translated(
    bench: Bench, wrong: str, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write({"a.jsonl": as_records(LINES[:1])})
    assert bench.run("out", "--set", wrong) == EXIT_USER_ERROR
    assert "text.field" in capsys.readouterr().err
    assert bench.run("out", "--set", 'decoding.targets=["en"]') == 0
    assert not (bench.directory / "out.run").exists()


def filtered(
    bench: Bench, lines: Sequence[str], target: str, monkeypatch: pytest.MonkeyPatch
) -> list[str]:
    """Translate lines with ``mmnmt translate``."""
    recipe = bench.directory / "recipe.toml"
    settings = "".join(f"{name} = {value}\n" for name, value in DECODING.items())
    recipe.write_text(f"[decoding]\n{settings}", encoding="utf-8")
    given, written = bench.directory / "given", bench.directory / "written"
    given.write_bytes("".join(f"{line}\n" for line in lines).encode())
    model = ["--checkpoint", str(bench.checkpoint), "--recipe", str(recipe)]
    with given.open() as source, written.open("w") as output, monkeypatch.context() as patch:
        patch.setattr("sys.stdin", source)
        patch.setattr("sys.stdout", output)
        assert cli.main(["translate", *model, "--from", "de", "--to", target]) == 0
    return written.read_bytes().decode().split("\n")[:-1]


# ---------------------------------------------------------------- line by line


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_every_line_of_every_file_is_translated_as_the_filter_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write(
        {
            "a.txt": as_text([*LINES, ""]),
            "no_end.txt": as_text(LINES[:1]),
            "empty.txt": b"",
            "deep/windows.txt": b"\xef\xbb\xbf" + as_text([*LINES[:3], ""], end="\r\n"),
            "deep/packed.txt.gz": gzip.compress(as_text([*LINES[3:], ""])),
            "deep/er/records.jsonl": as_records([LINES[0], None, "eins\nzwei", LINES[-1]]),
            "last.txt": b"",
            "picture.png": b"\x89PNG",
            "table.csv": b"id,text\n1,eins\n",
            ".hidden.txt": b"\xff",
        }
    )
    expected = {
        "a.txt": LINES,
        "no_end.txt": LINES[:1],
        "empty.txt": [],
        "deep/windows.txt": LINES[:3],
        "deep/packed.txt": LINES[3:],
        "deep/er/records.txt": [LINES[0], "", "eins zwei", LINES[-1]],
        "last.txt": [],
    }
    assert bench.run("out") == 0
    made = bench.made("out")
    assert set(made.names()) == {
        name
        for code in ("en", "fr")
        for file in expected
        for name in (f"text/{code}/{file}", f"scores/{code}/{file}.jsonl", f"text/de/{file}")
    }
    assert {file: bench.lines("out", f"text/de/{file}") for file in expected} == expected
    decoding = DecodingConfig.model_validate(DECODING)
    translator = Translator(open_artifact(bench.checkpoint, kind="checkpoint"), decoding)
    every = [line for lines in expected.values() for line in lines]
    for code in ("en", "fr"):
        texts = [bench.lines("out", f"text/{code}/{file}") for file in expected]
        assert list(map(len, texts)) == list(map(len, expected.values()))
        assert [text for of_file in texts for text in of_file] == (
            filtered(bench, every, code, monkeypatch)
        )
        found = [
            json.loads(line)
            for file in expected
            for line in bench.lines("out", f"scores/{code}/{file}.jsonl")
        ]
        alone = [translator.translate([Job(Direction("de", code), 0, line)])[0] for line in every]
        scores = [one.score for one in alone]
        assert [one["score"] for one in found] == pytest.approx(scores, abs=2e-4)
        assert [one["split"] for one in found] == [one.split for one in alone]
    assert made.statistics["files"] == len(expected)
    assert made.statistics["directions"] == dict.fromkeys(["de-en", "de-fr"], len(every))
    assert made.statistics["split"] == 4
    assert made.manifest.summary[0].startswith("38 lines in 2 directions translated; ")
    assert made.manifest.summary[-1].startswith("2 files left out, since text ends in .txt, .jsonl")
    assert made.manifest.summary[-1].endswith(": picture.png, table.csv")
    assert not (bench.directory / "out.run").exists()


def test_a_file_named_itself_is_translated_into_all_other_languages_by_default(
    bench: Bench,
) -> None:
    bench.write({"corpus.de": as_text(LINES[:1])})
    settings = ("targets=[]", "n_best=2", "beam_size=6")
    everywhere = [part for one in settings for part in ("--set", f"decoding.{one}")]
    assert bench.run("out", *everywhere, text="texts/corpus.de", source="deu") == 0
    for code in ("en", "fr", "ru"):
        (text,) = bench.lines("out", f"text/{code}/corpus.de")
        (about,) = map(json.loads, bench.lines("out", f"scores/{code}/corpus.de.jsonl"))
        best, second = about["details"]["n_best"]
        assert text == without_line_breaks(best["text"])
        assert about["score"] == best["score"] >= second["score"]


@pytest.mark.parametrize(("lines", "characters"), [(12, 10**6), (1, 10**6), (10**6, 30), (9, 30)])
@pytest.mark.parametrize("copies", [1, 3])
def test_chunks_hold_all_lines_in_order_and_are_bounded(
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    lines: int,
    characters: int,
    copies: int,
) -> None:
    monkeypatch.setattr(text_input, "CHUNK_LINES", lines)
    monkeypatch.setattr(text_input, "CHUNK_CHARACTERS", characters)
    texts = {
        f"{number}.txt": [f"{number} {line} " + "x" * (7 * line % 10) for line in range(number % 7)]
        for number in range(10, 30)
    }
    for name, of_file in texts.items():
        (tmp_path / name).write_bytes(as_text([*of_file, ""]))
    files, _ = text_input.find_texts(RawInput((tmp_path,)), field="")
    found: dict[str, list[str]] = {}
    every = list(text_input.chunks(files, copies=copies))
    assert [chunk.number for chunk in every] == list(range(len(every)))
    for number, chunk in enumerate(every):
        assert chunk.first == sum(len(before.texts) for before in every[:number])
        assert sum(count for _, count in chunk.files) == len(chunk.texts)
        assert copies * (len(chunk.texts) - 1) < lines
        assert copies * sum(map(len, chunk.texts[:-1])) < characters
        rest = iter(chunk.texts)
        for name, count in chunk.files:
            found.setdefault(name, []).extend(islice(rest, count))
    assert found == texts


def write_tables(folder: Path, rows: Mapping[str, Sequence[str | None]]) -> None:
    """Write columns ``id`` and ``words``, as Parquet or as a data set's ``save_to_disk`` does."""
    pyarrow = pytest.importorskip("pyarrow", reason="the package pyarrow is not installed")
    parquet = pytest.importorskip("pyarrow.parquet")
    for name, lines in rows.items():
        table = pyarrow.table({"id": range(len(lines)), "words": pyarrow.array(lines, "string")})
        path = folder / name
        path.parent.mkdir(parents=True, exist_ok=True)
        if path.suffix == ".parquet":
            parquet.write_table(table, path)
            continue
        with pyarrow.ipc.new_stream(str(path), table.schema) as stream:
            stream.write_table(table, max_chunksize=2)


def test_a_data_set_of_hugging_face_is_read_by_its_field(tmp_path: Path) -> None:
    rows: dict[str, list[str | None]] = {
        "dump/b.parquet": ["eins", None, "zwei\ndrei"],
        "train/data-00000-of-00002.arrow": ["vier", "", "fünf", "sechs", "sieben"],
        "train/data-00001-of-00002.arrow": ["acht"],
        "train/cache-0123456789abcdef.arrow": ["made by a map over the data set"],
    }
    write_tables(tmp_path, rows)
    for name in ("dataset_dict.json", "train/state.json", "train/dataset_info.json"):
        (tmp_path / name).write_text("{}", encoding="utf-8")
    files, left_out = text_input.find_texts(RawInput((tmp_path,)), field="words")
    assert {file.output: [*file.lines()] for file in files} == {
        "dump/b.txt": ["eins", "", "zwei drei"],
        "train/data-00000-of-00002.txt": ["vier", "", "fünf", "sechs", "sieben"],
        "train/data-00001-of-00002.txt": ["acht"],
    }
    assert "train/cache-0123456789abcdef.arrow" in left_out


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
@pytest.mark.parametrize(
    ("field", "message"),
    [
        ("word", r"row 1: text\.field is 'word', .* no such field\. Did you mean 'words'"),
        ("id", r"row 1: the field 'id' is no text\. "),
    ],
)
def test_a_column_that_is_no_text_is_named(
    tmp_path: Path, name: str, field: str, message: str
) -> None:
    write_tables(tmp_path, {name: ["eins"]})
    (file,), _ = text_input.find_texts(RawInput((tmp_path,)), field=field)
    with pytest.raises(DataError, match=message):
        list(file.lines())


@pytest.mark.parametrize("name", ["a.parquet", "a.arrow"])
def test_a_table_that_is_cut_off_is_named(tmp_path: Path, name: str) -> None:
    write_tables(tmp_path, {name: ["eins"] * 2000})
    path = tmp_path / name
    path.write_bytes(path.read_bytes()[:600])
    (file,), _ = text_input.find_texts(RawInput((tmp_path,)), field="words")
    with pytest.raises(DataError, match=rf"{name} is not a complete \w+ file \("):
        list(file.lines())


# ---------------------------------------------------------------- refusals


@pytest.mark.parametrize(
    ("files", "message"),
    [
        ({"a.txt": b"gut\n\xc3\x28\n"}, r"a\.txt, line 2: it is not UTF-8 \(.* at byte 0\)\. "),
        ({"a.txt": b"x" * 2**21}, r"a\.txt, line 1: it is longer than 1,048,576 bytes\. Split it"),
        ({"a.txt.gz": gzip.compress(b"eins\nzwei\n")[:-9]}, r"a\.txt\.gz is not a complete gzip"),
        ({"a.jsonl": b'{"txt": "x"}\n'}, r"a\.jsonl, line 1: .* no such field\. Did you mean 'txt"),
        ({"a.jsonl": b'\n{"text": 3}\n'}, r"a\.jsonl, line 2: the field 'text' is no text\. "),
        ({"a.jsonl": b'{"text": "x"\n'}, r"a\.jsonl, line 1 is not valid JSON"),
        (
            {"a.jsonl": b'{"text": "a", "text": "b"}'},
            "not valid JSON .* has the key 'text' twice",
        ),
        ({"a.jsonl": b'{"text": "a", "b": {"c": 1, "c": 1}}'}, "line 1 .* has the key 'c' twice"),
        ({"a.jsonl": b"[]\n"}, r"a\.jsonl, line 1: it is no JSON object\. "),
        ({"a.png": b"x"}, r"texts holds no file that ends in \.txt, \.jsonl, .*, \.arrow\. Name"),
        (
            {"a.txt": b"x", "a.txt.gz": gzip.compress(b"x")},
            r"a\.txt and \S+a\.txt\.gz would both be translated to a\.txt\. Rename",
        ),
        ({"A.txt": b"x", "a.jsonl": b""}, r"would both be translated to a\.txt"),
    ],
)
def test_text_that_cannot_be_read_is_named_before_anything_is_translated(
    bench: Bench, capsys: pytest.CaptureFixture[str], files: Mapping[str, bytes], message: str
) -> None:
    bench.write({"0.txt": b"gut\n"} if not message.startswith("texts") else {})
    bench.write(files)
    refused(bench.run("out"), message, capsys)
    assert not (bench.directory / "out").exists()
    assert not [*bench.directory.glob("out.run/rank-*")]


@pytest.mark.parametrize(
    ("source", "more", "message"),
    [
        ("zz", [], "does not know the language 'zz'"),
        ("en", [], r"decoding\.targets names en, the language of the text"),
        ('""', [], r"text\.source names no language\. .*--set text\.source=en"),
        ("de", ["--set", 'decoding.targets=["eng", "zz"]'], "does not know the language 'zz'"),
    ],
)
def test_languages_that_cannot_be_translated_are_refused(
    bench: Bench,
    capsys: pytest.CaptureFixture[str],
    source: str,
    more: Sequence[str],
    message: str,
) -> None:
    bench.write({"a.txt": b"x\n"})
    refused(bench.run("out", *more, source=source), message, capsys)


@pytest.mark.parametrize("change", ["grows", "shrinks", "goes", "is edited"])
def test_text_that_changes_while_it_is_translated_is_not_paired_with_other_lines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], change: str
) -> None:
    path = bench.write({"a.txt": b"eins\nzwei\n"}) / "a.txt"
    translate = Translator.translate

    def change_meanwhile(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        monkeypatch.setattr(Translator, "translate", translate)
        match change:
            case "grows":
                path.write_bytes(b"eins\nzwei\ndrei\n")
            case "shrinks":
                path.write_bytes(b"zwei\n")
            case "goes":
                path.unlink()
            case _:
                path.write_bytes(b"zwei\neins\n")
        return translate(self, jobs)

    monkeypatch.setattr(Translator, "translate", change_meanwhile)
    refused(bench.run("out"), r"a\.txt was changed while it was translated\. Run again", capsys)
    assert not (bench.directory / "out").exists()
    path.write_bytes(b"drei\n")
    assert bench.run("out", "--overwrite") == 0
    assert bench.lines("out", "text/de/a.txt") == ["drei"]


def test_an_output_within_the_text_is_refused(
    bench: Bench, capsys: pytest.CaptureFixture[str]
) -> None:
    bench.write({"a.txt": b"x\n"})
    refused(bench.run("texts/out"), "texts/out lies within the input text", capsys)


def refused(code: int, message: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert code == EXIT_USER_ERROR
    (said,) = capsys.readouterr().err.splitlines()
    assert pytest.raises(AssertionError, match=message).matches(AssertionError(said)), said


# ---------------------------------------------------------------- interruption and ranks


@pytest.mark.slow
@pytest.mark.usefixtures("small_chunks")
def test_an_interrupted_run_goes_on_with_the_same_batches_and_repeats_no_finished_one(
    bench: Bench, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    bench.write({"a.txt": as_text(LINES), "b.txt": as_text(LINES[::-1])})
    translated: list[tuple[tuple[str, int], ...]] = []
    translate = Translator.translate

    def record(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        translated.append(tuple((str(job.direction), job.line) for job in jobs))
        return translate(self, jobs)

    monkeypatch.setattr(Translator, "translate", record)
    assert bench.run("whole") == 0
    whole = Counter(translated)
    translated.clear()
    for batches, has_chunk in ((2, False), (4, True), (8, True)):
        stop_after(batches - len(translated))
        assert bench.run("out") == EXIT_RUN_AGAIN
        assert len(translated) == batches
        assert (bench.directory / "out.run" / "chunk-00000000.jsonl").exists() == has_chunk
    path = bench.directory / "out.run" / "rank-00000.jsonl"
    path.write_bytes(path.read_bytes()[:-7])  # as a kill may leave it
    repeated = translated[-1:]
    stop_after(10**6)
    assert bench.run("out") == 0
    assert Counter(translated) == whole + Counter(repeated)
    assert bench.made("out").digest == bench.made("whole").digest
    assert not (bench.directory / "out.run").exists()


IN_SMALL_CHUNKS = """
import sys
from pipeline.decoding import text_input
from support.forked import command
text_input.CHUNK_LINES = 8
command(sys.argv[1:])
"""


@pytest.mark.slow
def test_a_killed_run_of_one_process_goes_on_with_two_and_makes_what_one_does(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(text_input, "CHUNK_LINES", 8)
    bench.write({"a.txt": as_text(5 * LINES)})
    english = ("--set", 'decoding.targets=["en"]')
    assert bench.run("whole", *english) == 0
    given = bench.command("out", *english)
    kept = bench.directory / "out.run" / "chunk-00000000.jsonl"
    deadline = time.monotonic() + 90
    with started_code(IN_SMALL_CHUNKS, given, environment=os.environ) as killed:
        while killed.process.is_alive() and not kept.exists():
            assert time.monotonic() < deadline, "no chunk was ever finished"
            time.sleep(0.002)
        killed.process.kill()
        killed.end()
    assert not (bench.directory / "out").exists(), "killed too late"
    given += ["--processes", "2"]
    with started_code(IN_SMALL_CHUNKS, given, environment=os.environ) as started:
        code, _, error = started.end()
    assert code == 0, error
    assert bench.made("out").digest == bench.made("whole").digest
