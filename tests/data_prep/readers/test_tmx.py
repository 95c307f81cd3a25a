"""Translation memories: read as another parser reads them, and harmless whatever they hold."""

import xml.etree.ElementTree as ET
from collections.abc import Iterator
from itertools import combinations
from pathlib import Path
from xml.sax.saxutils import escape

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from support.raw_trees import Raw, run_import, write

from data_prep.readers import tmx
from data_prep.readers.raw_text import RawFile, Record, SkippedText
from data_prep.readers.tmx import CODES, iterate_units
from data_prep.settings import CorpusConfig
from pipeline.artifacts import raw_input as raw_bytes
from pipeline.artifacts.artifact import Artifact
from pipeline.artifacts.corpus import line_counts, read_lines
from pipeline.artifacts.raw_input import RawInput
from pipeline.artifacts.spelling import is_blank
from pipeline.errors import ConfigError, DataError

HEAD = '<?xml version="1.0" encoding="utf-8"?>\n<tmx version="1.4"><header srclang="en"/><body>\n'
TAIL = "</body></tmx>\n"
LANGUAGE = "{http://www.w3.org/XML/1998/namespace}lang"


def unit(**sides: str) -> str:
    """A unit of segments that are written as XML; ``pt_BR`` is the language ``pt-BR``."""
    return f"<tu>{''.join(tuv(code.replace('_', '-'), seg) for code, seg in sides.items())}</tu>\n"


def tuv(code: str, segment: str) -> str:
    return f'<tuv xml:lang="{code}"><seg>{segment}</seg></tuv>'


def memory(*units: str) -> str:
    return HEAD + "".join(units) + TAIL


def imported(out_dir: Path, raw: Raw, **settings: object) -> Artifact:
    return run_import("import_corpus", out_dir, raw, corpus={"source": "tmx", **settings})


def units_of(path: Path, content: str | bytes) -> list[Record]:
    path.write_bytes(content.encode() if isinstance(content, str) else content)
    return list(iterate_units(path))


@pytest.mark.parametrize("codes", [("de", "en", "fr"), ("bg", "cs", "da", "de_AT", "de", "el")])
def test_a_survey_holds_the_pairs_of_languages_however_many_units_have_others(
    codes: tuple[str, ...], tmp_path: Path
) -> None:
    """A memory in 24 languages has nearly as many sets of them as units."""
    sets = [some for size in range(len(codes) + 1) for some in combinations(codes, size)]
    path = write(tmp_path, {"a.tmx": memory(*(unit(**dict.fromkeys(one, "x")) for one in sets))})
    file, left_out = RawFile(path / "a.tmx", "a.tmx"), SkippedText()
    found = tmx.survey_file(file, "train", left_out=left_out)
    spelled = [code.replace("_", "-") for code in codes]
    assert sorted(map(sorted, found.together)) == sorted(map(sorted, combinations(spelled, 2)))
    assert found.spellings == {*spelled}
    assert left_out["records_one_sided"] == len(codes) + 1


def test_a_folder_of_translation_memories_becomes_a_corpus(tmp_path: Path) -> None:
    files: dict[str, str | bytes] = {
        "office/2023.tmx": memory(unit(en="one", de_DE="eins"), unit(EN_us="two", de="zwei")),
        "office/2024.tmx.gz": memory(unit(de="drei", en="three")),
        "test/contract.tmx": memory(unit(de="vier", en="four")),
        "notes.txt": "no memory",
    }
    corpus = imported(tmp_path / "corpus", write(tmp_path / "raw", files))
    assert corpus.statistics["pairs"] == {"de-en": {"train": 3, "valid": 0, "test": 1}}
    assert read_lines(corpus, "train", "de-en", "de") == ["eins", "zwei", "drei"]
    assert read_lines(corpus, "train", "de-en", "en") == ["one", "two", "three"]
    assert corpus.statistics["counts"]["files_ignored"] == 1


@pytest.mark.parametrize(
    ("directions", "pairs"),
    [
        ("all", {"de-en": 2, "de-fr": 1, "en-fr": 1}),
        ("pivot", {"de-en": 2, "en-fr": 1}),
        ("zero_shot", {"de-en": 2, "en-fr": 1}),
    ],
)
def test_units_of_many_languages_are_paired_as_the_recipe_says(
    tmp_path: Path, directions: str, pairs: dict[str, int]
) -> None:
    text = memory(unit(en="one", de="eins", fr="un"), unit(en="two", de="zwei"), unit(fr="trois"))
    corpus = imported(tmp_path / "corpus", {"a.tmx": text, "test.tmx": text}, directions=directions)
    assert line_counts(corpus, "train") == pairs
    of_test = {"de-en": 2, "en-fr": 1} | ({} if directions == "pivot" else {"de-fr": 1})
    assert line_counts(corpus, "test") == of_test
    assert corpus.statistics["counts"]["records_one_sided"] == 2


