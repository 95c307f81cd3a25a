"""Draw analyses from their JSON, and show them in the reports of an evaluation."""

from collections.abc import Mapping
from typing import Any

from pipeline.artifacts.artifact import Artifact
from pipeline.errors import ArtifactError
from pipeline.evaluation.charts import Bar, Series, bar_chart, legend, line_chart
from pipeline.evaluation.comparison_tables import TableSection, TextTable
from pipeline.evaluation.pictures import picture

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


def analysis_sections(analyses: Mapping[str, Artifact]) -> list[TableSection]:
    """Make a section of the report for each analysis, by its name.

    Raises:
        ArtifactError: a file does not have the format of its stage.
    """
    return [_section(name, artifact) for name, artifact in analyses.items()]


def _section(name: str, artifact: Artifact) -> TableSection:
    try:
        match artifact.statistics.get("analysis"):
            case "scales":
                return _scales(name, artifact.read_json("scales.json"))
            case "vectors":
                return _vectors(name, artifact.read_json("vectors.json"))
            case "lengths":
                return _lengths(name, artifact.read_json("lengths.json"))
    except (LookupError, TypeError, ValueError, ArithmeticError, AttributeError):
        pass
    raise ArtifactError(
        f"{artifact.directory} has no analysis that reports can show. Run stage "
        f"{artifact.manifest.stage!r} again."
    )


def _scales(name: str, document: JsonObject) -> TableSection:
    directions = document["directions"]
    scales = range(max(len(one["share"]) for one in directions.values()))
    heads = ("mean δ", "by weight", *(f"δ = {scale}, %" for scale in scales))
    rows = tuple(
        (direction, *_numbers(found["mean"], found["weighted_mean"], found["share"]))
        for direction, found in directions.items()
    )
    parts = tuple(
        (
            f"{code}, {part}",
            *(f"{100 * share:.1f}" for share in found["parts"][part]["share"]),
        )
        for code, found in document["sources"].items()
        for part in found["parts"]
    )
    pairs = tuple(
        (
            pair,
            f"{found['divergence']:.5f}",
            "" if found["length_ratio"] is None else f"{found['length_ratio']:.3f}",
        )
        for pair, found in document["pairs"].items()
    )
    apart = sorted(document["pairs"], key=lambda pair: -document["pairs"][pair]["divergence"])
    return TableSection(
        f"Scales chosen by {name}",
        "Shares of each δ among the top-k choices for the vectors of all source tokens, heads, "
        "and queries, keys and values; their mean, by number of choices and by weight. The charts "
        f"show the {SHOWN_PAIRS} pairs whose directions differ most; dotted lines are means.",
        (
            TextTable("By direction", ("Direction", *heads), rows),
            TextTable(
                "By source language, of queries, keys and values",
                ("Source", *(f"δ = {scale}, %" for scale in scales)),
                parts,
            ),
            TextTable(
                "Both directions of a pair",
                ("Pair", "Jensen–Shannon divergence, bits", "bytes of the first by the second"),
                pairs,
            ),
        ),
        tuple(
            scale_chart(document, pair) + legend(scale_series(document, pair))
            for pair in apart[:SHOWN_PAIRS]
        ),
    )


def _numbers(mean: float, weighted: float, shares: list[float]) -> tuple[str, ...]:
    return (f"{mean:.3f}", f"{weighted:.3f}", *(f"{100 * share:.1f}" for share in shares))


def _vectors(name: str, document: JsonObject) -> TableSection:
    rows = tuple(
        (f"{direction}, {shown}", f"{one['bleu']:.2f}", f"{one['chrf']:.2f}", f"{one['changed']:,}")
        for direction, found in document["directions"].items()
        for shown, one in [
            ("right", found["right"]),
            *([("no vector at all", found["without"])] if found["without"] is not None else []),
            *found["wrong"].items(),
        ]
    )
    return TableSection(
        f"Wrong language vectors: {name}",
        "Scores of translations whose router is shown the vector of another language than the "
        "source's, with the right tags, and the number of translations that this changes. The "
        "bars do not begin at 0.",
        (TextTable("By language shown", ("Direction", "BLEU", "chrF++", "changed"), rows),),
        tuple(
            vectors_chart(document, direction)
            for direction in list(document["directions"])[:SHOWN_PAIRS]
        ),
    )


def _lengths(name: str, document: JsonObject) -> TableSection:
    means, ratios = document["mean_bytes"], document["ratio_to_pivot"]
    rows = tuple(
        (
            code,
            f"{means[code]:.1f}" if means else "",
            f"{ratios[code]:.3f}" if code in ratios else "",
        )
        for code in document["order"]
    )
    lines, pivot = document["parallel_lines"], document["pivot"]
    measured = (
        f"Mean length in bytes of UTF-8 of {lines:,} test lines that all languages have"
        if lines
        else f"No test line of {pivot} is in all pairs, so that there is no mean length"
    )
    return TableSection(
        f"Lengths in bytes: {name}",
        f"{measured}; and bytes by those of {pivot}, over all test lines of their pair.",
        (
            TextTable(
                "From the longest to the most concise",
                ("Language", "bytes per line", f"by those of {pivot}"),
                rows,
            ),
            *_segmentation(document.get("segmentation", {})),
        ),
        (lengths_chart(document),),
    )


def _segmentation(languages: JsonObject) -> tuple[TextTable, ...]:
    """Return the table of pieces per word, or nothing without a tokenizer."""
    rows = tuple(
        (
            code,
            f"{found['words']:,}",
            "" if found["fertility"] is None else f"{found['fertility']:.2f}",
            "" if found["unknown_share"] is None else f"{found['unknown_share']:.2%}",
        )
        for code, found in languages.items()
    )
    heads = ("Language", "words", "pieces per word", "unknown pieces")
    return (TextTable("By the tokenizer's pieces", heads, rows),) if rows else ()
