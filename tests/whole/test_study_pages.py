"""Every score of a study on the papers' pages stands in a committed report of that study."""

import gzip
import json
import re
import shutil
import subprocess
import sys
import tarfile
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import pytest
from support.forked import run_script
from support.page_commands import ROOT
from support.raw_trees import write

PAPERS = ROOT / "docs" / "papers"
STUDIES = sorted(page for page in PAPERS.glob("*.md") if "../results/" in page.read_text("utf-8"))
DERIVED = ("FLOP", "parameters")
"""Columns that are computed from a report's, for example as a ratio."""


def linked_reports(page: Path) -> str:
    """Return the text of all reports that a page links to."""
    links = re.findall(r"\]\((\.\./results/[\w.]+)\)", page.read_text("utf-8"))
    assert links
    return "\n".join((page.parent / link).read_text("utf-8") for link in links)


def scores(page: Path) -> Iterator[tuple[int, str]]:
    """Yield the line number and the text of each score in a page's tables of systems.

    An interval is one score, as a report writes it: ``(-1.2 to +1.3)``.
    """
    header: list[str] = []
    for number, line in enumerate(page.read_text("utf-8").splitlines(), start=1):
        if not line.startswith("|"):
            header = []
            continue
        cells = [cell.strip().replace("−", "-") for cell in line.strip("|").split("|")]
        header = header or cells
        for name, cell in zip(header[1:], cells[1:], strict=True):
            if header[0] == "system" and not any(word in name for word in DERIVED):
                for found in re.findall(r"\([-+]\d+\.\d to [-+]\d+\.\d\)|\d+\.\d+", cell):
                    yield number, found


@pytest.mark.parametrize("page", STUDIES, ids=lambda page: page.stem)
def test_every_score_of_a_study_is_in_a_report_that_its_page_links(page: Path) -> None:
    reports = linked_reports(page)
    found = list(scores(page))
    assert len(found) >= 20
    missing = [
        f"{page.name}:{number}: {score}"
        for number, score in found
        if not re.search(rf"(?<![\d.]){re.escape(score)}(?!\d)", reports)
    ]
    assert not missing


