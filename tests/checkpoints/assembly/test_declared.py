"""``mmnmt upcycle ASSEMBLY.toml``: what is declared is what is made."""

import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.corpora import writing as writing_artifact
from support.foreign_models import LINES, m2m100_folder
from support.forked import forking
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model
from torch import Tensor

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.tokenizer import tags, with_languages
from pipeline.batching.batch import Batch, Example, collate
from pipeline.checkpoints.assembly import writing
from pipeline.checkpoints.assembly.rules import diversified
from pipeline.checkpoints.checkpoint import (
    load_model,
    open_checkpoint,
    read_spec,
    read_tokenizer,
)
from pipeline.checkpoints.importing import open_model
from pipeline.checkpoints.settings import UpcyclingConfig
from pipeline.checkpoints.weights import TensorFiles
from pipeline.cli import main
from pipeline.model.settings import MoEConfig
from pipeline.model.transformer import Transformer

MOE = MoEConfig(num_experts=4, every=2)


@pytest.fixture(scope="module")
def shelf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A dense model, a group-routed one, and an M2M-100 of another library."""
    folder = tmp_path_factory.mktemp("sources")
    make_checkpoint(folder / "dense", tiny_model(byte_spec(), seed=1))
    make_checkpoint(folder / "moe_lgr", tiny_model(byte_spec(moe=MOE, groups=2), seed=2))
    m2m100_folder(folder / "m2m100")
    return folder


@pytest.fixture
def at_shelf(shelf: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    for name in ("dense", "moe_lgr", "m2m100"):
        (tmp_path / name).symlink_to(shelf / name)
    monkeypatch.chdir(tmp_path)
    return tmp_path


def declare(text: str, name: str = "assembly.toml") -> str:
    Path(name).write_text(text, encoding="utf-8")
    return name


ROW_12 = """
[sources]
dense = "dense"
moe_lgr = "moe_lgr"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "moe_lgr"
[upcycling]
mask_ratio = 0.1
seed = 3
"""
ALL_DENSE = """
[sources]
dense = "{source}"
[parts]
embeddings = "dense"
encoder = "dense"
decoder = "dense"
[experts]
num_experts = 4
every = 2
[upcycling]
mask_ratio = {ratio}
"""


GROUP_ROUTED = 'num_experts = 4\ndecoder_router = "language_group"\n'


def receipt_of(directory: str) -> dict[str, Any]:
    made = open_artifact(Path(directory), kind="checkpoint")
    document: dict[str, Any] = made.read_json("receipt.json")
    return document


# ---------------------------------------------------------------- made as declared


@pytest.mark.usefixtures("at_shelf")
def test_row_12_is_declared_in_ten_lines() -> None:
    assert main(["upcycle", declare(ROW_12), "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    of_dense = TensorFiles(open_artifact(Path("dense"), kind="checkpoint"), "weights/")
    of_lgr = TensorFiles(open_artifact(Path("moe_lgr"), kind="checkpoint"), "weights/")
    tensors = TensorFiles(made, "weights/")
    receipt, config = receipt_of("made"), UpcyclingConfig(mask_ratio=0.1, seed=3)
    for entry in receipt["tensors"]:
        value = tensors.read(entry["target"])
        source = {"decoder": of_lgr}.get(entry["part"], of_dense)
        if entry["rule"] == "copied":
            assert torch.equal(value, source.read(entry["source"]))
        elif entry["rule"] == "expert of dense":
            expected = diversified(source.read(entry["source"]), entry["target"], config)
            assert torch.equal(value, expected)
    assert receipt["upcycling"] == config.model_dump(mode="json")


@pytest.mark.usefixtures("at_shelf")
def test_a_dry_run_prints_every_module_and_writes_none(capsys: pytest.CaptureFixture[str]) -> None:
    before = {*Path().iterdir()}
    name = declare(ROW_12)
    assert main(["upcycle", name, "--dry-run"]) == 0
    printed = capsys.readouterr().out
    assert printed.startswith("Enc(dense)-Dec(moe_lgr), embeddings of dense: 2+2 layers of width")
    for words in ("language-group routers", "10% of its entries zero (seed 3)", "fresh", "copied"):
        assert words in printed
    assert {*Path().iterdir()} == {*before, Path(name)}


# ---------------------------------------------------------------- the same bytes however made


def files_of(directory: str) -> dict[str, bytes]:
    folder = Path(directory) / "weights"
    return {path.name: path.read_bytes() for path in sorted(folder.iterdir())}


@pytest.mark.slow
@pytest.mark.usefixtures("at_shelf")
def test_one_process_and_four_write_the_same_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(writing, "FILE_BYTES", 4096)
    monkeypatch.setattr("pipeline.distributed.workers.get_context", lambda _: forking())
    name = declare(ROW_12)
    assert main(["upcycle", name, "--out", "one"]) == 0
    assert main(["upcycle", name, "--out", "four", "--processes", "4"]) == 0
    assert len(files_of("one")) > 4
    assert files_of("one") == files_of("four")
    assert receipt_of("one") == receipt_of("four")


@pytest.mark.usefixtures("at_shelf")
def test_what_is_made_already_is_not_made_again(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name = declare(ROW_12)
    assert main(["upcycle", name, "--out", "made"]) == 0
    before = Path("made/manifest.json").read_bytes()
    monkeypatch.setattr(writing, "make_assembly", pytest.fail)
    assert main(["upcycle", name, "--out", "made"]) == 0
    assert "already done, made is up to date" in capsys.readouterr().out
    assert Path("made/manifest.json").read_bytes() == before
    other = declare(ROW_12.replace("seed = 3", "seed = 4"), "other.toml")
    assert main(["upcycle", other, "--out", "made"]) == 2
    found = capsys.readouterr()
    assert "pass --overwrite to replace it" in found.err
    assert not found.out, "refused before anything is said of the plan"


# ---------------------------------------------------------------- what it computes


def batch_of(directory: Path) -> Batch:
    tokenizer = open_model(directory).tokenizer.build()
    found = tags(tokenizer, "src-tgt", source="en", target="de")
    examples = [
        Example(
            source=tokenizer.encode(line),
            target=tokenizer.encode(line)[:3],
            source_prefix=found.source_prefix,
            decoder_prompt=found.decoder_prompt,
            source_language=tokenizer.languages.index("en"),
            target_language=tokenizer.languages.index("de"),
        )
        for line in LINES
    ]
    return collate(examples, eos_id=tokenizer.eos_id)


@torch.no_grad()
def logits(model: Transformer, batch: Batch) -> Tensor:
    found: Tensor = model.eval()(batch).logits_LV
    return found


@pytest.mark.parametrize("source", ["dense", "m2m100"])
@pytest.mark.parametrize("ratio", [0.0, 0.1])
def test_the_function_check_measures_what_the_masks_did(
    source: str, ratio: float, at_shelf: Path
) -> None:
    """Against both models, whole in memory, on text of the test's own."""
    text = ALL_DENSE.format(source=source, ratio=ratio)
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    check = receipt_of("made")["function_check"]
    made = open_artifact(Path("made"), kind="checkpoint")
    before = open_model(Path(source))
    if source == "m2m100":
        assert main(["checkpoint", "import", source, "--out", "imported"]) == 0
    checkpoint = at_shelf / ("imported" if source == "m2m100" else source)
    dense = load_model(open_artifact(checkpoint, kind="checkpoint"))
    batch = batch_of(Path(source))
    one, other = logits(dense, batch), logits(load_model(made), batch)
    largest = ((one - other).abs().max() / one.abs().max()).item()
    assert read_tokenizer(made).fingerprint == before.tokenizer.build().fingerprint
    if ratio == 0:
        assert max(largest, check["largest"]) < 1e-5
        assert check["same_choice"] == 1
    else:
        assert min(largest, check["largest"]) > 1e-3
        assert check["largest"] == pytest.approx(largest, rel=3), "of the same order"
        assert check["mean_kl"] > 1e-6


