"""TOML and JSON from outside: small files that would cost a lot, and broken ones."""

import codecs
import errno
import json
import os
import time
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from unittest.mock import Mock

import pytest

from pipeline.config.documents import (
    MAX_DEPTH,
    MAX_JSON_BYTES,
    MAX_TOML_BYTES,
    MAX_TOML_DOTS,
    JsonLines,
    read_json,
    read_json_lines,
    read_toml,
    shipped,
)
from pipeline.config.recipe import load_recipe
from pipeline.errors import ArtifactError, ConfigError, UserError
from pipeline.jobs.plan import load_plan

ROOT = Path(__file__).resolve().parents[1]


@pytest.fixture
def path(tmp_path: Path) -> Path:
    return tmp_path / "document"


def lines_of_json(path: Path) -> object:
    return list(read_json_lines(path))


def refused(read: Callable[[Path], object], error: type[UserError], path: Path) -> str:
    with pytest.raises(error) as caught:
        read(path)
    assert "\n" not in str(caught.value)
    assert str(path) in str(caught.value)
    return str(caught.value)


def refused_toml(path: Path, text: str) -> str:
    path.write_text(text, encoding="utf-8")
    return refused(read_toml, ConfigError, path)


def refused_json(path: Path, content: bytes) -> str:
    path.write_bytes(content)
    return refused(read_json, ArtifactError, path)


def test_a_toml_file_beyond_its_limit_is_refused_before_it_is_parsed(path: Path) -> None:
    assert "larger than 1,048,576 bytes" in refused_toml(path, "#" * (MAX_TOML_BYTES + 1))
    path.write_text("a = 1\n#" + "#" * (MAX_TOML_BYTES - 7), encoding="utf-8")
    assert read_toml(path) == {"a": 1}


@pytest.mark.parametrize("before", ["", "b = 1\n\n"])
def test_a_number_of_too_many_digits_is_named_with_its_line(path: Path, before: str) -> None:
    number = before.count("\n") + 1
    said = f"(line {number} has a number of more than 4,300 digits). "
    assert f"{said}Correct that line." in refused_toml(path, f"{before}a = 1_{'9' * 4300}")
    as_json = before.replace("b = 1", "") + "9" * 4301
    assert said in refused_json(path, as_json.encode())


def test_a_file_without_end_is_read_up_to_its_limit_only(tmp_path: Path) -> None:
    path = tmp_path / "sparse.toml"
    with path.open("wb") as stream:
        stream.truncate(2**40)
    tracemalloc.start()
    with pytest.raises(ConfigError, match="larger than"):
        read_toml(path)
    with pytest.raises(ArtifactError, match="larger than"):
        read_json(path)
    with pytest.raises(ArtifactError, match="a line of more than"):
        list(read_json_lines(path))
    peak = tracemalloc.get_traced_memory()[1]
    tracemalloc.stop()
    assert peak < 4 * MAX_JSON_BYTES


def test_nesting_is_one_sentence(path: Path) -> None:
    for text in ("a = " + "[" * 100_000, "a = " + "[" * 400 + "]" * 400, "a=" + "{b=" * 100_000):
        assert f"more than {MAX_DEPTH} levels" in refused_toml(path, text)
    for content in (b"[" * 100_000, b"[" * 400 + b"]" * 400, b'{"a":' * 100_000):
        assert f"more than {MAX_DEPTH} levels" in refused_json(path, content)
    deepest = "[" * (MAX_DEPTH - 1) + "]" * (MAX_DEPTH - 1)
    path.write_text(f"a = {deepest}", encoding="utf-8")
    assert "a" in read_toml(path)


