"""Language-specific matrix synthesis: the plain layer at first, then W + V F of every sentence."""

from dataclasses import replace

import pytest
import torch
from support.tiny_models import (
    EOS_ID,
    EVERYWHERE,
    random_batch,
    random_examples,
    tiny_model,
    tiny_spec,
)
from torch import Tensor, nn

from pipeline.batching.batch import Example, Packing, collate
from pipeline.errors import ConfigError
from pipeline.extensions.language_modules import LowRankConfig
from pipeline.extensions.language_modules.low_rank import LowRankLinear, LowRankShape, Synthesis
from pipeline.model.parameters import count_parameters, named_slices, tensor_shapes
from pipeline.model.settings import ModelConfig
from pipeline.model.spec import ModelSpec, make_spec, refuse_languages_without_modules
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator

CODES = ("de", "en", "fr", "ru")


def spec_of(**modules: object) -> ModelSpec:
    config = LowRankConfig.model_validate({"rank": 3, **modules})
    return tiny_spec(model={"language_modules": config.model_dump()})


def trained(model: Transformer) -> Transformer:
    """With flat matrices that are not zeros any more."""
    for entry in named_slices(model):
        if entry.name.endswith((".flat", ".vertical")):
            generator = named_generator("trained", entry.name)
            entry.value.normal_(0, 0.3, generator=generator)
    return model


def layer_of(
    synthesis: Synthesis, *, has_shared: bool = False, kept: tuple[str, ...] | None = None
) -> LowRankLinear:
    torch.manual_seed(1)
    shape = LowRankShape(CODES, rank=3, synthesis=synthesis, has_shared=has_shared, kept=kept)
    layer = LowRankLinear(nn.Linear(5, 7), shape).double()
    nn.init.normal_(layer.low_rank.vertical)
    nn.init.normal_(layer.low_rank.flat)
    return layer


def tokens_of(pairs: list[tuple[int, int]], lengths: list[int]) -> Tokens:
    packing = Packing.from_lengths(lengths)
    source_B, target_B = torch.tensor(pairs).unbind(1)
    return Tokens(
        packing.sentence_N, packing.position_N, source_B, target_B, torch.zeros_like(source_B)
    )


@pytest.mark.parametrize("within", [EVERYWHERE[:1], EVERYWHERE[1:], EVERYWHERE])
@pytest.mark.parametrize("shared", [False, True])
def test_a_model_starts_as_the_plain_one_bit_for_bit(within: tuple[str, ...], shared: bool) -> None:
    spec = spec_of(within=within, shared=shared)
    plain, ours = tiny_model(tiny_spec()), tiny_model(spec)
    batch = random_batch(spec, sentences=9, seed=1)
    assert torch.equal(ours(batch).logits_LV, plain(batch).logits_LV)
    assert len(tensor_shapes(spec)) > len(tensor_shapes(tiny_spec()))


@pytest.mark.parametrize("synthesis", ["pair_wise", "source", "target"])
def test_every_row_goes_through_the_matrix_of_its_sentences_languages(
    synthesis: Synthesis,
) -> None:
    layer = layer_of(synthesis)
    pairs = [(0, 1), (0, 1), (1, 3), (2, 2), (0, 1), (3, 0)]
    tokens = tokens_of(pairs, lengths := [3, 1, 4, 2, 2, 5])
    x_ND = torch.randn(sum(lengths), 5, dtype=torch.float64)
    found = layer(x_ND, tokens)
    for row, sentence in enumerate(tokens.sentence_N.tolist()):
        source, target = pairs[sentence]
        first = target if synthesis == "target" else source
        second = source if synthesis == "source" else target
        matrix = layer.weight + layer.low_rank.vertical[first] @ layer.low_rank.flat[second]
        expected = x_ND[row] @ matrix.T + layer.bias
        torch.testing.assert_close(found[row], expected, rtol=0, atol=1e-12)


