"""The metrics of a run without a model: intervals, lines, monitors and resuming."""

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import TypeAdapter
from support.tiny_models import tiny_model, tiny_spec
from support.tiny_training import changed, make_recipe
from torch import Tensor

from pipeline.artifacts.run_folders import Position
from pipeline.distributed.world import LOOPBACK, World
from pipeline.model.parameters import PerToken
from pipeline.model.spec import ModelSpec
from pipeline.training import metrics as metrics_module
from pipeline.training.engine import StepResult
from pipeline.training.metrics import (
    Alarms,
    Interval,
    LayersOfExperts,
    MetricsLog,
    ModelOperations,
    slowest,
)
from pipeline.training.optim import learning_rate

EVERY_SECOND = changed(make_recipe(updates=5), "logging", every=2)
Event = tuple[str, float, int]


@pytest.fixture(autouse=True)
def _steady_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(metrics_module, "peak_resident_bytes", lambda: 3 * 2**29)


def metrics(
    path: Path,
    events: list[Event] | None = None,
    *,
    rank: int = 0,
    operations: ModelOperations | None = None,
    experts: LayersOfExperts | None = None,
) -> MetricsLog:
    """Return the metrics of one rank; no process group is open, so that sums stay its own."""
    world = World(rank, 2, rank, 2, LOOPBACK, 0)
    return MetricsLog(
        path,
        EVERY_SECOND,
        world=world,
        write_events=([] if events is None else events).extend,
        operations=operations,
        experts=experts or LayersOfExperts(),
    )


def make_updates(
    log: MetricsLog,
    *updates: int,
    position: Position | None = None,
    routes: Callable[[int], Tensor] | None = None,
) -> Position:
    """Log updates of ten labels each, whose loss per label is the update's number."""
    position = position or Position()
    for update in updates:
        loss = torch.tensor(10.0 * update)
        result = StepResult(loss, torch.tensor(20.0), 10, 7, 1.5, was_made=True)
        if routes is not None:
            result = replace(result, routes_R=routes(update))
        log.add(result, seconds=0.5)
        position = replace(position, update=update, seconds=float(update))
        log.write_update_if_due(position, gradient_norm=1.5)
    return position


def lines_of(path: Path) -> list[dict[str, Any]]:
    """Return the records of a file of metrics."""
    return [json.loads(line) for line in path.read_text(encoding="utf-8").splitlines()]


def test_a_line_holds_means_over_the_labels_of_its_interval(tmp_path: Path) -> None:
    log = metrics(tmp_path / "metrics.jsonl")
    make_updates(log, 1, 2, 3, 4, 5)
    lines = lines_of(tmp_path / "metrics.jsonl")
    assert [(one["update"], one["loss"]) for one in lines] == [(2, 1.5), (4, 3.5), (5, 5.0)]
    assert lines[0] == {
        "kind": "train",
        "update": 2,
        "seconds": 2.0,
        "loss": 1.5,
        "balance": 2.0,
        "tokens_per_second": 20.0,
        "target_tokens": 20,
        "source_tokens": 14,
        "source_tokens_per_second": 14.0,
        "peak_memory_gib": 1.5,
        "gradient_norm": 1.5,
        "learning_rate": learning_rate(EVERY_SECOND.optimizer, 2, total_updates=5),
    }
    assert log.note == "loss 5.000, 20 tokens/s"


def test_monitors_get_the_numbers_of_a_line_that_are_no_counts(tmp_path: Path) -> None:
    events: list[Event] = []
    log = metrics(tmp_path / "metrics.jsonl", events)
    log.write_validation({"loss": 2.0, "directions": {"de-en": 2.0}}, Position(update=4))
    assert events == [("validation/loss", 2.0, 4)]
    make_updates(log, 1, 2)
    assert ("train/loss", 1.5, 2) in events
    assert ("train/source_tokens_per_second", 14.0, 2) in events
    assert ("train/peak_memory_gib", 1.5, 2) in events
    assert not [name for name, _, _ in events if name.endswith("_tokens")]


