"""The survey of a corpus as one self-contained HTML page, in the form of an evaluation's report."""

from collections import Counter
from collections.abc import Mapping

from pipeline.artifacts.corpus import Split, language_of
from pipeline.evaluation.charts import SERIES_COLORS, Series, legend, line_chart
from pipeline.evaluation.rendering import render_html
from pipeline.evaluation.tables import (
    Cell,
    Figure,
    Heading,
    Report,
    ReportSection,
    Row,
    SampleText,
    Table,
    TextSample,
    bullets,
    headings,
    row,
)
from pipeline.survey.counts import LENGTH_BIN, LanguageCounts, quantile
from pipeline.survey.survey import Survey
from pipeline.terminal import counted

SHOWN_SHARE = 0.995
"""Histograms end at the length that this share of the lines of all languages does not exceed."""
SHOWN_LEAKS = 100
"""Number of rows in the table of leaks; the largest are shown."""
SPLITS: dict[Split, str] = {"train": "training", "valid": "validation", "test": "test"}


def survey_page(survey: Survey) -> str:
    """Return the page of a survey."""
    sections = (
        _sizes(survey),
        _lengths(survey),
        _languages(survey),
        _dropped(survey),
        _samples(survey),
        _leaks(survey),
        _notes(survey),
    )
    report = Report(
        f"The corpus {survey.origin}",
        "Survey of a corpus",
        _facts(survey),
        tuple(section for section in sections if section is not None),
        generator="survey",
    )
    return render_html(report)


def _facts(survey: Survey) -> tuple[str, ...]:
    zero_shot = [
        pair
        for pair, sizes in survey.sizes.items()
        if not sizes.get("train") and pair not in survey.emptied
    ]
    synthetic = survey.pairs(synthetic=True)
    facts = [
        counted(len(survey.sizes) - len(synthetic), "natural pair" if synthetic else "pair"),
        counted(
            len({language_of(side) for pair in survey.sizes for side in pair.split("-")}),
            "language",
        ),
        *(
            counted(survey.lines(split, synthetic=False), f"{name} line")
            for split, name in SPLITS.items()
        ),
    ]
    if synthetic:
        lines = counted(survey.lines("train", synthetic=True), "synthetic training line")
        facts.append(f"{lines} of {counted(len(synthetic), 'pair')}")
    if zero_shot:
        facts.append(f"{counted(len(zero_shot), 'pair')} without training text")
    if survey.emptied:
        facts.append(f"nothing left of {', '.join(sorted(survey.emptied))}")
    return tuple(facts)


def _sizes(survey: Survey) -> ReportSection:
    lead = (
        "Lines per pair and split. The ratio is that of the characters of the first language to "
        "those of the second: its median over the training lines, and its 5 % and 95 % quantiles."
    )
    if survey.joined:
        lead += (
            f" Of pairs that were joined over a pivot ({', '.join(survey.joined)}), the lines with "
            "equal pivots stand as imported."
        )
    if survey.epochs:
        lead += f" Epochs are how often training would see each line{_conditions(survey)}."
    titles = headings(
        *("Pair", "training lines", "imported", "dropped", "valid", "test"),
        *("ratio of characters", "5 %", "95 %"),
        *(("epochs",) if survey.epochs else ()),
    )
    largest = max((sizes.get("train", 0) for sizes in survey.sizes.values()), default=0)
    pairs = sorted(survey.sizes, key=lambda pair: (-survey.sizes[pair].get("train", 0), pair))
    rows = (_size_row(survey, pair, largest=largest) for pair in pairs)
    return ReportSection("Sizes", lead, tables=(Table("", titles, tuple(rows)),))


def _size_row(survey: Survey, pair: str, *, largest: int) -> Row:
    sizes = survey.sizes[pair]
    lines = sizes.get("train", 0)
    imported = survey.imported.get(pair, lines)
    counts = survey.counts.get(pair)
    ratios = [None if counts is None else counts.ratio(share) for share in (0.5, 0.05, 0.95)]
    return row(
        pair,
        Cell(lines, bar=lines / largest if largest else 0.0),
        imported,
        Cell(1 - lines / imported if imported else None, ".1%"),
        sizes.get("valid", 0),
        sizes.get("test", 0),
        *(Cell(ratio, ".2f") for ratio in ratios),
        *([Cell(survey.epochs.get(pair), ".3g")] if survey.epochs else []),
    )


def _conditions(survey: Survey) -> str:
    parts = []
    if survey.sampling_temperature is not None:
        parts.append(f"at T = {survey.sampling_temperature:g}")
    if survey.updates is not None:
        parts.append(f"in {counted(survey.updates, 'update')}")
    return f" {' '.join(parts)}" if parts else ""