@pytest.mark.usefixtures("at_shelf")
def test_a_fresh_part_has_no_function_to_compare(capsys: pytest.CaptureFixture[str]) -> None:
    text = ROW_12.replace('decoder = "moe_lgr"', 'decoder = "fresh"')
    text = text.replace('moe_lgr = "moe_lgr"\n', "")
    text += "[experts]\nnum_experts = 4\nevery = 2\n"
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    assert receipt_of("made")["function_check"] is None
    assert "fixed batch" not in capsys.readouterr().out


@pytest.mark.usefixtures("at_shelf")
def test_bfloat16_rounds_every_tensor_once() -> None:
    text = ALL_DENSE.format(source="dense", ratio=0.1)
    assert main(["upcycle", declare(text), "--out", "full"]) == 0
    assert main(["upcycle", declare('precision = "bfloat16"\n' + text), "--out", "half"]) == 0
    full = TensorFiles(open_artifact(Path("full"), kind="checkpoint"), "weights/")
    half = TensorFiles(open_artifact(Path("half"), kind="checkpoint"), "weights/")
    for name in full.names():
        assert torch.equal(half.read(name), full.read(name).bfloat16())
    load_model(open_artifact(Path("half"), kind="checkpoint"))


# ---------------------------------------------------------------- vocabularies


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize(
    ("spelling", "like"), [("gsw", "deu_Latn"), ("gsw_Latn", "de-DE"), ("GSW", "de")]
)
def test_added_languages_start_from_a_language_or_fresh_and_change_no_other_id(
    spelling: str, like: str
) -> None:
    added = f'[languages]\n{spelling} = "{like}"\nlad = "fresh"\n'
    text = ALL_DENSE.format(source="m2m100", ratio=0.0) + added
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    old, new = open_model(Path("m2m100")).tokenizer.build(), read_tokenizer(made)
    assert set(new.languages) == {*old.languages, "gsw", "lad"}
    assert new.size == old.size + 2
    assert [new.encode(line) for line in LINES] == [old.encode(line) for line in LINES]
    assert all(new.language_token_id(c) == old.language_token_id(c) for c in old.languages)
    table = TensorFiles(made, "weights/").read("embedding.weight")
    before = open_model(Path("m2m100")).tensors.read("embedding.weight")
    assert torch.equal(table[: old.size], before), "spare rows too, which are in every softmax"
    assert torch.equal(table[new.language_token_id("gsw")], before[old.language_token_id("de")])
    assert not torch.equal(table[new.language_token_id("lad")], before[old.language_token_id("de")])
    assert receipt_of("made")["function_check"]["largest"] < 1e-5


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize("is_named", [False, True])
@pytest.mark.parametrize(
    ("spelling", "code", "like"), [("srp_Latn", "sr_Latn", "sr"), ("zh-TW", "zh_Hant", "zh")]
)
def test_another_script_of_a_known_language_is_a_new_language(
    spelling: str, code: str, like: str, is_named: bool
) -> None:
    text = ALL_DENSE.format(source="m2m100", ratio=0.0) + f'[languages]\n"{spelling}" = "{like}"\n'
    if is_named:
        files = with_languages(open_model(Path("m2m100")).tokenizer, [code])
        with writing_artifact(Path("named"), "tokenizer", "train_tokenizer") as writer:
            files.write(writer.directory)
        text = 'tokenizer = "named"\n' + text
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    new, table = read_tokenizer(made), TensorFiles(made, "weights/").read("embedding.weight")
    assert torch.equal(table[new.language_token_id(code)], table[new.language_token_id(like)])


