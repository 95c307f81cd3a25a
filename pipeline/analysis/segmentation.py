"""How a tokenizer segments the languages of test lines (LOBEF, Tables 1 and 2).

Fertility is the number of pieces that a word has on average (Rust et al., 2021). Words are what
white space parts; pieces that are white space alone do not count.
"""

from collections import Counter
from dataclasses import dataclass

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.tokenizer import Tokenizer

WHITE_SPACE = ("\u2581", "<0x20>", " ")
"""How pieces spell a space that no text follows."""


@dataclass(frozen=True)
class Segmentation:
    """Words and pieces of one language."""

    words: int
    pieces: int
    unknown: int
    """Pieces that the vocabulary does not have."""

    @property
    def fertility(self) -> float | None:
        """Pieces a word; None where there are no words."""
        return self.pieces / self.words if self.words else None

    @property
    def unknown_share(self) -> float | None:
        """Unknown pieces by all pieces; None where there are none."""
        return self.unknown / self.pieces if self.pieces else None


def measure_segmentation(corpus: Artifact, tokenizer: Tokenizer) -> dict[str, Segmentation]:
    """Count the words and pieces of every language over the test lines of all its pairs."""
    words, pieces, unknown = Counter[str](), Counter[str](), Counter[str]()
    white = {index for index in range(tokenizer.size) if tokenizer.piece(index) in WHITE_SPACE}
    for pair in sorted(line_counts(corpus, "test")):
        for code in pair.split("-"):
            lines = read_lines(corpus, "test", pair, code)
            words[code] += sum(len(line.split()) for line in lines)
            for ids in tokenizer.encode_batch(lines, language=code):
                pieces[code] += sum(index not in white for index in ids)
                unknown[code] += ids.count(tokenizer.unk_id)
    return {code: Segmentation(words[code], pieces[code], unknown[code]) for code in sorted(words)}
