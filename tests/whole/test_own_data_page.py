"""The page from a folder of translation memories to a report does what it says.

Its recipe and its plan as they stand there, made shorter, on memories that are made here.
"""

import re
import shlex
import shutil
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from support.forked import run_command, run_line
from support.page_commands import ROOT, named_blocks

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import iterate_lines, line_counts

pytestmark = pytest.mark.slow

PAGE = ROOT / "docs" / "tutorials" / "your_own_data.md"
SHORTER = {
    "vocabulary_size = 4000": "vocabulary_size = 80",
    "updates = 600": "updates = 4",
    "validate_every = 100": "validate_every = 4",
    "checkpoint_every = 200": "checkpoint_every = 4\n[optimizer]\nwarmup_updates = 1",
}
KEPT = ("tokenizer", "shards", "mixture", "model")
NOUNS = {"house": "Haus", "garden": "Garten", "letter": "Brief", "river": "Fluss", "road": "Weg"}
ADJECTIVES = {"old": "alte", "new": "neue", "small": "kleine", "long": "lange", "quiet": "stille"}


def unit(english: str, german: str) -> str:
    pair = "".join(
        f'<tuv xml:lang="{code}"><seg>{escape(text)}</seg></tuv>'
        for code, text in (("en-GB", english), ("de-DE", german))
    )
    return f"<tu>{pair}</tu>"


def write_memory(path: Path, numbers: range) -> None:
    """Sentences, and a segment of many of them, which is longer than the model takes."""
    path.parent.mkdir(parents=True, exist_ok=True)
    units, sentences = [], []
    for number in numbers:
        noun = list(NOUNS)[number % 5]
        adjective = list(ADJECTIVES)[number // 5 % 5]
        english = f"We have seen the {adjective} {noun} at the end of street {number}."
        german = (
            f"Wir haben am Ende der Straße {number} das {ADJECTIVES[adjective]} {NOUNS[noun]} "
            "gesehen."
        )
        sentences.append((english, german))
        units.append(unit(english, german))
    units.append(unit(*(" ".join(side) for side in zip(*sentences[:25], strict=True))))
    path.write_text(
        f'<tmx version="1.4"><header/><body>{"".join(units)}</body></tmx>', encoding="utf-8"
    )


@pytest.fixture(scope="module")
def office(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder in which the page's files lie and its commands have succeeded."""
    folder = tmp_path_factory.mktemp("office")
    write_memory(folder / "memories" / "ours.tmx", range(400))
    write_memory(folder / "memories" / "valid" / "ours.tmx", range(1000, 1020))
    write_memory(folder / "memories" / "test" / "ours.tmx", range(2000, 2010))
    for name, text in named_blocks(PAGE, "toml").items():
        for long, short in SHORTER.items():
            text = text.replace(long, short)
        (folder / name).write_text(text, encoding="utf-8")
    (folder / "letters.en").write_text("We have seen the old house.\n\nThe road.\n")
    for line in named_blocks(PAGE, "bash")["walk"].splitlines():
        run_line(line, folder)
    return folder


def test_memories_become_a_report_of_both_systems(office: Path) -> None:
    report = (office / "runs" / "office" / "evaluation" / "report.html").read_text(encoding="utf-8")
    assert "nearest neighbor" in report
    assert open_artifact(office / "runs" / "office" / "evaluation", kind="evaluation")


def test_held_back_folders_are_held_back_and_regions_are_languages(office: Path) -> None:
    corpus = open_artifact(office / "runs" / "office" / "corpus", kind="corpus")
    lines = {split: line_counts(corpus, split) for split in ("train", "valid", "test")}
    assert lines == {"train": {"de-en": 401}, "valid": {"de-en": 21}, "test": {"de-en": 11}}


def test_a_segment_longer_than_the_model_takes_is_left_out_and_training_goes_on(
    office: Path,
) -> None:
    """One that cleaning keeps, in memories for training, validation and tests each."""
    runs = office / "runs" / "office"
    clean = open_artifact(runs / "clean", kind="corpus")
    longest = max(len(line) for line in iterate_lines(clean.file("train/de-en/en.txt")))
    assert 1000 < longest <= 2000
    shards = open_artifact(runs / "shards", kind="shards")
    positions = open_artifact(runs / "model", kind="checkpoint").manifest.config["model"]
    assert shards.manifest.config["shards"]["max_tokens"] == positions["max_positions"] - 2 == 254
    assert shards.statistics["too_long"] == {"de-en": 2}
    assert "left out 2 of more than 254 tokens (de 2, en 2)" in shards.manifest.summary
    lines = (runs / "translations" / "hypotheses" / "en-de.jsonl").read_text(encoding="utf-8")
    assert len(lines.splitlines()) == 11


def test_the_model_is_tested_as_it_is_where_a_training_line_comes_to_the_tests(
    office: Path, tmp_path: Path
) -> None:
    """By the commands of the page: the plan refuses before it builds anything in vain."""
    folder = tmp_path / "office"
    shutil.copytree(office, folder)
    text = PAGE.read_text(encoding="utf-8")
    (run,) = re.findall(r"^mmnmt (run .* --out .*)", text, re.MULTILINE)
    (only,) = re.findall(r"`(--only .*)`", text)

    def ended(options: str = "") -> tuple[int, str]:
        done = run_command(shlex.split(f"{run} {options}"), folder=folder, timeout=500)
        return done.returncode, done.stdout + done.stderr

    kept = {name: (folder / "runs" / "office" / name).stat().st_ino for name in KEPT}
    write_memory(folder / "memories" / "test" / "ours.tmx", range(7, 10))
    code, said = ended()
    assert (code, "would throw away 4 updates" in said) == (2, True), said
    code, said = ended(only)
    assert code == 0, said
    assert "scored on 8 test lines" in said
    assert {name: (folder / "runs" / "office" / name).stat().st_ino for name in KEPT} == kept


def test_letters_are_answered_line_by_line(office: Path) -> None:
    lines = (office / "letters.de").read_text(encoding="utf-8").split("\n")
    assert len(lines) == 4
    assert lines[1] == ""
