"""A plan of two real stages and the raw tree it reads, to be run within the process of a test."""

from collections.abc import Sequence

from pipeline import cli

RECIPE = '[corpus]\nsource = "tree"\n[clean]\n'
RAW = {
    f"en-de/{split}.{code}": "".join(f"{split} line {number} {code}\n" for number in range(3))
    for split in ("train", "valid", "test")
    for code in ("en", "de")
}
PLAN = """
[inputs]
text = "a tree"
[stages.corpus]
run = "import_corpus"
recipe = "{recipe}"
inputs = {{ raw = "$text" }}
[stages.clean]
run = "clean"
recipe = "{recipe}"
inputs = {{ corpus = "corpus" }}
"""


def in_this_process(arguments: Sequence[str], **_: object) -> int:
    return cli.main(arguments[2:])
