"""The survey of a corpus as one self-contained HTML page, in the form of the evaluation's."""

from collections.abc import Mapping, Sequence
from importlib import resources
from itertools import groupby

from pipeline.evaluation.charts import Series, legend, line_chart
from pipeline.evaluation.html_parts import (
    SERIES_COLOURS,
    bar,
    bullet_list,
    escape_html,
    section,
    table,
)
from pipeline.survey.counts import LENGTH_BIN, LanguageCounts, quantile
from pipeline.survey.survey import Survey
from pipeline.terminal import counted

SHOWN_SHARE = 0.995
"""Histograms end at the length that this share of the lines of all languages does not exceed."""
SHOWN_LEAKS = 100
"""Pairs and held-out sets in the table of leaks, the largest."""


PAGE_START = '<!doctype html>\n<html lang="en">\n<head>\n<meta name="generator" content="survey">\n'
"""By which a page is known: another file is never replaced by one."""


def survey_page(survey: Survey) -> str:
    """The whole page."""
    title = f"The corpus {escape_html(survey.origin)}"
    style = resources.files("pipeline.evaluation").joinpath("report.css").read_text("utf-8")
    sections = [
        _header(survey, title),
        _sizes(survey),
        _lengths(survey),
        _languages(survey),
        _dropped(survey),
        _samples(survey),
        _leaks(survey),
        _method(survey),
    ]
    body = "\n".join(one for one in sections if one)
    return (
        f'{PAGE_START}<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f'<meta name="color-scheme" content="light dark">\n<title>{title}</title>\n'
        f"<style>\n{style}</style>\n</head>\n<body>\n<main>\n{body}\n</main>\n</body>\n</html>\n"
    )


def _header(survey: Survey, title: str) -> str:
    totals = {split: _total(survey, split) for split in ("train", "valid", "test")}
    zero_shot = [
        pair
        for pair, sizes in survey.sizes.items()
        if not sizes.get("train") and pair not in survey.emptied
    ]
    facts = [
        counted(len(survey.sizes), "pair"),
        counted(len({code for pair in survey.sizes for code in pair.split("-")}), "language"),
        counted(totals["train"], "training line"),
        f"{totals['valid']:,} of validation",
        f"{totals['test']:,} of test",
    ]
    if zero_shot:
        facts.append(f"{counted(len(zero_shot), 'pair')} without training text")
    if survey.emptied:
        facts.append(f"nothing left of {', '.join(sorted(survey.emptied))}")
    return (
        f'<header><p class="eyebrow">Survey of a corpus</p><h1>{title}</h1>'
        f'<p class="facts">{escape_html(" · ".join(facts))}</p></header>'
    )


def _sizes(survey: Survey) -> str:
    largest = max((sizes.get("train", 0) for sizes in survey.sizes.values()), default=0)
    pairs = sorted(survey.sizes, key=lambda pair: (-survey.sizes[pair].get("train", 0), pair))
    titles = [
        *("training lines", "", "imported", "dropped", "valid", "test"),
        *("ratio of characters", "5 %", "95 %"),
        *(("epochs",) if survey.epochs else ()),
    ]
    rows = "".join(_size_row(survey, pair, largest=largest) for pair in pairs)
    lead = (
        "Lines per pair and split. The ratio is that of the characters of the first side to those "
        "of the second, its median over the training lines and what 5 % and 95 % are below."
    )
    if survey.epochs:
        lead += f" Epochs are how often training would see each line{_conditions(survey)}."
    return section("Sizes", table(_head("pair", titles), rows, tall=len(pairs) > 20), lead=lead)


def _size_row(survey: Survey, pair: str, *, largest: int) -> str:
    sizes = survey.sizes[pair]
    lines = sizes.get("train", 0)
    imported = survey.imported.get(pair, lines)
    counts = survey.counts.get(pair)
    ratios = [None if counts is None else counts.ratio(share) for share in (0.5, 0.05, 0.95)]
    cells = [
        f"{lines:,}",
        _bar(lines / largest if largest else 0.0),
        f"{imported:,}",
        f"{1 - lines / imported:.1%}" if imported else "–",
        f"{sizes.get('valid', 0):,}",
        f"{sizes.get('test', 0):,}",
        *("–" if ratio is None else f"{ratio:.2f}" for ratio in ratios),
    ]
    if survey.epochs:
        cells.append(f"{survey.epochs[pair]:.3g}" if pair in survey.epochs else "–")
    return _row(pair, cells)


def _bar(share: float) -> str:
    """A bar as wide as its column of a table."""
    drawn = bar(share, text="", style="s0")
    return f'<div class="bar-row" style="grid-template-columns:110px">{drawn}</div>'


def _conditions(survey: Survey) -> str:
    parts = []
    if survey.sampling_temperature is not None:
        parts.append(f"at T = {survey.sampling_temperature:g}")
    if survey.updates is not None:
        parts.append(f"in {counted(survey.updates, 'update')}")
    return f" {' '.join(parts)}" if parts else ""


def _lengths(survey: Survey) -> str:
    """A few languages per chart, in the order of the alphabet."""
    languages = survey.languages
    if not languages:
        return ""
    total = LanguageCounts()
    for counts in languages.values():
        total.add(counts)
    last = quantile(total.lengths, SHOWN_SHARE) or 0
    codes = list(languages)
    figures = [
        _length_figure(
            {code: languages[code] for code in codes[start : start + SERIES_COLOURS]}, last
        )
        for start in range(0, len(codes), SERIES_COLOURS)
    ]
    return section(
        "Lengths",
        f'<div class="charts">{"".join(figures)}</div>',
        lead=f"Characters per training line, in columns of {LENGTH_BIN}; the longest "
        f"{1 - SHOWN_SHARE:.1%} are beyond the right edge.",
    )


