"""Show analyses: their charts as SVG files, and their sections of a report."""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from itertools import islice
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.artifacts.artifact import Artifact, ArtifactWriter
from pipeline.errors import ArtifactError
from pipeline.evaluation.charts import (
    Bar,
    Series,
    bar_chart,
    heat_map,
    line_chart,
    picture,
    scatter_chart,
)
from pipeline.evaluation.scores import FAMILIES, Family, title_of_family
from pipeline.evaluation.tables import (
    Cell,
    Figure,
    ReportSection,
    Row,
    Table,
    headings,
    row,
    score_cell,
)

JsonObject = Mapping[str, Any]
SHOWN_PAIRS = 12
"""Most pairs or directions that a report draws; tables have all of them."""


@dataclass(frozen=True)
class Chart(Figure):
    """A figure of a report that is also a file of the artifact."""

    name: str = ""  # name of the file, without its ending


def write_analysis(writer: ArtifactWriter, document: JsonObject) -> None:
    """Write the JSON file and the pictures of an analysis."""
    kind = document["analysis"]
    writer.statistics["analysis"] = kind
    writer.write_json(f"{kind}.json", document)
    charts, _ = PARTS[kind]
    for chart in charts(document):
        path = writer.path(f"{chart.name}.svg")
        path.write_text(picture(chart.svg), encoding="utf-8", newline="\n")


def analysis_sections(analyses: Mapping[str, Artifact]) -> list[ReportSection]:
    """Return one section per analysis; ArtifactError if a file is not as its stage wrote it."""
    return [_section(name, artifact) for name, artifact in analyses.items()]


def _section(name: str, artifact: Artifact) -> ReportSection:
    kind: Any = artifact.statistics.get("analysis")
    try:
        charts, section = PARTS[kind]
        document = artifact.read_json(f"{kind}.json")
        return section(name, document, tuple(islice(charts(document), SHOWN_PAIRS)))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError) as error:
        raise ArtifactError(
            f"{artifact.directory} holds no analysis that reports can show. Run stage "
            f"{artifact.manifest.stage!r} again."
        ) from error


def _number(value: float | None, decimals: int) -> Cell:
    """Return a number as text, empty for None: formatting it here finds other values."""
    return Cell("" if value is None else score_cell(value, decimals=decimals).text)


def _percent(share: float | None, decimals: int = 1) -> Cell:
    return _number(None if share is None else 100 * share, decimals)


# scales


def scale_charts(document: JsonObject) -> Iterator[Chart]:
    """Draw the scales of both directions of every pair, the most different first (MoCE, Figure 4).

    Upright lines are means.
    """
    for pair in sorted(document["pairs"], key=lambda pair: -document["pairs"][pair]["divergence"]):
        first, second = pair.split("-")
        series = tuple(
            Series(
                name=f"{source} → {target}",
                points=tuple((float(x), 100.0 * y) for x, y in enumerate(counts["share"])),
                place=place,
                upright=counts["mean"],
            )
            for place, (source, target) in enumerate([(first, second), (second, first)])
            for counts in [document["directions"][f"{source}-{target}"]]
        )
        title, y_label = f"Scales chosen, {pair}", "share of choices, %"
        svg = line_chart(series, title=title, x_label="δ", y_label=y_label)
        yield Chart(svg, name=f"scales-{pair}")


def _scales(name: str, document: JsonObject, figures: tuple[Figure, ...]) -> ReportSection:
    directions = document["directions"]
    scales = range(max(len(counts["share"]) for counts in directions.values()))
    by_direction = tuple(
        row(
            direction,
            *(_number(counts[mean], 3) for mean in ("mean", "weighted_mean")),
            *map(_percent, counts["share"]),
        )
        for direction, counts in directions.items()
    )
    by_pair = tuple(
        row(pair, _number(compared["divergence"], 5), _number(compared["length_ratio"], 3))
        for pair, compared in document["pairs"].items()
    )
    titles = headings("Direction", "mean δ", "by weight", *(f"δ = {one}, %" for one in scales))
    of_pairs = headings("Pair", "Jensen–Shannon divergence, bits", "byte ratio, first to second")
    return ReportSection(
        f"Scales chosen by {name}",
        "Shares of each δ among the top-k choices for the vectors of all source tokens, heads, "
        "and queries, keys and values; and mean δ, by number of choices and by weight. The charts "
        f"show the pairs with the most different directions, at most {SHOWN_PAIRS}; dotted lines "
        "are means.",
        figures,
        tables=(
            Table("By direction", titles, by_direction),
            Table("Both directions of a pair", of_pairs, by_pair),
        ),
    )


