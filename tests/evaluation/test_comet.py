"""COMET scores are the model's own; of a checkpoint only weights are loaded."""

import importlib.util
import pickle
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import yaml
from support.comet_models import (
    settings,
    stub_package,
    write_checkpoint,
    write_encoder,
    write_model,
    write_stub_model,
)
from support.corpora import make_corpus, make_translations

from pipeline.artifacts.corpus import Direction
from pipeline.errors import CheckpointError, ConfigError, UserError
from pipeline.evaluation.comet import Comet, ask_comet, load_model, scores_of
from pipeline.evaluation.scores import TranslatedLines

needs_comet = pytest.mark.skipif(
    importlib.util.find_spec("comet") is None, reason="unbabel-comet is not installed"
)
SAMPLES = [
    {"src": "Haus . Buch " * (9 - count), "mt": "the cat " * count, "ref": "a dog sat on " * count}
    for count in range(9)
]


@pytest.fixture
def stub(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A folder with a package ``comet`` that knows one small model, before all others."""
    with stub_package(tmp_path / "stub", monkeypatch):
        yield


def asked(folder: Path, model: Path, lines: list[dict[str, str]]) -> Comet:
    """Score translations into English of one system."""
    sides = {"de": [one["src"] for one in lines], "en": [one["ref"] for one in lines]}
    corpus = make_corpus(folder / "corpus", {"test": {"de-en": sides}})
    ours = make_translations(folder / "lines", {"de-en": [one["mt"] for one in lines]})
    return ask_comet(
        model,
        digest="0" * 64,
        corpus=corpus,
        systems={"ours": ours},
        directions=[Direction("de", "en")],
        work_dir=folder,
    )


class Opens:
    """Unpickled, it makes a file."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def __reduce__(self) -> tuple[Any, ...]:
        return open, (str(self._path), "w")


@pytest.mark.usefixtures("stub")
def test_scores_of_all_lines_are_kept_as_files_and_averaged(tmp_path: Path) -> None:
    model = write_stub_model(tmp_path / "model")
    samples = [{"src": "x" * (40 - n), "mt": "y" * n, "ref": "z"} for n in range(40)]
    score = asked(tmp_path, model, samples)
    texts = [one["mt"] for one in samples]
    lines = TranslatedLines(Direction("de", "en"), texts, texts, [], "ours")
    found = score.line_statistics(lines)
    np.testing.assert_allclose(found.rows, [0.02 * n for n in range(40)], rtol=1e-6)
    assert found.signature == "model:model|digest:000000000000|version:9.9"
    assert score.of_corpus(found.rows) == pytest.approx(100 * 0.02 * 19.5)


@pytest.mark.usefixtures("stub")
def test_a_checkpoint_that_could_run_code_is_refused_and_runs_none(tmp_path: Path) -> None:
    mark = tmp_path / "opened"
    model = write_stub_model(tmp_path / "model", callbacks=Opens(mark))
    with pytest.raises(CheckpointError, match="could run any code") as caught:
        load_model(model)
    assert str(caught.value).startswith(str(model / "checkpoints" / "model.ckpt"))
    assert not mark.exists()
    pickle.loads(pickle.dumps(Opens(mark)))
    assert mark.exists(), "what was refused does run"


LACKS_WEIGHTS = "lacks 1 of the weights that its hparams.yaml asks for, weight among"


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("changes", "finding"),
    [
        ({"state_dict": {}}, LACKS_WEIGHTS),
        ({"state_dict": None}, LACKS_WEIGHTS),
        ({"encoder": "stranger/encoder"}, r"'stranger/encoder'.*nothing is downloaded"),
    ],
)
def test_weights_of_another_model_and_encoders_not_at_hand_are_refused(
    tmp_path: Path, changes: dict[str, Any], finding: str
) -> None:
    with pytest.raises(ConfigError, match=finding) as caught:
        load_model(write_stub_model(tmp_path / "model", **changes))
    assert "\n" not in str(caught.value)


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize(
    ("name", "text", "finding"),
    [
        ("hparams.yaml", "class_identifier: none", "names no known class of COMET models.*'none'"),
        ("hparams.yaml", "a: !!python/object/apply:os.getcwd []", "hparams.yaml cannot be read"),
        ("hparams.yaml", "[1, 2]", "names no known class of COMET models.*None"),
        ("checkpoints/model.ckpt", "no checkpoint", "model.ckpt"),
        ("checkpoints/model.ckpt", "", "model.ckpt cannot be read"),
    ],
)
def test_a_folder_that_holds_no_model_is_refused_in_one_sentence(
    tmp_path: Path, name: str, text: str, finding: str
) -> None:
    model = write_stub_model(tmp_path / "model")
    (model / name).write_text(text, encoding="utf-8")
    with pytest.raises(UserError, match=finding):
        load_model(model)
    (model / name).unlink()
    with pytest.raises(UserError, match=f"{name} cannot be read"):
        load_model(model)


