"""Tiny models and batches for tests.

Ids are fairseq's: 1 is padding, 2 end-of-sentence; the language tokens are the last ids.
"""

import numpy as np
import torch
from torch import nn

from pipeline.batching.batch import Batch, Example, collate
from pipeline.decoding.hypotheses import Source
from pipeline.kernels.noise import Noise
from pipeline.kernels.products import Activation
from pipeline.model.building import build_model
from pipeline.model.parameters import initialize_weights, named_slices
from pipeline.model.settings import ModelConfig, MoEConfig
from pipeline.model.spec import ModelSpec
from pipeline.model.sublayer import Regularization
from pipeline.model.tokens import Tokens
from pipeline.model.transformer import Transformer
from pipeline.seeds import named_generator

PAD_ID = 1
EOS_ID = 2
FIRST_PIECE = 4
EVERYWHERE = ("feed_forward", "self_attention", "cross_attention")  # low-rank modules


def tiny_spec(
    *,
    moe: MoEConfig | None = None,
    groups: int = 0,
    vocabulary: int = 40,
    width: int = 16,
    feed_forward_width: int = 32,
    layers: int = 2,
    num_heads: int = 2,
    languages: int = 4,
    activation: Activation = "relu",
    max_positions: int = 64,
    model: dict[str, object] | None = None,
) -> ModelSpec:
    """A model of a few thousand parameters; ``model`` has further fields of ModelConfig.

    With ``groups`` > 0 the decoder routes by language group, language i being of group i mod
    ``groups``.
    """
    if moe is not None and groups:
        moe = moe.model_copy(update={"decoder_router": "language_group"})
    config = ModelConfig(
        encoder_layers=layers,
        decoder_layers=layers,
        width=width,
        feed_forward_width=feed_forward_width,
        num_heads=num_heads,
        activation=activation,
        max_positions=max_positions,
        moe=moe,
    )
    config = ModelConfig.model_validate({**config.model_dump(), **(model or {})})
    tokens = tuple(range(vocabulary - languages, vocabulary))
    return ModelSpec(
        model=config,
        vocabulary_size=vocabulary,
        pad_id=PAD_ID,
        languages=("de", "en", "fr", "ru", "ja", "el")[:languages],
        language_token_ids=tokens if config.converter_layers else None,
        language_groups=tuple(i % groups for i in range(languages)) if groups else None,
    )


def tiny_model(
    spec: ModelSpec, *, seed: int = 1, regularization: Regularization | None = None
) -> Transformer:
    """A model with initial weights, whose biases and norms are moved away from 0 and 1."""
    model = build_model(spec, regularization=regularization)
    initialize_weights(model, seed=seed)
    perturb_vectors(model, seed=seed)
    return model


def perturb_vectors(model: nn.Module, *, seed: int) -> None:
    """Add noise to every bias and norm, so that a forgotten one is noticed."""
    for entry in named_slices(model):
        if entry.value.dim() == 1:
            generator = named_generator("perturb", seed, entry.name)
            entry.value.add_(0.2 * torch.randn(entry.value.shape, generator=generator))


def language_token(spec: ModelSpec, language: int) -> int:
    """Id of a language's token, by the language's index."""
    return spec.vocabulary_size - len(spec.languages) + language


def random_examples(
    spec: ModelSpec, *, sentences: int, seed: int, shortest: int = 2, longest: int = 9
) -> list[Example]:
    """Sentence pairs of random pieces and directions, tagged by the model's scheme.

    ``shortest`` and ``longest`` bound both sides, in tokens without tags and end-of-sentence.
    """
    generator = np.random.default_rng(seed)
    examples = []
    for line in range(sentences):
        source_length, target_length = generator.integers(shortest, longest + 1, size=2)
        source, target = generator.choice(len(spec.languages), size=2, replace=False).tolist()
        last_piece = language_token(spec, 0) - 1
        target_token = language_token(spec, target)
        by_scheme = spec.tag_scheme == "src-tgt"
        examples.append(
            Example(
                source=generator.integers(FIRST_PIECE, last_piece + 1, size=source_length),
                target=generator.integers(FIRST_PIECE, last_piece + 1, size=target_length),
                source_prefix=(language_token(spec, source) if by_scheme else target_token,),
                decoder_prompt=(EOS_ID, target_token) if by_scheme else (EOS_ID,),
                source_language=source,
                target_language=target,
                line=line,
            )
        )
    return examples


def source_of(example: Example, *, eos_id: int = EOS_ID) -> Source:
    """Return the sentence of an example as a search takes it."""
    return Source(
        tokens=[*example.source_prefix, *map(int, example.source), eos_id],
        prompt=example.decoder_prompt,
        source_language=example.source_language,
        target_language=example.target_language,
    )


def random_batch(
    spec: ModelSpec, *, sentences: int, seed: int, shortest: int = 2, longest: int = 9
) -> Batch:
    """The micro-batch of :func:`random_examples`."""
    examples = random_examples(
        spec, sentences=sentences, seed=seed, shortest=shortest, longest=longest
    )
    return collate(examples, eos_id=EOS_ID)


def tokens_in_groups(group_N: torch.Tensor) -> Tokens:
    """Tokens of language groups, each a sentence and a target language of its own."""
    number_N = torch.arange(len(group_N), device=group_N.device)
    return Tokens(
        sentence_N=number_N,
        position_N=torch.zeros_like(number_N),
        source_language_B=torch.zeros_like(number_N),
        target_language_B=number_N,
        group_of_language_L=group_N,
        noise=Noise(torch.zeros_like(number_N).int(), number_N.int()),
    )


def attend_to_source(model: Transformer, *, factor: float) -> None:
    """Make attention to the source stronger, so that translations differ with their sources."""
    with torch.no_grad():
        for layer in model.decoder_layers():
            for parameter in layer.cross_attention.parameters():
                parameter.mul_(factor if parameter.dim() == 2 else 1)


def embedding_table(model: Transformer) -> torch.nn.Parameter:
    """The tied embeddings of a model that has some."""
    assert model.embedding.weight is not None
    return model.embedding.weight