def test_a_dotted_key_that_would_take_minutes_is_refused_at_once(path: Path) -> None:
    began = time.monotonic()
    many = "a." * 100_000
    for text in (f"{many}a = 1", f"[{many}a]", "x = {" + "a." * 50 + "a=1}"):
        assert f"more than {MAX_TOML_DOTS} dots" in refused_toml(path, text)
    for text in ('"a\\".b" . ' * 40 + "a = 1", "x = [{ " + "'a b'." * 33 + "a = 1 }]"):
        assert f"more than {MAX_TOML_DOTS} dots" in refused_toml(path, text)
    assert time.monotonic() - began < 5


@pytest.mark.parametrize(
    ("text", "value"),
    [
        (f"a = [{'0.5, ' * 40}]", [0.5] * 40),
        (f"# {'. ' * 40}\na = '{'.' * 40}'", "." * 40),
        ("a = [" + '"x.de", ' * 40 + "]", ["x.de"] * 40),
    ],
)
def test_dots_of_numbers_and_texts_are_no_key(path: Path, text: str, value: object) -> None:
    path.write_text(text, encoding="utf-8")
    assert read_toml(path) == {"a": value}


@pytest.mark.parametrize(
    ("content", "reason"),
    [
        (b"", "not valid JSON"),
        (b"{", "not valid JSON"),
        (b"\xff\xfe{}", "not valid JSON"),
        (b'{"a": NaN}', "NaN is no number of JSON"),
        (b'{"a": -Infinity}', "-Infinity is no number of JSON"),
        (b'{"a": ' + b"9" * 5000 + b"}", "not valid JSON"),
        (b'{"a": "\\ud800"}', "not valid JSON"),
    ],
)
def test_broken_json_is_refused(content: bytes, reason: str, path: Path) -> None:
    assert reason in refused_json(path, content)


def test_a_byte_order_mark_before_toml_is_not_part_of_it(path: Path) -> None:
    path.write_bytes(codecs.BOM_UTF8 + b"a = 1\n")
    assert read_toml(path) == {"a": 1}


def test_text_beyond_ascii_is_read(path: Path) -> None:
    path.write_text(json.dumps({"a": "é\U0001f600"}), encoding="utf-8")  # a pair of surrogates
    assert read_json(path) == {"a": "é\U0001f600"}


def test_broken_toml_is_refused_with_its_line(path: Path) -> None:
    assert "line 2" in refused_toml(path, "a = 1\nb = \n")
    assert "not valid TOML" in refused_toml(path, "a = " + "9" * 5000)
    for content in (b"a = '\xff'", "a = 1\n".encode("utf-16")):
        path.write_bytes(content)
        with pytest.raises(ConfigError, match=r"not valid TOML .*Save it as UTF-8"):
            read_toml(path)
    path.unlink()
    with pytest.raises(ConfigError, match="cannot be read"):
        read_toml(path)


@pytest.mark.parametrize(
    "text", [r'a = "x\u0000.toml"', r"[a]" + "\n" + r'b = [{ "c\u0000d" = 1 }]']
)
def test_no_path_or_name_of_a_setting_can_have_the_character_nul(text: str, path: Path) -> None:
    assert "has the character NUL (\\u0000) in a text. Leave it out." in refused_toml(path, text)
    path.write_text(text.replace("u0000", "t"), encoding="utf-8")
    assert read_toml(path)


@pytest.mark.parametrize("folder", ["recipes", "plans"])
def test_a_shipped_file_is_found_by_its_name_alone_in_any_folder(folder: str) -> None:
    files = [*(ROOT / "pipeline" / folder).rglob("*.toml")]
    assert files
    assert shipped(folder) == {path.stem: path for path in files}
    assert len(shipped(folder)) == len(files), "two files have one name"


def test_recipes_and_plans_are_read_that_way(tmp_path: Path) -> None:
    path = tmp_path / "deep.toml"
    path.write_text("a = " + "[" * 100_000, encoding="utf-8")
    for read in (load_recipe, load_plan):
        with pytest.raises(ConfigError, match="levels deep"):
            read(str(path))