def test_only_languages_asked_for_are_read(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"a.tmx": memory(unit(en="one", de="eins", fr="un"))})
    corpus = imported(tmp_path / "corpus", raw, languages=("deu", "fr"))
    assert line_counts(corpus, "train") == {"de-fr": 1}
    with pytest.raises(ConfigError, match="asks for de, el"):
        imported(tmp_path / "again", raw, languages=("de", "el"))


def test_native_codes_are_left_out_and_highlighted_text_is_kept(tmp_path: Path) -> None:
    segment = (
        'The <bpt i="1">{\\b <sub>note</sub></bpt>big<ept i="1">}</ept> <hi>black <ph x="1"/>cat'
        "</hi><it>&lt;b></it> &amp; dog<ut>{}</ut>"
    )
    [found] = units_of(tmp_path / "a.tmx", memory(unit(en=segment, de="x")))
    assert found.texts["en"] == b"The big black cat & dog"


def test_blank_segments_are_missing_and_a_languages_first_text_is_read(tmp_path: Path) -> None:
    text = memory(
        unit(en=" \u200b", de="eins"),
        f"<tu>{tuv('de', 'zwei')}{tuv('en', 'two')}{tuv('en', 'too')}{tuv('en', 'two')}</tu>",
        f"<tu>{tuv('de', 'b')}{tuv('de', 'b')}{tuv('de', ' ')}</tu>",
        "<tu><tuv><seg>no language</seg></tuv></tu>",
        unit(pt_BR="três (Brasil)", pt="três", de="drei"),
        unit(pt_BR="quatro", de="vier"),
    )
    corpus = imported(tmp_path / "corpus", {"a.tmx": text})
    assert read_lines(corpus, "train", "de-en", "en") == ["two"]
    assert read_lines(corpus, "train", "de-pt", "pt") == ["três", "quatro"]
    assert corpus.statistics["counts"]["records_one_sided"] == 3
    assert corpus.statistics["counts"]["segments_untagged"] == 1
    assert corpus.statistics["counts"]["segments_repeated"] == 3
    told = "; 3 segments after another in the same language of one unit"
    assert any(line.endswith(told) for line in corpus.manifest.summary)


def test_units_carry_the_line_they_begin_in(tmp_path: Path) -> None:
    text = memory("<prop>x</prop>\n\n", unit(en="a", de="b"), "\n", unit(en="c", de="d"))
    assert [found.line for found in units_of(tmp_path / "a.tmx", text)] == [5, 7]


def test_old_memories_name_languages_without_prefix_or_variants(tmp_path: Path) -> None:
    text = memory('<tu><tuv lang="DE-DE-1996"><seg>a</seg></tuv></tu>')
    assert [found.texts for found in units_of(tmp_path / "a.tmx", text)] == [{"DE-DE": b"a"}]


def test_tags_that_are_no_languages_are_left_out_and_old_ones_understood(tmp_path: Path) -> None:
    norwegian = tuv("no-nyn", "e") + tuv("en-oxendict", "f")
    others = tuv("x-none", "a") + tuv("i-klingon", "b") + tuv("*all*", "c")
    chinese = tuv("zh-CHS", "简") + tuv("ZH-cht", "繁")
    text = memory(f"<tu>{others}{tuv('en', 'd')}{chinese}</tu>", f"<tu>{norwegian}</tu>")
    corpus = imported(tmp_path / "corpus", write(tmp_path, {"a.tmx": text}) / "a.tmx")
    assert corpus.statistics["counts"]["segments_untagged"] == 3
    told = "left out: 3 segments without a language code, or with a private one (x-…)"
    assert told in corpus.manifest.summary
    assert read_lines(corpus, "train", "en-zh", "zh") == ["简"]
    assert read_lines(corpus, "train", "en-zh_Hant", "zh_Hant") == ["繁"]
    assert read_lines(corpus, "train", "en-nn", "en") == ["f"]
    assert set(corpus.statistics["pairs"]) == {"en-nn", "en-zh", "en-zh_Hant", "zh-zh_Hant"}


