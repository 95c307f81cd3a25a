"""The command ``mmnmt simulate``: what it prints for a plan, and what it refuses."""

import json
import re
from typing import Any

import pytest

from pipeline import cli
from pipeline.errors import EXIT_USER_ERROR
from pipeline.estimates.network import LINK_NAMES
from pipeline.estimates.step_time import DEVICES

DEMO = ["simulate", "demo", "--only", "dense", "--only", "moe"]


@pytest.mark.slow
def test_a_stage_has_a_row_per_number_of_gpus_and_an_answer(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--nodes", "2", "--devices-per-node", "2", "--set", "batches.micro_batches=4"]
    assert cli.main([*DEMO, *options]) == 0
    said = capsys.readouterr().out
    tables = [table.splitlines() for table in said.split("\n\n")]
    (dense, moe, answers, assumptions) = tables
    assert dense[0].startswith("dense: ")
    assert moe[0].startswith("moe: ")
    for table in (dense, moe):
        assert [row.split()[0] for row in table[3:]] == ["1", "2", "4"]
        for row in table[3:]:
            assert 98 <= sum(map(int, re.findall(r"(\d+) %", row))) <= 102
    assert [row.split()[0] for row in answers[2:]] == ["dense", "moe"]
    assert "fastest" in answers[0]
    assert assumptions[1] == "Estimated, not measured. Assumptions:"
    assert "H100" in said
    assert "2 × 50 GB/s" in said  # an adapter per GPU


@pytest.mark.slow
def test_the_answer_as_json_scales_with_the_updates(capsys: pytest.CaptureFixture[str]) -> None:
    options = ["--nodes", "1", "--devices-per-node", "2", "--choices", "9", "--json"]
    assert cli.main([*DEMO, *options, "--device", "v100"]) == 0
    document: dict[str, Any] = json.loads(capsys.readouterr().out)
    dense, moe = document["stages"]
    assert document["device"] == "v100"
    assert moe["parameters"] > dense["parameters"]
    assert {(one["ranks"], one["expert_parallel_size"]) for one in moe["choices"]} == {
        *((1, 1), (2, 1), (2, 2))
    }
    for one in (*dense["choices"], *moe["choices"]):
        assert one["seconds"] == pytest.approx(sum(one["time"].values()))
        assert one["bytes"] > 4 * dense["parameters"]


@pytest.mark.slow
def test_numbers_of_gpus_that_cannot_serve_are_named_in_one_line(
    capsys: pytest.CaptureFixture[str],
) -> None:
    options = ["--nodes", "4", "--only", "dense", "--set", "batches.micro_batches=8"]
    assert cli.main(["simulate", "demo", *options]) == 0
    (line,) = (line for line in capsys.readouterr().out.splitlines() if "cannot serve" in line)
    assert line.startswith("16, 32 GPUs cannot serve: 16 ranks ")
    assert "8 micro-batches" in line


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["demo", "--device", "h10"], "There is no device 'h10'. Did you mean 'h100'?"),
        (["demo", "--link", "ib20"], "There is no link 'ib20'. Did you mean 'ib200'?"),
        (["demo", "--link-in-node", "nvlnk"], "Did you mean 'nvlink'?"),
        (["demo"], "Stage 'moe_lgr': Recipe 'demo_moe_lgr' takes its number of language groups"),
        (["demo", "--only", "clean"], "Plan 'demo' has no stage to simulate."),
        (["demo", "--only", "mo"], "plan 'demo' has no such stage. Did you mean 'moe'?"),
    ],
)
def test_what_cannot_be_simulated_is_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["simulate", *options, "--nodes", "1"]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


@pytest.mark.parametrize("command", ["simulate", "estimate"])
def test_the_help_names_all_devices_and_links(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(SystemExit):
        cli.main([command, "--help"])
    said = " ".join(capsys.readouterr().out.split())
    for name in (*DEVICES, *(LINK_NAMES if command == "simulate" else ())):
        assert name in said


def test_an_unknown_device_of_an_estimate_suggests_the_nearest(
    capsys: pytest.CaptureFixture[str],
) -> None:
    arguments = ["estimate", "--recipe", "demo_dense", "--device", "a10"]
    assert cli.main(arguments) == EXIT_USER_ERROR
    assert "There is no device 'a10'. Did you mean 'a100'?" in capsys.readouterr().err