@pytest.mark.usefixtures("at_shelf")
def test_a_new_vocabulary_keeps_or_averages_rows(capsys: pytest.CaptureFixture[str]) -> None:
    more = ["ein ganzer Satz mit Wörtern", "whichever sentence goes on", "слова и три слова"]
    m2m100_folder(Path("bigger"), pieces=90, lines=[*LINES, *more])
    assert main(["checkpoint", "import", "bigger", "--out", "vocabulary"]) == 0
    text = 'tokenizer = "vocabulary"\n' + ALL_DENSE.format(source="m2m100", ratio=0.0)
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    source = open_model(Path("m2m100"))
    old, new = source.tokenizer.build(), read_tokenizer(made)
    before = source.tensors.read("embedding.weight")
    after = TensorFiles(made, "weights/").read("embedding.weight")
    old_ids = {piece: index for index in range(old.size) if (piece := old.piece(index))}
    kept = averaged = 0
    for index in range(new.size):
        piece = new.piece(index)
        if piece in old_ids:
            kept += 1
            assert torch.equal(after[index], before[old_ids[piece]])
        elif piece is not None:
            parts = old.encode(piece.replace("▁", " "))
            lone = parts[0] == old_ids["▁"] and not piece.startswith("▁")
            known = [part for part in parts[lone:] if part != old.unk_id]
            if known:
                averaged += 1
                torch.testing.assert_close(after[index], before[known].mean(0))
    assert min(kept, averaged) > 5
    for code in ("de", "en"):
        one, other = new.language_token_id(code), old.language_token_id(code)
        assert torch.equal(after[one], before[other])
    assert receipt_of("made")["function_check"]["largest"] < 1e-5
    # 4 specials and 100 languages have their rows too
    assert f"{kept + 104:,} kept by piece" in capsys.readouterr().out


