"""Exports are loaded by the names of languages that a user of transformers would try."""

import io
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import sentencepiece
import torch
from babel.core import get_global
from support.exported_models import (
    BEYOND,
    HUNDRED,
    automatic_tokenizer,
    named_tokenizer,
    own_checkpoint,
    own_sentencepiece,
)
from support.foreign_families import nllb_folder, nllb_moe_folder
from support.foreign_models import (
    LINES,
    m2m100_folder,
    model_of,
    our_translations,
    their_translations,
)
from transformers import AutoModelForSeq2SeqLM, NllbTokenizer
from transformers.models.m2m_100.tokenization_m2m_100 import FAIRSEQ_LANGUAGE_CODES as M2M100_CODES
from transformers.models.nllb.tokenization_nllb import FAIRSEQ_LANGUAGE_CODES

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.tokenizer import (
    TokenizerDescription,
    TokenizerFiles,
    read_tokenizer_files,
    with_languages,
)
from pipeline.checkpoints.checkpoint import ModelSource, own_source
from pipeline.checkpoints.exporting import Export, Format, export_checkpoint
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    NLLB_LANGUAGES,
    chosen_layout,
    entries_of,
    model_codes,
    nllb_token,
    numbered,
    pieces_of,
)
from pipeline.checkpoints.importing import import_checkpoint, open_foreign
from pipeline.errors import CheckpointError
from pipeline.languages import ALIASES, FAMILIES, canonical, iso_639_3

BIBLIOGRAPHIC = (
    "alb arm baq bur chi cze dut fre geo ger gre ice mac mao may per rum slo tib wel".split()
)
"""The codes of ISO 639-2 that ISO 639-3 does not have: its table lists these twenty."""


def imported(make: Callable[[Path], Any], folder: Path) -> ModelSource:
    make(folder / "theirs")
    import_checkpoint(folder / "theirs", out_dir=folder / "ours")
    return own_source(open_artifact(folder / "ours", kind="checkpoint"))


def upcycled(make: Callable[[Path], Any], folder: Path) -> ModelSource:
    source = imported(make, folder)
    recipe = folder / "experts.toml"
    model = source.spec.model.model_dump(mode="json", exclude_none=True, exclude_defaults=True)
    model.pop("embedding", None)
    lines = [f"{name} = {str(value).lower()!s}" for name, value in model.items()]
    lines = [line.replace("= relu", '= "relu"').replace("= pre", '= "pre"') for line in lines]
    experts = "[model.moe]\nnum_experts = 4\nevery = 2\n"
    recipe.write_text("\n".join(["[model]", *lines, experts]), encoding="utf-8")
    parts = [word for part in ("embeddings", "encoder", "decoder") for word in (f"--{part}", "X")]
    words = [str(source.origin) if word == "X" else word for word in parts]
    out = folder / "upcycled"
    assert cli.main(["upcycle", "--recipe", str(recipe), *words, "--out", str(out)]) == 0
    return own_source(open_artifact(out, kind="checkpoint"))


CASES: dict[str, tuple[Callable[[Path], ModelSource], Format, str, str]] = {
    "M2M-100": (lambda folder: imported(m2m100_folder, folder), "hf-m2m100", "en", "de"),
    "NLLB": (lambda folder: imported(nllb_folder, folder), "hf-m2m100", "eng_Latn", "deu_Latn"),
    "NLLB-MoE": (lambda at: imported(nllb_moe_folder, at), "hf-nllb-moe", "eng_Latn", "deu_Latn"),
    "NLLB with experts": (
        lambda folder: upcycled(nllb_folder, folder),
        *("hf-nllb-moe", "eng_Latn", "deu_Latn"),
    ),
    "M2M-100 with experts": (lambda at: upcycled(m2m100_folder, at), "hf-nllb-moe", "en", "de"),
}