def test_gradients_are_those_of_autograd_and_zeros_for_languages_that_are_absent() -> None:
    layer = layer_of("pair_wise")
    tokens = tokens_of([(0, 1), (2, 1), (0, 0)], [2, 3, 1])
    x_ND = torch.randn(6, 5, dtype=torch.float64, requires_grad=True)
    inputs = (x_ND, layer.weight, layer.low_rank.vertical, layer.low_rank.flat)

    def run(x_ND: Tensor, weight: Tensor, vertical: Tensor, flat: Tensor) -> Tensor:
        parts = {"weight": weight, "low_rank.vertical": vertical, "low_rank.flat": flat}
        found: Tensor = torch.func.functional_call(layer, parts, (x_ND, tokens))
        return found

    assert torch.autograd.gradcheck(run, inputs)
    layer(x_ND, tokens).sum().backward()
    assert layer.low_rank.vertical.grad is not None
    assert layer.low_rank.vertical.grad[[1, 3]].abs().max() == 0
    assert layer.low_rank.vertical.grad[[0, 2]].abs().min() > 0


@pytest.mark.parametrize("within", [EVERYWHERE[1:], EVERYWHERE])
def test_the_decoders_attention_to_the_source_can_be_left_out(within: tuple[str, ...]) -> None:
    names = tensor_shapes(spec_of(within=within))
    fewer = tensor_shapes(spec_of(within=within[:-1]))
    left_out = set(names) - set(fewer)
    assert left_out == {
        name for name in names if ".cross_attention." in name and "low_rank" in name
    }
    assert len(left_out) == 2 * 4 * len(CODES) * 2


def test_initial_values_are_those_of_the_authors_code() -> None:
    model = tiny_model(spec_of(within=EVERYWHERE, rank=8))
    found = {e.name: e.value for e in named_slices(model) if ".low_rank." in e.name}
    flat = [value for name, value in found.items() if name.endswith(".flat")]
    vertical = torch.cat([v.flatten() for name, v in found.items() if name.endswith(".vertical")])
    assert flat
    assert not any(value.any() for value in flat)
    assert float(vertical.std()) == pytest.approx(0.01, rel=0.02)
    assert float(vertical.mean()) == pytest.approx(0, abs=2e-4)


@pytest.mark.parametrize("within", [EVERYWHERE[:1], EVERYWHERE])
@pytest.mark.parametrize("synthesis", ["pair_wise", "language_wise"])
def test_a_mixed_batch_is_the_batches_of_its_directions(
    within: tuple[str, ...], synthesis: str
) -> None:
    spec = spec_of(within=within, synthesis=synthesis)
    model = trained(tiny_model(spec))
    examples = random_examples(spec, sentences=20, seed=2)
    mixed = collate(examples, eos_id=EOS_ID)
    assert len({(e.source_language, e.target_language) for e in examples}) >= 8
    logits = model(mixed).logits_LV.split([len(e.target) + 1 for e in examples])
    by_direction: dict[tuple[int, int], list[int]] = {}
    for index, one in enumerate(examples):
        by_direction.setdefault((one.source_language, one.target_language), []).append(index)
    for indices in by_direction.values():
        alone: list[Example] = [examples[index] for index in indices]
        expected = model(collate(alone, eos_id=EOS_ID)).logits_LV
        found = torch.cat([logits[index] for index in indices])
        torch.testing.assert_close(
            found, expected, rtol=0, atol=1e-6 * expected.detach().abs().max().item()
        )


def test_gradients_of_a_mixed_batch_are_the_sum_over_its_directions() -> None:
    spec = spec_of(within=EVERYWHERE)
    model = trained(tiny_model(spec)).double()
    examples = random_examples(spec, sentences=12, seed=3)

    def gradients(chosen: list[list[Example]]) -> list[Tensor]:
        losses = [model(collate(part, eos_id=EOS_ID)).logits_LV.square().sum() for part in chosen]
        return list(torch.autograd.grad(sum(losses, torch.zeros(())), list(model.parameters())))

    together, apart = gradients([examples]), gradients([[one] for one in examples])
    for found, expected in zip(together, apart, strict=True):
        torch.testing.assert_close(found, expected, rtol=1e-9, atol=1e-9)


def test_the_decoder_of_language_wise_synthesis_may_have_the_sources_modules() -> None:
    found = {}
    for language in ("target", "source"):
        spec = spec_of(synthesis="language_wise", decoder_language=language)
        modules = tiny_model(spec).decoder.modules()
        wrapped = [one for one in modules if isinstance(one, LowRankLinear)]
        found[language] = {one.synthesis for one in wrapped}
    assert found == {"target": {"target"}, "source": {"source"}}


