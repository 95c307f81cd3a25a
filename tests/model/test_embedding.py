"""Embeddings and output: tied, untied, frozen or one-hot, in the model and in training."""

from itertools import product
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.nn.functional as F
from support.passes import passes_of
from support.plain_training import (
    LEARNING_RATE,
    MICRO_BATCHES,
    make_recipe,
    micro_batches,
    plain_training,
    set_weights,
)
from support.process_pool import ProcessPool
from support.tiny_models import random_batch, tiny_model, tiny_spec
from torch import Tensor, nn

from pipeline.artifacts.artifact import new_artifact, open_artifact
from pipeline.batching.batch import Packing
from pipeline.checkpoints.resharding import PieceReader, write_pieces
from pipeline.decoding.cached_keys import DecoderStates
from pipeline.decoding.hypotheses import Source
from pipeline.distributed.world import World
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, named_slices, num_parameters
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization, ResidualNorm
from pipeline.training.engine import Engine, connect

KINDS = [*product(("learned", "frozen", "one_hot"), ("tied", "untied"))]
VOCABULARY, WIDTH = 30, 32


def spec_of(input: str, output: str) -> ModelSpec:
    embedding = {"input": input, "output": output}
    return tiny_spec(vocabulary=VOCABULARY, width=WIDTH, model={"embedding": embedding})


@pytest.mark.parametrize(("input", "output"), KINDS)
def test_every_kind_has_its_parameters_and_no_others(input: str, output: str) -> None:
    body = num_parameters(spec_of("learned", "tied")) - VOCABULARY * WIDTH
    scales = {"tied": 2, "untied": 1}[output] if input == "one_hot" else 0
    tables = (input != "one_hot") + (output == "untied")
    expected = body + scales + tables * VOCABULARY * WIDTH
    assert num_parameters(spec_of(input, output)) == expected


def test_one_hot_embeddings_are_rows_of_the_identity_and_logits_the_first_states() -> None:
    model = tiny_model(spec_of("one_hot", "tied"))
    ids = torch.tensor([3, 29, 3])
    assert model.embedding.input_scale is not None
    assert model.embedding.output_scale is not None
    with torch.no_grad():
        model.embedding.input_scale.fill_(5.0)
        model.embedding.output_scale.fill_(2.0)
    torch.testing.assert_close(model.embedding(ids), 5 * torch.eye(WIDTH)[ids])
    x_ND = torch.randn(4, WIDTH)
    torch.testing.assert_close(model.embedding.project(x_ND), 2 * x_ND[:, :VOCABULARY])


@pytest.mark.parametrize("input", ["learned", "one_hot"])
def test_nothing_is_dropped_of_one_hot_embeddings_as_the_encoder_takes_them(input: str) -> None:
    rates = Regularization(dropout=0.5)
    model = tiny_model(spec_of(input, "tied"), regularization=rates).train()
    packing, language_B = Packing.from_lengths([8]).keyed(1), torch.zeros(1, dtype=torch.int64)
    x_ND, tokens = torch.ones(8, WIDTH), model.tokens_of(packing, language_B, language_B)
    expected_ND = x_ND + model.positions_TD[:8]
    entered = [
        stack.enter(x_ND, tokens, model.positions_TD) for stack in (model.encoder, model.decoder)
    ]
    kept = [torch.equal(one_ND, expected_ND) for one_ND in entered]
    assert kept == [input == "one_hot", False]