def test_the_script_of_the_page_cuts_pairs_to_short_verses(tmp_path: Path) -> None:
    page = (PAPERS / "mmnmt.md").read_text("utf-8")
    (script,) = re.findall(r"```python\n(import gzip.*?)```", page, re.DOTALL)
    (tmp_path / "cut.py").write_text(script, encoding="utf-8")
    english = ["In the beginning.", "x" * 100, "x" * 101, "Let there be light."]
    german = ["Am Anfang.", "y" * 300, "Kurz.", "Es werde Licht.\u2028"]
    pairs = {
        "en-de/train": (english, german),
        "en-de/test": (english[:1], german[:1]),
        "zero-shot/de-fr/test": (["a" * 110, "a", "é" * 110], ["b" * 110, "b" * 111, "ü" * 110]),
    }
    for place, sides in pairs.items():
        for code, lines in zip(place.split("/")[-2].split("-"), sides, strict=True):
            text = "".join(f"{line}\n" for line in lines)
            write(tmp_path / "pairs", {f"{place}.{code}.gz": text})
    command = [sys.executable, "cut.py", "pairs", "verses"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    cut = {
        path.relative_to(tmp_path / "verses").as_posix(): gzip.decompress(path.read_bytes())
        .decode()
        .split("\n")[:-1]
        for path in tmp_path.glob("verses/**/*.gz")
    }
    assert cut == {
        "en-de/train.en.gz": [english[0], english[1], english[3]],
        "en-de/train.de.gz": [german[0], german[1], german[3]],
        "en-de/test.en.gz": english[:1],
        "en-de/test.de.gz": german[:1],
        "zero-shot/de-fr/test.de.gz": ["a" * 110, "é" * 110],
        "zero-shot/de-fr/test.fr.gz": ["b" * 110, "ü" * 110],
    }


FAMILIES = {"de-en": "into_pivot", "en-de": "out_of_pivot", "de-fr": "zero_shot"}


def write_evaluation(
    folder: Path, runs: Mapping[str, tuple[float, list[float]]], translation: str = "dense_1"
) -> Path:
    """Write what ``evaluate`` writes of runs: name → chrF++ from German into English, losses."""
    systems, trainings, curves = [], [], []
    for name, (score, losses) in runs.items():
        scores: Any = {
            way: {"scores": {"chrf": score + place, "bleu": 5.0, "language_lid176": 50.0}}
            for place, way in enumerate(FAMILIES)
        }
        systems.append({"name": name, "runs": [], "directions": scores})
        spent = {"updates": 30, "operations": 3e15, "target_tokens": 90, "seconds": 4.0}
        trainings.append(
            {"system": name, "total": spent, "new": None, "parameters": [10**6, 10**6]}
        )
        points = [{"update": 10 * n, "losses": {"all": x}} for n, x in enumerate(losses, start=1)]
        last = {"de-en": losses[-1], "en-de": losses[-1] + 2}
        curves.append({"system": name, "validation": points, "directions": last})
    directions = [
        {
            "direction": dict(zip(("source", "target"), way.split("-"), strict=True)),
            "family": family,
            "resource": None if family == "zero_shot" else "low",
            "training_lines": 300,
            "test_lines": 2,
        }
        for way, family in FAMILIES.items()
    ]
    files = {
        "block/scores.json": {"directions": directions, "systems": systems},
        "block/history.json": {"trainings": trainings, "curves": curves},
        f"translate_{translation}/hypotheses/de-en.jsonl": [],
        "clean/test/de-en/de.txt": [],
        "clean/train/de-en/de.txt": [],
        "dense/weights/all.json": [],
        "dense/manifest.json": {"inputs": {"shards": {"path": f"{folder}/shards"}}},
    }
    write(folder, {name: json.dumps(content) for name, content in files.items()})
    return folder / "block"


def make(script: str, *options: str, folder: Path) -> subprocess.CompletedProcess[str]:
    return run_script(ROOT / "docs" / script, options, folder=folder, timeout=120)


@pytest.mark.slow
def test_a_study_is_kept_in_two_files_and_its_page_is_made_of_one(tmp_path: Path) -> None:
    first = {"dense@1": (10.0, [3.0, 2.0, 1.5]), "MoE@1": (10.0, [3.1, 1.9, 1.4])}
    later = {
        **{"dense@2": (11.0, [3.0, 2.0, 1.5]), "MoE@2": (12.0, [3.1, 1.9, 1.4])},
        **{"dense@3": (12.0, [3.0, 2.0, 1.5]), "MoE@3": (14.0, [3.1, 1.9, 1.4])},
    }

    def keep(given: Path | str, out: str) -> None:
        done = make("study.py", f"card={given}", "--out", out, folder=tmp_path)
        assert done.returncode == 0, done.stderr

    for number, runs in enumerate((first, later)):
        place = write_evaluation(tmp_path / f"run{number}", runs, f"dense_{number}")
        keep(place, "docs/results")
        keep(place, f"kept{number}")  # on a machine of its own, which gives back a folder
        shutil.rmtree(place.parent)
        keep(f"kept{number}", "elsewhere")
    outs = [tmp_path / "docs" / "results", tmp_path / "elsewhere"]
    study, other = (json.loads((out / "hundred.json").read_text(encoding="utf-8")) for out in outs)
    assert study == other
    kept = study["card"]["runs"]
    assert [(run["system"], run["seed"]) for run in kept] == [
        *(("dense", 1), ("MoE", 1), ("dense", 2), ("MoE", 2), ("dense", 3), ("MoE", 3))
    ]
    assert kept[3]["FLOP"] == 3e15
    assert kept[3]["curve"] == [[10, 1e15, 3.1], [20, 2e15, 1.9], [30, 3e15, 1.4]]
    assert kept[3]["directions"]["en-de"] == {
        **{"bleu": 5.0, "chrf++": 13.0, "lid.176": 50.0, "loss": 3.4}
    }
    for out in outs:
        with tarfile.open(out / "hundred-card.tar.xz") as packed:
            assert packed.getnames() == [
                "clean/test/de-en/de.txt",
                "dense/manifest.json",
                "translate_dense_0/hypotheses/de-en.jsonl",
                "translate_dense_1/hypotheses/de-en.jsonl",
            ]
            manifest = json.load(packed.extractfile("dense/manifest.json"))  # type: ignore[arg-type]
        # without folders of a machine
        assert manifest == {"inputs": {"shards": {"path": "shards"}}}
    made = make("generate.py", "--docs", "docs", folder=tmp_path)
    assert made.returncode == 0, made.stderr
    page = (tmp_path / "docs/results/hundred.md").read_text(encoding="utf-8")
    # Differences into English are 0, 1 and 2: 1 ± 4.303 (Student's t, two degrees) / √3
    row = next(line for line in page.splitlines() if line.startswith("| MoE − dense"))
    assert row.startswith("| MoE − dense | 1, 2, 3 | +1.0 (−1.5 to +3.5) | +1.0 (−1.5 to +3.5) |")
    assert row.endswith("| −0.100 (−0.100 to −0.100) | 2 |")  # from 2 PFLOP on, not at 1
    assert "| de | 300 | +1.0 | +1.0 |" in page
    for name in re.findall(r"\(\.\./(pictures/[\w.]+)\)", page):
        assert "<svg" in (tmp_path / "docs" / name).read_text(encoding="utf-8")
    assert page.count("](../pictures/") == 2


@pytest.mark.slow
@pytest.mark.parametrize(
    ("argument", "told"), [("card={}", "names no seed"), ("{}", "is not SIZE=EVALUATION")]
)
def test_a_run_without_a_seed_or_a_size_is_refused(
    argument: str, told: str, tmp_path: Path
) -> None:
    place = write_evaluation(tmp_path / "run", {"dense": (10.0, [3.0])})
    done = make("study.py", argument.format(place), "--out", "kept", folder=tmp_path)
    assert done.returncode == 1
    assert told in done.stderr
    assert "Traceback" not in done.stderr
    assert not (tmp_path / "kept" / "hundred.json").exists()


@pytest.mark.slow
def test_folders_and_files_that_cannot_be_read_are_named_in_one_sentence(tmp_path: Path) -> None:
    place = write_evaluation(tmp_path / "run", {"dense@1": (10.0, [3.0])})
    for name in ("empty", "list", "kept", "damaged", "packed"):
        (tmp_path / name).mkdir()
    (tmp_path / "file").touch()
    (tmp_path / "list" / "scores.json").write_text("[]")
    (tmp_path / "list" / "history.json").write_text("[]")
    (tmp_path / "kept" / "hundred.json").write_text('{"card": {"directions": {}, "runs": []}}')
    (tmp_path / "damaged" / "hundred.json").write_text('{"card": {"runs": [')
    (tmp_path / "packed" / "hundred-card.tar.xz").write_text("cut")
    told = {
        ("card=empty", "out"): "empty has no evaluation of size card. Give a folder",
        ("card=list", "out"): "list has no evaluation of size card. Give a folder",
        ("two_cores=kept", "out"): "kept has no evaluation of size two_cores. Give a folder",
        ("card=kept", "out"): "hundred-card.tar.xz is missing or damaged. Join its parts",
        (f"card={place}", "file"): "file cannot be a folder. Give another path",
        (f"card={place}", "damaged"): "hundred.json is damaged. Restore it",
        (f"card={place}", "packed"): "hundred-card.tar.xz is missing or damaged. Join its parts",
    }
    for (argument, out), sentence in told.items():
        done = make("study.py", argument, "--out", out, folder=tmp_path)
        assert done.returncode == 1
        assert sentence in done.stderr
        assert done.stderr.count("\n") == 1
        assert not (tmp_path / "out" / "hundred.json").exists()