def test_the_shared_route_is_that_of_the_folded_matrix() -> None:
    layer = layer_of("pair_wise", has_shared=True)
    tokens = replace(tokens_of([(0, 1), (2, 1)], [2, 3]), route="shared")
    x_ND = torch.randn(5, 5, dtype=torch.float64)
    folded = layer.weight + layer.low_rank.vertical[-1] @ layer.low_rank.flat[-1]
    expected = nn.functional.linear(x_ND, folded, layer.bias)
    torch.testing.assert_close(layer(x_ND, tokens), expected, rtol=0, atol=1e-12)


def test_languages_that_are_kept_have_the_modules_they_had() -> None:
    whole, kept = layer_of("pair_wise"), layer_of("pair_wise", kept=("ru", "de"))
    assert kept.low_rank.slots == ("de", "ru")
    with torch.no_grad():
        for name in ("vertical", "flat"):
            of_whole = getattr(whole.low_rank, name)
            getattr(kept.low_rank, name).copy_(of_whole[[0, 3]])
        kept.weight.copy_(whole.weight)
        kept.bias.copy_(whole.bias)
    x_ND = torch.randn(5, 5, dtype=torch.float64)
    pairs, lengths = [(0, 3), (3, 3)], [4, 1]
    assert torch.equal(
        kept(x_ND, tokens_of(pairs, lengths)), whole(x_ND, tokens_of(pairs, lengths))
    )


@pytest.mark.parametrize("code", ["de", "deu", "de_Latn"])
def test_a_language_without_a_module_is_named(code: str) -> None:
    spec = make_spec(
        model=ModelConfig.model_validate(
            {"language_modules": {"kind": "low_rank", "languages": [code]}, "width": 16}
        ),
        vocabulary_size=9,
        pad_id=0,
        languages=("de", "en"),
    )
    refuse_languages_without_modules(spec, ["de"])
    with pytest.raises(ConfigError, match=r"no language module for en\. Choose among de"):
        refuse_languages_without_modules(spec, ["en", "de"])


def test_modules_of_a_language_that_the_tokenizer_lacks_are_refused() -> None:
    with pytest.raises(ValueError, match="xx is none of them"):
        spec_of(languages=["de", "xx"])


PAPER_BIG: dict[str, object] = {
    **{"encoder_layers": 6, "decoder_layers": 6, "width": 1024},
    **{"feed_forward_width": 4096, "num_heads": 16},
}
PAPER_SMALL = PAPER_BIG | {"width": 512, "feed_forward_width": 1024, "num_heads": 4}


def total(model: dict[str, object], *, vocabulary: int, languages: int) -> int:
    config = ModelConfig.model_validate(model)
    return count_parameters(
        config, vocabulary_size=vocabulary, num_groups=0, num_languages=languages
    )["total"]


@pytest.mark.parametrize(
    ("rank", "millions", "shared_millions"), [(64, 989, 7.9), (16, 429, 2.0), (4, 289, 0.5)]
)
def test_parameters_on_opus100_are_those_of_the_paper(
    rank: int, millions: int, shared_millions: float
) -> None:
    modules = {"kind": "low_rank", "rank": rank}
    plain, with_modules, with_shared = (
        total(PAPER_BIG | more, vocabulary=64_095, languages=95)
        for more in (
            {},
            {"language_modules": modules},
            {"language_modules": modules | {"shared": True}},
        )
    )
    assert with_modules - plain == 2 * 95 * 12 * rank * (1024 + 4096)
    assert with_shared - with_modules == 2 * 12 * rank * (1024 + 4096)
    assert round(plain / 1e6) == 242
    assert round(with_modules / 1e6) == millions
    assert round((with_shared - with_modules) / 1e6, 1) == shared_millions


def test_parameters_on_iwslt14_are_those_of_the_paper() -> None:
    modules = {"kind": "low_rank", "rank": 32}
    plain = total(PAPER_SMALL, vocabulary=32_000, languages=9)
    with_modules = total(
        PAPER_SMALL | {"language_modules": modules}, vocabulary=32_000, languages=9
    )
    assert with_modules - plain == 2 * 9 * 12 * 32 * (512 + 1024)
    assert round(plain / 1e6) == 48
    assert with_modules == 58_546_176  # the table has 58 M
    shared = {"language_modules": modules | {"shared": True}}
    with_shared = total(PAPER_SMALL | shared, vocabulary=32_000, languages=9)
    assert round(with_shared / 1e6) == 60
    assert round((plain + with_shared - with_modules) / 1e6) == 49