# language vectors


def vectors_charts(document: JsonObject) -> Iterator[Chart]:
    """Draw the chrF++ of every direction by the language shown to the router (MoCE, Figure 7)."""
    for direction, scores in document["directions"].items():
        bars = [Bar("right", scores["right"]["chrf"], 2)]
        if scores["without"] is not None:
            bars.append(Bar("none", scores["without"]["chrf"], 1))
        bars += [Bar(code, wrong["chrf"]) for code, wrong in scores["wrong"].items()]
        values = [bar.value for bar in bars]
        low = max(2 * min(values) - max(values), 0.0)  # the smallest bar is half of the largest
        title = f"Wrong language vectors, {direction}"
        svg = bar_chart(bars, title=title, x_label="chrF++", low=low)
        yield Chart(svg, name=f"vectors-{direction}")


def _vectors(name: str, document: JsonObject, figures: tuple[Figure, ...]) -> ReportSection:
    rows = tuple(
        row(
            f"{direction}, {shown}",
            _number(scores["bleu"], 2),
            _number(scores["chrf"], 2),
            f"{scores['changed']:,}",
        )
        for direction, by_vector in document["directions"].items()
        for shown, scores in [
            ("right", by_vector["right"]),
            ("no vector at all", by_vector["without"]),
            *by_vector["wrong"].items(),
        ]
        if scores is not None
    )
    return ReportSection(
        f"Wrong language vectors: {name}",
        "Scores when the router is given the vector of another language than the source's, while "
        "the tags stay right; and the number of translations that change. The bars do not begin "
        "at 0.",
        figures,
        tables=(
            Table("By language shown", headings("Direction", "BLEU", "chrF++", "changed"), rows),
        ),
    )


# lengths


def lengths_charts(document: JsonObject) -> Iterator[Chart]:
    """Draw the lengths of languages from the longest to the most concise (MoCE, Figure 3)."""
    lengths, label = document["mean_bytes"], "mean bytes per line"
    if not lengths:
        lengths, label = (
            document["ratio_to_pivot"],
            f"bytes divided by bytes of {document['pivot']}",
        )
    bars = [Bar(code, lengths[code]) for code in document["order"]]
    yield Chart(
        bar_chart(bars, title="Length of languages in bytes", x_label=label), name="lengths"
    )


def _lengths(name: str, document: JsonObject, figures: tuple[Figure, ...]) -> ReportSection:
    means, ratios = document["mean_bytes"], document["ratio_to_pivot"]
    rows = tuple(
        row(code, _number(means[code] if means else None, 1), _number(ratios.get(code), 3))
        for code in document["order"]
    )
    lines, pivot = document["parallel_lines"], document["pivot"]
    measured = (
        f"Mean length in bytes of UTF-8 of {lines:,} test lines that all languages have"
        if lines
        else f"No test line of {pivot} is in all pairs, so there is no mean length"
    )
    titles = headings("Language", "bytes per line", f"ratio to {pivot}")
    tables = [Table("From the longest to the most concise", titles, rows)]
    if segmented := document.get("segmentation", {}):
        titles = headings("Language", "words", "pieces per word", "unknown pieces, %")
        rows = tuple(
            row(
                code,
                f"{counts['words']:,}",
                _number(counts["fertility"], 2),
                _percent(counts["unknown_share"], 2),
            )
            for code, counts in segmented.items()
        )
        tables.append(Table("By the tokenizer's pieces", titles, rows))
    return ReportSection(
        f"Lengths in bytes: {name}",
        f"{measured}; and ratio of bytes to the bytes of {pivot}, over the test lines of a pair.",
        figures,
        tables=tuple(tables),
    )


# languages inside a model


