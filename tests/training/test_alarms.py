"""Alarms of a training run: each is said when it begins and when it ends."""

from typing import Any

from pipeline.training.alarms import Alarms


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