@pytest.mark.parametrize(
    ("segment", "text"),
    [
        ('one<ph type="lb"/>two', "one two"),
        ('one <ph x="1" type="lb"/> <ph type="lb"/>two', "one two"),
        ("one<ph>&lt;br/&gt;</ph>two", "one two"),
        ('one<it pos="begin" type="x-BR"/>two', "one two"),
        ('one<bpt i="1" type="pb"/>two<ept i="1"/>', "one two"),
        ('o<ph type="image"/>ne<bpt i="1">&lt;brown&gt;</bpt>!', "one!"),
        ('<ph type="lb"/>one', "one"),
    ],
)
def test_a_code_that_breaks_a_line_parts_words(tmp_path: Path, segment: str, text: str) -> None:
    content = memory(f"<tu>{tuv('en', segment)}</tu>")
    [found] = units_of(tmp_path / "a.tmx", content)
    assert found.texts == {"en": text.encode()}


@pytest.mark.parametrize(
    ("declared", "encoding"),
    [
        *(("utf-8", "utf-8"), ("utf-8", "utf-8-sig"), ("utf-16", "utf-16"), ("utf-8", "utf-16")),
        *(("utf-16", "utf-8-sig"), ("utf-16be", "utf-16-be"), ("iso-8859-1", "latin-1")),
        ("windows-1252", "cp1252"),
    ],
)
def test_a_byte_order_mark_or_else_a_declaration_counts(
    tmp_path: Path, declared: str, encoding: str
) -> None:
    text = memory(unit(en="naïve", de="für")).replace("utf-8", declared, 1)
    [found] = units_of(tmp_path / "a.tmx", text.encode(encoding))
    assert found.texts == {"en": "naïve".encode(), "de": "für".encode()}


TEXT = st.text(st.characters(exclude_categories=("Cs", "Cc"))).map(escape)
INLINE = st.recursive(
    TEXT,
    lambda inner: st.tuples(st.sampled_from([*sorted(CODES), "hi", "sub", "x"]), inner, inner).map(
        lambda parts: f'<{parts[0]} i="1">{parts[1]}</{parts[0]}>{parts[2]}'
    ),
)
SEGMENTS = st.dictionaries(st.sampled_from(["de", "en", "fr"]), INLINE)


def visible(element: ET.Element) -> Iterator[str]:
    """The text of an element by a parser of whole documents."""
    yield element.text or ""
    for child in element:
        if child.tag not in CODES:
            yield from visible(child)
        yield child.tail or ""


@settings(deadline=None, max_examples=60)
@given(st.lists(SEGMENTS, max_size=6), st.integers(1, 60))
def test_segments_are_those_of_a_parser_of_whole_documents(
    tmp_path_factory: pytest.TempPathFactory, units: list[dict[str, str]], block: int
) -> None:
    text = memory(*(unit(**sides) for sides in units))
    expected = []
    for element in ET.fromstring(text.encode()).iter("tu"):
        sides = {
            side.attrib[LANGUAGE]: "".join(visible(segment)).encode().strip()
            for side in element
            for segment in side.iter("seg")
        }
        expected.append({code: one for code, one in sides.items() if not is_blank(one.decode())})
    path = tmp_path_factory.mktemp("tmx") / "a.tmx"
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(raw_bytes, "BLOCK_BYTES", block)
        assert [found.texts for found in units_of(path, text)] == expected


BILLION_LAUGHS = """<?xml version="1.0"?>
<!DOCTYPE tmx [
 <!ENTITY lol "lol">
 <!ENTITY lol2 "&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;&lol;">
 <!ENTITY lol3 "&lol2;&lol2;&lol2;&lol2;&lol2;&lol2;&lol2;&lol2;&lol2;&lol2;">
]>
<tmx version="1.4"><body><tu><tuv xml:lang="en"><seg>&lol3;</seg></tuv></tu></body></tmx>
"""
EXTERNAL = """<?xml version="1.0"?>
<!DOCTYPE tmx [<!ENTITY secret SYSTEM "file:SECRET">]>
<tmx version="1.4"><body><tu><tuv xml:lang="en"><seg>&secret;</seg></tuv></tu></body></tmx>
"""
PARAMETER = """<?xml version="1.0"?>
<!DOCTYPE tmx [<!ENTITY % more SYSTEM "file:SECRET"> %more;]>
<tmx version="1.4"><body/></tmx>
"""


@pytest.mark.parametrize(
    ("text", "name"), [(BILLION_LAUGHS, "lol"), (EXTERNAL, "secret"), (PARAMETER, "more")]
)
def test_a_file_that_declares_entities_is_refused(tmp_path: Path, text: str, name: str) -> None:
    (tmp_path / "secret").write_text("secret")
    text = text.replace("SECRET", str(tmp_path / "secret"))
    with pytest.raises(DataError, match=rf"a\.tmx, line [23]: it declares the entity '{name}'"):
        units_of(tmp_path / "a.tmx", text)


