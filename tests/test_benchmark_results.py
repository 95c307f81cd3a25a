"""Stored benchmark results belong to benchmarks, cases and peers that exist today."""

import ast
import json
import re
from pathlib import Path

import pytest

BENCH = Path(__file__).parent / "bench"
RESULTS = sorted((BENCH / "results").glob("*.json"))
DATA_TYPES = {"float32", "bfloat16"}
"""Words of cases that come from PyTorch's names of types."""


def script_of(result: Path) -> Path:
    """Return the benchmark that wrote a result: the file's name up to its first dash."""
    return BENCH / f"{result.stem.partition('-')[0]}.py"


def unknown_words(case: str, source: str) -> set[str]:
    """Return the words of a case that its benchmark does not contain."""
    words = set(re.findall(r"\b[^\W\d_]\w*", case)) - DATA_TYPES - {"against"}
    return {word for word in words if not re.search(rf"\b{re.escape(word)}\b", source)}


def names_peer(peer: str, source: str) -> bool:
    """Return whether a benchmark writes the text, with any value where it fills in one."""
    for node in ast.walk(ast.parse(source)):
        match node:
            case ast.Constant(value=str() as text) if text == peer:
                return True
            case ast.JoinedStr(values=parts) if any(isinstance(p, ast.Constant) for p in parts):
                pattern = "".join(
                    re.escape(str(part.value)) if isinstance(part, ast.Constant) else ".+"
                    for part in parts
                )
                if re.fullmatch(pattern, peer):
                    return True
            case ast.keyword(arg=str() as name) if name == peer:
                return True
    return False


def gone(case: str, source: str) -> set[str]:
    """Return what of a case its benchmark does not measure any more."""
    _, _, peer = case.partition(", against ")
    missing = set() if not peer or names_peer(peer, source) else {f"against {peer}"}
    return missing | unknown_words(case, source)


@pytest.mark.parametrize("result", RESULTS, ids=lambda path: path.stem)
def test_every_stored_case_is_one_that_its_benchmark_still_measures(result: Path) -> None:
    script = script_of(result)
    assert script.is_file(), f"{result.name} has no benchmark: remove it, or measure anew"
    source = script.read_text(encoding="utf-8")
    rows = json.loads(result.read_text(encoding="utf-8"))["rows"]
    missing = {row["case"]: gone(row["case"], source) for row in rows if "case" in row}
    missing = {case: parts for case, parts in missing.items() if parts}
    assert not missing, f"{script.name} does not measure {missing}: measure {result.name} anew"


def test_a_case_or_peer_that_is_gone_is_found() -> None:
    source = 'case = f"step, {kind}"\npeers = {"eager": 1, f"{family} sdpa": 2}\n'
    assert not gone("step, float32, against eager", source)
    assert not gone("step, float32, against M2M100 sdpa", 'M2M100 = ""\n' + source)
    assert gone("step, float32, against flash", source) == {"against flash", "flash"}
    assert gone("search, float32, against eager", source) == {"search"}