def test_utilization_is_the_operations_of_all_tokens_per_peak_of_the_devices(
    tmp_path: Path,
) -> None:
    """Against 14 source and 20 target tokens in one second on one device."""
    events: list[Event] = []
    operations = ModelOperations(PerToken(source=1000.0, target=3000.0), peak=1e6)
    log = metrics(tmp_path / "metrics.jsonl", events, operations=operations)
    make_updates(log, 1, 2)
    [line] = lines_of(tmp_path / "metrics.jsonl")
    assert line["mfu"] == pytest.approx(0.074)
    assert ("train/mfu", line["mfu"], 2) in events
    assert operations.utilization(source=14, target=20, seconds=2, ranks=4) == pytest.approx(
        0.074 / 8
    )


def dense_operations(spec: ModelSpec) -> tuple[int, int]:
    """Return six operations per parameter that a token of each side meets, by the paper's sizes."""
    shape, rows = spec.model, spec.vocabulary_size
    width, inner = shape.width, shape.feed_forward_width
    linear, norm = width * width + width, 2 * width
    feed_forward = 2 * width * inner + width + inner
    layers = shape.encoder_layers, shape.decoder_layers
    source = layers[0] * (4 * linear + feed_forward + 2 * norm) + norm + layers[1] * 2 * linear
    target = layers[1] * (6 * linear + feed_forward + 3 * norm) + norm + rows * width
    return 6 * source, 6 * target


def test_the_operations_of_a_model_are_six_per_parameter_that_a_token_meets() -> None:
    spec = tiny_spec(width=32, feed_forward_width=48, vocabulary=60)
    found = ModelOperations.of(tiny_model(spec), make_recipe(), peak=7e12)
    assert found is not None
    assert found.peak == 7e12
    assert (found.per_token.source, found.per_token.target) == dense_operations(spec)
    assert ModelOperations.of(tiny_model(spec), make_recipe(), peak=None) is None


def test_the_second_pass_of_fuse_distillation_doubles_the_operations() -> None:
    once, twice = (
        ModelOperations.of(
            tiny_model(tiny_spec()),
            changed(make_recipe(), "loss", objective=objective),
            peak=1e12,
        )
        for objective in ("cross_entropy", "fuse_distillation")
    )
    assert once is not None
    assert twice is not None
    assert twice.per_token.source == 2 * once.per_token.source
    assert twice.per_token.target == 2 * once.per_token.target


NODES = ["a", "a", "b", "b"]


@pytest.mark.parametrize(
    ("own", "expected"),
    [
        # seconds and tokens of every rank
        ([(1, 100), (1, 100), (1, 100), (2, 100)], (2.0, 3, "b")),
        ([(1, 100), (1.2, 100), (1, 100), (1, 100)], (1.2, None, None)),
        ([(1, 100), (1.3, 100), (1, 100), (1, 100)], (1.3, 1, "a")),
        ([(2, 200), (1, 100), (1, 100), (2, 200)], (1.0, None, None)),  # of more micro-batches
        ([(3, 100), (1, 100)], (1.5, 0, "a")),
    ],
)
def test_the_slowest_rank_per_token_is_named_if_it_is_far_above_the_median(
    own: list[tuple[float, float]], expected: tuple[float, int | None, str | None]
) -> None:
    found = slowest(torch.tensor(own, dtype=torch.float64), NODES)
    assert found["slowest_to_median"] == pytest.approx(expected[0])
    assert (found.get("slowest_rank"), found.get("slowest_node")) == expected[1:]


@pytest.mark.parametrize("own", [[(1, 100)], [(1, 100), (0, 0)], [(0, 100), (1, 100)]])
def test_one_rank_or_a_rank_without_tokens_is_compared_with_nothing(
    own: list[tuple[float, float]],
) -> None:
    assert slowest(torch.tensor(own, dtype=torch.float64), NODES) == {}


def test_ranks_other_than_0_write_nothing(tmp_path: Path) -> None:
    events: list[Event] = []
    log = metrics(tmp_path / "metrics.jsonl", events, rank=1)
    make_updates(log, 1, 2)
    log.write_validation({"loss": 2.0}, Position(update=2))
    assert not events
    assert not (tmp_path / "metrics.jsonl").exists()