def test_encoder_and_decoder_can_have_a_scale_each() -> None:
    """By hand: row i of the identity, times the scale of its side; and all three are learned.

    They start at the root of the width.
    """
    spec = spec_of("one_hot_two_scales", "tied")
    assert num_parameters(spec) == num_parameters(spec_of("one_hot", "tied")) + 1
    model = build_model(spec)
    initialize_weights(model, seed=1)
    names = ("input_scale", "target_input_scale", "output_scale")
    scales: list[nn.Parameter] = [getattr(model.embedding, name) for name in names]
    assert [scale.item() for scale in scales] == pytest.approx([WIDTH**0.5] * 3)
    one, other, _ = scales
    with torch.no_grad():
        one.fill_(3.0)
        other.fill_(7.0)
    source, target = torch.tensor([1, 29]), torch.tensor([5, 6, 29])
    source_ND, target_ND = model.embedding.both(source, target)
    torch.testing.assert_close(source_ND, 3 * torch.eye(WIDTH)[source])
    torch.testing.assert_close(target_ND, 7 * torch.eye(WIDTH)[target])
    torch.testing.assert_close(model.embedding(target, is_target=True), target_ND)
    batch = random_batch(spec, sentences=4, seed=1)
    loss = F.cross_entropy(model(batch).logits_LV, batch.labels_L)
    first, second, _ = torch.autograd.grad(loss, scales)
    assert not torch.equal(first, second)


def test_a_fixed_scale_is_no_parameter_and_is_refused_without_an_output() -> None:
    spec = spec_of("one_hot_fixed_scale", "untied")
    body = num_parameters(spec_of("learned", "tied")) - VOCABULARY * WIDTH
    assert num_parameters(spec) == body + VOCABULARY * WIDTH
    for dtype in (torch.float32, torch.bfloat16):
        model = tiny_model(spec).to(dtype)
        ids = torch.tensor([3, 29])
        expected = torch.eye(WIDTH, dtype=dtype)[ids] * WIDTH**0.5
        torch.testing.assert_close(model.embedding(ids), expected)
        assert model(random_batch(spec, sentences=2, seed=1)).logits_LV.dtype == dtype
    with pytest.raises(ValueError, match='set output to "untied"'):
        spec_of("one_hot_fixed_scale", "tied")


@pytest.mark.parametrize(
    "kind", ["learned", "one_hot", "one_hot_two_scales", "one_hot_fixed_scale"]
)
def test_what_is_dropped_follows_the_code_of_one_hot_models(kind: str) -> None:
    """With fairseq's ``no_embed``: none of encoder inputs, none in the last decoder layer."""
    spec = spec_of(kind, "untied" if kind == "one_hot_fixed_scale" else "tied")
    model = tiny_model(spec, regularization=Regularization(dropout=0.5))
    layers = [*model.encoder.layers, *model.decoder.layers]
    rates = [
        {one.dropout for one in layer.modules() if isinstance(one, ResidualNorm)}
        for layer in layers
    ]
    last = {0.0} if kind == "one_hot_two_scales" else {0.5}
    assert rates == [{0.5}] * (len(layers) - 1) + [last]
    assert model.encoder.dropout == (0.5 if kind in ("learned", "one_hot_fixed_scale") else 0.0)
    assert model.decoder.dropout == 0.5


def test_a_model_with_a_scale_for_each_side_decodes_as_it_is_trained() -> None:
    """Logits of a step by step pass are those of the pass over the whole target."""
    model = tiny_model(spec_of("one_hot_two_scales", "tied")).eval()
    assert model.embedding.target_input_scale is not None
    with torch.no_grad():
        model.embedding.target_input_scale.fill_(2.0)
        model.embedding.input_scale.fill_(9.0)  # type: ignore[union-attr]
    batch = random_batch(model.spec, sentences=1, seed=3)
    first, *rest = batch.target_N.tolist()
    source = Source(
        batch.source_N.tolist(), (first,), *batch.source_language_B, *batch.target_language_B
    )
    with torch.inference_mode():
        states = DecoderStates(model, [source])
        stepped = [states.begin()]
        states.keep(torch.tensor([0]), torch.tensor([[0]]))
        stepped += [
            states.step(torch.tensor([token]), place) for place, token in enumerate(rest, start=1)
        ]
        found = model.project(torch.cat(stepped))[batch.label_rows_L]
        torch.testing.assert_close(found, model(batch).logits_LV, rtol=1e-4, atol=1e-5)


