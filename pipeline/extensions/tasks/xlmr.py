"""Read an XLM-R from a Hugging Face folder: shape, vocabulary, and weights by our names.

Weights are safetensors or ``pytorch_model.bin``, from which only tensors are read. They are named
as in ``modeling_xlm_roberta.py``, with the prefix ``roberta.`` if the folder has a model with a
head. That head is ignored, because training begins with a new one.

The vocabulary is a SentencePiece model with ids shifted by one and with fairseq's specials
(``tokenization_xlm_roberta.py``): ``<s>`` is 0, ``<pad>`` 1, ``</s>`` 2, ``<unk>`` 3, piece i of
the model i + 1, and ``<mask>`` the last id. Text that looks like a special stays text.
"""

from pathlib import Path
from typing import NamedTuple

import numpy as np
import numpy.typing as npt
from torch import Tensor, nn

from pipeline.checkpoints.foreign.files import (
    CONFIG_FILE,
    INDEX_FILE,
    PICKLED,
    WEIGHTS_FILE,
    Described,
    ModelFolder,
    StateDict,
    described_model,
    read_torch_file,
    refuse_adapter,
    refuse_other,
    refuse_quantized,
)
from pipeline.checkpoints.foreign.hugging_face_tokenizer import load_pieces
from pipeline.checkpoints.foreign.tensor_names import NameTable
from pipeline.checkpoints.weights import Tensors, refuse_not_finite
from pipeline.config.settings import shown
from pipeline.errors import CheckpointError, ConfigError
from pipeline.languages import meant_code
from pipeline.model.parameters import initial_value, named_slices
from pipeline.model.settings import LanguageModulesConfig, ModelConfig
from pipeline.model.spec import ModelSpec, make_spec
from pipeline.model.transformer import POSITION_OFFSET

Integers = npt.NDArray[np.int64]

BOS, PAD, EOS, UNKNOWN = range(4)
OFFSET = 1
PIECES_FILE = "sentencepiece.bpe.model"


class Located(NamedTuple):
    """Ids of a text and the range of characters of each, without surrounding space.

    A piece of only space has an empty range.
    """

    ids: Integers
    begin: Integers
    """First character of each piece."""
    end: Integers
    """Character behind each piece."""


class Pieces:
    """Encoder of text by the pieces of an XLM-R."""

    def __init__(self, model: bytes, *, origin: Path) -> None:
        """Load the pieces; raise CheckpointError if they are not an XLM-R's SentencePiece model."""
        self.model = model
        self._processor = load_pieces(model, origin / PIECES_FILE)
        specials = " ".join(self._processor.id_to_piece(index) for index in range(3))
        refuse_other(origin, **{f"{PIECES_FILE}[:3]": (specials, "<unk> <s> </s>")})

    @property
    def size(self) -> int:
        """Number of ids, ``<mask>`` included."""
        size: int = self._processor.get_piece_size()
        return size + OFFSET + 1

    def encode(self, text: str) -> Integers:
        """Return the ids of a text, without specials."""
        return _moved(self._processor.encode(text))

    def locate(self, text: str) -> Located:
        """Return the ids of a text, without specials, and their places in it."""
        found = self._processor.encode(text, out_type="offset_mapping")
        ranges = [_trimmed(text, *one) for one in found["offsets"]]
        range_N2 = np.array(ranges, dtype=np.int64).reshape(-1, 2)
        return Located(_moved(found["ids"]), *range_N2.T)


def _moved(ids: object) -> Integers:
    found = np.asarray(ids, dtype=np.int64)
    return np.where(found == 0, UNKNOWN, found + OFFSET)


def _trimmed(text: str, begin: int, end: int) -> tuple[int, int]:
    """Shrink a range of characters by the space at its beginning and end."""
    while begin < end and text[begin].isspace():
        begin += 1
    while begin < end and text[end - 1].isspace():
        end -= 1
    return begin, end


TABLE = NameTable.parse("""
embeddings.word_embeddings.weight                         embedding.weight
embeddings.position_embeddings.weight                     encoder.positions.weight
embeddings.LayerNorm.{kind}                               encoder.embedding_norm.{kind}
encoder.layer.{layer}.attention.self.query.{kind}         encoder.layers.{layer}.self_attention.query.{kind}
encoder.layer.{layer}.attention.self.key.{kind}           encoder.layers.{layer}.self_attention.key.{kind}
encoder.layer.{layer}.attention.self.value.{kind}         encoder.layers.{layer}.self_attention.value.{kind}
encoder.layer.{layer}.attention.output.dense.{kind}       encoder.layers.{layer}.self_attention.output.{kind}
encoder.layer.{layer}.attention.output.LayerNorm.{kind}   encoder.layers.{layer}.self_attention_norm.{kind}
encoder.layer.{layer}.intermediate.dense.{kind}           encoder.layers.{layer}.feed_forward.up.{kind}
encoder.layer.{layer}.output.dense.{kind}                 encoder.layers.{layer}.feed_forward.down.{kind}
encoder.layer.{layer}.output.LayerNorm.{kind}             encoder.layers.{layer}.feed_forward_norm.{kind}
""")  # noqa: E501 (a table)
TOKEN_TYPES = "embeddings.token_type_embeddings.weight"
"""The embedding of the only token type, which is added to every position."""


class _Config(Described):
    """Content of ``config.json``."""

    vocab_size: int
    hidden_size: int
    num_hidden_layers: int
    num_attention_heads: int
    intermediate_size: int
    max_position_embeddings: int
    layer_norm_eps: float
    hidden_act: str
    pad_token_id: int = PAD
    bos_token_id: int = BOS
    eos_token_id: int = EOS
    type_vocab_size: int = 1
    position_embedding_type: str = "absolute"
    is_decoder: bool = False
    add_cross_attention: bool = False
    quantization_config: dict[str, object] | None = None


