"""Pictures of analyses, from what stands in their JSON.

Sections of an evaluation's report about analyses: tables, and charts on the HTML page.
"""

from collections.abc import Iterator, Mapping
from statistics import fmean
from typing import Any

import numpy as np

from pipeline.artifacts.artifact import Artifact
from pipeline.errors import ArtifactError
from pipeline.evaluation.charts import (
    Bar,
    Series,
    bar_chart,
    heat_map,
    legend,
    line_chart,
    picture,
    scatter_chart,
)
from pipeline.evaluation.directions import FAMILIES, Family, title_of_family
from pipeline.evaluation.tables import (
    Cell,
    Figure,
    ReportSection,
    Row,
    Table,
    Value,
    headings,
    row,
    score_cell,
)

JsonObject = Mapping[str, Any]
SHOWN_PAIRS = 12
"""Most pairs or directions that are drawn; tables have all of them."""


def scale_series(document: JsonObject, pair: str) -> list[Series]:
    """Return the shares of δ in both directions of a pair, and their means."""
    first, second = pair.split("-")
    names = [f"{first}-{second}", f"{second}-{first}"]
    return [
        Series(
            name=name.replace("-", " → "),
            points=tuple((float(x), 100.0 * y) for x, y in enumerate(found["share"])),
            place=place,
            upright=found["mean"],
        )
        for place, name in enumerate(names)
        for found in [document["directions"][name]]
    ]


def scale_chart(document: JsonObject, pair: str) -> str:
    """Draw the scales of both directions of a pair (MoCE, Figure 4)."""
    return line_chart(
        scale_series(document, pair),
        title=f"Scales chosen, {pair}",
        x_label="δ",
        y_label="share of choices, %",
    )


def scale_picture(document: JsonObject, pair: str) -> str:
    """Return :func:`scale_chart` as an SVG file with its legend."""
    return picture(scale_chart(document, pair), scale_series(document, pair))


def lengths_chart(document: JsonObject) -> str:
    """Draw the lengths of languages from the longest to the most concise (MoCE, Figure 3)."""
    lengths, label = document["mean_bytes"], "mean bytes per line"
    if not lengths:
        lengths, label = document["ratio_to_pivot"], f"bytes by those of {document['pivot']}"
    bars = [Bar(code, lengths[code]) for code in document["order"]]
    return bar_chart(bars, title="Length of languages in bytes", x_label=label)


def lengths_picture(document: JsonObject) -> str:
    """Return :func:`lengths_chart` as an SVG file."""
    return picture(lengths_chart(document))


def vectors_chart(document: JsonObject, direction: str) -> str:
    """Draw the chrF++ of a direction by the language shown to the router (MoCE, Figure 7)."""
    found = document["directions"][direction]
    bars = [Bar("right", found["right"]["chrf"], 2)]
    if found["without"] is not None:
        bars.append(Bar("none", found["without"]["chrf"], 1))
    bars += [Bar(code, one["chrf"]) for code, one in found["wrong"].items()]
    values = [bar.value for bar in bars]
    low = max(2 * min(values) - max(values), 0.0)  # the smallest bar is half of the largest
    return bar_chart(bars, title=f"Wrong language vectors, {direction}", x_label="chrF++", low=low)


def vectors_picture(document: JsonObject, direction: str) -> str:
    """Return :func:`vectors_chart` as an SVG file."""
    return picture(vectors_chart(document, direction))


def expert_shares(document: JsonObject) -> dict[Family, dict[str, list[float]]]:
    """Return family → language → share of its routes that each expert of the last layer gets.

    The language is the source of directions into the pivot, else the target. Its shares are means
    over its directions (MMNMT, Figure 6).
    """
    found: dict[Family, dict[str, list[list[float]]]] = {family: {} for family in FAMILIES}
    for direction, one in document["directions"].items():
        source, target = direction.split("-")
        routed, family = one["routed"][-1], one["family"]
        shares = [count / sum(routed) for count in routed]
        found[family].setdefault(source if family == "into_pivot" else target, []).append(shares)
    return {
        family: {code: np.mean(rows, axis=0).tolist() for code, rows in sorted(by_code.items())}
        for family, by_code in found.items()
        if by_code
    }