def _lengths(survey: Survey) -> ReportSection | None:
    """Return histograms of a few languages per chart, in alphabetical order."""
    languages = survey.languages
    if not languages:
        return None
    total = LanguageCounts()
    for counts in languages.values():
        total.add(counts)
    last = quantile(total.lengths, SHOWN_SHARE) or 0
    codes = list(languages)
    figures = (
        _length_figure(
            {code: languages[code] for code in codes[start : start + SERIES_COLORS]}, last
        )
        for start in range(0, len(codes), SERIES_COLORS)
    )
    return ReportSection(
        "Lengths",
        f"Characters per training line, in bins of {LENGTH_BIN}; the longest "
        f"{1 - SHOWN_SHARE:.1%} of the lines are beyond the right edge.",
        figures=tuple(figures),
    )


def _length_figure(languages: Mapping[str, LanguageCounts], last: int) -> Figure:
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
    return Figure(chart + legend(series))


def _languages(survey: Survey) -> ReportSection | None:
    languages = survey.languages
    if not languages:
        return None
    titles = ["Language", "training lines", "characters per line", "words per line"]
    lead = "Lines of a language count once in each of its pairs. Words are separated by spaces."
    if survey.fertility:
        titles += ["tokens", "tokens per word", "tokens per character"]
        lead += (
            " Fertility is the number of tokens per word; for a language written without spaces, "
            "tokens per character say more. Lines too long for the shards have no tokens here."
        )
    rows = tuple(_language_row(survey, code, counts) for code, counts in languages.items())
    return ReportSection("Languages", lead, tables=(Table("", headings(*titles), rows),))


def _language_row(survey: Survey, code: str, counts: LanguageCounts) -> Row:
    fertility = survey.fertility.get(code)
    cells = [
        Cell(counts.lines),
        Cell(counts.characters / counts.lines, ".1f"),
        Cell(counts.words / counts.lines, ".1f"),
    ]
    if survey.fertility:
        cells += (
            [Cell(None)] * 3
            if fertility is None
            else [
                Cell(fertility.tokens),
                Cell(fertility.per_word, ".2f"),
                Cell(fertility.per_character, ".3f"),
            ]
        )
    return row(code, *cells)


def _dropped(survey: Survey) -> ReportSection | None:
    """Return the lines that each rule dropped, of synthetic pairs apart from the others."""
    kinds = {"Natural": False, "Synthetic": True} if survey.pairs(synthetic=True) else {"": False}
    dropped = {kind: Counter[str]() for kind in kinds}
    for kind, synthetic in kinds.items():
        for pair in survey.pairs(synthetic=synthetic):
            dropped[kind].update(survey.dropped.get(pair, {}))
    total = sum(dropped.values(), Counter[str]())
    if not total:
        return None
    read = {
        kind: max(dropped[kind].total() + survey.lines("train", synthetic=synthetic), 1)
        for kind, synthetic in kinds.items()
    }
    columns = [
        Heading(f"{kind} {title}".strip())
        for kind in kinds
        for title in ("lines", "share of lines read")
    ]
    rows = (
        row(
            rule,
            *(
                cell
                for kind, lines in dropped.items()
                for cell in (Cell(lines[rule]), Cell(lines[rule] / read[kind], ".2%"))
            ),
        )
        for rule in sorted(total, key=lambda rule: (-total[rule], rule))
    )
    return ReportSection(
        "Lines dropped by cleaning",
        "A line counts under the first rule that it violates.",
        tables=(Table("", (*headings("Rule"), *columns), tuple(rows)),),
    )


def _samples(survey: Survey) -> ReportSection | None:
    samples = tuple(
        TextSample(
            str(sample["pair"]),
            sample["line"],
            tuple(SampleText(code, str(text), code) for code, text in sample["text"].items()),
            group=str(sample["rule"]),
        )
        for sample in survey.samples
    )
    if not samples:
        return None
    return ReportSection("Samples of dropped lines", "Drawn evenly from all.", samples=samples)


def _leaks(survey: Survey) -> ReportSection | None:
    found = [
        (lines, pair, held_out)
        for pair, sets in survey.leaks.items()
        for held_out, lines in sets.items()
    ]
    if not found:
        return None
    found.sort(key=lambda one: (-one[0], one[1], one[2]))
    lead = "Training lines with a side that is a line of a held-out set; cleaning dropped them."
    if len(found) > SHOWN_LEAKS:
        lead += f" The {SHOWN_LEAKS} largest of {len(found):,} counts; the corpus has the others."
    titles = headings("Training text", "held-out set", "training lines", words=["held-out set"])
    rows = tuple(row(pair, held_out, lines) for lines, pair, held_out in found[:SHOWN_LEAKS])
    return ReportSection("Held-out lines in training text", lead, tables=(Table("", titles, rows),))


def _notes(survey: Survey) -> ReportSection:
    notes = ["Characters are code points. All training lines were counted."]
    if not survey.fertility:
        notes.append("Fertility is left out: it needs the shards.")
    if not survey.epochs:
        notes.append("Expected epochs are left out: they need the mixture.")
    return ReportSection("Notes", lists=bullets(notes))
