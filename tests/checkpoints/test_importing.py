"""`mmnmt checkpoint import`: a checkpoint that translates as the model that it came from."""

import io
import json
from pathlib import Path
from typing import Any

import pytest
import torch
from support.folder_listing import names_in
from support.foreign_families import FAMILIES, nllb_folder
from support.foreign_models import LINES

from pipeline import cli
from pipeline.artifacts.artifact import open_artifact
from pipeline.checkpoints.checkpoint import read_spec
from pipeline.errors import EXIT_USER_ERROR
from pipeline.model.parameters import num_parameters

pytestmark = pytest.mark.slow

RECIPE = """
[decoding]
beam_size = 5
stopping = "huggingface"
max_length_ratio = 0.0
max_extra_length = 20
"""
"""As transformers' generate."""


PIECES = slice(4, 54)
"""Ids of pieces of the vocabulary that all tokenizers of the tests are made from."""


def write_text(peer: Any, folder: Path) -> None:
    """Let a random model write pieces rather than language tokens, which are no text."""
    with torch.no_grad():
        peer.get_output_embeddings().weight[PIECES.stop :] *= 0.25
    peer.save_pretrained(folder)


def translated(monkeypatch: pytest.MonkeyPatch, folder: Path, *options: str) -> list[str]:
    given, written = folder / "given.txt", io.BytesIO()
    given.write_text("".join(f"{line}\n" for line in LINES), encoding="utf-8")
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.FileIO(given)))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, encoding="utf-8"))
    assert cli.main(["translate", *options]) == 0
    lines = written.getvalue().decode().split("\n")
    monkeypatch.undo()
    return lines[:-1]


def their_text(peer: Any, tokenizer: Any, tag: int) -> list[str]:
    """Lines that their library translates, one at a time, without the forced tag."""
    peer.generation_config.forced_eos_token_id = None
    options: dict[str, Any] = {"num_beams": 5, "do_sample": False, "early_stopping": False}
    options |= {"forced_bos_token_id": tag, "max_new_tokens": 21}
    encoded = (tokenizer(line, return_tensors="pt") for line in LINES)
    ids = [peer.generate(**one, **options)[0, 2:] for one in encoded]
    return [text.strip() for text in tokenizer.batch_decode(ids, skip_special_tokens=True)]


# The tests of exports import M2M-100 and NLLB-200.
@pytest.mark.parametrize("name", ["untied M2M-100", "legacy NLLB-200", "NLLB-MoE", "mBART-50"])
def test_an_imported_checkpoint_is_inspected_and_translates_as_its_library_does(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    family = FAMILIES[name]
    peer = family.make(tmp_path / "theirs")
    write_text(peer, tmp_path / "theirs")
    out = str(tmp_path / "ours")
    assert cli.main(["checkpoint", "import", str(tmp_path / "theirs"), "--out", out]) == 0

    assert cli.main(["checkpoint", "import", str(tmp_path / "theirs"), "--out", out]) == 0
    assert f"already done, {out} is up to date" in capsys.readouterr().err
    assert cli.main(["checkpoint", "inspect", out, "--json"]) == 0
    said = json.loads(capsys.readouterr().out)
    spec = read_spec(open_artifact(Path(out), kind="checkpoint"))
    parameters = sum(parameter.numel() for parameter in peer.parameters())
    assert num_parameters(spec) == parameters
    assert f"{parameters}" in json.dumps(said)
    assert cli.main(["checkpoint", "verify", out]) == 0

    (tmp_path / "recipe.toml").write_text(RECIPE)
    options = ["--from", "en", "--to", "de", "--recipe", str(tmp_path / "recipe.toml")]
    found = translated(monkeypatch, tmp_path, "--checkpoint", out, *options)
    tokenizer = family.read_tokenizer(tmp_path / "theirs")
    expected = their_text(peer, tokenizer, family.tag(tokenizer))
    assert [line.strip() for line in found] == expected
    assert len(set(found)) > 1


def test_a_refused_import_writes_none(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    nllb_folder(tmp_path / "theirs")
    (tmp_path / "theirs" / "config.json").unlink()
    before = names_in(tmp_path)
    arguments = ["checkpoint", "import", str(tmp_path / "theirs"), "--out", str(tmp_path / "ours")]
    assert cli.main(arguments) == EXIT_USER_ERROR
    assert names_in(tmp_path) == before
    said = capsys.readouterr().err
    assert said.startswith("mmnmt checkpoint import: ")
    assert said.count("\n") == 1
