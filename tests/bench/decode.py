"""Beam search beside Hugging Face's ``generate`` (sdpa, cached): same weights, same sentences.

Beam 5, 32 sentences of 24 to 40 tokens, exactly 40 new tokens each: end-of-sentence is barred on
both sides, on ours by naming padding, which is never generated, as the token that ends a sentence.

CTranslate2 stands beside it where it is installed, in float32 and in 8 bits, with all sentences at
once and with 8 of them one at a time; run the command with CT2_USE_MKL=1 and with CT2_USE_MKL=0 to
see both of its libraries. It has no experts: those in 8 bits stand beside ours in float32.

    python tests/bench/decode.py [--quick] [--rounds N] [--only PEER] [--json FILE]
"""

import copy
import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import torch
from dense_step import QUICK, WIDE, model_and_examples, shape_text
from ratios import DEVICE, Options, Row, compare, dtype_name, interleaved, parse_options, report
from support.m2m100_peer import m2m100_peer, padded
from support.tiny_models import EOS_ID, PAD_ID
from work import Sequences, beam_search

from pipeline.batching.batch import Example, collate
from pipeline.decoding.quantization import quantize
from pipeline.model.settings import MoEConfig

TARGETS = {torch.float32: 1.15, torch.bfloat16: 1.5}
CTRANSLATE2_TARGETS = {"float32": (1.15, 1.15), "int8": (1.1, 1.05)}
"""With one thread and with several, of all sentences at once; one at a time, the target is 1."""
EXPERTS_TARGET = 1.3
BEAMS = 5
PEERS = ("generate", "ctranslate2", "experts")
CASES = {
    r"beam search, (float32|bfloat16), against generate": "milliseconds",
    r"(beam 5, (float32|int8)|(beam 5|greedy), (float32|int8), one sentence at a time), against "
    r"CTranslate2 (with MKL|without MKL|as it chooses)": "milliseconds",
    r"beam 5, 8 experts, int8, against float32": "milliseconds",
}


def sizes(options: Options) -> tuple[int, int, int]:
    """Return the sentences searched at once and one at a time, and how many tokens each gets."""
    return (4, 2, 6) if options.quick else (32, 8, 40)


def peer_search(peer: Any, examples: list[Example], *, new_tokens: int) -> Callable[[], Sequences]:
    """The same search of the peer, over the same prompts."""
    batch = collate(examples, eos_id=EOS_ID).to(DEVICE)
    source_BS = padded(batch.source_N, batch.source, fill=PAD_ID)
    prompts_BT = torch.tensor([one.decoder_prompt for one in examples], device=DEVICE)

    def search() -> Sequences:
        sequences = peer.generate(
            input_ids=source_BS,
            attention_mask=source_BS.ne(PAD_ID).long(),
            decoder_input_ids=prompts_BT,
            num_beams=BEAMS,
            length_penalty=1.0,
            early_stopping=False,
            min_new_tokens=new_tokens,
            max_new_tokens=new_tokens,
        )
        return [tuple(tokens) for tokens in sequences[:, prompts_BT.shape[1] :].tolist()]

    return search


def ctranslate2_rows(options: Options) -> list[Row]:
    """Ours in float32 and in 8 bits beside CTranslate2's."""
    from ctranslate2_peer import ctranslate2_search, library, write_model

    count, few, new_tokens = sizes(options)
    model, examples = model_and_examples(torch.float32, sentences=count, quick=options.quick)
    rows: list[Row] = []
    with tempfile.TemporaryDirectory() as folder:
        directory = Path(folder) / "model"
        write_model(directory, model)
        for kind, targets in CTRANSLATE2_TARGETS.items():
            target = targets[options.threads > 1]
            for beams, sentences, at_once in ((BEAMS, count, count), (BEAMS, few, 1), (1, few, 1)):
                lines = examples[:sentences]
                searched = copy.deepcopy(model.eval())
                if kind == "int8":
                    quantize(searched, for_single_rows=beams == 1)  # as a translator does
                asked: dict[str, Any] = {
                    "beams": beams,
                    "new_tokens": new_tokens,
                    "at_once": at_once,
                }
                ours = beam_search(searched, lines, **asked)
                peer = ctranslate2_search(
                    directory, lines, compute_type=kind, threads=options.threads, **asked
                )
                found, expected = ours(), peer()
                same = sum(one == other for one, other in zip(found, expected, strict=True))
                print(f"{kind}: {same} of {sentences} translations are CTranslate2's")
                assert {len(tokens) for tokens in found + expected} == {new_tokens}
                seconds = interleaved(
                    {"ours": ours, f"CTranslate2 {library()}": peer},
                    rounds=options.rounds,
                    warm_up=1,
                )
                search = f"beam {beams}" if beams > 1 else "greedy"
                case = f"{search}, {kind}" + ("" if at_once > 1 else ", one sentence at a time")
                rows += compare(seconds, case=case, target=target if at_once > 1 else 1.0)
    return rows


def experts_rows(options: Options) -> list[Row]:
    """Experts in 8 bits beside the same in float32."""
    sentences, _, new_tokens = sizes(options)
    case = replace(QUICK if options.quick else WIDE, pairs=sentences)
    model = case.model(torch.float32, moe=MoEConfig(num_experts=8, every=2)).eval()
    examples = case.examples(model)
    small = copy.deepcopy(model)
    quantize(small)
    searches = {
        name: beam_search(one, examples, new_tokens=new_tokens)
        for name, one in (("ours", small), ("float32", model))
    }
    seconds = interleaved(searches, rounds=options.rounds, warm_up=1)
    return compare(seconds, case=f"beam {BEAMS}, 8 experts, int8", target=EXPERTS_TARGET)


def main() -> None:
    options = parse_options("Beam search, against Hugging Face's generate.", peers=PEERS)
    rows: list[Row] = []
    measured = [peer for peer in PEERS if options.only in (None, peer)]
    if "generate" in measured:
        rows += generate_rows(options)
    if "ctranslate2" in measured:
        rows += ctranslate2_rows(options)
    if "experts" in measured:
        rows += experts_rows(options)
    sentences, _, new_tokens = sizes(options)
    model, _ = model_and_examples(torch.float32, sentences=1, quick=options.quick)
    lengths = f"{sentences} sentences, beam {BEAMS}, {new_tokens} tokens each"
    shapes = f"{shape_text(model)}, {lengths}"
    report(rows, options, shapes=shapes)


def generate_rows(options: Options) -> list[Row]:
    """Ours beside Hugging Face's, in both precisions."""
    rows: list[Row] = []
    sentences, _, new_tokens = sizes(options)
    for dtype, target in TARGETS.items():
        model, examples = model_and_examples(dtype, sentences=sentences, quick=options.quick)
        peer = m2m100_peer(model.eval(), eos_id=EOS_ID)
        searches = {
            "ours": beam_search(model, examples, new_tokens=new_tokens),
            "generate": peer_search(peer, examples, new_tokens=new_tokens),
        }
        found, expected = (search() for search in searches.values())
        same = sum(one == other for one, other in zip(found, expected, strict=True))
        print(f"{dtype}: {same} of {sentences} translations are the same on both sides")
        assert {len(tokens) for tokens in found + expected} == {new_tokens}
        assert same == sentences or dtype == torch.bfloat16 or DEVICE.type == "cuda"
        seconds = interleaved(searches, rounds=options.rounds)
        case = f"beam search, {dtype_name(dtype)}"
        rows += compare(seconds, case=case, target=target)
    return rows


if __name__ == "__main__":
    main()