def routes_of(update: int) -> Tensor:
    """Two layers of two experts; the second keeps half, and none of expert 0 in updates 3 to 8."""
    chosen_LE = torch.tensor([[update, 4], [0 if 3 <= update <= 8 else 2, 6]])
    return torch.stack([chosen_LE, chosen_LE // torch.tensor([[1], [2]])]).flatten()


@pytest.mark.parametrize("stopped_after", [1, 2, 3, 5, 8, 9])
def test_lines_and_alarms_of_a_resumed_run_are_those_of_an_uninterrupted_one(
    tmp_path: Path, stopped_after: int
) -> None:
    """The first attempt dies three updates after its last state, or at the end."""
    experts = LayersOfExperts(("encoder.layers.1", "decoder.layers.1"), 2)
    straight, path = tmp_path / "straight.jsonl", tmp_path / "metrics.jsonl"
    make_updates(metrics(straight, experts=experts), *range(1, 11), routes=routes_of)
    first = metrics(path, experts=experts)
    saved = make_updates(first, *range(1, stopped_after + 1), routes=routes_of)
    saved = replace(saved, interval=first.interval_sums())
    rest = range(stopped_after + 1, 11)
    make_updates(first, *rest[:3], position=saved, routes=routes_of)
    second = metrics(path, experts=experts)
    second.resume(TypeAdapter(Position).validate_python(json.loads(json.dumps(saved.to_json()))))
    make_updates(second, *rest, position=saved, routes=routes_of)
    assert lines_of(path) == lines_of(straight)
    lines = lines_of(straight)
    assert [one["routing"]["decoder.layers.1"] for one in lines if one["kind"] == "train"] == [
        *({"dropped": 0.5, "idle": idle} for idle in ([], [0], [0], [0], [0], [])),
    ]
    assert [(one["update"], one["text"][:9]) for one in lines if one["kind"] == "alarm"] == [
        *((2, "more than"), (6, "no token "), (10, "tokens ch")),
    ]


@pytest.mark.parametrize("end", [1, 2, 3])
def test_a_run_that_ends_within_an_interval_writes_its_line_and_a_longer_one_goes_on(
    tmp_path: Path, end: int
) -> None:
    """The state of its end holds the sums of the interval, which the longer run writes whole.

    A run that is killed after the line writes the same again.
    """
    straight, path = tmp_path / "straight.jsonl", tmp_path / "metrics.jsonl"
    make_updates(metrics(straight), 1, 2, 3, 4, 5)
    first = metrics(path)
    saved = make_updates(first, *range(1, end + 1))
    saved = replace(saved, interval=first.interval_sums())
    for _ in range(2):  # the second time, nothing is left
        first.write_rest(saved)
        lines = lines_of(path)
        assert [one["update"] for one in lines] == [*range(2, end, 2), end]
        assert sum(one["target_tokens"] for one in lines) == 10 * end
    again = metrics(path)
    again.resume(saved)
    again.write_rest(saved)
    assert lines_of(path) == lines
    second = metrics(path)
    second.resume(saved)
    make_updates(second, *range(end + 1, 6), position=saved)
    assert lines_of(path) == lines_of(straight)


def test_a_state_of_an_earlier_version_counts_routes_from_its_update_on() -> None:
    experts = LayersOfExperts(("encoder.layers.1", "decoder.layers.1"), 2)
    interval = Interval((6.0, 1.0, 3.0, 0.5, 9.0), experts=experts)
    result = StepResult(torch.tensor(2.0), torch.tensor(0.0), 1, 7, 1.0, was_made=True)
    interval.add(replace(result, routes_R=routes_of(3)), seconds=0.5)
    record = interval.finish()
    assert record["source_tokens"] == 16
    assert record["routing"] == {
        "encoder.layers.1": {"dropped": 0.0, "idle": []},
        "decoder.layers.1": {"dropped": 0.5, "idle": [0]},
    }


def test_only_rank_0_takes_up_the_sums_of_a_state(tmp_path: Path) -> None:
    """They are sums over all ranks, and would otherwise count once for each rank."""
    saved = Position(update=1, interval=(10.0, 0.0, 10.0, 0.5, 7.0))
    for rank, expected in ((0, saved.interval), (1, (0.0,) * 5)):
        log = metrics(tmp_path / "metrics.jsonl", rank=rank)
        log.resume(saved)
        assert log.interval_sums() == expected


def sentences(lines: list[dict[str, Any]]) -> list[tuple[int, str]]:
    """Return the number of the line and the first words of every sentence of an alarm."""
    alarms = Alarms()
    return [(number, said) for number, line in enumerate(lines) for said in alarms.add(line)]


def losses(*values: float) -> list[dict[str, Any]]:
    return [{"loss": value} for value in values]


def layer(dropped: float, *idle: int) -> dict[str, Any]:
    return {"dropped": dropped, "idle": list(idle)}


def test_a_jump_of_the_loss_is_said_once_and_its_end_too() -> None:
    before = losses(5.0, 4.8, 4.6, 4.4, 4.2, 4.0, 3.9, 3.8, 3.7, 3.6)
    said = sentences([*before, *losses(6.0, 7.5, 6.5, 3.7, 3.6)])
    assert [number for number, _ in said] == [10, 13]
    assert said[0][1].startswith("the loss is 6.000, and the median of 10 lines before was 4.100.")
    assert said[1][1] == "the loss is 3.700 again."


def test_a_loss_that_stays_high_is_an_alarm_without_end() -> None:
    said = sentences(losses(*[3.0] * 10, *[8.0] * 30))
    assert [number for number, _ in said] == [10]


def test_usual_noise_the_first_lines_and_small_losses_are_no_spikes() -> None:
    assert not sentences(losses(9.0, 12.0, 7.0, 9.0, 3.0, 5.0, 3.0, 3.0, 3.0, 3.0))
    assert not sentences(losses(*[3.0] * 10, 3.49, 2.6, 3.4))  # less than 0.5 nats
    assert not sentences(losses(*[0.02] * 10, 0.4, 0.02))
    assert not sentences(losses(*[8.0] * 10, 8.9))  # less than 20 %


def test_a_line_whose_loss_is_no_number_is_passed_over() -> None:
    for odd in ({"loss": None}, {}, *losses(float("nan"), float("inf"))):  # live, or read again
        said = sentences([*losses(*[3.0] * 10), *[odd] * 9, *losses(3.1, 6.0)])
        assert [number for number, _ in said] == [20]


def test_layers_that_drop_routes_are_named_with_their_shares_and_when_they_stop() -> None:
    said = sentences(
        [
            {"routing": {"encoder.layers.1": layer(0.1), "decoder.layers.1": layer(0.2)}},
            {"routing": {"encoder.layers.1": layer(0.75), "decoder.layers.1": layer(0.31)}},
            {"routing": {"encoder.layers.1": layer(0.74), "decoder.layers.1": layer(0.3)}},
            {"routing": {"encoder.layers.1": layer(0.75), "decoder.layers.1": layer(0.02)}},
        ]
    )
    assert [number for number, _ in said] == [1, 3]
    assert "dropped in encoder.layers.1 (75%), decoder.layers.1 (31%). Raise" in said[0][1]
    assert said[1][1].endswith("again in decoder.layers.1.")


def test_an_expert_is_dead_after_three_lines_in_a_row_without_a_token() -> None:
    idle = [(0, 3), (3,), (3, 5), (3, 5), (5,), ()]
    said = sentences([{"routing": {"encoder.layers.1": layer(0.0, *each)}} for each in idle])
    assert [number for number, _ in said] == [2, 4, 4, 5]
    assert "3 lines of metrics: encoder.layers.1:3. Raise" in said[0][1]
    assert "3 lines of metrics: encoder.layers.1:5. Raise" in said[1][1]
    assert said[2][1] == "tokens choose these experts again: encoder.layers.1:3."
    assert said[3][1] == "tokens choose these experts again: encoder.layers.1:5."