@pytest.mark.usefixtures("stub")
def test_scores_that_are_no_numbers_are_refused(tmp_path: Path) -> None:
    weights = {"weight": torch.tensor(float("nan"))}
    model = write_stub_model(tmp_path / "model", state_dict=weights)
    with pytest.raises(ConfigError, match=r"gives scores that are no numbers\. Use another model"):
        asked(tmp_path, model, [{"src": "a", "mt": "b", "ref": "c"}])


@pytest.mark.usefixtures("stub")
@pytest.mark.parametrize("large", ["to", "predict_step"])  # the weights, and a batch of lines
def test_a_gpu_with_too_little_memory_for_a_model_is_told_in_one_sentence(
    large: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def out_of_memory(*_: object) -> None:
        raise torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 20.00 MiB.")

    folder = write_stub_model(tmp_path / "model")
    monkeypatch.setattr(type(load_model(folder)), large, out_of_memory)
    with pytest.raises(ConfigError, match=r"^A GPU has too little memory .*CUDA_VISIBLE_DEVICES="):
        asked(tmp_path, folder, SAMPLES)


def test_comet_that_is_not_installed_is_asked_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "hparams.yaml").write_text("class_identifier: regression_metric", encoding="utf-8")
    monkeypatch.setitem(sys.modules, "comet", None)
    monkeypatch.delitem(sys.modules, "comet.models", raising=False)
    with pytest.raises(ConfigError, match=r"pip install 'mmnmt\[comet\]'"):
        load_model(tmp_path)


@needs_comet
def test_scores_are_comets_own(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from comet import load_from_checkpoint

    monkeypatch.setenv("HF_HUB_OFFLINE", "1")
    folder = write_model(tmp_path / "model")
    peer = load_from_checkpoint(str(folder / "checkpoints" / "model.ckpt"), local_files_only=True)
    expected = peer.predict(SAMPLES, gpus=0, progress_bar=False, batch_size=4).scores
    found = scores_of(load_model(folder), SAMPLES)
    assert found == pytest.approx(expected, abs=1e-5)
    assert len({round(one, 4) for one in found}) > 5, "the lines differ"


@needs_comet
def test_an_encoder_known_by_name_is_looked_for_in_the_models_folder(tmp_path: Path) -> None:
    folder = write_model(tmp_path / "model")
    expected = scores_of(load_model(folder), SAMPLES)
    changed = {**settings("stranger/encoder"), "layer_transformation": "sparsemax"}
    (folder / "hparams.yaml").write_text(yaml.safe_dump(changed), encoding="utf-8")
    contents = torch.load(folder / "checkpoints" / "model.ckpt", weights_only=True)
    contents["hyper_parameters"]["pretrained_model"] = "stranger/encoder"
    write_checkpoint(folder, contents)
    assert scores_of(load_model(folder), SAMPLES) == expected
    write_encoder(folder / "stranger" / "encoder")
    (folder / "encoder").rename(folder / "elsewhere")
    assert scores_of(load_model(folder), SAMPLES) == expected