def expert_charts(document: JsonObject) -> dict[Family, str]:
    """Draw the experts of each family of directions, in the same colors."""
    shares = expert_shares(document)
    high = max((max(row) for rows in shares.values() for row in rows.values()), default=1.0)
    return {
        family: heat_map(
            rows,
            [str(expert) for expert in range(len(next(iter(rows.values()))))],
            title=f"Experts, {title_of_family(family, pivot=document['pivot'])}",
            x_label="expert",
            low=0.0,
            high=high,
        )
        for family, rows in shares.items()
    }


def states_series(document: JsonObject) -> list[Series]:
    """Return the encoder states of every language in two dimensions; none if they are too few."""
    outlines = document.get("outlines", {})  # earlier versions made none
    return [
        Series(
            code,
            tuple((float(x), float(y)) for x, y in points),
            place,
            outline=tuple(
                ((float(x), float(y)), (float(to_x), float(to_y)))
                for segments in outlines.get(code, [])
                for (x, y), (to_x, to_y) in segments
            ),
        )
        for place, (code, points) in enumerate(document["points"].items())
    ]


def states_chart(document: JsonObject) -> str:
    """Draw the encoder states of the same lines by language (MMNMT, Figure 4)."""
    return scatter_chart(states_series(document), title="Encoder states of the same lines")


def language_pictures(document: JsonObject) -> dict[str, str]:
    """Return name → SVG file of the heat maps and of the encoder states."""
    found = {f"experts-{family}": picture(one) for family, one in expert_charts(document).items()}
    if document["points"]:
        found["states"] = picture(states_chart(document), states_series(document))
    return found


def analysis_sections(analyses: Mapping[str, Artifact]) -> list[ReportSection]:
    """Return one section per analysis, titled by its name.

    Raises:
        ArtifactError: a file does not have the format of its stage.
    """
    return [_section(name, artifact) for name, artifact in analyses.items()]


def _section(name: str, artifact: Artifact) -> ReportSection:
    try:
        match artifact.statistics.get("analysis"):
            case "scales":
                return _scales(name, artifact.read_json("scales.json"))
            case "vectors":
                return _vectors(name, artifact.read_json("vectors.json"))
            case "lengths":
                return _lengths(name, artifact.read_json("lengths.json"))
            case "languages":
                return _languages(name, artifact.read_json("languages.json"))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        pass
    raise ArtifactError(
        f"{artifact.directory} holds no analysis that reports can show. Run stage "
        f"{artifact.manifest.stage!r} again."
    )


def _number(value: float, decimals: int) -> Cell:
    """Return a number as text: formatting it here finds values that are no numbers."""
    return Cell(score_cell(value, decimals=decimals).text)


def _percent(share: float) -> Cell:
    return _number(100 * share, 1)


def _scales(name: str, document: JsonObject) -> ReportSection:
    directions = document["directions"]
    scales = range(max(len(one["share"]) for one in directions.values()))
    shares = tuple(f"δ = {scale}, %" for scale in scales)
    by_direction = tuple(
        row(
            direction,
            _number(found["mean"], 3),
            _number(found["weighted_mean"], 3),
            *map(_percent, found["share"]),
        )
        for direction, found in directions.items()
    )
    by_source = tuple(
        row(f"{code}, {part}", *map(_percent, found["parts"][part]["share"]))
        for code, found in document["sources"].items()
        for part in found["parts"]
    )
    by_pair = tuple(
        row(
            pair,
            _number(found["divergence"], 5),
            "" if found["length_ratio"] is None else _number(found["length_ratio"], 3),
        )
        for pair, found in document["pairs"].items()
    )
    apart = sorted(document["pairs"], key=lambda pair: -document["pairs"][pair]["divergence"])
    return ReportSection(
        f"Scales chosen by {name}",
        "Shares of each δ among the top-k choices for the vectors of all source tokens, heads, "
        "and queries, keys and values; and mean δ, by number of choices and by weight. The charts "
        f"show the pairs whose two directions differ most, at most {SHOWN_PAIRS}; dotted lines are "
        "means.",
        tables=(
            Table(
                "By direction", headings("Direction", "mean δ", "by weight", *shares), by_direction
            ),
            Table(
                "By source language, of queries, keys and values",
                headings("Source", *shares),
                by_source,
            ),
            Table(
                "Both directions of a pair",
                headings("Pair", "Jensen–Shannon divergence, bits", "byte ratio, first to second"),
                by_pair,
            ),
        ),
        figures=tuple(
            Figure(scale_chart(document, pair) + legend(scale_series(document, pair)))
            for pair in apart[:SHOWN_PAIRS]
        ),
    )


