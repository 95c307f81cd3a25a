"""Experts in the files of fairseq's ranks are the model's, each under its global number."""

import re
import shutil
from argparse import Namespace
from pathlib import Path
from typing import Any

import pytest
import torch
from fairseq_files import (
    PRE_NORM,
    TIED,
    Files,
    as_fairseq,
    peer_config,
    peer_logits,
    settings,
    vocabulary_files,
    write_checkpoint,
)
from support.foreign_models import PAIRS, assert_same_logits, logits_of, spread
from torch import Tensor
from transformers import NllbMoeConfig, NllbMoeForConditionalGeneration

from pipeline.checkpoints.importing import open_foreign
from pipeline.errors import CheckpointError

EXPERTS = 4
MASKED = 0.25
"""Share of experts' outputs masked in training, and not scaled up."""
MOE: dict[str, Any] = {
    **TIED,
    **PRE_NORM,
    "moe_freq": 2,
    "moe_expert_count": EXPERTS,
    "moe_top1_expert": False,
    "moe_second_expert_policy": "all",
    "moe_batch_prioritized_routing": True,
    "moe_eom": MASKED,
}
Weights = dict[str, Tensor]


@pytest.fixture(scope="module")
def files(tmp_path_factory: pytest.TempPathFactory) -> Files:
    return vocabulary_files(tmp_path_factory.mktemp("vocabulary"))


@pytest.fixture(scope="module")
def peer(files: Files) -> Any:
    moe = {"encoder_sparse_step": 2, "decoder_sparse_step": 2, "moe_token_dropout": MASKED}
    moe |= {"num_experts": EXPERTS, "scale_embedding": True}
    config = peer_config(NllbMoeConfig, size=files.size, **moe)
    return spread(NllbMoeForConditionalGeneration(config), eos_id=2)


def fairseq_name(name: str) -> str:
    """transformers' name of a tensor of NLLB-MoE → fairseq's: its converter's table, backwards."""
    name = re.sub(r"\.ffn\.experts\.expert_(\d+)\.", r".moe_layer.experts.\1.", name)
    name = name.replace(".ffn.router.classifier.", ".moe_layer.gate.wg.")
    name = name.replace(".ffn.fc", ".fc").replace("ff_layer_norm", "final_layer_norm")
    name = name.replace("cross_attention_layer_norm", "encoder_attn_layer_norm")
    return name.replace(".cross_attention.", ".encoder_attn.")


def write_ranks(directory: Path, weights: Weights, args: Namespace, *, ranks: int) -> Path:
    """The shared file and the files of the ranks, as fairseq's ``moe`` branch writes them."""
    local = EXPERTS // ranks
    shared: Weights = {}
    parts: list[Weights] = [{} for _ in range(ranks)]
    for name, value in weights.items():
        number = re.search(r"\.experts\.(\d+)\.", name)
        if number is None:
            shared[name] = value
        else:
            rank, index = divmod(int(number[1]), local)
            parts[rank][name.replace(number[0], f".experts.{index}.")] = value
    for rank, part in enumerate(parts):
        write_checkpoint(directory / f"checkpoint_2-rank-{rank}.pt", part, args)
    return write_checkpoint(directory / "checkpoint_2-shared.pt", shared, args)


@pytest.fixture(scope="module")
def weights(peer: Any) -> Weights:
    return {fairseq_name(name): value for name, value in as_fairseq(peer).items()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_logits_equal_the_library_s_for_any_number_of_ranks(
    ranks: int, peer: Any, weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=ranks)
    source = open_foreign(path, vocabulary=files.vocabulary)
    expected = peer_logits(peer, source.tokenizer.build(), PAIRS)
    assert_same_logits(logits_of(source, PAIRS), expected)


def test_every_expert_is_under_its_global_number_scaled_by_what_training_kept(
    weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE, moe_fom=0.5), ranks=2)
    tensors = open_foreign(path, vocabulary=files.vocabulary).tensors
    for stack in ("encoder", "decoder"):
        theirs, ours = f"{stack}.layers.1.moe_layer", f"{stack}.layers.1.feed_forward"
        assert torch.equal(
            tensors.read(f"{ours}.router.weight"), weights[f"{theirs}.gate.wg.weight"]
        )
        for expert in range(EXPERTS):
            for fc, layer in (("fc1", "up"), ("fc2", "down")):
                for kind in ("weight", "bias"):
                    found = tensors.read(f"{ours}.experts.{expert}.{layer}.{kind}")
                    factor = 1 if fc == "fc1" else (1 - MASKED) * (1 - 0.5)
                    expected = weights[f"{theirs}.experts.{expert}.{fc}.{kind}"] * factor
                    assert torch.equal(found, expected)


def test_top_1_experts_keep_the_probability(weights: Weights, files: Files, tmp_path: Path) -> None:
    args = settings(**(MOE | {"moe_top1_expert": True, "moe_second_expert_policy": "sampling"}))
    path = write_ranks(tmp_path, weights, args, ranks=2)
    moe = open_foreign(path, vocabulary=files.vocabulary).spec.model.moe
    assert moe is not None
    assert (moe.num_experts, moe.top_k, moe.every) == (EXPERTS, 1, 2)
    assert moe.combine_weights == "probability"


@pytest.mark.parametrize("rank", [0, 1, 3])
def test_a_missing_rank_is_named(rank: int, weights: Weights, files: Files, tmp_path: Path) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=4)
    (tmp_path / f"checkpoint_2-rank-{rank}.pt").unlink()
    with pytest.raises(CheckpointError, match=rf"checkpoint_2-rank-{rank}\.pt, .* is missing"):
        open_foreign(path, vocabulary=files.vocabulary)


