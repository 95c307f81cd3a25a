"""The translate stage and filter, from a tiny checkpoint of bytes to translations."""

import io
import json
import os
import signal
import subprocess
import sys
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch
from folder_listing import names_in
from tiny_models import perturb_vectors

from pipeline import cli, translate
from pipeline.artifacts import Artifact, new_artifact, open_artifact
from pipeline.checkpoint import write_model_files, write_weights
from pipeline.config import DecodingConfig, ModelConfig, MoEConfig
from pipeline.corpus import Direction, Hypothesis, directions, read_hypotheses, text_name
from pipeline.decoding import Source, beam_search
from pipeline.distributed import StopFlag
from pipeline.errors import EXIT_RUN_AGAIN, EXIT_USER_ERROR, ConfigError
from pipeline.model.spec import ModelSpec
from pipeline.model.transformer import build_model
from pipeline.tokenizer import ByteVocabulary, TokenizerDescription, write_tokenizer
from pipeline.translate import Job, Translator
from pipeline.weights import initialize_weights, named_slices

LANGUAGES = ("de", "en", "fr")
MAX_POSITIONS = 40
LINES: Mapping[str, Mapping[str, Sequence[str]]] = {
    "de-en": {
        "de": ["Ein kurzer Satz.", "", "Ja", "Der zweite Satz ist etwas länger.", "x" * 100],
        "en": ["A short sentence.", "Empty.", "Yes", "The second one is longer.", "x y z"],
    },
    "en-fr": {
        "en": ["Bread", "  ", "We are going home now."],
        "fr": ["Du pain", "Rien", "Nous rentrons maintenant."],
    },
}
NUM_LINES = 2 * (5 + 3)
DECODING = "beam_size = 2\nmax_length_ratio = 0.3\nmax_extra_length = 6\n"


@dataclass(frozen=True)
class Bench:
    """A checkpoint, a corpus and a recipe in a folder."""

    directory: Path
    checkpoint: Artifact
    corpus: Artifact

    def command(self, out: str, *more: str, decoding: str = DECODING) -> list[str]:
        """Arguments of ``mmnmt`` that translate the corpus."""
        recipe_path = self.directory / "recipe.toml"
        recipe_path.write_text(f"[decoding]\n{decoding}tokens = 100\n", encoding="utf-8")
        inputs = {"checkpoint": self.checkpoint.directory, "corpus": self.corpus.directory}
        named = [part for name, path in inputs.items() for part in (f"--{name}", str(path))]
        out_options = ["--out", str(self.directory / out)]
        return ["translate", "--recipe", str(recipe_path), *named, *out_options, *more]

    def run(self, out: str, *more: str, decoding: str = DECODING) -> int:
        return cli.main(self.command(out, *more, decoding=decoding))

    def found(self, out: str) -> dict[str, list[Hypothesis]]:
        """Direction → hypotheses of a finished run."""
        artifact = open_artifact(self.directory / out, kind="translations")
        artifact.verify()
        return {str(one): read_hypotheses(artifact, one) for one in directions(self.corpus, "test")}


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Artifact:
    directory = tmp_path_factory.mktemp("model")
    description = TokenizerDescription(
        kind="bytes", languages=LANGUAGES, language_token_scheme="underscores"
    )
    write_tokenizer(directory, description=description, model=None)
    spec = ModelSpec(
        model=ModelConfig(
            encoder_layers=2,
            decoder_layers=2,
            width=16,
            feed_forward_width=32,
            num_heads=2,
            max_positions=MAX_POSITIONS,
            moe=MoEConfig(num_experts=4, decoder_router="language_group"),
        ),
        vocabulary_size=ByteVocabulary.size + len(LANGUAGES),
        pad_id=ByteVocabulary.pad_id,
        languages=LANGUAGES,
        language_groups=(0, 1, 1),
    )
    model = build_model(spec)
    initialize_weights(model, seed=1)
    perturb_vectors(model, seed=1)
    for layer in model.decoder_layers():  # so that translations differ with their sources
        for name, parameter in layer.cross_attention.named_parameters():
            parameter.data *= 6 if name.endswith("weight") else 1
    with new_artifact(
        directory / "checkpoint", kind="checkpoint", stage="pretrain", config={}, inputs={}
    ) as writer:
        tensors = ((entry.name, entry.value) for entry in named_slices(model))
        write_weights(writer.directory / "weights", tensors)
        write_model_files(writer, spec=spec, tokenizer_dir=directory)
    return open_artifact(directory / "checkpoint", kind="checkpoint")


