"""Stored benchmark results belong to benchmarks and cases that exist today."""

import ast
import json
import sys
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
RESULTS = sorted((BENCH / "results").glob("*.json"))
SCRIPTS = sorted(BENCH.glob("*.py"))


@pytest.fixture(autouse=True)
def bench(monkeypatch: pytest.MonkeyPatch) -> None:
    """Import modules of the benchmarks as they do themselves."""
    monkeypatch.syspath_prepend(str(BENCH))


def script_of(result: Path) -> Path:
    """Return the benchmark that wrote a result: the file's name up to its first dash."""
    return BENCH / f"{result.stem.partition('-')[0]}.py"


def columns_of(script: Path) -> set[str]:
    """Return the fields of a benchmark's own class of rows; empty if it uses that of ``ratios``."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        if isinstance(node, ast.ClassDef) and node.name == "Row":
            fields = [one.target for one in node.body if isinstance(one, ast.AnnAssign)]
            return {field.id for field in fields if isinstance(field, ast.Name)}
    return set()


def imported_from_ratios(script: Path) -> set[str]:
    """Return the names that a script imports from ``ratios``."""
    return {
        alias.name
        for node in ast.parse(script.read_text(encoding="utf-8")).body
        if isinstance(node, ast.ImportFrom) and node.module == "ratios"
        for alias in node.names
    }


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_every_stored_case_is_one_that_its_benchmark_still_measures(result: Path) -> None:
    from cases import declared_cases, is_declared

    script = script_of(result)
    assert script.is_file(), f"{result.name} has no benchmark: remove it, or measure anew"
    cases, columns = declared_cases(script), columns_of(script)
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    if script.stem == "gpu":
        from gpu_goals import GOALS

        assert {row["case"] for row in rows} <= {case for one in GOALS.values() for case in one}
        return
    if columns:  # figures under names of the script's own
        assert all(set(row) == columns for row in rows)
        return
    gone = [
        (row["case"], row["metric"])
        for row in rows
        if not is_declared(row["case"], row["metric"], cases)
    ]
    assert not gone, f"{script.name} does not measure {gone}: measure {result.name} anew"


@pytest.mark.parametrize("script", SCRIPTS, ids=lambda path: path.stem)
def test_a_benchmark_that_writes_rows_declares_their_cases(script: Path) -> None:
    from cases import declared_cases

    writes = imported_from_ratios(script) & {"report", "write_rows", "check_cases"}
    assert bool(writes) == bool(declared_cases(script))


def test_a_case_is_compared_as_a_whole_and_with_its_metric() -> None:
    from cases import is_declared

    cases = {r"step, d 512, (float32|bfloat16), against eager": "milliseconds"}
    good = "step, d 512, float32, against eager"
    assert is_declared(good, "milliseconds", cases)
    for case, metric in (
        (good, "MiB"),
        (f"{good} kernels", "milliseconds"),
        (f"a {good}", "milliseconds"),
        (good.replace("512", "256"), "milliseconds"),
        (good.replace("d 512, ", ""), "milliseconds"),
        (good.replace("eager", "sdpa"), "milliseconds"),
    ):
        assert not is_declared(case, metric, cases)


def test_a_quick_run_has_other_sizes_but_no_other_words() -> None:
    from cases import is_declared

    cases = {r"memory after 100,000 requests of \d+\.\d GB": "MiB"}
    quick = "memory after 100 requests of 0.1 GB"
    assert not is_declared(quick, "MiB", cases)
    assert is_declared(quick, "MiB", cases, any_size=True)
    assert not is_declared(quick.replace("requests", "lines"), "MiB", cases, any_size=True)


def test_rows_of_undeclared_cases_are_refused_and_written_with_their_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from ratios import Options, Row, write_rows

    script, json_path = tmp_path / "script.py", tmp_path / "found.json"
    script.write_text('CASES = {"step": "milliseconds"}\n', encoding="utf-8")
    monkeypatch.setattr(sys, "argv", [str(script)])
    options = Options(quick=False, rounds=1, threads=1, json_path=json_path)
    row = Row("step", "milliseconds", 1.0, 2.0, 2.0, 1.0, holds=True)
    write_rows([row], options, shapes="d 512; d 256")
    assert json.loads(json_path.read_text(encoding="utf-8"))["shapes"] == "d 512; d 256"
    other = Row("search", "milliseconds", 1.0, 2.0, 2.0, 1.0, holds=True)
    with pytest.raises(SystemExit, match=r"script\.py: CASES has no 'search' in milliseconds"):
        write_rows([row, other], options, shapes="")