@pytest.mark.usefixtures("at_shelf")
def test_bytes_take_over_the_rows_of_characters_alone() -> None:
    text = 'tokenizer = "dense"\n' + ALL_DENSE.format(source="m2m100", ratio=0.0)
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    made = open_artifact(Path("made"), kind="checkpoint")
    source = open_model(Path("m2m100"))
    old, new = source.tokenizer.build(), read_tokenizer(made)
    before = source.tensors.read("embedding.weight")
    after = TensorFiles(made, "weights/").read("embedding.weight")
    (letter,) = new.encode("x")
    assert torch.equal(after[letter], before[old.encode("x")[-1]])
    first, second = new.encode("ä")
    assert not any(torch.equal(after[index], row) for index in (first, second) for row in before)


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize(
    "settings",
    [
        {"top_k": 1, "combine_weights": "probability"},
        {"every": 1, "top_k": 3},
        {"decoder_router": "language_group"},
        {"decoder_router": "language_group", "num_groups": 2},
    ],
)
def test_settings_of_experts_that_are_not_declared_stay(settings: dict[str, Any]) -> None:
    moe = MoEConfig(num_experts=4, **settings)
    groups = 2 if moe.needs_groups else 0
    make_checkpoint(Path("moe"), tiny_model(byte_spec(moe=moe, groups=groups)))
    text = ALL_DENSE.format(source="moe", ratio=0.1).replace("= 4\nevery = 2", "= 8")
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    spec = read_spec(open_checkpoint(Path("made")))
    assert spec.model.moe == moe.model_copy(update={"num_experts": 8})


@pytest.mark.usefixtures("at_shelf")
def test_a_fresh_decoder_does_not_route_as_the_source_of_the_encoder() -> None:
    text = ALL_DENSE.format(source="moe_lgr", ratio=0.1).replace("= 4", "= 8")
    name = declare(text.replace('decoder = "dense"', 'decoder = "fresh"'))
    assert main(["upcycle", name, "--out", "made"]) == 0
    moe = read_spec(open_checkpoint(Path("made"))).model.moe
    assert moe is not None
    assert moe.decoder_router == "token"


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize("experts", [2, 3])
def test_a_source_of_embeddings_may_have_more_experts(experts: int) -> None:
    text = ALL_DENSE.format(source="dense", ratio=0.1).replace("= 4", f"= {experts}")
    text = text.replace("[parts]", 'moe_lgr = "moe_lgr"\n[parts]')
    text = text.replace('embeddings = "dense"', 'embeddings = "moe_lgr"')
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    moe = read_spec(open_checkpoint(Path("made"))).model.moe
    assert moe is not None
    assert moe.num_experts == experts