@pytest.mark.parametrize("case", CASES)
def test_translations_by_the_names_a_user_would_try_are_ours(case: str, tmp_path: Path) -> None:
    make, to, english, german = CASES[case]
    source, out = make(tmp_path), tmp_path / "out"
    export_checkpoint(source.origin, out_dir=out, export=Export(to=to))
    tokenizer, tag = named_tokenizer(out, english=english, german=german)
    ours = our_translations(
        model_of(source, dtype=torch.float64), source.tokenizer.build(), LINES, beams=5, limit=20
    )
    peer = AutoModelForSeq2SeqLM.from_pretrained(out).double().eval()
    theirs = their_translations(peer, tokenizer, LINES, beams=5, limit=20, tag=tag)
    rows = chosen_layout(entries_of(source.tokenizer, source.origin)).rows
    assert [tuple(rows[index] for index in one) for one in theirs] == ours
    assert len(set(ours)) > 2, "sentences are told apart"


# ---------------------------------------------------------------- tokens that a model came with


@pytest.mark.parametrize("make", [nllb_folder, nllb_moe_folder, m2m100_folder])
def test_an_exported_import_keeps_all_tokens(make: Callable[[Path], Any], tmp_path: Path) -> None:
    source = imported(make, tmp_path)
    to: Format = "hf-nllb-moe" if make is nllb_moe_folder else "hf-m2m100"
    export_checkpoint(tmp_path / "ours", out_dir=tmp_path / "out", export=Export(to=to))
    before, after = (automatic_tokenizer(tmp_path / name) for name in ("theirs", "out"))
    published = M2M100_CODES["m2m100"] if make is m2m100_folder else FAIRSEQ_LANGUAGE_CODES
    tokens = [f"__{code}__" if make is m2m100_folder else code for code in published]
    expected = before.convert_tokens_to_ids(tokens)
    assert len(set(expected)) == len(tokens) >= 100
    rows = chosen_layout(entries_of(source.tokenizer, tmp_path)).rows
    assert [rows[index] for index in after.convert_tokens_to_ids(tokens)] == expected
    again = open_foreign(tmp_path / "out").tokenizer.description
    assert again.token_spellings == source.tokenizer.description.token_spellings


def test_spellings_of_tokens_leave_the_fingerprint_as_it_was(tmp_path: Path) -> None:
    """Shards made with an import of before, which had none recorded, can still be trained on."""
    source = imported(nllb_folder, tmp_path)
    description = source.tokenizer.description
    assert description.token_spellings["en"] == "eng_Latn"
    before = TokenizerFiles(
        description.model_copy(update={"token_spellings": {}}), source.tokenizer.model
    )
    assert before.build().fingerprint == source.tokenizer.build().fingerprint
    layouts = [chosen_layout(entries_of(one, tmp_path)) for one in (before, source.tokenizer)]
    assert layouts[0] == layouts[1], "and it is exported by the same names"
    source.tokenizer.write(tmp_path / "copy")
    assert read_tokenizer_files(tmp_path / "copy") == source.tokenizer


@pytest.mark.parametrize(
    ("make", "added", "expected"),
    [
        (nllb_folder, "chr", {"en": "eng_Latn", "prs": "prs_Arab", "chr": "chr_Cher"}),
        (m2m100_folder, "chr", {"en": "__en__", "zh": "__zh__", "chr": "__chr__"}),
    ],
)
def test_an_added_language_follows_the_style_of_the_tokens_a_model_came_with(
    make: Callable[[Path], Any], added: str, expected: dict[str, str], tmp_path: Path
) -> None:
    grown = with_languages(imported(make, tmp_path).tokenizer, [added])
    source = own_checkpoint(tmp_path / "grown", tokenizer=grown)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    tokenizer_type: Any = NllbTokenizer
    theirs = tokenizer_type.from_pretrained(tmp_path / "out", src_lang=expected["en"])
    rows = chosen_layout(entries_of(grown, tmp_path)).rows
    back = open_foreign(tmp_path / "out").tokenizer
    for code, token in expected.items():
        index = theirs.convert_tokens_to_ids(token)
        assert rows[index] == grown.build().language_token_id(code)
        assert back.description.language_token(code) == token
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    code = card.split("```python\n")[1].split("```")[0]
    named: dict[str, Any] = {}
    exec(code.replace('"DIR', f'"{tmp_path / "out"}'), named)
    spelled = code.split('src_lang="')[1].split('"')[0]
    assert spelled in back.description.token_spellings.values()
    assert named["tokenizer"].convert_tokens_to_ids(spelled) in named["batch"]["input_ids"][0]