def expert_shares(document: JsonObject) -> dict[Family, dict[str, list[float]]]:
    """Return family → language → share of its routes that each expert of the last layer gets.

    The language is the source of directions into the pivot, else the target. Its shares are means
    over its directions (MMNMT, Figure 6).
    """
    rows: dict[Family, dict[str, list[list[float]]]] = {family: {} for family in FAMILIES}
    for direction, counts in document["directions"].items():
        source, target = direction.split("-")
        routed, family = counts["routed"][-1], counts["family"]
        shares = [count / sum(routed) for count in routed]
        rows[family].setdefault(source if family == "into_pivot" else target, []).append(shares)
    return {
        family: {code: np.mean(shares, axis=0).tolist() for code, shares in sorted(codes.items())}
        for family, codes in rows.items()
        if codes
    }


def language_charts(document: JsonObject) -> Iterator[Chart]:
    """Draw the experts of families of directions, and encoder states (MMNMT, Figures 6 and 4)."""
    shares, pivot = expert_shares(document), document["pivot"]
    high = max((max(row) for rows in shares.values() for row in rows.values()), default=1.0)
    for family, rows in shares.items():
        title = title_of_family(family, pivot=pivot)
        svg = heat_map(rows, title=f"Experts, {title}", x_label="expert", high=high)
        yield Chart(svg, title=title, name=f"experts-{family}")
    if not document["points"]:
        return
    outlines = document["outlines"]
    series = tuple(
        Series(
            code,
            tuple((float(x), float(y)) for x, y in points),
            place,
            outline=tuple(
                ((float(x), float(y)), (float(to_x), float(to_y)))
                for segments in outlines[code]
                for (x, y), (to_x, to_y) in segments
            ),
        )
        for place, (code, points) in enumerate(document["points"].items())
    )
    note = "Outlines hold 50 and 90 % of the kernel density of a language's points."
    title = "Encoder states of the same lines"
    shown = note if any(outlines.values()) else ""
    yield Chart(scatter_chart(series, title=title), f"{title}, t-SNE", shown, name="states")


def _languages(name: str, document: JsonObject, figures: tuple[Figure, ...]) -> ReportSection:
    layers, pivot, lines = document["layers"], document["pivot"], document["parallel_lines"]
    experts = (
        f"The heat maps show the share of a language's tokens that each expert of {layers[-1]} "
        "gets, with the reference as the decoder's input; a row is a source into "
        f"{pivot}, else a target."
        if document["directions"]
        else "No tokens go to experts."
    )
    states = (
        f"Encoder states are means over the tokens of {lines:,} lines that all languages have. A "
        "line is retrieved if its translation is the nearest line of another language."
        if lines
        else f"No test line of {pivot} that fits into the model is in all of its pairs, so no "
        "encoder states are compared."
    )
    tables = (
        Table(
            "Encoder states of translations",
            headings("Language", "cosine to translations", "to other lines", "retrieved, %"),
            tuple(_likeness_rows(document)),
        ),
        Table(
            "Routes that zero-shot directions share with trained ones, %",
            headings("Target", f"into {pivot}", f"{pivot} into it"),
            tuple(_overlap_rows(expert_shares(document))),
        ),
    )
    shown = tuple(table for table in tables if table.rows)
    return ReportSection(f"Languages inside {name}", f"{experts} {states}", figures, shown)


def _likeness_rows(document: JsonObject) -> Iterator[Row]:
    """Yield the means over the pairs of every language."""
    for code in document["encoded"]:
        pairs = [one for pair, one in document["pairs"].items() if code in pair.split("-")]
        if not pairs:
            continue
        same, retrieved = (fmean(one[key] for one in pairs) for key in ("same", "retrieved"))
        others = [one["different"] for one in pairs if one["different"] is not None]
        different = _number(fmean(others) if others else None, 3)
        yield row(code, _number(same, 3), different, _percent(retrieved))


def _overlap_rows(shares: Mapping[Family, Mapping[str, list[float]]]) -> Iterator[Row]:
    """Yield for every zero-shot target the routes that go to the experts of trained directions."""
    into = shares.get("into_pivot", {})
    out_of = shares.get("out_of_pivot", {})
    for code, own in shares.get("zero_shot", {}).items():
        others = [np.mean([*into.values()], axis=0) if into else None, out_of.get(code)]
        common = (None if one is None else float(np.minimum(own, one).sum()) for one in others)
        yield row(code, *map(_percent, common))


PARTS = {
    "scales": (scale_charts, _scales),
    "vectors": (vectors_charts, _vectors),
    "lengths": (lengths_charts, _lengths),
    "languages": (language_charts, _languages),
}
"""Kind of an analysis → its charts and its section."""