class Pretrained:
    """A pretrained XLM-R in a Hugging Face folder."""

    def __init__(self, directory: Path) -> None:
        """Read shape and vocabulary, and find the weights.

        Raises:
            CheckpointError: the folder has no XLM-R, or its files do not belong together.
        """
        self.origin = directory
        refuse_adapter(directory)
        if not (directory / CONFIG_FILE).is_file():
            raise CheckpointError(
                f"{directory} is no folder with {CONFIG_FILE}. Name the folder of an XLM-R, as "
                "Hugging Face's save_pretrained writes it."
            )
        folder = ModelFolder(directory)
        config = _read_config(folder)
        settings: dict[str, object] = {
            "encoder_layers": config.num_hidden_layers,
            "decoder_layers": 1,
            "width": config.hidden_size,
            "feed_forward_width": config.intermediate_size,
            "num_heads": config.num_attention_heads,
            "norm": "post",
            "activation": "gelu",
            "positions": "learned",
            "max_positions": config.max_position_embeddings - POSITION_OFFSET,
            "scale_embedding": False,
            "embedding_norm": True,
        }
        self.model = described_model(settings, directory / CONFIG_FILE)
        self.vocabulary_size = config.vocab_size
        self.pieces = Pieces(folder.read_bytes(PIECES_FILE), origin=directory)
        if self.pieces.size > config.vocab_size:
            raise CheckpointError(
                f"{directory} has {self.pieces.size:,} pieces with their specials in {PIECES_FILE} "
                f"and a model of vocab_size {config.vocab_size:,}. Name a folder whose files "
                "belong together."
            )
        self._stored = _stored(folder)
        self._names = set(self._stored.names())
        self._prefix = "roberta." if f"roberta.{TOKEN_TYPES}" in self._names else ""

    def spec(
        self, languages: tuple[str, ...], modules: LanguageModulesConfig | None = None
    ) -> ModelSpec:
        """Return the shape of a model with this encoder for these languages.

        Raises:
            ConfigError: an encoder cannot have modules of this kind, or a language has none.
        """
        if modules is not None and not modules.fits_encoder_alone:
            raise ConfigError(
                f"model.language_modules.kind is {modules.kind}, and an encoder with a head "
                "supports only low_rank. Change it, or leave [model.language_modules] out."
            )
        own = languages if modules is None else modules.languages_among(languages)
        meant = {meant_code(code, languages) for code in own}
        if missing := sorted(set(languages) - meant):
            raise ConfigError(
                f"There is text in {', '.join(missing)} to train on, and "
                "model.language_modules.languages leaves that out. Name it there, or set "
                "tasks.languages to others."
            )
        return make_spec(
            model=ModelConfig.model_validate({**dict(self.model), "language_modules": modules}),
            vocabulary_size=self.vocabulary_size,
            pad_id=PAD,
            languages=languages,
        )

    def fill(self, model: nn.Module, spec: ModelSpec, *, seed: int) -> None:
        """Set the encoder as stored, the rest as initialized; CheckpointError if a tensor lacks."""
        for entry in named_slices(model):
            theirs = TABLE.to_theirs(entry.name)
            if theirs is None:
                entry.value.copy_(initial_value(entry, spec, seed=seed))
                continue
            shape = tuple(entry.value.shape)
            value = self._read(theirs, shape)
            if entry.name == "encoder.positions.weight":
                value = value + self._read(TOKEN_TYPES, (1, shape[1]))
            entry.value.copy_(value)

    def _read(self, theirs: str, shape: tuple[int, ...]) -> Tensor:
        name = self._prefix + theirs
        if name not in self._names or self._stored.shape(name) != shape:
            raise CheckpointError(
                f"{self.origin} has no tensor {name} of the shape {shape} that its config.json "
                "describes. Restore the folder from where it was published."
            )
        value = self._stored.read(name)
        return refuse_not_finite(value, name, self.origin, fix="fetch this one again").float()


def _read_config(folder: ModelFolder) -> _Config:
    """Read ``config.json``; raise CheckpointError for another architecture or variant."""
    model_type = folder.read_object(CONFIG_FILE).get("model_type")
    if model_type != "xlm-roberta":
        raise CheckpointError(
            f"{folder.origin} holds a model of type {shown(model_type)}, and tasks are trained on "
            "an XLM-R (xlm-roberta). Name the folder of one."
        )
    config = folder.described(_Config)
    refuse_quantized(folder.origin, config.quantization_config)
    refuse_other(
        folder.origin,
        layer_norm_eps=(config.layer_norm_eps, 1e-5),
        hidden_act=(config.hidden_act, "gelu"),
        pad_token_id=(config.pad_token_id, PAD),
        bos_token_id=(config.bos_token_id, BOS),
        eos_token_id=(config.eos_token_id, EOS),
        type_vocab_size=(config.type_vocab_size, 1),
        position_embedding_type=(config.position_embedding_type, "absolute"),
        is_decoder=(config.is_decoder, False),
        add_cross_attention=(config.add_cross_attention, False),
    )
    return config


def _stored(folder: ModelFolder) -> Tensors:
    """Return the folder's weights; safetensors take precedence."""
    path = folder.origin / PICKLED[0]
    if folder.has(WEIGHTS_FILE) or folder.has(INDEX_FILE) or not path.is_file():
        return folder.tensors
    return StateDict.checked(path, read_torch_file(path, form="model.state_dict()"))