MIXED = """
[sources]
plain = "plain"
other = "other"
[parts]
embeddings = "{embeddings}"
encoder = "{encoder}"
decoder = "{decoder}"
"""
LOW_RANK = {"kind": "low_rank", "rank": 2}


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize(
    ("parts", "settings"),
    [
        ({"embeddings": "plain", "encoder": "other", "decoder": "other"}, {"converter_layers": 1}),
        ({"embeddings": "other", "encoder": "plain", "decoder": "plain"}, {"converter_layers": 1}),
        (
            {"embeddings": "plain", "encoder": "other", "decoder": "other"},
            {"language_modules": LOW_RANK | {"synthesis": "language_wise"}},
        ),
    ],
)
def test_parts_decide_their_settings_and_not_the_embeddings(
    parts: dict[str, str], settings: dict[str, Any]
) -> None:
    make_checkpoint(Path("plain"), tiny_model(byte_spec(), seed=1))
    make_checkpoint(Path("other"), tiny_model(byte_spec(model=settings), seed=2))
    assert main(["upcycle", declare(MIXED.format(**parts)), "--out", "made"]) == 0
    made, body = (read_spec(open_checkpoint(Path(name))) for name in ("made", parts["encoder"]))
    assert made.model == body.model


@pytest.mark.usefixtures("at_shelf")
def test_language_modules_that_differ_are_not_taken_for_each_other(
    capsys: pytest.CaptureFixture[str],
) -> None:
    """Their tensors are the same, but not the language that chooses them."""
    for name, synthesis in (("plain", "pair_wise"), ("other", "language_wise")):
        modules = LOW_RANK | {"synthesis": synthesis}
        spec = byte_spec(model={"language_modules": modules})
        make_checkpoint(Path(name), tiny_model(spec))
    text = MIXED.format(embeddings="plain", encoder="plain", decoder="other")
    assert main(["upcycle", declare(text), "--out", "made"]) == 2
    assert "plain and other have different language modules: declare" in capsys.readouterr().err
    declared = '[model.language_modules]\nkind = "low_rank"\nrank = 2\n'
    assert main(["upcycle", declare(text + declared), "--out", "made"]) == 0


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize("more", [{}, {"embedding_norm": True, "front": {"kind": "ncf"}}])
def test_the_function_check_has_the_norms_of_post_norm_models(more: dict[str, Any]) -> None:
    make_checkpoint(Path("post"), tiny_model(byte_spec(model={"norm": "post"} | more)))
    assert (
        main(["upcycle", declare(ALL_DENSE.format(source="post", ratio=0.0)), "--out", "made"]) == 0
    )
    assert receipt_of("made")["function_check"]["largest"] < 1e-5


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize("parts", [("other", "plain"), ("plain", "other")])
def test_the_function_check_converts_languages_as_the_encoder_does(parts: tuple[str, str]) -> None:
    for name, layers in (("plain", 0), ("other", 1)):
        spec = byte_spec(model={"converter_layers": layers})
        first = spec.vocabulary_size - len(spec.languages)
        ids = tuple(range(first, spec.vocabulary_size)) if layers else None
        spec = spec.model_copy(update={"language_token_ids": ids})
        make_checkpoint(Path(name), tiny_model(spec))
    encoder, decoder = parts
    text = MIXED.format(embeddings="plain", encoder=encoder, decoder=decoder)
    assert main(["upcycle", declare(text), "--out", "made"]) == 0
    assert receipt_of("made")["function_check"]["largest"] < 1e-5


MODULES_OF_TWO = '[model.language_modules]\nkind = "low_rank"\nrank = 2\nlanguages = ["de", "fr"]\n'


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize("kind", ["low_rank", "language_experts", "clsr"])
def test_the_function_check_translates_between_languages_with_modules(kind: str) -> None:
    text = ALL_DENSE.partition("[experts]")[0]
    if kind == "low_rank":
        assert (
            main(["upcycle", declare(text.format(source="dense") + MODULES_OF_TWO), "--out", "two"])
            == 0
        )
        assert receipt_of("two")["function_check"]["largest"] < 1e-5
    make_checkpoint(Path("all"), tiny_model(byte_spec(model={"language_modules": {"kind": kind}})))
    assert main(["checkpoint", "prune", "all", "--languages", "de", "en", "--out", "pruned"]) == 0
    assert main(["upcycle", declare(text.format(source="pruned")), "--out", "made"]) == 0
    assert receipt_of("made")["function_check"]["largest"] < 1e-5