def test_lines_of_json_are_named_by_their_number(path: Path) -> None:
    path.write_text('{"a": 1}\n{"a": 2}', encoding="utf-8")
    assert list(read_json_lines(path)) == [{"a": 1}, {"a": 2}]
    for line in ("7", "{", ""):
        path.write_text(f'{{"a": 1}}\n{line}\n', encoding="utf-8")
        with pytest.raises(ArtifactError, match=r"^Line 2 of "):
            list(read_json_lines(path))


@pytest.mark.parametrize(
    ("read", "error"),
    [(read_toml, ConfigError), (read_json, ArtifactError), (lines_of_json, ArtifactError)],
)
def test_a_file_without_permission_asks_for_it(
    read: Callable[[Path], object],
    error: type[UserError],
    path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """To run a stage again would not help, and could take days."""
    path.write_text("{}", encoding="utf-8")
    denied = PermissionError(errno.EACCES, "Permission denied")
    monkeypatch.setattr(Path, "open", Mock(side_effect=denied))
    said = refused(read, error, path)
    assert said == f"{path} cannot be read (Permission denied). Make it readable."


@pytest.mark.parametrize("read", [read_toml, read_json])
def test_a_pipe_is_refused_and_not_waited_for(
    tmp_path: Path, read: Callable[[Path], object]
) -> None:
    os.mkfifo(tmp_path / "recipe.toml")
    (tmp_path / "device.toml").symlink_to("/dev/full")  # it has no end
    for name in ("recipe", "device"):
        with pytest.raises(UserError, match=rf"{name}.toml is a pipe.* Copy its content to a file"):
            read(tmp_path / f"{name}.toml")


def test_records_are_appended_one_per_line_and_text_stays_as_it_is(tmp_path: Path) -> None:
    path = tmp_path / "run" / "metrics.jsonl"
    JsonLines(path).write({"update": 1, "text": "a\u2028b ü"})
    JsonLines(path).write({"update": 2})
    lines = path.read_text(encoding="utf-8").split("\n")
    assert lines == ['{"update": 1, "text": "a\u2028b ü"}', '{"update": 2}', ""]


def test_numbers_that_are_not_finite_become_null_at_any_depth(tmp_path: Path) -> None:
    path = tmp_path / "metrics.jsonl"
    JsonLines(path).write({"loss": float("nan"), "layers": [{"share": float("inf")}, 0.5]})
    assert json.loads(path.read_text()) == {"loss": None, "layers": [{"share": None}, 0.5]}


def test_a_resumed_run_drops_later_records_and_an_incomplete_last_line(tmp_path: Path) -> None:
    lines = JsonLines(tmp_path / "metrics.jsonl")
    lines.truncate_after(5)
    assert list(tmp_path.iterdir()) == [], "there was no file"
    lines.write({"note": "no update"})
    for update in (10, 20, 30):
        lines.write({"update": update})
    with lines.path.open("a") as stream:
        stream.write('{"update": 1')
    lines.truncate_after(20)
    lines.write({"update": 21})
    records = [json.loads(line) for line in lines.path.read_text().split("\n")[:-1]]
    assert records == [{"note": "no update"}, {"update": 10}, {"update": 20}, {"update": 21}]
    assert [path.name for path in tmp_path.iterdir()] == ["metrics.jsonl"]


def test_a_broken_line_of_metrics_is_named_and_an_incomplete_last_one_dropped(
    tmp_path: Path,
) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"update": 1}\n{"update": 2}\n{"upd', encoding="utf-8")
    assert list(JsonLines(path).read()) == [{"update": 1}, {"update": 2}]
    path.write_text('{"update": 1}\n{"upd\n{"update": 2}\n', encoding="utf-8")
    before = path.read_bytes()
    for use in (lambda: list(JsonLines(path).read()), lambda: JsonLines(path).truncate_after(1)):
        with pytest.raises(ArtifactError, match=r"^Line 2 of .*metrics\.jsonl is not valid JSON"):
            use()
    assert path.read_bytes() == before