def test_the_usual_document_type_is_not_fetched_nor_are_its_entities(tmp_path: Path) -> None:
    text = memory(unit(en="a", de="b")).replace("<tmx", '<!DOCTYPE tmx SYSTEM "tmx14.dtd"><tmx')
    assert len(units_of(tmp_path / "a.tmx", text)) == 1
    with pytest.raises(DataError, match="line 3: it uses the entity 'nbsp'"):
        units_of(tmp_path / "a.tmx", text.replace(">a<", ">&nbsp;<"))


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (b"", "is empty"),
        (b"eins\tone\n", "line 1, is not well-formed XML"),
        (b"<html><body/></html>", "its outermost element is <html>, not <tmx>"),
        (memory(unit(en="a", de="b"))[:-20].encode(), "line 3, is not well-formed XML"),
        (memory(unit(en="a\0", de="b")).encode(), "line 3, is not well-formed XML"),
        (memory(unit(en="a", de="\xff")).encode("latin-1"), "line 3, is not well-formed XML"),
        (memory(unit(English="a")).encode(), "line 3: 'English' is not a language code, 'en' is"),
        (memory(unit(Unsinniges="a")).encode(), "'Unsinniges' is not a language code. Export"),
        (memory().replace("utf-8", "klingon").encode(), "is not well-formed XML|encoding"),
        (HEAD.encode() + b"<!--" + b"x" * (2**24 + 2**20), "that does not end"),
    ],
)
def test_what_is_no_memory_is_told_in_a_sentence(tmp_path: Path, content: bytes, said: str) -> None:
    with pytest.raises(DataError, match=said) as refusal:
        units_of(tmp_path / "a.tmx", content)
    assert str(tmp_path / "a.tmx") in str(refusal.value)
    assert "\n" not in str(refusal.value)


def test_memories_without_a_pair_and_pairs_without_the_pivot_are_told(tmp_path: Path) -> None:
    raw = write(tmp_path / "raw", {"a.tmx": memory(unit(en="one"), unit(en="two"))})
    with pytest.raises(DataError, match=r"No record has text .* in .*a\.tmx\. Name other files\.$"):
        imported(tmp_path / "corpus", raw)
    write(tmp_path / "raw", {"a.tmx": memory(unit(fr="un", de="eins"))})
    with pytest.raises(ConfigError, match=r"No pair that was found \(de-fr\) has the pivot 'en'"):
        imported(tmp_path / "corpus", raw, directions="pivot")


def test_a_folder_without_memories_or_none_at_all_is_told(tmp_path: Path) -> None:
    with pytest.raises(DataError, match=r"holds no file that ends in \.tmx"):
        imported(tmp_path / "corpus", {"a.txt": "x"})
    with pytest.raises(ConfigError, match="Pass --raw DIR"):
        imported(tmp_path / "corpus", None)
    with pytest.raises(DataError, match="does not exist"):
        imported(tmp_path / "corpus", RawInput((tmp_path / "nowhere",)))


def test_a_name_of_two_splits_is_refused(tmp_path: Path) -> None:
    with pytest.raises(DataError, match="is named as test and train text"):
        imported(tmp_path / "corpus", {"test/train.tmx": memory(unit(de="a", en="b"))})


def test_no_more_is_read_than_units_need(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = tmp_path / "a.tmx"
    path.write_text(memory(*(unit(en=f"one {n}", de=f"eins {n}") for n in range(20_000))))
    read = 0

    def counted(place: Path) -> Iterator[bytes]:
        nonlocal read
        for block in raw_bytes.iterate_blocks(place):
            read += len(block)
            yield block

    monkeypatch.setattr(raw_bytes, "BLOCK_BYTES", 4096)
    monkeypatch.setattr(tmx, "iterate_blocks", counted)
    size, total = path.stat().st_size, 0
    for number, found in enumerate(iterate_units(path), start=1):
        total += len(found.texts)
        assert read <= size * number / 20_000 + 4 * 4096
    assert total == 40_000


def test_of_a_longer_segment_no_more_is_held_and_its_unit_goes_to_the_quarantine(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    text = memory(unit(en="x" * 3_000_000, de="eins"), unit(en="two", de="zwei"))
    raw = write(tmp_path / "raw", {"a.tmx": text})
    monkeypatch.setattr(CorpusConfig, "max_line_bytes", 1000)
    [long, _] = iterate_units(raw / "a.tmx")
    assert 1000 < len(long.texts["en"]) < 1000 + 2 * raw_bytes.BLOCK_BYTES
    corpus = imported(tmp_path / "corpus", raw)
    assert read_lines(corpus, "train", "de-en", "de") == ["zwei"]
    listed = corpus.file("quarantine.jsonl").read_text()
    assert listed == '{"file": "a.tmx", "line": 3, "reason": "too_long"}\n'
