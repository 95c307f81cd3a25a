"""NLLB's experts: what its routers may do and ours do too, and what is refused."""

from pathlib import Path
from typing import Any

import pytest
import torch
from support.foreign_families import FAMILIES, forced_logits, nllb_moe_folder
from support.foreign_models import LINES, PAIRS, logits_of

from pipeline.checkpoints.importing import open_foreign
from pipeline.errors import CheckpointError

ALONE = [(LINES[5], LINES[5])]
"""A batch without padding: where experts drop tokens, theirs count padding, and ours do not."""


def largest_difference(folder: Path, peer: Any, pairs: list[tuple[str, str]]) -> float:
    """Between their logits and ours, as a share of the largest."""
    tokenizer = FAMILIES["NLLB-MoE"].read_tokenizer(folder)
    tag = tokenizer.convert_tokens_to_ids("deu_Latn")
    expected = torch.cat(forced_logits(peer, tokenizer, pairs, tag=tag))
    ours = logits_of(open_foreign(folder), pairs)
    return float((torch.cat(ours) - expected).abs().max() / expected.abs().max())


@pytest.mark.parametrize(
    "changes",
    [
        {"moe_token_dropout": 0.0, "batch_prioritized_routing": True},
        {"moe_token_dropout": 0.5, "normalize_router_prob_before_dropping": True},
        {"router_ignore_padding_tokens": True, "moe_eval_capacity_token_fraction": 2.0},
        {"encoder_sparse_step": 1, "decoder_sparse_step": 1, "num_experts": 2},
        {"encoder_sparse_step": 0, "decoder_sparse_step": 0},
        {"activation_function": "gelu", "scale_embedding": False, "tie_word_embeddings": False},
    ],
    ids=str,
)
def test_logits_equal_the_library_s_where_none_drop(
    changes: dict[str, Any], tmp_path: Path
) -> None:
    peer = nllb_moe_folder(tmp_path, **changes)
    assert largest_difference(tmp_path, peer, PAIRS) < 1e-5


@pytest.mark.parametrize("prioritized", [False, True])
def test_full_experts_drop_what_the_library_drops(prioritized: bool, tmp_path: Path) -> None:
    settings = {"moe_eval_capacity_token_fraction": 0.3, "batch_prioritized_routing": prioritized}
    peer = nllb_moe_folder(tmp_path, **settings)
    assert largest_difference(tmp_path, peer, ALONE) < 1e-5
    for module in peer.modules():
        if hasattr(module, "moe_eval_capacity_token_fraction"):
            module.moe_eval_capacity_token_fraction = 1.0
    assert largest_difference(tmp_path, peer, ALONE) > 1e-2, "some were dropped"


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"router_bias": True}, "router_bias = True"),
        ({"router_dtype": "bfloat16"}, "router_dtype = 'bfloat16'"),
        ({"second_expert_policy": "sampling"}, "second_expert_policy = 'sampling'"),
        ({"decoder_sparse_step": 1}, "decoder_sparse_step = 1"),
        ({"moe_eval_capacity_token_fraction": 0.0}, "moe_eval_capacity_token_fraction = 0.0"),
        (
            {
                "normalize_router_prob_before_dropping": True,
                "moe_eval_capacity_token_fraction": 0.5,
            },
            "normalize_router_prob_before_dropping = True",
        ),
        ({"moe_token_dropout": 1.0}, "moe_token_dropout = 1.0"),
        ({"num_experts": 1}, "top_k 2 exceeds num_experts 1"),
    ],
    ids=lambda value: next(iter(value)) if isinstance(value, dict) else "",
)
def test_what_our_routers_lack_is_refused_by_its_name(
    changes: dict[str, Any], said: str, tmp_path: Path
) -> None:
    nllb_moe_folder(tmp_path, **changes)
    with pytest.raises(CheckpointError) as caught:
        open_foreign(tmp_path)
    assert said in str(caught.value)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float64])
def test_the_factor_of_outputs_is_not_rounded(dtype: torch.dtype, tmp_path: Path) -> None:
    peer = nllb_moe_folder(tmp_path)
    peer.to(dtype).save_pretrained(tmp_path)
    source = open_foreign(tmp_path)
    expert = peer.model.decoder.layers[1].ffn.experts["expert_4"]
    name = "decoder.layers.1.feed_forward.experts.4"
    wanted = expert.fc2.weight.double() * 0.8
    found = source.tensors.read(f"{name}.down.weight")
    assert found.dtype == (torch.float64 if dtype == torch.float64 else torch.float32)
    torch.testing.assert_close(found.double(), wanted, rtol=1e-7, atol=0)
    assert torch.equal(source.tensors.read(f"{name}.up.weight"), expert.fc1.weight)
