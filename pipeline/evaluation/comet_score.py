"""COMET: what a trained metric thinks of each translation, beside its source and its reference.

The model is a folder on this machine. It is loaded and asked in a process of its own
(``comet_process``): what COMET needs is imported nowhere else, and many lines meet one model. Lines
go there as files, and scores come back as files.
"""

import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import numpy as np

from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import Direction
from pipeline.errors import EXIT_USER_ERROR, ConfigError
from pipeline.evaluation.comet_process import LINES, SCORES, VERSION
from pipeline.evaluation.score_slot import Column, Floats, LineStatistics, Score, TranslatedLines
from pipeline.evaluation.scoring import read_translated
from pipeline.terminal import track

OFFLINE = {"HF_HUB_OFFLINE": "1", "TRANSFORMERS_OFFLINE": "1", "TOKENIZERS_PARALLELISM": "false"}
DIGEST_DIGITS = 12


@dataclass(frozen=True)
class CometScores:
    """What a model gave to all lines of an evaluation."""

    folder: Path
    """Holds ``{system}/{direction}.json``."""
    signature: str
    """The model's name and digest, and the version of COMET that ran it."""


@dataclass(frozen=True)
class Comet(Score):
    """The mean over lines of a COMET model's scores, times 100."""

    given: CometScores

    column = Column("comet", "COMET")

    def line_statistics(self, lines: TranslatedLines) -> LineStatistics:
        """(lines,) floats, as the model gave them."""
        path = _place(self.given.folder, lines.system, lines.direction)
        scores = np.array(json.loads(path.read_text("utf-8")), dtype=np.float64)
        assert len(scores) == len(lines.hypotheses)
        return LineStatistics(scores, self.given.signature)

    def of_sums(self, sums: Floats, *, lines: int) -> Floats:
        """Of summed scores, (draws, 1) → (draws,)."""
        found: Floats = 100.0 * sums[:, 0] / lines
        return found


def ask_comet(
    model_dir: Path,
    *,
    digest: str,
    corpus: Artifact,
    systems: Mapping[str, Artifact],
    directions: Sequence[Direction],
    work_dir: Path,
) -> CometScores:
    """Score every line of every system; the scores stay in ``work_dir``.

    Args:
        digest: of the model's folder.

    Raises:
        ConfigError: the model cannot be loaded, or COMET is not installed.
    """
    for system, translations in systems.items():
        for direction in directions:
            lines = read_translated(system, corpus, translations, direction)
            sides = zip(lines.sources, lines.hypotheses, lines.references, strict=True)
            samples = [{"src": src, "mt": mt, "ref": ref} for src, mt, ref in sides]
            path = _place(work_dir / LINES, system, direction)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(samples), encoding="utf-8")
    total = len(systems) * len(directions)
    for _ in track(_run(model_dir, work_dir), label="comet", total=total):
        pass
    version = (work_dir / VERSION).read_text("utf-8")
    parts = (f"model:{model_dir.name}", f"digest:{digest[:DIGEST_DIGITS]}", f"version:{version}")
    return CometScores(work_dir / SCORES, "|".join(parts))


def _place(folder: Path, system: str, direction: Direction) -> Path:
    return folder / system / f"{direction}.json"


def _run(model_dir: Path, work_dir: Path) -> Iterator[str]:
    """A line for every file of lines that has been scored."""
    module = "pipeline.evaluation.comet_process"
    command = [sys.executable, "-m", module, str(model_dir), str(work_dir)]
    with (
        (work_dir / "errors.txt").open("w+", encoding="utf-8", errors="replace") as errors,
        subprocess.Popen(
            command,
            env={**os.environ, **OFFLINE},
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=errors,
            text=True,
        ) as process,
    ):
        try:
            assert process.stdout is not None
            yield from process.stdout
            status = process.wait()
        finally:
            process.kill()
        if status:
            errors.seek(0)
            said = errors.read().split("\n")
            last = next((line for line in reversed(said) if line.strip()), "it said nothing")
            if status == EXIT_USER_ERROR:
                raise ConfigError(last)
            raise ConfigError(f"COMET stopped while it scored with {model_dir}: {last.strip()}")