@pytest.mark.parametrize(
    ("kept", "added", "words"),
    [
        (".experts.0.", {}, "holds 1 experts of a layer"),
        ("", {"encoder.layer_norm.bias": torch.zeros(16)}, "belongs to no expert"),
    ],
)
def test_files_of_ranks_that_do_not_belong_together_are_refused(
    kept: str, added: Weights, words: str, weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=2)
    second = tmp_path / "checkpoint_2-rank-1.pt"
    part = torch.load(second, weights_only=False)["model"]
    part = {name: value for name, value in part.items() if kept in name}
    write_checkpoint(second, part | added, None)
    with pytest.raises(CheckpointError, match=words):
        open_foreign(path, vocabulary=files.vocabulary)


@pytest.mark.parametrize(("ranks", "source"), [(2, "rank-0"), (4, "rank-2")])
def test_a_copy_of_another_rank_is_refused(
    ranks: int, source: str, weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=ranks)
    shutil.copy(tmp_path / f"checkpoint_2-{source}.pt", tmp_path / "checkpoint_2-rank-1.pt")
    with pytest.raises(CheckpointError, match=rf"copies of one file as .*{source}\.pt"):
        open_foreign(path, vocabulary=files.vocabulary)


def test_files_left_by_more_ranks_are_refused(
    weights: Weights, files: Files, tmp_path: Path
) -> None:
    write_ranks(tmp_path, weights, settings(**MOE), ranks=4)
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=2)
    with pytest.raises(CheckpointError, match="holds 2 experts of a layer, but 4 files share 4"):
        open_foreign(path, vocabulary=files.vocabulary)


@pytest.mark.parametrize(
    ("change", "name"),
    [
        ({"moe_freq": 0, "encoder_moe_freq": 2, "decoder_moe_freq": 1}, "decoder_moe_freq"),
        ({"moe_expert_ffn_dim": 64}, "moe_expert_ffn_dim"),
        ({"alternate_decoder_ffn_embed_dim": 64}, "alternate_decoder_ffn_embed_dim"),
        ({"alternate_ffn_embed_dim": 32}, "alternate_ffn_embed_dim"),
        ({"moe_second_expert_policy": "sampling"}, "moe_second_expert_policy"),
        ({"moe_cmr": True}, "moe_cmr"),
        ({"moe_eom": 1.0}, "moe_eom"),
        ({"encoder_moe_layers": "1,3"}, "encoder_moe_layers"),
        ({"moe_expert_count": 0}, "num_experts"),
        ({"moe_freq": 0}, "moe_freq"),
    ],
)
def test_what_our_experts_lack_is_refused_by_its_name(
    change: dict[str, Any], name: str, weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**(MOE | change)), ranks=2)
    with pytest.raises(CheckpointError, match=name):
        open_foreign(path, vocabulary=files.vocabulary)


def test_a_router_with_a_bias_is_refused(weights: Weights, files: Files, tmp_path: Path) -> None:
    name = "encoder.layers.1.moe_layer.gate.wg.bias"
    path = write_ranks(tmp_path, weights | {name: torch.zeros(4)}, settings(**MOE), ranks=2)
    with pytest.raises(CheckpointError, match=re.escape(name)):
        open_foreign(path, vocabulary=files.vocabulary)


def test_the_file_of_a_rank_is_no_model(weights: Weights, files: Files, tmp_path: Path) -> None:
    write_ranks(tmp_path, weights, settings(**MOE), ranks=2)
    with pytest.raises(CheckpointError, match=r"Name .*checkpoint_2-shared\.pt instead"):
        open_foreign(tmp_path / "checkpoint_2-rank-1.pt", vocabulary=files.vocabulary)


@pytest.mark.parametrize("form", ["args", "cfg"])
def test_files_of_ranks_under_each_other_s_name_are_refused(
    form: str, weights: Weights, files: Files, tmp_path: Path
) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=2)
    first, second = (tmp_path / f"checkpoint_2-rank-{rank}.pt" for rank in range(2))

    def name_ranks(*ranks: int) -> None:
        for file, rank in zip((first, second), ranks, strict=True):
            state = torch.load(file, weights_only=False)
            state["args"] = Namespace(distributed_rank=rank) if form == "args" else None
            state["cfg"] = {"distributed_training": {"distributed_rank": rank}}
            torch.save(state if form == "cfg" else {**state, "cfg": None}, file)

    for ranks in ((0, 1), (0, 0)):  # files that one process wrote anew name its rank
        name_ranks(*ranks)
        open_foreign(path, vocabulary=files.vocabulary)
    name_ranks(1, 0)
    with pytest.raises(CheckpointError, match=r"rank-0\.pt was written by rank 1, as its settings"):
        open_foreign(path, vocabulary=files.vocabulary)


def test_the_record_has_files_of_all_ranks(weights: Weights, files: Files, tmp_path: Path) -> None:
    path = write_ranks(tmp_path, weights, settings(**MOE), ranks=2)
    before = open_foreign(path, vocabulary=files.vocabulary).record
    name = "decoder.layers.1.moe_layer.experts.3.fc2.bias"
    write_ranks(tmp_path, weights | {name: weights[name] + 1}, settings(**MOE), ranks=2)
    assert open_foreign(path, vocabulary=files.vocabulary).record.digest != before.digest
