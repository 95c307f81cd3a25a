"""Export: what is refused, what is fused, files, model cards, and the way back."""

import json
import shutil
import tomllib
from pathlib import Path
from typing import Any, Literal

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from support.corpora import writing
from support.exported_models import (
    BEYOND,
    HUNDRED,
    own_checkpoint,
    own_sentencepiece,
    own_tokenizer,
    tokenizer_of_two,
)
from support.foreign_families import nllb_folder
from support.foreign_models import (
    LINES,
    PAIRS,
    assert_same_logits,
    logits_of,
    m2m100_folder,
)
from support.raw_trees import unpack_stored_run
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model, tiny_spec
from transformers import M2M100ForConditionalGeneration

from pipeline import cli
from pipeline.artifacts.artifact import InputRecord, new_artifact, open_artifact
from pipeline.artifacts.tokenizer import TokenizerDescription, TokenizerFiles
from pipeline.artifacts.vocabularies import Numbering
from pipeline.checkpoints.checkpoint import own_source
from pipeline.checkpoints.exporting import (
    FORMATS,
    Export,
    Format,
    export_checkpoint,
    refuse_unwritable,
)
from pipeline.checkpoints.foreign.export_to_hugging_face import with_pieces
from pipeline.checkpoints.foreign.hugging_face_tokenizer import (
    chosen_layout,
    entries_of,
    nllb_token,
)
from pipeline.checkpoints.importing import import_checkpoint, open_foreign
from pipeline.cli import model_commands
from pipeline.errors import ArtifactError, CheckpointError, ConfigError
from pipeline.model.building import build_model
from pipeline.model.settings import DenseConfig, MoEConfig

ROOT = Path(__file__).parents[2]
MOE = MoEConfig(num_experts=4, every=2)
GROUPED = MOE.model_copy(update={"decoder_router": "language_group"})


@pytest.mark.parametrize(
    ("to", "settings", "said"),
    [
        ("hf-m2m100", {"norm": "post"}, "model.norm = 'post'.*only 'pre'.*--to ctranslate2"),
        ("hf-m2m100", {"positions": "learned"}, "model.positions = 'learned'.*--to ctranslate2"),
        ("hf-m2m100", {"embedding_norm": True}, "model.embedding_norm = True.*--to ctranslate2"),
        (
            "hf-m2m100",
            {"converter_layers": 1},
            "converter_layers = 1.*No format supports this model",
        ),
        (
            "ctranslate2",
            {"converter_layers": 1},
            "converter_layers = 1.*No format supports this model",
        ),
        ("hf-m2m100", {"embedding": {"output": "untied"}}, "output = 'untied'.*--to ctranslate2"),
        ("hf-m2m100", {"tag_scheme": "tgt"}, "tag_scheme = 'tgt'.*--to ctranslate2"),
        ("hf-m2m100", {"moe": MOE}, "model.moe = 'experts'.*--to hf-nllb-moe"),
        ("ctranslate2", {"moe": MOE}, "model.moe = 'experts'.*--to hf-nllb-moe"),
        ("hf-nllb-moe", {}, "model.moe = 'none'.*--to hf-m2m100"),
        # The format that is named takes the model.
        ("hf-nllb-moe", {"norm": "post"}, "model.moe = 'none'.*--to ctranslate2"),
        ("ctranslate2", {"moe": MOE, "norm": "post"}, "model.moe.*No format supports this model"),
        ("hf-m2m100", {"tag_scheme": "src-suffix-tgt"}, "tag_scheme.*No format supports this mod"),
        (
            "hf-nllb-moe",
            {"moe": MOE, "norm": "post"},
            "model.norm = 'post'.*No format supports this model",
        ),
        *(
            ("hf-nllb-moe", {"moe": MOE.model_copy(update={name: value})}, said)
            for name, value, said in (
                ("top_k", 1, "model.moe.top_k = 1.*only 2. No format supports this model"),
                ("combine_weights", "probability", "combine_weights = 'probability'"),
                ("evaluation_capacity_factor", 1.0, "evaluation_capacity_factor = 1.0"),
            )
        ),
        # A group is only asked for where one helps.
        ("ctranslate2", {"moe": GROUPED, "groups": (1, 0, 0)}, "model.moe .* --to hf-nllb-moe"),
        (
            "hf-nllb-moe",
            {"moe": GROUPED.model_copy(update={"top_k": 1}), "groups": (1, 0, 0)},
            "top_k = 1",
        ),
    ],
)
def test_what_a_format_cannot_express_is_refused_by_name(
    to: Format, settings: dict[str, Any], said: str, tmp_path: Path
) -> None:
    source = own_checkpoint(tmp_path / "checkpoint", **settings)
    with pytest.raises(CheckpointError, match=said):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to=to))
    assert not (tmp_path / "out").exists()


