"""Languages whose words white space does not part, where the model's front parts words by it."""

from collections.abc import Collection, Mapping

from pipeline.config import WsfConfig
from pipeline.languages import parts_words_by_spaces
from pipeline.model.spec import ModelSpec
from pipeline.summary import counted, listed


def unspaced_lines(
    spec: ModelSpec, train_lines: Mapping[str, int], *, segmented: Collection[str] = ()
) -> dict[str, int]:
    """Language → training lines of its pairs, where word structure is of no help to it.

    Of Byte-WSF alone: to it what stands between white space is one word, the whole line where there
    is none. ``segmented``: the languages whose words a segmenter finds.
    """
    if not isinstance(spec.model.front, WsfConfig):
        return {}
    found: dict[str, int] = {}
    for pair, lines in train_lines.items():
        for code in pair.split("-"):
            if code not in segmented and not parts_words_by_spaces(code):
                found[code] = found.get(code, 0) + lines
    return dict(sorted(found.items()))


def unspaced_notes(
    spec: ModelSpec, train_lines: Mapping[str, int], *, segmented: Collection[str] = ()
) -> tuple[str, ...]:
    """One sentence about them, without a full stop; none where there are none."""
    lines = unspaced_lines(spec, train_lines, segmented=segmented)
    if not lines:
        return ()
    names = listed(f"{code} ({counted(number, 'line')})" for code, number in lines.items())
    return (
        "model.front wsf parts words by white space, which is not written between those of "
        f"{names}: what stands between two spaces is one word there, as a rule the whole line "
        "(tokenizer.segmenters can name what parts it)",
    )
