"""Every figure that a GPU has to confirm, measured on one card in at most nine minutes.

    python tests/bench/gpu.py [--quick] [--only SECTION ...] [--demo DIR] [--json FILE]

Every section runs in a process of its own with a time limit. A section that fails, and a peer that
is not installed, leave rows that say so. A row names its commit and is kept until its section is
measured again on the card. The result file has card, commit, clocks, versions and,
per case of ``gpu_goals.py``, what was measured and its goal. ``--quick`` runs every section with
tiny sizes in this process, on a CPU too, and measures nothing. Sections for two cards run where
there are two; they train on the demo's data.

Only sections that train or compare with ``mmnmt estimate`` need DeepSpeed, and only those that
compare with transformers or CTranslate2 need them. CTranslate2's wheel loads ``libcublas.so.12``.
With PyTorch for CUDA 13, make a folder with links ``libcublas.so.12`` and ``libcublasLt.so.12`` to
the libraries of version 13 in ``site-packages/nvidia/cu13/lib``, and name the folder in
``LD_LIBRARY_PATH``.
"""

import argparse
import gc
import json
import os
import shutil
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import chdir, suppress
from dataclasses import asdict
from functools import partial
from importlib import metadata
from itertools import cycle
from pathlib import Path
from typing import Any

if __name__ == "__main__":
    from pipeline.machine import prepare_process

    prepare_process()  # before torch is loaded

import gpu_steps as steps
import torch
import torch.nn.functional as F
from gpu_goals import GOALS, NOT_MEASURED, Row, rows_of
from gpu_steps import BFLOAT16, ROOT, Asked, changed, ratio, seconds
from plain_layer_peer import PlainLayer
from ratios import DEVICE, provenance
from support.passes import join
from support.tiny_models import EOS_ID, random_examples, tokens_in_groups
from torch import Tensor
from work import beam_search, training_step

from pipeline.batching.batch import collate
from pipeline.distributed.world import leave
from pipeline.kernels.logits import summed_cross_entropy
from pipeline.model.sublayer import Regularization
from pipeline.model.tokens import Unbiased

MINUTES = 9
SECONDS = {"passes": 110, "training": 120, "ctranslate2": 100, "m2m100": 200}
"""Time limits of sections; of all others, 60 seconds."""
LEAST = 20
"""Seconds that a section needs to begin."""
TWO_CARDS = {"ranks": 120, "slurm": 120}
"""Time limits of sections that one card does not run."""
PASSES = 4
"""Bare passes that are timed together."""
Found = Iterator[tuple[str, float | str | Mapping[str, str]]]
"""Cases with what was measured, or why not; titles with tables."""


# Sections of one card


def passes(asked: Asked) -> Found:
    """Time bare passes of one and four micro-batches, and list their kernels."""
    for kind, recipe in (("dense", asked.dense), ("experts", asked.experts)):
        estimated = ThreadPoolExecutor(1).submit(steps.estimates, recipe.name, asked.vocabulary)
        model = steps.random_model(recipe, asked)
        for number, tokens in ((1, "4,096"), (4, "16,384")):
            batches = steps.full_batches(model, asked, number)
            work = training_step(model, cycle([join(batches)]), recipe.loss)
            times = 1 if asked.quick else PASSES
            in_a_row = partial(steps.repeated, work, times)  # a host can run ahead, as in training
            took = seconds(asked, rounds=4, work=in_a_row)[0] / times
            yield f"{kind}, bare pass of {tokens} tokens", 1000 * took
            found = steps.kernels_by_name(work)
            yield f"{kind}, kernels of a pass of {tokens} tokens", steps.listed(found)
            if number == 1:
                spent, numbers = zip(*found.values(), strict=True) if found else ((0.0,), (1,))
                kernels = sum(numbers)
                yield f"{kind}, kernels per pass, by the profiler", kernels
        mfu = steps.utilization(model, batches, took)
        yield f"{kind}, MFU, forward + backward, 16k tokens a pass", mfu
        launches, estimate = estimated.result()["pass"]  # may fail: last
        yield f"{kind}, kernels / those counted by mmnmt estimate", kernels / launches
        yield f"{kind}, time of the kernels / mmnmt estimate", sum(spent) / estimate