def _vectors(name: str, document: JsonObject) -> ReportSection:
    rows = tuple(
        row(
            f"{direction}, {shown}",
            _number(one["bleu"], 2),
            _number(one["chrf"], 2),
            f"{one['changed']:,}",
        )
        for direction, found in document["directions"].items()
        for shown, one in [
            ("right", found["right"]),
            *([("no vector at all", found["without"])] if found["without"] is not None else []),
            *found["wrong"].items(),
        ]
    )
    return ReportSection(
        f"Wrong language vectors: {name}",
        "Scores when the router is given the vector of another language than the source's, while "
        "the tags stay right; and the number of translations that change. The bars do not begin "
        "at 0.",
        tables=(
            Table("By language shown", headings("Direction", "BLEU", "chrF++", "changed"), rows),
        ),
        figures=tuple(
            Figure(vectors_chart(document, direction))
            for direction in list(document["directions"])[:SHOWN_PAIRS]
        ),
    )


def _lengths(name: str, document: JsonObject) -> ReportSection:
    means, ratios = document["mean_bytes"], document["ratio_to_pivot"]
    rows = tuple(
        row(
            code,
            _number(means[code], 1) if means else "",
            _number(ratios[code], 3) if code in ratios else "",
        )
        for code in document["order"]
    )
    lines, pivot = document["parallel_lines"], document["pivot"]
    measured = (
        f"Mean length in bytes of UTF-8 of {lines:,} test lines that all languages have"
        if lines
        else f"No test line of {pivot} is in all pairs, so there is no mean length"
    )
    return ReportSection(
        f"Lengths in bytes: {name}",
        f"{measured}; and ratio of bytes to those of {pivot}, over all test lines of their pair.",
        tables=(
            Table(
                "From the longest to the most concise",
                headings("Language", "bytes per line", f"ratio to {pivot}"),
                rows,
            ),
            *_segmentation(document.get("segmentation", {})),
        ),
        figures=(Figure(lengths_chart(document)),),
    )


def _segmentation(languages: JsonObject) -> tuple[Table, ...]:
    """Return the table of pieces per word, if a tokenizer was given."""

    def optional(value: float | None, spec: str) -> Value:
        return "" if value is None else format(value, spec)

    rows = tuple(
        row(
            code,
            f"{found['words']:,}",
            optional(found["fertility"], ".2f"),
            optional(found["unknown_share"], ".2%"),
        )
        for code, found in languages.items()
    )
    titles = headings("Language", "words", "pieces per word", "unknown pieces")
    return (Table("By the tokenizer's pieces", titles, rows),) if rows else ()


def _languages(name: str, document: JsonObject) -> ReportSection:
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
        else f"No test line of {pivot} is in all of its pairs, so that no encoder states are "
        "compared."
    )
    figures = [
        Figure(chart, title=title_of_family(family, pivot=pivot))
        for family, chart in expert_charts(document).items()
    ]
    if document["points"]:
        chart = states_chart(document) + legend(states_series(document))
        note = "Outlines hold 50 and 90 % of the kernel density of a language's points."
        note = note if any(one.outline for one in states_series(document)) else ""
        title = "Encoder states of the same lines, t-SNE"
        figures.append(Figure(chart, title=title, note=note))
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
    return ReportSection(
        f"Languages inside {name}",
        f"{experts} {states}",
        tables=tuple(table for table in tables if table.rows),
        figures=tuple(figures),
    )


def _likeness_rows(document: JsonObject) -> Iterator[Row]:
    """Yield the means over the pairs of every language."""
    for code in document["encoded"]:
        pairs = [one for pair, one in document["pairs"].items() if code in pair.split("-")]
        if not pairs:
            continue
        same, retrieved = (fmean(one[key] for one in pairs) for key in ("same", "retrieved"))
        others = [one["different"] for one in pairs if one["different"] is not None]
        yield row(
            code,
            _number(same, 3),
            _number(fmean(others), 3) if others else "",
            _percent(retrieved),
        )


def _overlap_rows(shares: Mapping[Family, Mapping[str, list[float]]]) -> Iterator[Row]:
    """Yield for every zero-shot target the routes that go to the experts of trained directions."""
    into = shares.get("into_pivot", {})
    out_of = shares.get("out_of_pivot", {})
    for code, own in shares.get("zero_shot", {}).items():
        others = [np.mean([*into.values()], axis=0) if into else None, out_of.get(code)]
        yield row(
            code,
            *("" if one is None else _percent(float(np.minimum(own, one).sum())) for one in others),
        )
