"""A reader is a variant: text in another form is read by one new file, one setting and one case.

The additions are made to a copy of the packages, which then imports such text.
"""

import json
from pathlib import Path

from support.added_variants import Variant, copy_with, run_in
from support.raw_trees import write

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import read_lines

BARS = '''"""Files as word aligners take them, ``train.de-en.bars``: lines of ``eins ||| one``."""

from collections.abc import Iterator
from pathlib import Path

from data_prep.readers.raw_text import RawLine, RawText, Section
from data_prep.readers.raw_text import source_of
from pipeline.artifacts.raw_input import iterate_raw_lines
from pipeline.artifacts.raw_input import RawInput
from data_prep.settings import CorpusConfig
from pipeline.errors import ConfigError


def read_bars(raw: RawInput | None, config: CorpusConfig) -> RawText:
    """All files of a folder."""
    if raw is None:
        raise ConfigError("corpus.source is 'bars', but no raw folder was given: pass --raw DIR.")
    folder = raw.only_path()
    return RawText([_section(path, folder, config) for path in sorted(folder.glob("*.bars"))])


def _section(path: Path, folder: Path, config: CorpusConfig) -> Section:
    split, pair, _ = path.name.split(".")
    first, second = pair.split("-")
    return Section(
        split=split,
        languages=(first, second),
        spellings=(first, second),
        sources=(source_of(path, folder), source_of(path, folder)),
        lines=_lines(path, max_line_bytes=config.max_line_bytes),
    )


def _lines(path: Path, *, max_line_bytes: int) -> Iterator[RawLine]:
    lines = iterate_raw_lines(path, max_line_bytes=max_line_bytes)
    for number, line in enumerate(lines, start=1):
        first, _, second = line.partition(b" ||| ")
        yield RawLine(number, (first, second))
'''
VARIANT = Variant(
    {"data_prep/readers/bars.py": BARS},
    {
        "data_prep/settings.py": [
            ('source: Literal["tree", "cldr",', 'source: Literal["bars", "tree", "cldr",')
        ],
        "data_prep/import_corpus.py": [
            (
                "from data_prep.readers.cldr import read_phrases\n",
                "from data_prep.readers.bars import read_bars\n"
                "from data_prep.readers.cldr import read_phrases\n",
            ),
            (
                '        case "hub":\n',
                '        case "bars":\n            return read_bars(raw, config)\n'
                '        case "hub":\n',
            ),
        ],
    },
)


def test_a_reader_is_one_file_one_setting_and_one_case(tmp_path: Path) -> None:
    copied = copy_with(tmp_path / "copy", [VARIANT])
    raw = write(
        tmp_path / "raw",
        {
            "train.de-en.bars": b"eins ||| one\nzw\xffei ||| two\ndrei ||| three\n",
            "test.de-en.bars": "vier ||| four\n",
        },
    )
    recipe, out = tmp_path / "recipe.toml", tmp_path / "corpus"
    recipe.write_text('[corpus]\nsource = "bars"\nmax_train_lines = 2\n', encoding="utf-8")
    command = ["-m", "pipeline", "import_corpus", "--recipe", str(recipe)]
    run_in(copied, [*command, "--raw", str(raw), "--out", str(out)], cwd=tmp_path)
    corpus = open_artifact(out, kind="corpus")
    assert corpus.statistics["pairs"] == {"de-en": {"train": 2, "valid": 0, "test": 1}}
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "three"]
    listed = [json.loads(line) for line in corpus.file("quarantine.jsonl").open()]
    assert listed == [{"file": "train.de-en.bars", "line": 2, "reason": "invalid_utf8"}]
    for setting in ("columns={de='a', en='b'}", "files=[{pair='de-en', paths=['a.tsv']}]"):
        more = ["--raw", str(raw), "--out", str(tmp_path / "other"), "--set", f"corpus.{setting}"]
        refused = run_in(copied, [*command, *more], cwd=tmp_path, check=False)
        name = setting.partition("=")[0]
        assert f"'bars', but it does not read corpus.{name}. Leave that out" in refused.stderr