class OddFeedForward(DenseConfig):
    kind: Literal["odd"] = "odd"  # type: ignore[assignment]


@pytest.mark.parametrize(("to", "moe"), [("hf-m2m100", None), ("hf-nllb-moe", MOE)])
def test_a_feed_forward_of_one_s_own_is_refused_by_its_kind(
    to: Format, moe: MoEConfig | None
) -> None:
    spec = tiny_spec(moe=moe)
    model = spec.model.model_copy(update={"feed_forward": OddFeedForward()})
    with pytest.raises(CheckpointError) as raised:
        refuse_unwritable(Path("a"), spec.model_copy(update={"model": model}), to=to)
    said = f"a has model.feed_forward = 'odd'; {to} supports only 'dense'. No format supports this "
    assert str(raised.value) == f"{said}model."


@pytest.mark.parametrize("norm", ["pre", "post"])
@pytest.mark.parametrize("to", ["hf-m2m100", "ctranslate2"])
def test_vocabularies_of_bytes_and_of_two_sides_are_refused(
    to: Format, norm: Literal["pre", "post"], tmp_path: Path
) -> None:
    """Also where a setting alone would call for another format, which cannot have them either."""
    spec = tiny_spec(vocabulary=264, model={"norm": norm}).model_copy(
        update={"pad_id": 0, "languages": ("de", "en", "fr", "ru")}
    )
    make_checkpoint(tmp_path / "bytes", build_model(spec))
    own_checkpoint(tmp_path / "two", tokenizer=tokenizer_of_two(), norm=norm)
    of_bytes = r"of bytes \(tokenizer.kind\)"
    for name, words in (("bytes", of_bytes), ("two", "vocabulary per side")):
        with pytest.raises(CheckpointError, match=words):
            export_checkpoint(tmp_path / name, out_dir=tmp_path / "out", export=Export(to=to))
    grouped = tiny_model(byte_spec(moe=GROUPED, groups=2))
    made = make_checkpoint(tmp_path / "grouped", grouped)
    with pytest.raises(CheckpointError, match=of_bytes):
        export_checkpoint(made, out_dir=tmp_path / "out", export=Export(to="hf-nllb-moe"))
    assert not (tmp_path / "out").exists()


# ---------------------------------------------------------------- one language group


def test_routers_of_one_group_are_the_mean_with_the_shared_one(tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "checkpoint", moe=GROUPED, groups=(1, 0, 0))
    export_checkpoint(
        source.origin, out_dir=tmp_path / "out", export=Export(to="hf-nllb-moe", target_group="fr")
    )
    read = source.tensors.read
    router = "layers.1.feed_forward.router"
    with safe_open(tmp_path / "out" / "model.safetensors", framework="pt") as stored:
        fused = stored.get_tensor("model.decoder.layers.1.ffn.router.classifier.weight")
        shared = stored.get_tensor("model.encoder.layers.1.ffn.router.classifier.weight")
        assert not [name for name in stored.keys() if "group" in name]  # noqa: SIM118
    own, of_groups = read(f"decoder.{router}.weight"), read(f"decoder.{router}.group_weight")
    assert torch.equal(fused, (own + of_groups[0]) / 2)
    assert torch.equal(shared, read(f"encoder.{router}.weight"))
    card = (tmp_path / "out" / "README.md").read_text("utf-8")
    assert "Into: `en`, `fr`." in card