@pytest.mark.parametrize(
    ("scheme", "spellings", "expected"),
    [
        ("lang_tok", ["EN", "DE"], ["LANG_TOK_EN", "LANG_TOK_DE"]),
        ("underscores", ["eng_Latn", "deu_Latn"], ["eng_Latn", "deu_Latn"]),
        ("underscores", ["en", "de"], ["__en__", "__de__"]),
        ("brackets", ["en_XX", "de_DE"], ["[en_XX]", "[de_DE]"]),
        ("angle", ["en", "de"], ["<2en>", "<2de>"]),
    ],
    ids=["mRASP2's", "NLLB's of fairseq", "M2M-100's of fairseq", "mBART's of fairseq", "2en"],
)
def test_tokens_of_fairseq_are_those_that_transformers_users_know(
    scheme: Any, spellings: list[str], expected: list[str], tmp_path: Path
) -> None:
    model = own_sentencepiece()
    count = len(pieces_of(model, tmp_path))
    files = numbered(
        tmp_path,
        model,
        size=count + 2,
        specials={"pad": 0, "bos": 1, "eos": 2, "unk": 3},
        pieces=list(range(count)),
        languages={spelling: count + place for place, spelling in enumerate(spellings)},
        scheme=scheme,
    )
    layout = chosen_layout(entries_of(files, tmp_path))
    assert [layout.token_of[code] for code in ("en", "de")] == expected
    source = own_checkpoint(tmp_path / "ours", tokenizer=files)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    back = open_foreign(tmp_path / "out").tokenizer.description
    assert [back.language_token(code) for code in ("en", "de")] == expected


# ---------------------------------------------------------------- names of languages


def test_codes_of_nllb_are_those_of_transformers() -> None:
    assert list(NLLB_LANGUAGES) == FAIRSEQ_LANGUAGE_CODES
    ours = model_codes(FAIRSEQ_LANGUAGE_CODES)
    assert {spelling: nllb_token(code) for spelling, code in ours.items()} == {
        spelling: spelling for spelling in FAIRSEQ_LANGUAGE_CODES
    }


def test_every_language_of_the_registry_has_a_token_of_its_own_in_nllbs_form() -> None:
    codes = {*ALIASES.values(), *(code for family in FAMILIES.values() for code in family)}
    tokens = {code: nllb_token(code) for code in codes}
    assert len(set(tokens.values())) == len(codes) > 190
    for code, token in tokens.items():
        assert re.fullmatch("[a-z]{3}_[A-Z][a-z]{3}", token), token
        assert canonical(token) == code


def test_three_letter_codes_are_those_of_iso_639_3() -> None:
    """CLDR lists what replaces a three-letter code, bibliographic codes among them.

    Of two languages it has another opinion than ISO 639-3: hbs is Serbian, and tgl Filipino.
    """
    known = get_global("language_aliases")
    codes = [code for code in {*ALIASES.values()} if len(code) == 2]
    assert len(codes) > 170
    for code in codes:
        found = iso_639_3(code)
        assert len(found) == 3
        assert found not in BIBLIOGRAPHIC
        assert known.get(found) == {"sh": "sr_Latn", "tl": "fil"}.get(code, code), found
    assert iso_639_3("de-AT") == "deu"
    assert iso_639_3("chr") == "chr"
    assert iso_639_3("qq") == "qq"


