"""The command ``mmnmt estimate``: what it prints for a recipe and for a plan, and what it refuses.

The arithmetic is tested in ``tests/estimates``.
"""

import json
import re
from pathlib import Path

import pytest

from pipeline import cli
from pipeline.config.recipe import load_recipe
from pipeline.errors import EXIT_USER_ERROR
from pipeline.estimates.devices import DEVICES

DEMO = ["estimate", "demo", "--only", "dense", "--only", "moe", "--processes", "4"]
SMALL = ["--vocabulary", "500"]


def test_a_recipe_has_tables_of_memory_launches_and_time(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main(["estimate", "demo_moe", *SMALL]) == 0
    memory, training, decoding, last = capsys.readouterr().out.split("\n\n")
    assert memory.splitlines()[-1].startswith("cuda, at its peak")
    assert training.startswith("training micro-batch: ")
    assert re.search(r"\nand \d+ all-to-alls of [\d.]+ GB in all", training)  # experts on 2 ranks
    assert decoding.startswith("decoding step: ")
    for table in (training, decoding):
        assert re.search(r"\n[\d.]+ ms: the GPU takes [\d.]+, the host [\d.]+", table)
    assert "H100" in last


def test_a_recipe_as_json_has_the_same_numbers_for_the_device_and_the_processes_asked_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    found = {}
    for device, processes in (("A100", "2"), ("h200", "2"), ("h200", "1")):
        options = ["--device", device, "--processes", processes, "--json"]
        assert cli.main(["estimate", "demo_moe", *SMALL, *options]) == 0
        found[device, processes] = json.loads(capsys.readouterr().out)
    for document in found.values():
        memory = document["memory"]
        assert memory["device"] == "cuda"
        assert memory["device_bytes"] == sum(memory["phases"][memory["peak_phase"]].values())
        for name in ("training micro-batch", "decoding step"):
            step = document[name]
            assert step["launches"] == sum(step["kinds"].values()) > 0
            assert step["seconds"] == max(step["kernel_seconds"], step["host_seconds"])
    slow, fast, alone = found.values()
    assert (slow["device"], slow["processes"]) == ("a100", 2)
    step = "training micro-batch"
    assert slow[step]["kernel_seconds"] > fast[step]["kernel_seconds"]
    assert alone["memory"]["device_bytes"] > fast["memory"]["device_bytes"]


def test_on_a_cpu_memory_is_estimated_and_time_is_not(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["estimate", "demo_moe", *SMALL, "--device", "cpu"]) == 0
    said = capsys.readouterr().out
    assert "\ncpu, at its peak" in said
    assert " ms" not in said
    assert "Time on a CPU is not estimated" in said
    assert cli.main([*DEMO, "--device", "cpu"]) == EXIT_USER_ERROR


@pytest.mark.parametrize("setting", ["batches.tokens=100000000", "model.width=65536"])
def test_a_pass_that_a_gpu_cannot_hold_is_neither_counted_nor_timed(
    setting: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("pipeline.estimates.launches.micro_batch", None)
    assert cli.main(["estimate", "demo_dense", *SMALL, "--set", setting]) == 0
    table, last = capsys.readouterr().out.split("\n\n")
    assert "cuda, at its peak" in table
    assert last == (
        "Time is not estimated: H100 holds 74.5 GiB. Use more GPUs, or smaller batches.tokens.\n"
    )
    assert cli.main(["estimate", "demo_dense", *SMALL, "--set", setting, "--json"]) == 0
    assert json.loads(capsys.readouterr().out).keys() == {"device", "processes", "memory"}


@pytest.mark.slow
def test_a_stage_of_a_plan_has_a_row_per_number_of_gpus(
    capsys: pytest.CaptureFixture[str],
) -> None:
    assert cli.main([*DEMO, "--set", "batches.micro_batches=2"]) == 0
    dense, moe, last = capsys.readouterr().out.split("\n\n")
    for name, table in (("dense", dense), ("moe", moe)):
        lines = table.splitlines()
        assert re.fullmatch(rf"{name}: [\d,]+ updates", lines[0])
        assert [row.split()[0] for row in lines[3:5]] == ["1", "2"]
        for row in lines[3:5]:
            assert 98 <= sum(map(int, re.findall(r"(\d+)%", row))) <= 102
        assert lines[5].startswith("4 GPUs cannot serve: 4 ranks are more than the 2 micro-batches")
    assert "Forecast, not measured." in last


@pytest.mark.slow
def test_a_plan_as_json_names_sizes_memory_and_time(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main([*DEMO, "--json"]) == 0
    stages = json.loads(capsys.readouterr().out)["stages"]
    assert [*stages] == ["dense", "moe"]
    for stage in stages.values():
        assert [choice["ranks"] for choice in stage["choices"]] == [1, 2]
        assert [*stage["refused"]] == ["4"]
        for choice in stage["choices"]:
            assert choice["seconds"] == pytest.approx(sum(choice["time"].values()))
    assert {choice["expert_parallel_size"] for choice in stages["dense"]["choices"]} == {1}


@pytest.mark.parametrize("stage", ["dense", "moe"])
def test_updates_of_a_dense_model_are_estimated_in_updates_of_the_stages_own(
    stage: str, capsys: pytest.CaptureFixture[str]
) -> None:
    changes = ["--set", "training.updates_of=dense", "--set", "training.updates=1000"]
    arguments = ["demo", "--only", stage, "--processes", "1", *SMALL, *changes, "--json"]
    assert cli.main(["estimate", *arguments]) == 0
    found = json.loads(capsys.readouterr().out)["stages"][stage]["updates"]
    model = load_recipe(f"demo_{stage}").model
    attention, feed_forward = 4 * model.width**2, 2 * model.width * model.feed_forward_width
    layers = model.encoder_layers + model.decoder_layers
    dense = (layers + model.decoder_layers) * attention + layers * feed_forward + 500 * model.width
    moe, further = model.moe, 0
    if moe is not None:
        routed = model.encoder_layers // moe.every + model.decoder_layers // moe.every
        further = routed * ((moe.top_k - 1) * feed_forward + model.width * moe.num_experts)
    assert found == pytest.approx(1000 * dense / (dense + further), rel=0.005)  # without biases
    assert (found < 1000) == (stage == "moe")


PAGE = Path(__file__).parents[2] / "docs" / "how-to" / "profile.md"


@pytest.mark.slow
@pytest.mark.parametrize("wanted", ["mmnmt estimate moe_lgr_opus100 ", "mmnmt estimate opus100 "])
def test_the_page_on_profiles_shows_the_memory_that_its_command_prints(
    wanted: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Its figures were of an earlier version: 13.6 GiB where the command said 12.9."""
    _, begin, rest = PAGE.read_text("utf-8").partition(wanted)
    command, *blocks = (begin + rest).split("```")
    assert cli.main(command.split()[1:]) == 0
    said, shown = capsys.readouterr().out.splitlines(), blocks[1].splitlines()[1:]
    of_memory = [line for line in shown if re.search(r",\d{3},\d{3}|^\d+ +\d+ +\d+\.\d ", line)]
    assert of_memory
    assert set(of_memory) <= {line.rstrip() for line in said}


@pytest.mark.parametrize(("kind", "bound"), [("sentencepiece", "at most "), ("bytes", "")])
def test_updates_of_bytes_bound_the_updates_of_longer_pieces(
    kind: str, bound: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """They were told as the stage's own, and so were the hours of all."""
    changes = ["--set", "training.updates_of=bytes", "--set", f"tokenizer.kind={kind}"]
    arguments = ["demo", "--only", "dense", "--processes", "1", *SMALL, *changes]
    assert cli.main(["estimate", *arguments]) == 0
    assert capsys.readouterr().out.startswith(f"dense: {bound}400 updates\n")


@pytest.mark.parametrize(
    ("options", "said"),
    [
        (["demo", "--device", "h10"], "There is no device 'h10'. Did you mean 'h100'?"),
        (["demo_dense", "--device", "a10"], "There is no device 'a10'. Did you mean 'a100'?"),
        (
            ["demo"],
            "Stage 'moe_lgr': Recipe 'demo_moe_lgr' leaves the number of its language groups",
        ),
        (["demo", "--only", "clean"], "Plan 'demo' has no stage to estimate."),
        (["demo", "--only", "mo"], "plan 'demo' has no stage 'mo'. Did you mean 'moe'?"),
        (["demo_dens"], "There is no recipe or plan 'demo_dens'. Did you mean 'demo_dense'?"),
        (["demo_dense", "--only", "dense"], "Recipe 'demo_dense' has no stages."),
        (["demo_moe", "--groups", "3"], "has no language groups that it routes by"),
    ],
)
def test_what_cannot_be_estimated_is_one_sentence(
    options: list[str], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.main(["estimate", *options]) == EXIT_USER_ERROR
    (line,) = capsys.readouterr().err.splitlines()
    assert said in line


def test_files_are_told_apart_by_their_stages(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    recipe, plan = tmp_path / "recipe.toml", tmp_path / "plan.toml"
    recipe.write_text('parent = "demo_dense"\n')
    plan.write_text(text := '[stages.corpus]\nrun = "import_corpus"\nrecipe = "demo_dense"\n')
    assert cli.main(["estimate", str(recipe), "--device", "cpu"]) == 0
    (odd := tmp_path / "my+plan.toml").write_text(text)
    for path in (plan, odd):
        assert cli.main(["estimate", str(path), "--device", "cpu"]) == EXIT_USER_ERROR
        assert "has no stage to estimate" in capsys.readouterr().err
    (own := tmp_path / "overlay.toml").write_text("[training]\nseed = 2\n")
    for overlay in ("smoke", own):
        assert cli.main(["estimate", f"{recipe}+{overlay}", "--device", "cpu", "--json"]) == 0
    assert cli.main(["estimate", f"{plan}+smoke"]) == EXIT_USER_ERROR
    assert "there is no setting 'stages'" in capsys.readouterr().err


def test_the_help_names_all_devices(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        cli.main(["estimate", "--help"])
    said = capsys.readouterr().out
    assert all(name in said for name in (*DEVICES, "cpu"))