@pytest.mark.parametrize(
    ("moe", "groups", "choice", "said"),
    [
        (GROUPED, (1, 0, 0), None, r"--target-group from 0 \(en, fr\), 1 \(de\)"),
        (GROUPED, (1, 0, 0), "2", r"--target-group 2: .* has the groups 0 \(en, fr\), 1 \(de\)"),
        (GROUPED, (1, 0, 0), 5000 * "9", r"--target-group 9+: .* has the groups 0 \(en, fr\)"),
        (GROUPED, (1, 0, 0), "ru", r"--target-group ru: .* groups 0 \(en, fr\), 1 \(de\)\. Choose"),
        (MOE, None, "0", "has no language groups. Leave out --target-group"),
    ],
)
def test_a_group_must_be_named_where_there_are_groups_and_nowhere_else(
    moe: MoEConfig, groups: tuple[int, ...] | None, choice: str | None, said: str, tmp_path: Path
) -> None:
    source = own_checkpoint(tmp_path / "checkpoint", moe=moe, groups=groups)
    export = Export(to="hf-nllb-moe", target_group=choice)
    with pytest.raises(ConfigError, match=said):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=export)


@pytest.mark.parametrize("to", ["hf-m2m100", "ctranslate2"])
def test_no_group_is_asked_for_by_a_format_that_has_no_experts(to: Format, tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "checkpoint", moe=GROUPED, groups=(1, 0, 0))
    with pytest.raises(CheckpointError, match=r"supports only 'none'\. Export it --to hf-nllb-moe"):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to=to))


# ---------------------------------------------------------------- there and back


@pytest.mark.parametrize("languages", [HUNDRED, ("de", "en"), BEYOND])
def test_what_is_exported_is_read_back_as_it_was(
    languages: tuple[str, ...], tmp_path: Path
) -> None:
    source = own_checkpoint(tmp_path / "checkpoint", languages=languages)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    back = import_checkpoint(tmp_path / "out", out_dir=tmp_path / "back")
    assert back.spec == source.spec.model_copy(update={"pad_id": 1})
    ours, theirs = source.tokenizer.build(), back.tokenizer.build()
    layout = chosen_layout(entries_of(source.tokenizer, source.origin))
    rows = [row for row in layout.rows if row is not None]  # without languages that ours lacks
    for line in LINES:
        assert [rows[index] for index in theirs.encode(line)] == ours.encode(line)
    for code in source.spec.languages:
        assert rows[theirs.language_token_id(code)] == ours.language_token_id(code)
    for name in source.tensors.names():
        value = back.tensors.read(name)
        if name == "embedding.weight":
            value = value[[rows.index(index) for index in range(ours.size)]]
        assert torch.equal(value, source.tensors.read(name))
    found, expected = logits_of(back, PAIRS), logits_of(source, PAIRS)
    assert_same_logits(found, [logits_LV[:, rows] for logits_LV in expected])
    export_checkpoint(tmp_path / "back", out_dir=tmp_path / "ct2", export=Export(to="ctranslate2"))


@pytest.mark.parametrize("code", ["de", "fr"])
def test_a_language_that_somebody_suppresses_is_known(code: str, tmp_path: Path) -> None:
    source = own_checkpoint(tmp_path / "checkpoint")
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    before = open_foreign(tmp_path / "out")
    path = tmp_path / "out" / "generation_config.json"
    found = json.loads(path.read_text())
    tokens = json.loads((tmp_path / "out" / "tokenizer_config.json").read_text())
    [index] = [
        int(index)
        for index, token in tokens["added_tokens_decoder"].items()
        if token["content"] == f"__{code}__"
    ]
    found["suppress_tokens"] += [index, 1]  # and padding, which has a row of zeros in many models
    path.write_text(json.dumps(found))
    assert open_foreign(tmp_path / "out").spec == before.spec


