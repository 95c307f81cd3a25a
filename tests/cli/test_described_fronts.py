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
    "msc": 'kind = "msc"',
    "msha": 'kind = "msha"\nscales = [0, 2, 3, 4]',
    "ada_msha": 'kind = "ada_msha"\nlanguage_vector = true',
    "ncf": 'kind = "ncf"',
    "wsf": 'kind = "wsf"\nlayers = 2',
}
IN_FRONT = {
    "msc": 2 * (4 * 4 * (3 + 5 + 7) + 3 * 4),
    "msha": 8 * 8 * (3 + 5 + 7) + 3 * 8,
    "ada_msha": 8 * 8 * (1 + 3 + 5 + 7 + 9) + 5 * 8 + 6 * 16,
    "ncf": 32 * 32 * (2 + 3 + 4) + 3 * 32 + 4,
    "wsf": 0,
}


def test_parameters_memory_and_launches_of_a_front_are_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def said(*words: str, front: str = 'kind = "subwords"') -> Any:
        recipe = tmp_path / "recipe.toml"
        recipe.write_text(RECIPE.format(front=front), encoding="utf-8")
        assert main([*words, str(recipe), "--vocabulary", "260", "--json"]) == 0
        return json.loads(capsys.readouterr().out)

    plain = said("describe", "--recipe")["parameters"]
    launches = said("estimate")["training micro-batch"]["launches"]
    assert plain["front"] == 0
    for name, front in FRONTS.items():
        added = {"front": IN_FRONT[name], "total": IN_FRONT[name], "active": IN_FRONT[name]}
        parameters = said("describe", "--recipe", front=front)["parameters"]
        assert parameters == {part: count + added.get(part, 0) for part, count in plain.items()}
        assert parameters["total"] == sum({**parameters, "total": 0, "active": 0}.values())
        estimated = said("estimate", front=front)
        assert estimated["memory"]["device_bytes"] > 0
        assert estimated["training micro-batch"]["launches"] > launches