@pytest.fixture
def bench(checkpoint: Artifact, tmp_path: Path) -> Bench:
    with new_artifact(
        tmp_path / "corpus", kind="corpus", stage="clean", config={}, inputs={}
    ) as writer:
        for pair, sides in LINES.items():
            for language, lines in sides.items():
                text = "".join(f"{line}\n" for line in lines)
                writer.path(text_name("test", pair, language)).write_text(text, encoding="utf-8")
        writer.statistics["pairs"] = {
            pair: {"train": 9, "test": len(next(iter(sides.values())))}
            for pair, sides in LINES.items()
        }
    return Bench(tmp_path, checkpoint, open_artifact(tmp_path / "corpus", kind="corpus"))


def assert_same(found: dict[str, list[Hypothesis]], expected: dict[str, list[Hypothesis]]) -> None:
    """Texts equal, scores up to what another cut into batches rounds differently."""
    assert found.keys() == expected.keys()
    for direction, hypotheses in expected.items():
        pairs = zip(found[direction], hypotheses, strict=True)
        for one, other in pairs:
            assert (one.text, one.truncated) == (other.text, other.truncated)
            assert one.score == pytest.approx(other.score, abs=2e-4)


# ---------------------------------------------------------------- the stage


def test_every_line_is_translated_as_if_it_were_alone_and_kept_in_order(bench: Bench) -> None:
    assert bench.run("out") == 0
    found = bench.found("out")
    assert set(found) == {"de-en", "en-de", "en-fr", "fr-en"}
    decoding = DecodingConfig(beam_size=2, max_length_ratio=0.3, max_extra_length=6)
    translator = Translator(bench.checkpoint, decoding)
    expected = {
        name: [
            translator.translate([Job(Direction(*name.split("-")), line, text)])[0]
            for line, text in enumerate(LINES["-".join(sorted(name.split("-")))][name[:2]])
        ]
        for name in found
    }
    assert_same(found, expected)
    texts = [one.text for lines in found.values() for one in lines if one.text]
    assert len(set(texts)) > NUM_LINES / 2


def test_empty_lines_stay_empty_and_too_long_ones_are_cut_and_say_so(bench: Bench) -> None:
    assert bench.run("out") == 0
    found = bench.found("out")
    assert found["de-en"][1] == found["en-fr"][1] == Hypothesis("")
    assert [one.truncated for one in found["de-en"]] == [False, False, False, False, True]
    translator = Translator(bench.checkpoint, DecodingConfig(beam_size=2))
    cut = Job(Direction("de", "en"), 0, "x" * (MAX_POSITIONS - 2))
    longer = Job(Direction("de", "en"), 0, "x" * (MAX_POSITIONS - 1))
    (one,), (other,) = translator.translate([cut]), translator.translate([longer])
    assert (one.text, one.score) == (other.text, other.score)
    assert (one.truncated, other.truncated) == (False, True)


def test_a_line_is_tagged_with_both_languages_and_ended(bench: Bench) -> None:
    decoding = DecodingConfig(beam_size=2)
    translator = Translator(bench.checkpoint, decoding)
    text = "Ein Satz"
    german, english = (ByteVocabulary.size + LANGUAGES.index(code) for code in ("de", "en"))
    eos_id = ByteVocabulary.eos_id
    (piece_ids,) = ByteVocabulary().encode_batch([text])
    source = Source([german, *piece_ids, eos_id], (eos_id, english), LANGUAGES.index("en"))
    (expected,) = beam_search(translator.model, [source], decoding, eos_id=eos_id)
    (found,) = translator.translate([Job(Direction("de", "en"), 0, text)])
    assert found.score == round(expected.score, 4)
    assert found.text == translator.tokenizer.decode(expected.tokens)


def test_the_statistics_count_lines_empty_and_cut_ones(bench: Bench) -> None:
    assert bench.run("out") == 0
    found = bench.found("out")
    statistics = open_artifact(bench.directory / "out", kind="translations").statistics
    every = [one for lines in found.values() for one in lines]
    assert statistics == {
        "lines": NUM_LINES,
        "empty": sum(not one.text for one in every),
        "truncated": 1,
        "directions": {"de-en": 5, "en-de": 5, "en-fr": 3, "fr-en": 3},
    }


@pytest.mark.parametrize("beam_size", [1, 3])
def test_batches_hold_every_line_once_within_the_budget(bench: Bench, beam_size: int) -> None:
    decoding = DecodingConfig(beam_size=beam_size, tokens=120)
    translator = Translator(bench.checkpoint, decoding)
    jobs = [Job(Direction("de", "en"), line, "y" * (7 * line % 38)) for line in range(50)]
    batches = translator.cut(jobs)
    assert sorted(job.line for batch in batches for job in batch) == list(range(50))
    for batch in batches:
        longest = max(len(job.text) for job in batch) + 2
        assert len(batch) == 1 or len(batch) * longest * beam_size <= 120
    assert len(batches) < 50 / (2 if beam_size == 1 else 1)


