"""The section of the reports for what translations look like, whatever their references say."""

from pipeline.evaluation.score_slot import Section

OUTPUTS = Section(
    title="Lengths and failed outputs",
    lead="Characters of the translations by those of the references, and shares of translations "
    "that are copies of the source, empty, cut of invalid UTF-8, or caught in a loop.",
    note="Length ratios are of characters. A copy is a translation equal to its source but for "
    "case and white space; a loop is one n-gram of up to four words (or of up to sixteen "
    "characters within a word longer than thirty) at least four times in a row, where the "
    "reference has none. Bytes that are no UTF-8 never stand in a translation: they are dropped.",
)
