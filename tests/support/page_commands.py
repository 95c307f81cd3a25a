"""The commands of README.md, CONTRIBUTING.md and the pages in docs/, by block."""

import re
import shlex
from collections.abc import Collection
from dataclasses import dataclass
from pathlib import Path

ROOT = Path(__file__).parents[2]
PAGES = [
    ROOT / "README.md",
    ROOT / "CONTRIBUTING.md",
    *sorted(page for page in (ROOT / "docs").rglob("*.md") if "results" not in page.parent.parts),
]
PROGRAMS = ("mmnmt", "make", "sbatch", "srun", "mpirun", "torchrun", "deepspeed", "python", "pip")
"""What a line of a block that is a command begins with."""


@dataclass(frozen=True)
class Block:
    """A fenced block: its page, the heading above it, what stands behind the fence, its text."""

    page: str
    section: str
    info: str
    text: str

    @property
    def tag(self) -> str:
        """``demo`` of a block that is opened as ``bash demo``; empty where there is none."""
        return self.info.removeprefix("bash").strip()

    def commands(self) -> list[str]:
        """Its lines without comments; one that ends with a backslash goes on in the next."""
        joined = self.text.replace("\\\n", " ")
        lines = [line.split("  #")[0].strip() for line in joined.split("\n")]
        return [line for line in lines if line and not line.startswith("#")]

    def has_commands(self) -> bool:
        """Whether somebody who reads it would type one of its lines."""
        if self.info.split(" ")[0] in ("bash", "sh", "shell", "console"):
            return True
        words = [line.split()[0].removeprefix("$") for line in self.commands()]
        return not self.info and any(Path(word).name in PROGRAMS for word in words)


def blocks(pages: Collection[Path] = PAGES) -> list[Block]:
    """All fenced blocks in the order of the pages."""
    found = []
    for page in pages:
        section = ""
        text = page.read_text(encoding="utf-8")
        for match in re.finditer(r"^#+ ([^\n]+)$|^```([^\n]*)\n(.*?)^```$", text, re.M | re.S):
            if match[1] is not None:
                section = match[1]
            else:
                name = page.relative_to(ROOT).as_posix()
                found.append(Block(name, section, match[2].strip(), match[3]))
    return found


def named_blocks(page: Path, kind: str) -> dict[str, str]:
    """What stands in the blocks of one language, by the word behind the language."""
    found: dict[str, str] = {}
    for block in blocks([page]):
        language, _, name = block.info.partition(" ")
        if language == kind and name:
            found[name] = found.get(name, "") + block.text
    return found


def without_launcher(command: str) -> list[str]:
    """The mmnmt arguments of a command line, whatever starts it; [] for other programs."""
    words = shlex.split(command.split("|")[-1])
    name = Path(words[0]).name
    if name == "mmnmt":
        return words[1:]
    if name == "sbatch":
        return words[words.index("slurm/stage.sbatch") + 1 :]
    for at, word in enumerate(words[:-1]):
        module = words[at + 1].rpartition(".")
        if word in ("-m", "--module") and module[0] in ("pipeline.stages", "data_prep"):
            return [module[2], *words[at + 2 :]]
    return []
