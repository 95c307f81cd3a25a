"""What the command line says of recipes with a front: parameters, memory, launches."""

import json
from pathlib import Path
from typing import Any

import pytest

from pipeline.cli import main

pytestmark = pytest.mark.slow

RECIPE = """
[tokenizer]
kind = "bytes"
[model]
encoder_layers = 2
decoder_layers = 2
width = 32
feed_forward_width = 64
num_heads = 4
max_positions = 512
[model.front]
{front}
[model.moe]
num_experts = 4
[batches]
tokens = 512
"""
FRONTS = {
    "plain": 'kind = "subwords"',
    "msc": 'kind = "msc"',
    "msha": 'kind = "msha"\nscales = [0, 2, 3, 4]',
    "ada_msha": 'kind = "ada_msha"\nlanguage_vector = true',
    "ncf": 'kind = "ncf"',
    "wsf": 'kind = "wsf"\nlayers = 2',
}
IN_FRONT = {
    "plain": 0,
    "msc": 2 * (4 * 4 * (3 + 5 + 7) + 3 * 4),
    "msha": 8 * 8 * (3 + 5 + 7) + 3 * 8,
    "ada_msha": 8 * 8 * (1 + 3 + 5 + 7 + 9) + 5 * 8 + 6 * 16,
    "ncf": 32 * 32 * (2 + 3 + 4) + 3 * 32 + 4,
    "wsf": 0,
}


def said(capsys: pytest.CaptureFixture[str], *words: str) -> Any:
    assert main([*words, "--vocabulary", "260", "--json"]) == 0
    return json.loads(capsys.readouterr().out)


@pytest.mark.parametrize("front", FRONTS)
def test_parameters_memory_and_launches_of_a_front_are_told(
    tmp_path: Path, front: str, capsys: pytest.CaptureFixture[str]
) -> None:
    recipes = {}
    for name in ("plain", front):
        recipes[name] = tmp_path / f"{name}.toml"
        recipes[name].write_text(RECIPE.format(front=FRONTS[name]), encoding="utf-8")
    given = ("--recipe", str(recipes[front]))
    parameters = said(capsys, "describe", *given)["parameters"]
    assert parameters["front"] == IN_FRONT[front]
    assert parameters["total"] == sum(
        count for part, count in parameters.items() if part not in ("total", "active")
    )
    recipe = str(recipes[front])
    memory = said(capsys, "estimate", recipe, "--processes", "2", "--device", "cpu")["memory"]
    assert memory["device_bytes"] > 0
    launches = said(capsys, "estimate", recipe)["training micro-batch"]
    plain = said(capsys, "estimate", str(recipes["plain"]))["training micro-batch"]
    assert (launches["launches"] > plain["launches"]) == (front != "plain")