# ---------------------------------------------------------------- careless users


@pytest.mark.usefixtures("at_shelf")
@pytest.mark.parametrize(
    ("change", "words"),
    [
        (('dense = "dense"', 'dense = "nowhere"'), "nowhere does not exist. Name a checkpoint"),
        (('encoder = "dense"', 'encoder = "danse"'), "parts name 'danse', but the sources are"),
        (('decoder = "moe_lgr"', 'decoder = "dense"'), "no part comes from the source 'moe_lgr'"),
        (("mask_ratio = 0.1", "mask_rate = 0.1"), "mask_rate"),
        (("mask_ratio = 0.1", "mask_ratio = 1.5"), "mask_ratio"),
        (("[upcycling]", "[model]\nnum_heads = 4\n[upcycling]"), "num_heads: 2 → 4"),
        (("[upcycling]", "[model]\nmoe = 3\n[upcycling]"), "model.moe belongs to [experts]"),
        (("[upcycling]", "[experts]\nevery = 3\n[upcycling]"), "or leave [experts] out."),
        (("[upcycling]", "[experts]\ntop_k = 1\n[upcycling]"), "experts.combine_weights is"),
        (
            ('decoder = "moe_lgr"\n', 'decoder = "fresh"\n[experts]\n' + GROUP_ROUTED),
            "no part comes from the source 'moe_lgr'",
        ),
        (
            (
                'moe_lgr = "moe_lgr"\n[parts]\nembeddings = "dense"\nencoder = "dense"\n'
                'decoder = "moe_lgr"\n',
                '[parts]\nembeddings = "dense"\nencoder = "dense"\ndecoder = "fresh"\n[experts]\n'
                + GROUP_ROUTED,
            ),
            "or `groups` of a declaration",
        ),
        (("[sources]", "groups = 'dense'\n[sources]"), "is a checkpoint artifact where a groups"),
        (("[upcycling]", "[languages]\nde = 'en'\n[upcycling]"), "already knows the language 'de'"),
        (("[upcycling]", "[languages]\ndeu = 'en'\n[upcycling]"), "language 'deu', as 'de'"),
        (("[upcycling]", "[languages]\n'd e' = 'en'\n[upcycling]"), "is no language code"),
        (
            ("[upcycling]", "[languages]\ngsw = 'de'\ngsw_Latn = 'de'\n[upcycling]"),
            "names 'gsw' twice. Leave out 'gsw_Latn'.",
        ),
        (("[upcycling]", "[languages]\ngsw = 'german'\n[upcycling]"), "Write 'de'."),
    ],
)
def test_a_declaration_that_cannot_be_is_one_sentence(
    change: tuple[str, str], words: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = set(Path().iterdir())
    name = declare(ROW_12.replace(*change))
    assert main(["upcycle", name, "--out", "made"]) == 2
    error = capsys.readouterr().err
    assert words in error, error
    assert len(error.strip().splitlines()) == 1
    made = {path.name for path in set(Path().iterdir()) - before}
    assert made <= {name, ".made.lock"}


@pytest.mark.usefixtures("at_shelf")
def test_an_output_that_is_a_source_is_refused(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upcycle", declare(ROW_12), "--out", "dense", "--overwrite"]) == 2
    assert "Choose another folder for the output" in capsys.readouterr().err
    assert json.loads(Path("dense/manifest.json").read_text())["kind"] == "checkpoint"


@pytest.mark.usefixtures("at_shelf")
def test_a_declaration_needs_an_output_and_no_recipe(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["upcycle", declare(ROW_12)]) == 2
    assert "Pass --out DIR, or --dry-run" in capsys.readouterr().err
    with pytest.raises(SystemExit):
        main(["upcycle", declare(ROW_12), "--recipe", "demo_mmnmt", "--out", "made"])
    assert "there is no option '--recipe'" in capsys.readouterr().err