def training(asked: Asked) -> Found:
    """Time whole updates of 32 micro-batches."""
    from plain_loop_peer import plain_loop

    times, rounds = (2, 1) if asked.quick else (8, 3)
    experts = asked.experts.model.moe
    assert experts is not None
    held = changed(asked.experts, "model", moe=experts.model_copy(update={"num_experts": 4}))
    for case, recipe in (
        ("dense, MFU, training, optimizer included", asked.dense),
        ("4 experts held (a rank of EP 8), MFU, training", held),
    ):
        model = steps.random_model(recipe, asked, dtype=torch.float32)
        batches = steps.full_batches(model, asked, 4) * times
        (took,) = seconds(asked, rounds=rounds, work=steps.updates(model, recipe, batches))
        yield case, steps.utilization(model, batches, took)
        del model
        gc.collect()
        torch.cuda.empty_cache()
    sizes = {"width": 512, "feed_forward_width": 2048, "encoder_layers": 6, "decoder_layers": 6}
    recipe = asked.dense if asked.quick else changed(asked.dense, "model", **sizes)
    loop = plain_loop(
        steps.random_model(recipe, asked), recipe.loss, learning_rate=1e-4, clip_norm=1.0
    )
    model = steps.random_model(recipe, asked, dtype=torch.float32)
    batches = steps.full_batches(model, asked, 4) * 2  # the peer takes long
    ours, peer = steps.updates(model, recipe, batches), partial(loop, batches)
    case = "d 512, 6 + 6 layers, tokens/s against a plain loop"
    yield case, ratio(asked, rounds=rounds, ours=ours, peer=peer)


def search(asked: Asked) -> Found:
    """Time a step of a search: the difference of two lengths, by their number of tokens."""
    model = steps.random_model(asked.dense, asked)
    examples = steps.examples_of(model, 25)
    first, last = (4, 8) if asked.quick else (20, 60)
    short, long = (
        beam_search(model, examples, new_tokens=length, at_once=25) for length in (first, last)
    )
    took_short, took_long = seconds(asked, short=short, long=long)
    step = 1000 * (took_long - took_short) / (last - first)
    yield "search step, 25 sentences x beam 5, bfloat16", step
    yield f"kernels of a search of {last} tokens", steps.listed(steps.kernels_by_name(long))
    _, estimate = steps.estimates(asked.dense.name, asked.vocabulary)["step"]
    yield "search step / mmnmt estimate", step / estimate


def whole(result: Tensor | Unbiased) -> Tensor:
    """Return the result of a sublayer with its bias."""
    return result if isinstance(result, Tensor) else result.total


