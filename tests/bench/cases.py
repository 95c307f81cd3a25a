"""The cases that a benchmark declares, against which its rows and stored results are held.

Every script whose rows have cases has a dict ``CASES``: pattern of a case → metric of its rows.
Patterns are regular expressions that match whole cases.
"""

import ast
import re
from collections.abc import Mapping
from pathlib import Path


def declared_cases(script: Path) -> dict[str, str]:
    """Return ``CASES`` of a script, without running it; empty if it has none."""
    for node in ast.parse(script.read_text(encoding="utf-8")).body:
        match node:
            case ast.Assign(targets=[ast.Name(id="CASES")], value=value):
                found: dict[str, str] = ast.literal_eval(value)
                return found
    return {}


def is_declared(
    case: str, metric: str, cases: Mapping[str, str], *, any_size: bool = False
) -> bool:
    """Return whether a pattern of ``cases`` matches the whole case and has its metric.

    Args:
        any_size: ignore the values of numbers, which differ in a run with ``--quick``.
    """
    return any(
        known == metric
        and (
            re.fullmatch(_without_sizes(pattern), _without_sizes(case))
            if any_size
            else re.fullmatch(pattern, case)
        )
        for pattern, known in cases.items()
    )


def _without_sizes(text: str) -> str:
    return re.sub(r"\d+(,\d{3})*", "0", text)