@pytest.mark.parametrize(
    ("narrow", "expected"),
    [("model.shared.weight", "float32"), ("fc1.weight", "float32"), ("", "bfloat16")],
)
def test_an_export_is_loaded_in_a_type_that_has_all_values(
    narrow: str, expected: str, tmp_path: Path
) -> None:
    nllb_folder(tmp_path / "theirs")
    path = tmp_path / "theirs" / "model.safetensors"
    values = load_file(path)
    save_file({k: v.bfloat16() if k.endswith(narrow) else v for k, v in values.items()}, path)
    import_checkpoint(tmp_path / "theirs", out_dir=tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    config = json.loads((tmp_path / "out" / "config.json").read_text())
    assert config["torch_dtype"] == expected


def test_an_imported_model_is_exported_as_it_came(tmp_path: Path) -> None:
    """Its hundred languages, its numbering, and the spare rows that its softmax has."""
    m2m100_folder(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", out_dir=tmp_path / "ours")
    export_checkpoint(tmp_path / "ours", out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    first, second = open_foreign(tmp_path / "theirs"), open_foreign(tmp_path / "out")
    assert second.spec == first.spec
    assert second.tokenizer == first.tokenizer
    for name in first.tensors.names():
        assert torch.equal(first.tensors.read(name), second.tensors.read(name))
    assert "suppress_tokens" not in json.loads(
        (tmp_path / "out" / "generation_config.json").read_text()
    )


def test_weights_beyond_a_size_lie_in_several_files_with_an_index(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source = own_checkpoint(tmp_path / "checkpoint")
    monkeypatch.setattr("pipeline.checkpoints.weights.SHARD_BYTES", 8000)
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    files = sorted(path.name for path in (tmp_path / "out").glob("*.safetensors"))
    assert len(files) > 2
    assert files[0] == f"model-00001-of-{len(files):05d}.safetensors"
    index = json.loads((tmp_path / "out" / "model.safetensors.index.json").read_text())
    assert set(index["weight_map"].values()) == set(files)
    back = open_foreign(tmp_path / "out")
    name = "decoder.layers.1.feed_forward.up.weight"
    assert torch.equal(back.tensors.read(name), source.tensors.read(name))
    peer_type: Any = M2M100ForConditionalGeneration
    peer, loading = peer_type.from_pretrained(tmp_path / "out", output_loading_info=True)
    assert not loading["missing_keys"]
    assert torch.equal(
        peer.state_dict()[f"model.{name}".replace("feed_forward.up", "fc1")],
        source.tensors.read(name),
    )


# ---------------------------------------------------------------- vocabularies


def test_pieces_in_another_order_split_text_as_before() -> None:
    from sentencepiece import SentencePieceProcessor

    model = own_sentencepiece()
    before = SentencePieceProcessor(model_proto=model)
    ordinary = [before.id_to_piece(index) for index in range(4, before.get_piece_size())]
    after = SentencePieceProcessor(model_proto=with_pieces(model, ordinary[::-1]))
    assert [after.id_to_piece(index) for index in range(after.get_piece_size())] == [
        *("<unk>", "<s>", "</s>"),
        *ordinary[::-1],
    ]
    for line in LINES:
        assert after.encode(line, out_type=str) == before.encode(line, out_type=str)
    assert (after.unk_id(), after.bos_id(), after.eos_id()) == (0, 1, 2)


def tokenizer_with(pieces: tuple[int | None, ...], size: int) -> TokenizerFiles:
    tokens = dict(zip(BEYOND, range(size - 3, size), strict=True))
    numbering = Numbering(
        size=size, pad=1, bos=0, eos=2, unk=3, pieces=pieces, language_tokens=tokens
    )
    description = TokenizerDescription(
        kind="sentencepiece",
        languages=BEYOND,
        language_token_scheme="underscores",
        numbering=numbering,
    )
    return TokenizerFiles(description, own_sentencepiece())


def test_unknown_pieces_are_refused_where_they_would_get_ids(tmp_path: Path) -> None:
    from sentencepiece import SentencePieceProcessor

    count = SentencePieceProcessor(model_proto=own_sentencepiece()).get_piece_size()
    pieces = (1, 0, 2, 3, *range(4, count - 1), None)
    files = tokenizer_with(pieces, count + 3)
    source = own_checkpoint(tmp_path / "checkpoint", languages=BEYOND, tokenizer=files)
    with pytest.raises(CheckpointError, match=r"has 1 piece without an id.* --to ctranslate2"):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="ctranslate2"))
    source = own_checkpoint(tmp_path / "moe", languages=BEYOND, tokenizer=files, moe=MOE)
    with pytest.raises(CheckpointError, match=r"has 1 piece without an id.* No format supports"):
        export_checkpoint(source.origin, out_dir=tmp_path / "no", export=Export(to="hf-nllb-moe"))


# ---------------------------------------------------------------- places


def test_an_exported_folder_is_replaced_only_if_asked_and_ours(tmp_path: Path) -> None:
    source, out = own_checkpoint(tmp_path / "checkpoint"), tmp_path / "out"
    export = Export(to="hf-m2m100")
    export_checkpoint(source.origin, out_dir=out, export=export)
    with pytest.raises(ArtifactError, match="--overwrite"):
        export_checkpoint(source.origin, out_dir=out, export=export)
    export_checkpoint(source.origin, out_dir=out, export=export, overwrite=True)
    (out / "notes.txt").write_text("mine")
    with pytest.raises(ArtifactError, match=r"notes\.txt"):
        export_checkpoint(source.origin, out_dir=out, export=export, overwrite=True)
    with pytest.raises(ConfigError, match="lies within"):
        export_checkpoint(source.origin, out_dir=source.origin / "out", export=export)


def test_a_failed_export_leaves_nothing(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    source = own_checkpoint(tmp_path / "checkpoint")

    def fail(*_: object, **__: object) -> None:
        raise CheckpointError("the last file")

    monkeypatch.setattr(
        "pipeline.checkpoints.foreign.export_to_hugging_face.write_vocabulary", fail
    )
    with pytest.raises(CheckpointError, match="the last file"):
        export_checkpoint(source.origin, out_dir=tmp_path / "out", export=Export(to="hf-m2m100"))
    assert [path.name for path in tmp_path.iterdir()] == ["checkpoint"]


def test_a_command_exports(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert model_commands.FORMATS == FORMATS
    source, out = own_checkpoint(tmp_path / "checkpoint"), tmp_path / "out"
    command = ["export", str(source.origin), "--to", "hf-m2m100", "--out", str(out)]
    assert cli.main(command) == 0
    assert "as hf-m2m100" in capsys.readouterr().out
    assert cli.main(command) == 0
    assert f"mmnmt export: already done, {out} is up to date." in capsys.readouterr().err
    assert cli.main([*command, "--license", "mit"]) == 2
    assert f"{out} exists already" in capsys.readouterr().err
    assert cli.main(["checkpoint", "verify", str(out)]) == 0
    assert cli.main(["export", str(out), "--to", "hf-m2m100", "--out", str(out / "x")]) == 2
    assert "is an export artifact where a checkpoint" in capsys.readouterr().err


def test_a_trained_model_is_exported_for_a_group_of_its_languages(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The stored run's MMNMT model, from its manifest of an earlier version."""
    unpack_stored_run(tmp_path)
    monkeypatch.chdir(tmp_path)
    command = ["export", "run/mmnmt", "--to", "hf-nllb-moe", "--target-group", "de", "--out", "out"]
    assert cli.main(command) == 0
    config = json.loads(Path("out/config.json").read_text("utf-8"))
    source = own_source(open_artifact(Path("run/mmnmt"), kind="checkpoint"))
    assert source.spec.model.moe is not None
    assert config["num_experts"] == source.spec.model.moe.num_experts
    assert config["decoder_sparse_step"] == source.spec.model.moe.every
    assert "Into: " in Path("out/README.md").read_text("utf-8")


# ---------------------------------------------------------------- model cards


def trained(
    folder: Path, checkpoint: Path, stage: str, inputs: dict[str, InputRecord], **config: Any
) -> Path:
    """A checkpoint as a stage makes it of these inputs, with the files of another."""
    taken = open_artifact(checkpoint, kind="checkpoint")
    with new_artifact(
        folder / "trained", kind="checkpoint", stage=stage, config=config, inputs=inputs
    ) as writer:
        for name in taken.names():
            writer.take_over(name, taken)
        writer.summary.append("80 updates")
    return folder / "trained"


def produced(
    out_dir: Path, kind: Any, stage: str, inputs: dict[str, InputRecord], **statistics: Any
) -> InputRecord:
    with new_artifact(out_dir, kind=kind, stage=stage, config={}, inputs=inputs) as writer:
        writer.statistics.update(statistics)
    return open_artifact(out_dir, kind=kind).as_input


def card_of(checkpoint: Path, **export: Any) -> str:
    out_dir = checkpoint.parent / "out"
    export_checkpoint(checkpoint, out_dir=out_dir, export=Export(**{"to": "hf-m2m100"} | export))
    return (out_dir / "README.md").read_text("utf-8")


def example_of(card: str) -> str:
    return card.split("```python\n")[1].split("```")[0]


def header(card: str) -> list[str]:
    first, head, _ = card.split("---\n", 2)
    assert not first
    return head.splitlines()


def test_a_model_card_has_a_header_that_hubs_read(tmp_path: Path) -> None:
    yaml = pytest.importorskip("yaml")
    source = own_checkpoint(tmp_path / "checkpoint", languages=("de", "en", "no"))
    card = card_of(source.origin, license="cc-by-nc-4.0")
    assert yaml.safe_load("\n".join(header(card))) == {
        "language": ["de", "en", "no"],
        "license": "cc-by-nc-4.0",
        "library_name": "transformers",
        "pipeline_tag": "translation",
        "tags": ["translation"],
    }
    for row in ("German | `de` | `__de__`", "Norwegian | `no` | `__no__`"):
        assert f"| {row} |\n" in card
    assert "## Data\n\nNot recorded." in card
    assert "## Scores\n\nNot recorded." in card


def test_a_model_card_tells_data_stages_and_scores(tmp_path: Path) -> None:
    checkpoint = own_checkpoint(tmp_path / "plain").origin
    with writing(tmp_path / "shards", "shards", "make_shards") as writer:
        pairs = {"de-en": {"train": 1234, "valid": 5}, "de-fr": {"train": 0, "valid": 0}}
        writer.statistics["pairs"] = pairs
        writer.summary.append("read 1,300 training lines")
    inputs = {"shards": open_artifact(tmp_path / "shards", kind="shards").as_input}
    made = trained(tmp_path, checkpoint, "finetune", inputs, optimizer={"learning_rate": 0.5})
    inputs = {"checkpoint": open_artifact(made, kind="checkpoint").as_input}
    inputs = {"systems/ours": produced(tmp_path / "answers", "translations", "translate", inputs)}
    scores = {"into_pivot": {"bleu": 31.416}, "zero_shot": {"bleu": None}}
    systems = {"ours": scores, "theirs": scores}
    produced(tmp_path / "scores", "evaluation", "evaluate", inputs, systems=systems)
    card = card_of(made, scores_dir=tmp_path / "scores")
    assert "1,234 sentence pairs for training." in card
    assert "| de-en | 1,234 |\n" in card
    assert "de-fr" not in card
    assert "- `make_shards`: read 1,300 training lines\n- `finetune`: 80 updates\n" in card
    assert '"learning_rate": 0.5' in card
    assert "| ours | into pivot | bleu | 31.42 |\n" in card
    assert "theirs" not in card
    assert str(tmp_path) not in card


@pytest.mark.parametrize(("second", "expected"), [("second", 1040), ("first", 40)])
def test_a_model_card_counts_the_lines_of_every_corpus_once(
    second: str, expected: int, tmp_path: Path
) -> None:
    made = own_checkpoint(tmp_path / "plain").origin
    for name, corpus, lines in (("pretrain", "first", 1000), ("finetune", second, 40)):
        folder = tmp_path / name
        if not (tmp_path / corpus).exists():
            with writing(tmp_path / corpus, "corpus", "clean") as writer:
                writer.path("train/de-en/de.txt").write_text(corpus)
        inputs = {"corpus": open_artifact(tmp_path / corpus, kind="corpus").as_input}
        pairs = {"de-en": {"train": lines}}
        shards = produced(folder / "shards", "shards", "make_shards", inputs, pairs=pairs)
        before = open_artifact(made, kind="checkpoint").as_input
        made = trained(folder, made, name, {"shards": shards, "checkpoint": before})
    assert f"| de-en | {expected:,} |\n" in card_of(made)


@pytest.mark.parametrize("systems", [5, {"ours": 0}, {"ours": {"into_pivot": {"bleu": "high"}}}])
def test_scores_that_evaluate_did_not_write_are_refused(tmp_path: Path, systems: Any) -> None:
    checkpoint = own_checkpoint(tmp_path / "plain").origin
    produced(tmp_path / "scores", "evaluation", "evaluate", {}, systems=systems)
    with pytest.raises(ArtifactError, match=r"scores has no scores as .* Restore it from a copy"):
        card_of(checkpoint, scores_dir=tmp_path / "scores")


def test_a_model_card_says_what_could_no_longer_be_found(tmp_path: Path) -> None:
    """The stored run was made in a folder that is not there: it is looked for next to the model."""
    unpack_stored_run(tmp_path)
    for name in ("mixture", "shards", "translations"):
        shutil.rmtree(tmp_path / "run" / name)
    card = card_of(tmp_path / "run" / "dense", scores_dir=tmp_path / "run" / "evaluation")
    assert "Some of its inputs could not be found: mixture, shards." in card
    assert "It is not known which of these systems is this model." in card
    assert "| MMNMT | into pivot | bleu | 0.88 |\n" in card


@pytest.mark.parametrize(
    ("languages", "lines", "targets", "expected"),
    [
        (("ace", "de", "en"), {}, (), ("en", "ace")),
        (("cop", "de", "el", "en"), {"el-en": 500, "cop-en": 20}, (), ("en", "el")),
        (("ace", "de", "en"), {"ace-de": 7}, (), ("ace", "de")),
        (("chr", "de", "en"), {}, ("en",), ("chr", "en")),
    ],
)
def test_the_example_of_a_card_is_of_the_trained_pair_with_most_text(
    languages: tuple[str, ...],
    lines: dict[str, int],
    targets: tuple[str, ...],
    expected: tuple[str, str],
    tmp_path: Path,
) -> None:
    source, target = expected
    checkpoint = own_checkpoint(tmp_path / "plain", languages=languages).origin
    config = {"mixture": {"targets": targets}}
    with new_artifact(tmp_path / "mix", kind="mixture", stage="mix", config=config, inputs={}):
        pass
    pairs = {pair: {"train": count} for pair, count in lines.items()}
    inputs = {
        "mixture": open_artifact(tmp_path / "mix", kind="mixture").as_input,
        "shards": produced(tmp_path / "shards", "shards", "make_shards", {}, pairs=pairs),
    }
    card = card_of(trained(tmp_path, checkpoint, "pretrain", inputs))
    code = example_of(card)
    assert f'src_lang="{nllb_token(source)}"' in code
    assert f'convert_tokens_to_ids("{nllb_token(target)}")' in code
    for language in languages:
        assert f"| `{language}` | `{nllb_token(language)}` |\n" in card


def test_imported_tokens_in_ctranslate2(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nllb_folder(tmp_path / "theirs")
    import_checkpoint(tmp_path / "theirs", out_dir=tmp_path / "ours")
    out = tmp_path / "out"
    export_checkpoint(tmp_path / "ours", out_dir=out, export=Export(to="ctranslate2"))
    vocabulary = json.loads((out / "shared_vocabulary.json").read_text("utf-8"))
    assert {"eng_Latn", "deu_Latn", "prs_Arab", "zho_Hant"} <= set(vocabulary)
    code = example_of((out / "README.md").read_text("utf-8"))
    assert 'tokens = ["eng_Latn"' in code
    exec(code.replace('"DIR', f'"{out}'))
    assert capsys.readouterr().out.strip()


def test_a_card_names_the_versions_of_transformers_that_compute_its_model(tmp_path: Path) -> None:
    """NLLB-MoE sets the limit of the extra; a dense model needs none."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text("utf-8"))["project"]
    (extra,) = (one for one in project["optional-dependencies"]["export"] if "transf" in one)
    char = own_tokenizer(BEYOND, own_sentencepiece(model_type="char"))
    cases: list[tuple[dict[str, Any], str]] = [
        ({"moe": MOE}, extra),
        ({"moe": MOE, "languages": BEYOND}, extra),
        ({}, extra.removesuffix(",<5")),
        ({"languages": BEYOND}, extra.removesuffix(",<5")),
        ({"languages": BEYOND, "tokenizer": char}, extra),  # without tokenizer.json
    ]
    for number, (settings, expected) in enumerate(cases):
        source = own_checkpoint(tmp_path / f"{number}" / "checkpoint", **settings)
        to = "hf-nllb-moe" if "moe" in settings else "hf-m2m100"
        assert f'pip install "{expected}"\n' in card_of(source.origin, to=to)


@pytest.mark.parametrize(
    ("to", "languages"),
    [*((to, BEYOND) for to in FORMATS), *((to, HUNDRED) for to in FORMATS if to != "ctranslate2")],
)
def test_the_lines_that_a_card_gives_load_the_model(
    to: Format, languages: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    moe = MOE if to == "hf-nllb-moe" else None
    source = own_checkpoint(tmp_path / "checkpoint", languages=languages, moe=moe)
    code = example_of(card_of(source.origin, to=to))
    exec(code.replace('"DIR', f'"{tmp_path / "out"}'))
    assert capsys.readouterr().out.strip()