def test_a_vocabulary_wider_than_the_model_cannot_be_one_hot() -> None:
    with pytest.raises(ValueError, match="does not fit a width of 16"):
        tiny_spec(vocabulary=17, width=16, model={"embedding": {"input": "one_hot"}})


@pytest.mark.parametrize(("input", "output"), KINDS)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_every_kind_learns_what_it_may(input: str, output: str, dtype: torch.dtype) -> None:
    model = tiny_model(spec_of(input, output)).to(dtype)
    batch = random_batch(model.spec, sentences=4, seed=1)
    logits_LV = model(batch).logits_LV
    assert logits_LV.dtype == dtype
    F.cross_entropy(logits_LV.float(), batch.labels_L).backward()
    for name, parameter in model.named_parameters():
        is_frozen = input == "frozen" and name == "embedding.weight"
        assert (parameter.grad is None) == is_frozen, name


def trained(
    world: World, spec: ModelSpec, directory: Path, stage: int
) -> tuple[list[float], dict[str, Tensor]]:
    """Two updates, saved, then one more from the state in an engine of other weights."""
    connect(world)
    mine = range(world.rank, MICRO_BATCHES, world.size)

    def engine() -> Engine:
        model = build_model(spec)
        set_weights(model)
        return Engine(
            model,
            make_recipe(spec.model),
            world=world,
            ds_config={"zero_optimization": {"stage": stage, "overlap_comm": False}},
            make_optimizer=lambda groups: torch.optim.Adam(
                groups, lr=LEARNING_RATE / 100, fused=True
            ),
        )

    def step(engine: Engine, update: int) -> float:
        batches = micro_batches(spec, update)
        return engine.train_step(
            passes_of([batches[index] for index in mine]),
            total_labels=sum(batch.num_labels for batch in batches),
            learning_rate=LEARNING_RATE / 100,
        ).gradient_norm

    first = engine()
    norms = [step(first, update) for update in range(2)]
    write_pieces(directory / "optimizer", first.optimizer_pieces(), part=world.rank)
    dist.barrier()
    norms.append(step(first, 2))

    second = engine()
    for entry in named_slices(second.model):
        entry.value.fill_(0.5)
    if world.rank == 0:
        with new_artifact(
            directory / "state", kind="training_state", stage="pretrain", config={}, inputs={}
        ) as writer:
            for path in sorted((directory / "optimizer").iterdir()):
                writer.path(f"optimizer/{path.name}").write_bytes(path.read_bytes())
    dist.barrier()
    state = open_artifact(directory / "state", kind="training_state")
    second.load_optimizer_pieces(PieceReader(state), update=2)
    assert step(second, 2) == pytest.approx(norms[2], rel=1e-6)
    return norms, {entry.name: entry.value.clone() for entry in named_slices(second.model)}


@pytest.mark.parametrize(
    ("input", "output", "stage"),
    [
        *(("learned", "untied", 1), ("frozen", "tied", 1), ("one_hot", "tied", 1)),
        *(("frozen", "tied", 2), ("frozen", "untied", 2)),
    ],
)
def test_two_ranks_train_save_and_resume_every_kind(
    input: str, output: str, stage: int, pool2: ProcessPool, tmp_path: Path
) -> None:
    spec = spec_of(input, output)
    (norms, weights), _ = pool2.run(trained, spec, tmp_path, stage)
    expected, _ = plain_training(
        spec, make_optimizer=lambda parameters: torch.optim.Adam(parameters, lr=LEARNING_RATE / 100)
    )
    assert norms == pytest.approx(expected.norms, rel=1e-4)
    for name, value in expected.weights.items():
        # Adam steps 5e-3. Biases of keys change no attention: their steps follow rounding errors.
        most = 1.5e-2 if name.endswith("key.bias") else 1e-4
        torch.testing.assert_close(weights[name], value, rtol=0, atol=most)
    if input == "frozen":
        model = build_model(spec)
        set_weights(model)
        initial = {entry.name: entry.value for entry in named_slices(model)}
        assert torch.equal(weights["embedding.weight"], initial["embedding.weight"])
