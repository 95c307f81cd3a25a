"""Plans as they ship, run whole with tiny models on made-up pairs, a stage a process."""

import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from pipeline import cli
from pipeline.artifacts.raw_input import RawInput
from pipeline.jobs.plan import Plan, ResolvedPlan, load_plan, resolve_plan
from support.forked import forking
from support.raw_trees import write

COMMON = """
optimizer = { warmup_updates = 1 }
decoding = { beam_size = 1, max_length_ratio = 0.1, max_extra_length = 2 }
evaluation = { language_accuracy = false }
logging = { every = 1 }
[training]
updates = 2
validate_every = 2
checkpoint_every = 2
resource_thresholds = {thresholds}
[model]
encoder_layers = 2
decoder_layers = 2
width = 16
feed_forward_width = 32
num_heads = 2
"""
TINY = f"""
tokenizer = {{ kind = "bytes" }}
batches = {{ tokens = 400, micro_batches = 2, window_steps = 2, evaluation_tokens = 2000 }}
{COMMON}
max_positions = 64
[corpus]
languages = []
"""


def placed_small(
    name: str,
    folder: Path,
    *,
    thresholds: Sequence[int],
    given: Mapping[str, Path],
    wanted: Sequence[str] = (),
    tiny: str = TINY,
) -> ResolvedPlan:
    """A plan as it stands, on CPU, one process a stage, with tiny models.

    Where stages are wanted by name, these and what they need, and no others.
    """
    overlay = folder / "tiny.toml"
    overlay.write_text(tiny.replace("{thresholds}", str(list(thresholds))), encoding="utf-8")
    whole = load_plan(name)
    chosen = with_needs(whole, wanted) if wanted else set(whole.stages)
    on_cpu = {
        stage: planned.model_copy(update={"ds_config": "cpu_fp32"})
        for stage, planned in whole.stages.items()
        if stage in chosen
    }
    return resolve_plan(
        whole.model_copy(update={"stages": on_cpu}),
        out_dir=folder / "run",
        overlay=str(overlay),
        given={key: RawInput((path,)) for key, path in given.items()},
        processes=1,
    )


def with_needs(plan: Plan, wanted: Sequence[str]) -> set[str]:
    """Names of stages and of all that they read from."""
    found: set[str] = set()
    left = list(wanted)
    while left:
        name = left.pop()
        found.add(name)
        left += plan.stages[name].dependencies()
    return found


def write_tree(root: Path, *, lines: Mapping[str, int], validated: Sequence[str]) -> None:
    """Pairs of English with languages, each with so many training lines, and one test line.

    A line of a language is its code and a number; each language has a word in its own script.
    """
    words = {"hi": "घर", "ru": "дом", "el": "σπίτι", "zh": "房子", "ar": "بيت"}

    def text(code: str, start: int, count: int) -> str:
        word = words.get(code, f"house{code}")
        return "".join(f"{word} {start + number}\n" for number in range(count))

    files = {}
    for code, count in lines.items():
        pair = "-".join(sorted((code, "en")))
        for split, start, number in (
            ("train", 100, count),
            ("dev", 1000, 2 * (code in validated)),
            ("test", 2000, 1),
        ):
            for side in (code, "en"):
                if number:
                    name = f"supervised/{pair}/opus.{pair}-{split}.{side}"
                    files[name] = text(side, start, number)
    write(root, files)


def as_child(arguments: Sequence[str], **_: object) -> int:
    """Run a stage in a process of its own, forked from one that has loaded its code."""
    child = forking().Process(target=run_stage, args=(list(arguments[2:]),))
    child.start()
    child.join()
    assert child.exitcode is not None
    return child.exitcode


def run_stage(arguments: list[str]) -> None:
    sys.exit(cli.main(arguments))