def kernels(asked: Asked) -> Found:
    """Compare parts of a layer in training with PyTorch's plain operators: values and time."""
    recipe = changed(asked.dense, "model", encoder_layers=1, decoder_layers=1)
    recipe = changed(recipe, "training", dropout=0.0, attention_dropout=0.0)
    model = steps.random_model(recipe, asked)
    batch = join(steps.full_batches(model, asked, 4))
    layer: Any = model.encoder.layers[0]
    tokens = model.tokens_of(batch.source, batch.source_language_B, batch.target_language_B)
    plain = PlainLayer(model)
    x_ND, y_ND = torch.randn(
        *(2, len(batch.source_N), recipe.model.width), device=DEVICE, dtype=BFLOAT16
    )
    labels_L = batch.labels_L[: len(batch.labels_L) // 2]
    logits_LV = torch.randn(len(labels_L), asked.vocabulary, device=DEVICE, dtype=BFLOAT16)
    parts: dict[str, tuple[Callable[..., Tensor], Callable[..., Tensor], list[Tensor]]] = {
        "loss": (
            lambda x: summed_cross_entropy(x.clone(), labels_L, smoothing=0.1)[0],
            lambda x: F.cross_entropy(x.float(), labels_L, label_smoothing=0.1, reduction="sum"),
            [logits_LV],
        ),
        "attention": (
            lambda x: whole(layer.self_attention(x, batch.source, tokens)),
            lambda x: plain.self_attention(x, batch.source),
            [x_ND],
        ),
        "feed-forward": (
            lambda x: whole(layer.feed_forward(x, tokens)),
            plain.feed_forward,
            [x_ND],
        ),
        "residual and norm": (
            lambda x, y: layer.self_attention_norm.pass_on(
                x, y, None, None, following=layer.feed_forward_norm
            )[1],
            lambda x, y: plain.norm(x + y, "feed_forward_norm"),
            [x_ND, y_ND],
        ),
    }
    for name, (our_function, plain_function, inputs) in parts.items():
        exact = steps.with_gradients(plain_function, *(x.float() for x in inputs))()
        ours, peer = (steps.with_gradients(f, *inputs) for f in (our_function, plain_function))
        our_error, error = (steps.distance(work(), exact) for work in (ours, peer))
        yield f"{name}, error / the plain form's", our_error / error
        del exact
        our_time, time = (steps.time_of_kernels(work) for work in (ours, peer))
        yield f"{name}, time of the plain form / ours", time / our_time


def resumed(asked: Asked) -> Found:
    """Compare a training on long sentences that was stopped and resumed with one that was not."""
    from support.tiny_training import make_inputs, make_recipe, pretrain, read_weights

    part = 10 if asked.quick else 1
    recipe = changed(make_recipe(), "model", width=128, max_positions=512)
    recipe = changed(recipe, "batches", tokens=1000 // part, evaluation_tokens=1000 // part)
    recipe = changed(recipe, "training", expert_parallel_size=1)
    ds_config = "zero1_bf16" if DEVICE.type == "cuda" else "cpu_bf16"
    world, folder = steps.opened_world(), Path.cwd()
    data = make_inputs(folder, lengths=(150 // part, 195 // part), recipe=recipe)
    run = partial(pretrain, world, data, recipe=recipe, ds_config=ds_config)
    run(out_dir=folder / "straight")
    assert run(out_dir=folder / "stopped", terminate_at=(0, 4)) != "done"
    run(out_dir=folder / "stopped")
    found, expected = (read_weights(folder / name) for name in ("stopped", "straight"))
    same = [torch.equal(found[name], value) for name, value in expected.items()]
    yield "tensors of a resumed training equal to an uninterrupted one's", sum(same) / len(same)


def ctranslate2(asked: Asked) -> Found:
    """Translate 1,000 sentences on both sides, each in the better of two sizes of batches."""
    from ctranslate2_peer import ctranslate2_search, write_model

    sentences, length, sizes = (8, 4, (4, 8)) if asked.quick else (1000, 40, (64, 256))
    model, directory = steps.random_model(asked.dense, asked), Path.cwd() / "model"
    examples = steps.examples_of(model, sentences)
    write_model(directory, model)
    found = []
    for at_once in sizes:
        ours = beam_search(model, examples, new_tokens=length, at_once=at_once)
        peer = ctranslate2_search(
            *(directory, examples),
            compute_type="float16" if DEVICE.type == "cuda" else "float32",
            device=DEVICE.type,
            threads=1,
            beams=5,
            new_tokens=length,
            at_once=at_once,
        )
        found.append(seconds(asked, rounds=2, ours=ours, peer=peer))
    our_best, peer_best = (min(times) for times in zip(*found, strict=True))
    yield "1,000 sentences, beam 5, against CTranslate2 float16", peer_best / our_best


def moe(asked: Asked) -> Found:
    """Time a layer of 32 experts, forward and backward, with the weights of both peers."""
    import moe_layer
    from torchtitan_peer import TorchtitanLayer

    shape = moe_layer.Shape(1024, 4096, 32, 16_384, {})
    if asked.quick:
        (shape,) = moe_layer.QUICK_SHAPES
    ours, x_ND = moe_layer.our_layer(shape, BFLOAT16), next(moe_layer.inputs(shape, BFLOAT16))
    tokens = tokens_in_groups(torch.zeros(shape.tokens, dtype=torch.int64, device=DEVICE))

    def our_call(x_ND: Tensor) -> tuple[Tensor, Tensor]:
        y_ND, record = ours(x_ND, tokens)
        return y_ND, record.balance_loss

    titan = TorchtitanLayer(ours, top_k=moe_layer.TOP_K)
    peers: dict[str, Callable[[], Any]] = {
        "torchtitan's form": lambda: (titan, titan),
        "transformers' NLLB-MoE": lambda: moe_layer.nllb_layer(shape, ours),
    }
    for name, build in peers.items():
        case = f"MoE layer, 16k tokens, against {name}"
        try:
            module, call = build()
            moe_layer.assert_same(our_call(x_ND)[0], call(x_ND)[0], name)
        except Exception as error:  # the other peer can still be measured
            yield case, why_not(error)
            continue
        our_step = partial(moe_layer.train_once, ours, our_call, x_ND)
        peer_step = partial(moe_layer.train_once, module, call, x_ND)
        yield case, ratio(asked, ours=our_step, peer=peer_step)


def m2m100(asked: Asked) -> Found:
    """Time a training step with dropout, and Hugging Face's model with the same weights."""
    from dense_step import LARGE, QUICK, peer_step
    from support.m2m100_peer import m2m100_peer

    case, pairs = (QUICK, 16) if asked.quick else (LARGE, 512)
    rates = Regularization(dropout=0.3, attention_dropout=0.1)
    model = case.model(BFLOAT16, rates=rates).train()
    examples = random_examples(model.spec, sentences=pairs, seed=1, shortest=24, longest=40)
    batch = collate(examples, eos_id=EOS_ID).to(DEVICE)
    ours = training_step(model, cycle([batch]))
    peer = m2m100_peer(model, eos_id=EOS_ID, rates=rates).train()
    compiled = torch.compile(peer, dynamic=False, disable=asked.quick)
    for name, module in (("M2M100 sdpa", peer), ("compiled M2M100", compiled)):
        found = ratio(asked, ours=ours, peer=peer_step(module, batch))
        yield f"training step, 16k tokens, dropout, against {name}", found


# Sections of two cards


def ranks(asked: Asked) -> Found:
    """Train on two ranks that share experts over NCCL, and on one."""
    found, expected = pretrained(asked, "--processes", "2"), pretrained(asked)
    yield "two ranks over NCCL, losses / one rank's", found / expected


def slurm(asked: Asked) -> Found:
    """Train as two tasks of SLURM, each of which is shown one GPU, and as one process."""
    launcher = ["srun", "--ntasks=2", "--gpus-per-task=1"]
    found, expected = pretrained(asked, launcher=launcher), pretrained(asked)
    yield "one GPU per SLURM rank, losses / one rank's", found / expected


def pretrained(asked: Asked, *options: str, launcher: Sequence[str] = ()) -> float:
    """Train on the demo's data without dropout; return the mean loss of 20 updates."""
    out = "-".join(["run", *launcher, *options])
    program = ["-m", "pipeline.stages.pretrain"] if launcher else ["-m", "pipeline", "pretrain"]
    command = [*launcher, sys.executable, *program, *stage_options(asked, out), *options]
    subprocess.run(command, check=True, env=os.environ | {"PYTHONPATH": str(ROOT)})
    lines = (Path(out) / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    entries = map(json.loads, lines)
    return statistics.fmean(one["loss"] for one in entries if one["kind"] == "train")


def stage_options(asked: Asked, out: str) -> list[str]:
    """Return the options of a short training stage."""
    lengths = ("training.updates", "training.validate_every", "training.checkpoint_every")
    settings = dict.fromkeys(lengths, 20) | {"logging.every": 1, "training.dropout": 0}
    settings["optimizer.warmup_updates"] = 1
    options = ["--recipe", "demo_moe", "--ds-config", "zero2_bf16", "--out", out]
    options += [word for name, value in settings.items() for word in ("--set", f"{name}={value}")]
    data = ("shards", "mixture")
    return options + [word for name in data for word in (f"--{name}", str(asked.demo / name))]


SECTIONS: dict[str, Callable[[Asked], Found]] = {
    section.__name__: section
    for section in (
        *(passes, training, search, kernels, resumed, ctranslate2, moe, m2m100),
        *(ranks, slurm),
    )
}


# All of them


def why_not(error: Exception) -> str:
    """Return what a row says of an error."""
    is_absent = isinstance(error, ImportError)
    return f"{NOT_MEASURED}: {error}" if is_absent else f"failed: {error!r:.300}"


def outcome(name: str, asked: Asked) -> Found:
    """Run a section in this process, in a folder of its own; report why it ends early."""
    with tempfile.TemporaryDirectory() as folder, chdir(folder):
        try:
            for case, value in SECTIONS[name](asked):
                assert case in GOALS[name] or isinstance(value, Mapping), case
                yield case, value
        except Exception as error:  # a section that fails does not stop the others
            yield name, why_not(error)


def missing(name: str, asked: Asked, *, left: float) -> str:
    """Return what a section lacks on this machine with ``left`` seconds; empty if nothing."""
    is_of_one, gpus = name not in TWO_CARDS, torch.cuda.device_count()
    has = {
        "a GPU": gpus > 0 or asked.quick,
        "two cards": gpus > 1 or is_of_one,
        f"more than {MINUTES} minutes": left > LEAST or asked.quick or not is_of_one,
        "the demo's data": (asked.demo / "shards").is_dir() or is_of_one,
        "SLURM": shutil.which("srun") is not None or name != "slurm",
    }
    return ", ".join(need for need, is_there in has.items() if not is_there)


MARK = "found: "
"""Begins a line with a measurement; stages print more."""


def in_a_process(command: Sequence[str], *, name: str, limit: float) -> Found:
    """Run a section for at most ``limit`` seconds; its own children end with it."""
    with tempfile.TemporaryFile("w+") as out:
        process = subprocess.Popen(command, stdout=out, start_new_session=True)
        ending = ""
        try:
            if code := process.wait(limit):
                ending = f"failed: exit code {code}"
        except subprocess.TimeoutExpired:
            ending = f"failed: stopped after {limit:.0f} seconds"
        finally:  # also if this process is asked to end
            with suppress(ProcessLookupError):
                os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        out.seek(0)
        for line in out:
            if line.startswith(MARK):
                case, value = json.loads(line.removeprefix(MARK))
                yield case, value
    if ending:
        yield name, ending


def end_sections_on_request() -> None:
    """Let SIGTERM end this process by an exception, so that its section ends, too."""
    signal.signal(signal.SIGTERM, lambda *_: sys.exit(128 + signal.SIGTERM))


def about_this_machine() -> dict[str, Any]:
    """Return card, commit, date and versions."""
    about: dict[str, Any] = {"processor": steps.card_name(), **provenance()}
    for package in ("torch", "triton", "transformers", "deepspeed", "ctranslate2"):
        with suppress(metadata.PackageNotFoundError):
            about[package] = metadata.version(package)
    return about


def clocks() -> str:
    """Return the card's clocks, power and temperature; empty without a card."""
    query = "--query-gpu=clocks.sm,clocks.mem,power.draw,temperature.gpu"
    command = ["nvidia-smi", query, "--format=csv,noheader"]
    try:
        return subprocess.check_output(command, text=True).splitlines()[0]
    except (OSError, subprocess.CalledProcessError):
        return ""


def result_path() -> Path:
    """Return the result file of this card, such as ``gpu-nvidia-h100.json``.

    The first word names no card of many others, such as "GeForce" or "Tesla".
    """
    words = steps.card_name().lower().replace("nvidia ", "").split()
    card = "-".join(words) if steps.peak() is None else words[0]
    return Path(__file__).parent / "results" / f"gpu-nvidia-{card}.json"


def earlier(path: Path | None, about: Mapping[str, Any]) -> dict[str, Any]:
    """Return rows that were measured and tables of a result file, if it is of this card."""
    if path is None or not path.exists():
        return {}
    result = json.loads(path.read_text(encoding="utf-8"))
    if result["processor"] != about["processor"]:
        return {}
    tables = {title: one for title, one in result.items() if isinstance(one, dict)}
    rows = (Row(**row) for row in result["rows"] if row["holds"] != NOT_MEASURED)
    return tables | {row.case: row for row in rows}


def kept(before: Mapping[str, Any], found: Mapping[str, Any], name: str) -> dict[str, Any]:
    """Return what was found, and earlier rows of a section that cannot be measured here."""

    def lacks(value: object) -> bool:
        return str(value).startswith(NOT_MEASURED)

    old = {case: row for case, row in before.items() if lacks(found.get(case, found.get(name)))}
    return {**found, **old}


def result_file(name: str) -> Path:
    """Parse an option: an earlier result file, or a new file in a folder that exists."""
    path = Path(name)
    try:
        if path.exists():
            json.loads(path.read_text(encoding="utf-8"))["rows"]
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise argparse.ArgumentTypeError(f"{path} is no result file. Name another") from error
    if not path.parent.is_dir():  # known before minutes of measuring are lost
        raise argparse.ArgumentTypeError(f"there is no folder {path.parent}. Make it first")
    return path


def parsed() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n\n")[0])
    parser.add_argument(
        "--only", choices=[*SECTIONS], metavar="SECTION", nargs="+", help="sections"
    )
    parser.add_argument("--quick", action="store_true", help="tiny sizes: only whether it runs")
    parser.add_argument("--demo", type=Path, default=ROOT / "runs" / "demo", help="demo's result")
    parser.add_argument("--json", type=result_file, metavar="FILE", help="result file")
    parser.add_argument("--here", action="store_true", help=argparse.SUPPRESS)
    return parser.parse_args()


def main() -> int:
    """Run the sections; return 1 if one of them failed."""
    options, began = parsed(), time.monotonic()
    asked = Asked(quick=options.quick, demo=options.demo.resolve())
    if options.here:
        for entry in outcome(options.only[0], asked):
            print(MARK + json.dumps(entry), flush=True)
        return 0
    end_sections_on_request()
    path, about = options.json, {**about_this_machine(), "clocks before": clocks()}
    if path is None and DEVICE.type == "cuda" and not asked.quick:
        path = result_path()
    found, rows_now = earlier(path, about), partial(rows_of, commit=about["commit"])
    for name in options.only or SECTIONS:
        before = {case: found.pop(case) for case in GOALS[name] if case in found}
        left = 60 * MINUTES - (time.monotonic() - began)
        limit = TWO_CARDS.get(name) or min(SECONDS.get(name, 60), left)
        command = [sys.executable, str(Path(__file__).resolve()), "--here", "--only", name]
        command += ["--demo", str(asked.demo)]
        if lacks := missing(name, asked, left=left):
            found[name] = f"{NOT_MEASURED}: needs {lacks}"
        elif asked.quick:
            found |= {
                case: value if isinstance(value, str) else f"{NOT_MEASURED}: --quick"
                for case, value in outcome(name, asked)
            }
        else:
            found |= dict(in_a_process(command, name=name, limit=limit))
        found = kept(before, found, name)
        for one in rows_now(name, found):
            print(f"{one.case}: {one.measured} {one.unit}, goal {one.goal or 'none'}: {one.holds}")
        sys.stdout.flush()
        if path is not None:  # each time: nothing is lost if the whole is stopped
            rows = [asdict(one) for section in GOALS for one in rows_now(section, found)]
            tables = {title: one for title, one in found.items() if isinstance(one, Mapping)}
            result = {**about, "clocks after": clocks(), "rows": rows, **tables}
            path.write_text(json.dumps(result, indent=1) + "\n", encoding="utf-8")
    print(f"{time.monotonic() - began:.0f} seconds")
    return int(any(str(one).startswith("failed") for one in found.values()))


if __name__ == "__main__":
    with steps.WORLD:
        code = main()
    leave(code)