def _length_figure(languages: Mapping[str, LanguageCounts], last: int) -> str:
    series = [
        Series(
            code,
            tuple(
                ((place + 0.5) * LENGTH_BIN, 100.0 * counts.lengths[place] / counts.lines)
                for place in range(last + 1)
            ),
            place=number,
        )
        for number, (code, counts) in enumerate(languages.items())
    ]
    chart = line_chart(
        series,
        title=f"Lengths of lines in {', '.join(languages)}",
        x_label="characters",
        y_label="% of lines",
    )
    return f"<figure>{chart}{legend(series)}</figure>"


def _languages(survey: Survey) -> str:
    titles = ["training lines", "characters per line", "words per line"]
    if survey.fertility:
        titles += ["tokens", "tokens per word", "tokens per character"]
    rows = []
    for code, counts in survey.languages.items():
        cells = [
            f"{counts.lines:,}",
            f"{counts.characters / counts.lines:.1f}",
            f"{counts.words / counts.lines:.1f}",
        ]
        if survey.fertility:
            found = survey.fertility.get(code)
            cells += (
                ["–"] * 3
                if found is None
                else [f"{found.tokens:,}", f"{found.per_word:.2f}", f"{found.per_character:.3f}"]
            )
        rows.append(_row(code, cells))
    if not rows:
        return ""
    lead = "A language's lines count once in each of its pairs. Words are what spaces divide."
    if survey.fertility:
        lead += (
            " Fertility is the tokens per word; where a language is written without spaces, those "
            "per character say more. Lines too long for the shards are without tokens here."
        )
    return section(
        "Languages", table(_head("language", titles), "".join(rows), tall=len(rows) > 20), lead=lead
    )


def _dropped(survey: Survey) -> str:
    found = {rule: lines for rule, lines in survey.dropped.items() if lines}
    if not found:
        return ""
    read = sum(found.values()) + _total(survey, "train")
    rows = "".join(
        _row(rule, [f"{lines:,}", f"{lines / read:.2%}"])
        for rule, lines in sorted(found.items(), key=lambda item: (-item[1], item[0]))
    )
    return section(
        "Dropped by cleaning",
        table(_head("rule", ["lines", "of those read"]), rows),
        lead="Each line under the first rule that it breaks.",
    )


def _samples(survey: Survey) -> str:
    parts = []
    for rule, rows in groupby(survey.samples, key=lambda row: str(row["rule"])):
        cards = "".join(
            f'<article class="sample"><h4>{escape_html(str(row["pair"]))}'
            f"<small>line {row['line']:,}</small></h4><dl>{_texts(row['text'])}</dl></article>"
            for row in rows
        )
        parts.append(f'<h3>{escape_html(rule)}</h3><div class="samples">{cards}</div>')
    if not parts:
        return ""
    return section(
        "Samples of what was dropped", "".join(parts), lead="Drawn evenly from all, not by hand."
    )


def _texts(text: Mapping[str, object]) -> str:
    return "".join(
        f'<dt class="given">{escape_html(code)}</dt>'
        f'<dd class="given" lang="{escape_html(code)}" dir="auto">'
        + (escape_html(str(side)) if str(side).strip() else '<em class="empty">empty</em>')
        + "</dd>"
        for code, side in text.items()
    )


def _leaks(survey: Survey) -> str:
    found = [
        (lines, pair, held_out)
        for pair, sets in survey.leaks.items()
        for held_out, lines in sets.items()
    ]
    if not found:
        return ""
    found.sort(key=lambda one: (-one[0], one[1], one[2]))
    rows = "".join(
        _row(pair, [escape_html(held_out), f"{lines:,}"])
        for lines, pair, held_out in found[:SHOWN_LEAKS]
    )
    lead = "Training lines with a side that is a line of a held-out set, before they were dropped."
    if len(found) > SHOWN_LEAKS:
        lead += (
            f" The {SHOWN_LEAKS} largest of {len(found):,} numbers; the others stand in the corpus."
        )
    titles = ["held-out set", "training lines"]
    return section(
        "Held-out lines in training text",
        table(_head("training text", titles), rows, tall=len(found) > 20),
        lead=lead,
    )


def _method(survey: Survey) -> str:
    notes = ["Characters are code points. All training lines were counted, none was sampled."]
    if not survey.fertility:
        notes.append("Fertility is left out: it needs the shards.")
    if not survey.epochs:
        notes.append("Expected epochs are left out: they need the mixture.")
    return section("How to read this", bullet_list(notes))


def _head(first: str, titles: Sequence[str]) -> str:
    cells = "".join(f'<th scope="col">{escape_html(title)}</th>' for title in titles)
    return f'<tr><th scope="col">{escape_html(first)}</th>{cells}</tr>'


def _row(name: str, cells: Sequence[str]) -> str:
    """A row of HTML cells; its name is text."""
    shown = "".join(f"<td>{cell}</td>" for cell in cells)
    return f'<tr><th scope="row">{escape_html(name)}</th>{shown}</tr>'


def _total(survey: Survey, split: str) -> int:
    return sum(sizes.get(split, 0) for sizes in survey.sizes.values())
