"""Tests of pipeline/serving/worker.py: failures, cancelled lines, its end."""

from pathlib import Path

import pytest
from support.stored_checkpoints import byte_spec, make_checkpoint
from support.tiny_models import tiny_model

from pipeline.artifacts.artifact import open_artifact
from pipeline.artifacts.corpus import Direction
from pipeline.decoding.settings import DecodingConfig
from pipeline.decoding.translator import Job, Translator
from pipeline.errors import ConfigError
from pipeline.serving.systems import System, Systems
from pipeline.serving.worker import Worker

DECODING = DecodingConfig(beam_size=2, max_length_ratio=0.3, max_extra_length=6)


@pytest.fixture(scope="module")
def system(tmp_path_factory: pytest.TempPathFactory) -> System:
    model = tiny_model(byte_spec(max_positions=40))
    directory: Path = tmp_path_factory.mktemp("model") / "checkpoint"
    make_checkpoint(directory, model)
    return System.load("one", open_artifact(directory, kind="checkpoint"), decoding=DECODING)


def test_a_choice_by_minimum_bayes_risk_is_among_as_many_as_the_recipe_says(
    tmp_path: Path,
) -> None:
    make_checkpoint(tmp_path / "checkpoint", tiny_model(byte_spec(max_positions=40)))
    checkpoint = open_artifact(tmp_path / "checkpoint", kind="checkpoint")
    decoding = DecodingConfig(beam_size=6, n_best=2, choose="mbr", max_extra_length=6)
    served = System.load("one", checkpoint, decoding=decoding).translator
    jobs = [Job(Direction("de", "en"), line, "Haus " * line) for line in range(8)]
    assert served.translate(jobs) == Translator(checkpoint, decoding).translate(jobs)


def test_a_line_that_fails_leaves_the_others_of_its_batch(system: System) -> None:
    sizes: list[int] = []
    worker = Worker(lambda _, lines: sizes.append(lines))
    known, unknown = Direction("de", "en"), Direction("de", "xx")
    results = [worker.submit(system, one, "Haus") for one in (known, unknown, known) * 5]
    for number, result in enumerate(results):
        if number % 3 == 1:
            with pytest.raises(ConfigError):
                result.result()
        else:
            assert result.result() == results[0].result()
    worker.close()
    assert sum(sizes) == 10


def test_lines_that_were_cancelled_are_not_translated(system: System) -> None:
    sizes: list[int] = []
    worker = Worker(lambda _, lines: sizes.append(lines))
    direction = Direction("de", "en")
    results = [worker.submit(system, direction, "Haus " * 50) for _ in range(500)]
    dropped = [result for result in results[1:] if result.cancel()]
    assert worker.submit(system, direction, "Ja").result().text
    worker.close()
    assert dropped
    assert sum(sizes) == 501 - len(dropped)


def test_the_end_of_a_worker_cancels_what_waits(system: System) -> None:
    worker = Worker(lambda *_: None)
    results = [worker.submit(system, Direction("de", "en"), "Haus " * 50) for _ in range(2000)]
    worker.close()
    assert all(result.done() for result in results)
    assert results[-1].cancelled()


def test_no_system_is_made_of_a_name_that_is_misspelled(system: System) -> None:
    with pytest.raises(ConfigError, match=r"no system 'on'\. Did you mean 'one'"):
        Systems([system]).choose("on", "de", "en")