@pytest.mark.parametrize(
    ("code", "expected"),
    [
        *[("zh", "zho_Hans"), ("zh_Hant", "zho_Hant"), ("sr", "srp_Cyrl"), ("sr_Latn", "srp_Latn")],
        *[("sh", "hbs_Latn"), ("no", "nor_Latn"), ("nb", "nob_Latn"), ("pt", "por_Latn")],
        *[("pt_BR", "por_Latn_BR"), ("es_419", "spa_Latn_419"), ("zh_TW", "zho_Hant_TW")],
        *[("co", "cos_Latn"), ("chr", "chr_Cher"), ("fa", "pes_Arab"), ("prs", "prs_Arab")],
        *[("kr", "knc_Latn"), ("kr_Arab", "knc_Arab"), ("qq", "qq_Zzzz")],
    ],
)
def test_scripts_regions_and_languages_beyond_nllb_have_tokens(code: str, expected: str) -> None:
    assert nllb_token(code) == expected


def test_scripts_and_regions_of_one_language_are_told_apart_and_read_back(tmp_path: Path) -> None:
    languages = ("en", "es", "es_419", "pt", "pt_BR", "sh", "sr", "sr_Latn", "zh", "zh_Hant")
    source = own_checkpoint(tmp_path / "ours", languages=languages)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    tokenizer_type: Any = NllbTokenizer
    theirs = tokenizer_type.from_pretrained(tmp_path / "out", src_lang="por_Latn_BR")
    rows = chosen_layout(entries_of(source.tokenizer, tmp_path)).rows
    ours = source.tokenizer.build()
    assert rows[theirs("x")["input_ids"][0]] == ours.language_token_id("pt_BR")
    back = open_foreign(tmp_path / "out").tokenizer.build()
    assert back.languages == languages
    header = (tmp_path / "out" / "README.md").read_text("utf-8").partition("license:")[0]
    # Hubs refuse a card with a code of more than a language
    assert header == '---\nlanguage:\n- "en"\n- "es"\n- "pt"\n- "sh"\n- "sr"\n- "zh"\n'


@pytest.mark.parametrize(
    ("spellings", "expected"),
    [
        (["en_XX", "pt_BR", "pt"], ["en", "pt_BR", "pt"]),
        (["zh_CN", "zh_TW", "zh", "por_Latn", "por_Latn_BR"], "zh_CN zh_Hant zh pt pt_BR".split()),
        (["es_MX", "es_419", "en_XX", "en_GB"], ["es", "es_419", "en", "en_GB"]),
        (
            ["eng_Latn", "en", "zho_Hant_TW", "zho_Hant", "zho_Hans"],
            "eng en zh_TW zh_Hant zh".split(),
        ),
    ],
)
def test_spellings_of_one_language_have_their_own_codes_in_any_order(
    spellings: list[str], expected: list[str]
) -> None:
    codes = model_codes(spellings)
    assert [codes[spelling] for spelling in spellings] == expected


@pytest.mark.parametrize("languages", [BEYOND, HUNDRED])
def test_a_piece_like_a_language_token_is_refused(
    languages: tuple[str, ...], tmp_path: Path
) -> None:
    token = "deu_Latn" if languages == BEYOND else "__de__"
    stream = io.BytesIO()
    sentencepiece.SentencePieceTrainer.train(
        sentence_iterator=iter(LINES * 20),
        model_writer=stream,
        vocab_size=60,
        hard_vocab_limit=False,
        user_defined_symbols=[token],
        pad_id=0,
        bos_id=1,
        eos_id=2,
        unk_id=3,
        minloglevel=2,
    )
    description = TokenizerDescription(
        kind="sentencepiece", languages=languages, language_token_scheme="angle"
    )
    files = TokenizerFiles(description, stream.getvalue())
    source = own_checkpoint(tmp_path / "ours", tokenizer=files)
    with pytest.raises(CheckpointError, match=f"has a piece '{token}'"):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    assert not (tmp_path / "out").exists()
