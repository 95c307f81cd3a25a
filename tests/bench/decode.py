"""Beam search beside Hugging Face's ``generate`` (sdpa, cached): same weights, same sentences.

32 sentences, beam 5, exactly 40 tokens each: end-of-sentence is barred on both sides, here by
naming padding, which is never generated, as the token that ends a sentence.

    python tests/bench/decode.py [--quick] [--rounds N] [--json FILE]
"""

import sys
from pathlib import Path

import torch

sys.path.insert(0, str(Path(__file__).resolve().parents[1]))  # the modules that tests share

from m2m100_peer import m2m100_peer, padded  # noqa: E402
from ratios import Row, compare, interleaved, parse_options, report  # noqa: E402
from tiny_models import EOS_ID, random_batch, random_examples, tiny_spec  # noqa: E402

from pipeline.config import DecodingConfig  # noqa: E402
from pipeline.decoding import Source, beam_search  # noqa: E402
from pipeline.model.transformer import build_model  # noqa: E402
from pipeline.weights import initialize_weights  # noqa: E402
