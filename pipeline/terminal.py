"""Format numbers, lists and tables for a terminal."""

from collections.abc import Iterable, Mapping


def clock_text(seconds: float) -> str:
    """Format seconds as ``M:SS`` or ``H:MM:SS``."""
    minutes, second = divmod(max(round(seconds), 0), 60)
    hour, minute = divmod(minutes, 60)
    return f"{hour}:{minute:02}:{second:02}" if hour else f"{minute}:{second:02}"


def text_table(header: list[str], rows: list[list[str]]) -> str:
    """Return columns aligned with spaces, with a rule under every column that has a name.

    A column without one may hold sentences, and a rule as long would fill lines of a terminal.
    """
    widths = [max(len(row[column]) for row in [header, *rows]) for column in range(len(header))]
    rule = ["-" * width if name else "" for name, width in zip(header, widths, strict=True)]
    lines = [header, rule, *rows]
    return "\n".join(
        "  ".join(cell.ljust(width) for cell, width in zip(line, widths, strict=True)).rstrip()
        for line in lines
    )


LISTED = 6
"""Largest number of names that ``listed`` writes out."""


def listed(names: Iterable[str]) -> str:
    """Join names, ``a, b, c``, in the order given; a long list ends in ``and 12 more``."""
    found = list(names)
    if len(found) <= LISTED:
        return ", ".join(found)
    return f"{', '.join(found[: LISTED - 1])} and {len(found) - LISTED + 1} more"


def counted(number: int, noun: str, plural: str = "") -> str:
    """Return ``1 line``, ``2,000 lines``; ``plural`` is for nouns that take more than an s."""
    return f"{number:,} {noun if number == 1 else plural or noun + 's'}"


def size_text(size: float) -> str:
    """Return bytes as ``1.5 GiB``, and less than a GiB as ``20 MiB``."""
    return f"{size / 2**30:,.1f} GiB" if size >= 2**30 else f"{rounded(size / 2**20)} MiB"


def an_artifact(kind: str) -> str:
    """Return ``a corpus artifact``, ``an evaluation artifact``; ``a translations`` were wrong."""
    return f"{'an' if kind[:1] in tuple('aeiou') else 'a'} {kind} artifact"


def rounded(number: float) -> str:
    """Return three digits, and of a large number the whole part: ``5.19``, ``38,072``."""
    return f"{number:.3g}" if number < 999.5 else f"{number:,.0f}"


def tallied(counts: Mapping[str, int]) -> str:
    """Return ``empty 3, copy 1`` in the order given, without zeros."""
    return ", ".join(f"{name} {number:,}" for name, number in counts.items() if number)