def test_half_precision_translates_in_half_precision(bench: Bench) -> None:
    decoding = DecodingConfig(precision="bfloat16", beam_size=2)
    translator = Translator(bench.checkpoint, decoding)
    assert {one.dtype for one in translator.model.parameters()} == {torch.bfloat16}
    (found,) = translator.translate([Job(Direction("de", "en"), 0, "Ja")])
    assert found.score < 0


def test_an_unknown_language_is_named_with_its_nearest(bench: Bench) -> None:
    translator = Translator(bench.checkpoint, DecodingConfig())
    message = "does not know the language 'deu': it knows de, en, fr; nearest is 'de'"
    with pytest.raises(ConfigError, match=message):
        translator.translate([Job(Direction("en", "deu"), 0, "Yes")])
    with pytest.raises(ConfigError, match="does not know the language 'zz'"):
        translator.translate([Job(Direction("zz", "en"), 0, "Yes")])


# ---------------------------------------------------------------- interruption and ranks


@pytest.fixture
def stop_after(monkeypatch: pytest.MonkeyPatch) -> Callable[[int], None]:
    """Lets the next run be asked to stop when it has done that many batches."""

    def arrange(batches: int) -> None:
        asked = iter(range(10**6))
        monkeypatch.setattr(StopFlag, "agreed", lambda _: next(asked) >= batches)

    return arrange


def record_translated(monkeypatch: pytest.MonkeyPatch) -> list[tuple[str, int]]:
    """The (direction, line) of everything that is translated from now on."""
    translated: list[tuple[str, int]] = []
    whole = Translator.translate

    def record(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        translated.extend((str(job.direction), job.line) for job in jobs)
        return whole(self, jobs)

    monkeypatch.setattr(Translator, "translate", record)
    return translated


def test_an_interrupted_run_goes_on_and_translates_nothing_twice(
    bench: Bench, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.run("whole") == 0
    translated = record_translated(monkeypatch)
    stop_after(3)
    assert bench.run("out") == EXIT_RUN_AGAIN
    assert not (bench.directory / "out").exists()
    before = len(translated)
    assert 0 < before < NUM_LINES
    stop_after(10**6)
    assert bench.run("out") == 0
    assert len(translated) == len(set(translated)) == NUM_LINES
    assert_same(bench.found("out"), bench.found("whole"))
    assert not (bench.directory / "out.run").exists()


def test_a_line_that_a_killed_run_half_wrote_is_translated_again(
    bench: Bench, stop_after: Callable[[int], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bench.run("whole") == 0
    stop_after(3)
    assert bench.run("out") == EXIT_RUN_AGAIN
    path = bench.directory / "out.run" / "rank-00000.jsonl"
    lines = path.read_text(encoding="utf-8").splitlines()
    path.write_text("\n".join(lines)[:-7], encoding="utf-8")
    translated = record_translated(monkeypatch)
    stop_after(10**6)
    assert bench.run("out") == 0
    torn = json.loads(lines[-1])
    assert (torn["direction"], torn["line"]) in translated
    assert len(translated) == NUM_LINES - len(lines) + 1
    assert_same(bench.found("out"), bench.found("whole"))


def test_what_was_translated_with_other_settings_is_replaced_only_on_demand(
    bench: Bench, stop_after: Callable[[int], None], capsys: pytest.CaptureFixture[str]
) -> None:
    other = DECODING.replace("beam_size = 2", "beam_size = 1")
    assert bench.run("whole") == 0
    stop_after(3)
    assert bench.run("out", decoding=other) == EXIT_RUN_AGAIN
    stop_after(10**6)
    kept = (bench.directory / "out.run" / "rank-00000.jsonl").read_bytes()
    capsys.readouterr()
    assert bench.run("out") == EXIT_USER_ERROR
    said = capsys.readouterr().err
    assert "other settings or inputs (settings.decoding.beam_size: 1 → 2)" in said
    assert "--overwrite" in said
    assert (bench.directory / "out.run" / "rank-00000.jsonl").read_bytes() == kept
    assert bench.run("out", "--overwrite") == 0
    assert_same(bench.found("out"), bench.found("whole"))
    assert not (bench.directory / "out.run").exists()


@pytest.mark.parametrize("content", ["notes.txt", "states/update-0000001/manifest.json"])
def test_a_run_folder_that_is_not_of_translations_is_left_alone(
    bench: Bench, capsys: pytest.CaptureFixture[str], content: str
) -> None:
    path = bench.directory / "out.run" / content
    path.parent.mkdir(parents=True)
    path.write_text("mine")
    assert bench.run("out", "--overwrite") == EXIT_USER_ERROR
    assert "nothing there is touched" in capsys.readouterr().err
    assert path.read_text() == "mine"
    assert names_in(path.parent) == [path.name]


def test_a_file_of_the_users_in_a_run_folder_outlives_the_run(
    bench: Bench, stop_after: Callable[[int], None]
) -> None:
    stop_after(3)
    assert bench.run("out") == EXIT_RUN_AGAIN
    (bench.directory / "out.run" / "notes.txt").write_text("mine")
    stop_after(10**6)
    assert bench.run("out") == 0
    assert (bench.directory / "out.run" / "notes.txt").read_text() == "mine"


def run_process(arguments: Sequence[str]) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "pipeline.cli", *arguments],
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
        timeout=120,
        check=False,
    )


def test_two_ranks_translate_what_one_does_even_when_one_began(
    bench: Bench, stop_after: Callable[[int], None]
) -> None:
    assert bench.run("whole") == 0
    stop_after(2)
    assert bench.run("out") == EXIT_RUN_AGAIN
    ended = run_process(bench.command("out", "--processes", "2"))
    assert ended.returncode == 0, ended.stderr
    assert_same(bench.found("out"), bench.found("whole"))


def test_a_signal_keeps_what_is_translated(bench: Bench, monkeypatch: pytest.MonkeyPatch) -> None:
    whole = Translator.translate
    translated = record_translated(monkeypatch)

    def signalled(self: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        os.kill(os.getpid(), signal.SIGTERM)
        return whole(self, jobs)

    recorded = Translator.translate
    monkeypatch.setattr(Translator, "translate", signalled)
    assert bench.run("out") == EXIT_RUN_AGAIN
    kept = (bench.directory / "out.run" / "rank-00000.jsonl").read_text(encoding="utf-8")
    assert len(kept.splitlines()) > 0
    monkeypatch.setattr(Translator, "translate", recorded)
    assert bench.run("out") == 0
    assert len(translated) == NUM_LINES - len(kept.splitlines())


# ---------------------------------------------------------------- the filter


def pipe(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, text: str, *, to: str = "en"
) -> tuple[int, list[str]]:
    """Exit code and output lines of the filter from German."""
    written = io.BytesIO()
    monkeypatch.setattr("sys.stdin", io.TextIOWrapper(io.BytesIO(text.encode())))
    monkeypatch.setattr("sys.stdout", io.TextIOWrapper(written, write_through=True))
    recipe = bench.command("unused")[1:3]
    model = ["--checkpoint", str(bench.checkpoint.directory)]
    code = cli.main(["translate", *recipe, *model, "--from", "de", "--to", to])
    output = written.getvalue().decode()
    assert output == "" or output.endswith("\n")
    return code, output.split("\n")[:-1]


@pytest.mark.parametrize("ahead", [1, 3, 256])
def test_the_filter_writes_one_line_per_line_in_order_however_far_it_reads_ahead(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, ahead: int
) -> None:
    monkeypatch.setattr(translate, "FILTER_LINES", ahead)
    lines = [*LINES["de-en"]["de"], "a", *LINES["en-fr"]["fr"], "b\rc\u2028d", *"efghijk"]
    code, found = pipe(bench, monkeypatch, "\n".join(lines))
    assert code == 0
    decoding = DecodingConfig(beam_size=2, max_length_ratio=0.3, max_extra_length=6)
    translator = Translator(bench.checkpoint, decoding)
    direction = Direction("de", "en")
    expected = [translator.translate([Job(direction, 0, line)])[0].text for line in lines]
    assert found == [text.replace("\n", " ") for text in expected]
    assert found[1] == ""
    assert len(set(found)) > len(lines) / 2


def test_a_line_feed_within_a_translation_does_not_break_the_filters_lines(
    bench: Bench, monkeypatch: pytest.MonkeyPatch
) -> None:
    def two_lines(_: Translator, jobs: Sequence[Job]) -> list[Hypothesis]:
        return [Hypothesis(f"{job.text}\n{job.text}") for job in jobs]

    monkeypatch.setattr(Translator, "translate", two_lines)
    assert pipe(bench, monkeypatch, "a\nb\n") == (0, ["a a", "b b"])


def test_the_filter_refuses_an_unknown_language_before_it_reads(
    bench: Bench, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    assert pipe(bench, monkeypatch, "", to="deu") == (EXIT_USER_ERROR, [])
    assert "nearest is 'de'" in capsys.readouterr().err
