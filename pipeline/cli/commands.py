"""Declare all commands that are not stages, and the options that stages share, in one table."""

import argparse
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, TypeAlias

from data_prep.settings import MAX_VOCABULARY
from pipeline.cli import model_commands, plan_commands
from pipeline.cli.parser import (
    Command,
    Option,
    path_option,
    place,
    share,
    update_window,
    whole_number,
)
from pipeline.config.ds_config import AUTO, ds_config_names
from pipeline.config.settings import MAX_EXPERTS, MAX_GROUPS, MAX_STATES
from pipeline.jobs.launch import MAX_PROCESSES
from pipeline.jobs.plan import plan_names

MAX_RANKS = 10**5
"""Most ranks of a job."""

_PLAN = f"{', '.join(plan_names())}, or PATH.toml"
_SET = (
    "--set SECTION.SETTING=VALUE...  change a setting after all overlays, for example "
    "training.updates=300; VALUE is a number, true, false, a word or another TOML value "
    "(repeatable)"
)
_DS_CONFIG = (
    f"--ds-config NAME  how DeepSpeed uses the machine: {', '.join(ds_config_names())}, or "
    "PATH.json (default: %(default)s, by the machine)"
)
_OUTPUT = "--out DIR!  directory of the new artifact"
_OVERWRITE = "--overwrite  replace an existing artifact"
_JSON = "--json  JSON on standard output"
_PLACE = "--out DIR  directory of all stages (default: runs/PLAN)"
_REBUILD = (
    "--rebuild STAGE...  let STAGE train anew if its settings or inputs differ; the earlier "
    "training is kept as STAGE.before-1, or STAGE.before-1.run if unfinished (repeatable)"
)
_CHANGES = f"""--with OVERLAY  overlay for every recipe
    {_SET}
    --input NAME=PATH+  outside data that the plan needs
    --only STAGE...  run only STAGE; it reads existing artifacts as they are (repeatable)
    --until STAGE...  run STAGE and all that it depends on (repeatable)"""
_SIZES = f"""--vocabulary V  rows of the embedding (default: the recipe's vocabulary, without \
language tokens)
    --groups G  language groups of routers (default: the recipe's num_groups)
    --languages L  languages with modules (default: as the recipe says)
    {_JSON}"""
_TABLE = f"""
run: run the stages of a plan that are not up to date
    plan  {_PLAN}
    {_PLACE}
    {_CHANGES}
    --dry-run  print what would run and why; start nothing
    {_REBUILD}
    --processes N  number of processes of every stage, instead of the plan's
    --jobs N  stages to run side by side where none needs another, each of ranks as one process \
(default: %(default)s)
status: show which stages of a plan are done, running, waiting, stale or missing, and why
    plan  {_PLAN}
    {_PLACE}
    {_CHANGES}
submit: submit the stages of a plan that are not up to date as SLURM jobs
    plan  {_PLAN}
    {_PLACE}
    {_CHANGES}
    --site FILE!  site file (TOML) of the cluster
    --dry-run  print the commands as lines of bash; run none
    {_REBUILD}
cancel: cancel the SLURM jobs of a plan
    plan  {_PLAN}
    {_PLACE}
    --only STAGE...  cancel only this job (repeatable)
logs: print the log of a stage's newest SLURM job
    plan  {_PLAN}
    {_PLACE}
    stage STAGE  print the log of the newest job of this stage
    --rank K  print only the lines of this rank
doctor: check this machine for a plan: packages, devices, storage, disk space; with fixes
    plan  {_PLAN}
    {_PLACE}
    {_CHANGES}
    --site FILE  site file (TOML) of a cluster, to check it
describe: show a recipe's resolved settings and its number of parameters, or list the recipes
    --recipe NAME  a recipe, with overlays (default: list all recipes)
    {_SET}
    {_SIZES}
    --settings  instead: list every setting with its value and where that comes from
estimate: estimate memory, kernel launches and time of a recipe on a GPU, or a plan on several
    name RECIPE|PLAN  a recipe, with overlays, or a plan; a name of both is the plan
    --device NAME  a100, h100, h200, or cpu for memory only (default: %(default)s)
    --processes N  ranks of the run (default: the recipe's expert_parallel_size); of a plan: the \
most GPUs (default: {plan_commands.NODE})
    {_DS_CONFIG}
    {_SET}
    --only STAGE...  only this stage of the plan (repeatable)
    {_SIZES}
report: write a page that compares runs: losses, budgets, experts, scores, translations
    runs RUN+  DIR, NAME=DIR or, for each of several runs of a system, NAME@SEED=DIR; a \
checkpoint, translations, an evaluation, an analysis, or the folder of a plan
    --out FILE!  HTML page to write
serve: serve checkpoints over HTTP, with the API of LibreTranslate and a page
    runs [NAME=]RUN+  checkpoint, and the name that requests choose it by (default: of its \
directory)
    --port N  port to listen on; 0 takes a free one (default: %(default)s)
    --host ADDRESS  address to listen on; 0.0.0.0 lets other machines in (default: %(default)s)
    --recipe NAME  recipe with the settings of the search (reads decoding, tokenizer.segmenters)
    {_SET}
    --key-file FILE  file with the key that requests must send as api_key (default: they need none)
    --max-characters N  most characters of a request (default: %(default)s)
    --max-requests N  most requests that wait or are translated; more get status 429 (default: \
%(default)s)
    --max-seconds N  longest time of a request (default: %(default)s)
upcycle: assemble a model from modules of trained models, as a file declares
    assembly ASSEMBLY.toml  declaration of the assembly
    --dry-run  check all but the values of tensors and print the plan; write nothing
    --out DIR  directory of the new artifact; without it, pass --dry-run
    {_OVERWRITE}
    --processes N  files that are written at a time (default: %(default)s)
export: write a checkpoint as other software loads it, with its tokenizer and a model card
    checkpoint CHECKPOINT
    --to  format of the export
    --out DIR!  directory of the export
    --target-group GROUP  target group of a language-group router, by number or language
    --license NAME  license that the model card names
    --scores EVALUATION  evaluation that the model card quotes
    {_OVERWRITE}
checkpoint inspect: show the model, parameters, update and files of an artifact
    directory DIR
    --tensors  list every tensor
    --recipe  instead: print an overlay with the settings that a checkpoint decides
    {_JSON}
checkpoint verify: compare every file of an artifact, of any kind, with its digest
    directory DIR
checkpoint diff: show in which settings and tensors two checkpoints differ
    first A
    second B
checkpoint average: average checkpoints, or the training states of a run
    checkpoints DIR*
    --run OUT.run  average training states of this run instead
    --last N  number of last states to average
    {_OUTPUT}
    {_OVERWRITE}
checkpoint import: convert a checkpoint of other software, or extract the tokenizer of a checkpoint
    source SOURCE  directory of Hugging Face, or .pt file of fairseq; with --tokenizer a checkpoint
    --tokenizer  extract the tokenizer of a checkpoint, to make shards with it
    --dictionary FILE  of fairseq: dict.txt of the model
    --sentencepiece FILE  of fairseq: SentencePiece model of the dictionary
    --languages CODE+  of fairseq: languages in the order of the task, if neither checkpoint nor \
dictionary has them
    {_OUTPUT}
    {_OVERWRITE}
checkpoint prune: keep the experts that serve the given target languages (--experts, --keep-mass), \
or else the language modules of the given languages
    directory DIR
    --languages CODE+  languages to keep
    --experts K  keep so many experts per layer
    --keep-mass SHARE  keep the fewest experts with this share of the routes of every layer
    {_OUTPUT}
    {_OVERWRITE}
checkpoint fold: fold the shared route of a model into a checkpoint without language modules
    directory DIR
    {_OUTPUT}
    {_OVERWRITE}
translate: translate lines of standard input to standard output
    --checkpoint DIR  model to translate with (default: the best in \
{model_commands.DEMO} by validation perplexity)
    --recipe NAME  recipe with the settings of the search
    {_SET}
    --from CODE!  source language, as en
    --to CODE!  target language, as de
    --n-best N  print the N best hypotheses of different text, or N samples, with scores; each \
line is a JSON object
    --word-scores  print the log-probability of every word; each line is a JSON object
    --alignments  print the source word that each word aligns with; each line is a JSON object
    --banned PHRASE...  phrase that no translation may contain, within a word either (repeatable)
    --must PHRASE...  phrase that every translation must contain, as the vocabulary spells it \
(repeatable)
    --must-file FILE  file whose line n has the phrases that translation n must contain, \
tab-separated
    --prefixes  lines contain, after a tab, the beginning of their translation
STAGE: options of stages, with the sections and the module of each
    --recipe NAME  recipe: a name of `mmnmt describe` or PATH.toml, with overlays as \
NAME+OVERLAY (reads SECTIONS)
    {_SET}
    {_OUTPUT}
    {_OVERWRITE}
    --if-stale  with --overwrite, keep an artifact that is up to date
    --processes N  processes on this machine (default: 1); ignored under a launcher
    --mpi  spread the work over the ranks of mpirun -n N python -m mpi4py.futures -m \
MODULE, which share these directories (needs the extra mpi)
    {_DS_CONFIG}
    --profile FIRST:LAST  profile these updates on rank 0: a trace and a table of operators in \
OUT.profile
"""
"""Commands, each with its options: a name, a metavar and, after two spaces, the help.

An option ``--NAME`` without a metavar is a switch unless ``_SETTINGS`` has it. Behind a metavar,
``!`` means required, ``...`` repeatable, and ``+`` and ``*`` several values.
"""

Type: TypeAlias = Callable[[str], Any]
_SETTINGS: Mapping[str, Type | dict[str, Any]] = {
    "--ds-config": {"default": AUTO},
    "--experts": whole_number(MAX_EXPERTS),
    "--from": {"dest": "source"},
    "--groups": whole_number(MAX_GROUPS),
    "--input": {"default": []},
    "--jobs": {"type": whole_number(MAX_PROCESSES), "default": 1},
    "--keep-mass": share,
    "--last": whole_number(MAX_STATES),
    "--must": {"dest": "required"},
    "--n-best": whole_number(1000),
    "--processes": whole_number(MAX_PROCESSES),
    "--profile": update_window,
    "--rank": whole_number(MAX_RANKS, least=0),
    "--scores": path_option,
    "--set": {"dest": "overrides"},
    "--vocabulary": whole_number(MAX_VOCABULARY),
    "--with": {"dest": "overlay"},
    "checkpoint diff first": path_option,
    "checkpoint diff second": path_option,
    "checkpoint import --languages": {"default": []},
    "checkpoint import source": path_option,
    "checkpoint prune --languages": {"required": True},
    "describe --languages": whole_number(MAX_GROUPS),
    "doctor plan": {"nargs": "?"},
    "estimate --device": {"type": str.lower, "default": "h100"},
    "estimate --languages": whole_number(MAX_GROUPS),
    "estimate --processes": whole_number(MAX_RANKS),
    "export --license": {"default": "unknown"},
    "export --to": {"choices": model_commands.FORMATS, "required": True},
    "export checkpoint": path_option,
    "serve --host": {"default": "127.0.0.1"},
    "serve --max-characters": {"type": whole_number(10**5), "default": 5000},
    "serve --max-requests": {"type": whole_number(10**5), "default": 64},
    "serve --max-seconds": {"type": whole_number(86400), "default": 60},
    "serve --port": {"type": whole_number(65535, least=0), "default": 8080},
    "translate --to": {"dest": "target"},
    "upcycle --processes": {"type": whole_number(MAX_PROCESSES), "default": 1},
}
"""Option, behind its command if another command has that name → its type, or further settings."""

_ACTIONS: Mapping[str, Callable[[argparse.Namespace], int]] = {
    "run": plan_commands.run,
    "status": plan_commands.status,
    "submit": plan_commands.submit,
    "cancel": plan_commands.cancel,
    "logs": plan_commands.logs,
    "doctor": plan_commands.doctor,
    "describe": plan_commands.describe,
    "estimate": plan_commands.estimate,
    "report": model_commands.report,
    "serve": model_commands.serve,
    "upcycle": model_commands.upcycle,
    "export": model_commands.making(model_commands.export),
    "checkpoint inspect": model_commands.inspect,
    "checkpoint verify": model_commands.verify,
    "checkpoint diff": model_commands.diff,
    "checkpoint average": model_commands.average,
    "checkpoint import": model_commands.making(model_commands.import_),
    "checkpoint prune": model_commands.making(model_commands.prune),
    "checkpoint fold": model_commands.making(model_commands.fold),
    "translate": model_commands.filter_lines,
}
_MARKS: Mapping[str, dict[str, Any]] = {
    "!": {"required": True},
    "...": {"action": "append", "default": []},
    "+": {"nargs": "+", "action": "extend"},
    "*": {"nargs": "*"},
}
_ROW = re.compile(
    r"(?P<name>\S+)(?: (?P<metavar>\S+?)(?P<mark>!|\.\.\.|\+|\*|))?(?:  +(?P<help>.*))?"
)


def _parsed(table: str) -> Iterator[tuple[str, str, tuple[Option, ...]]]:
    """Yield name, description and options of each command of a table."""
    for block in re.split(r"\n(?=\S)", table.strip()):
        head, *rows = block.split("\n")
        name, _, about = head.partition(": ")
        yield name, about, tuple(_option(row.strip(), name) for row in rows)


def _option(row: str, command: str) -> Option:
    cells = _ROW.fullmatch(row)
    assert cells is not None, row
    name, metavar = cells["name"], cells["metavar"]
    further = _SETTINGS.get(f"{command} {name}", _SETTINGS.get(name, {}))
    found: dict[str, Any] = {"help": cells["help"], **_MARKS.get(cells["mark"] or "", {})}
    if metavar is not None:
        found |= {"metavar": metavar, **({"type": _TYPES[metavar]} if metavar in _TYPES else {})}
    elif name.startswith("--") and not further:
        found["action"] = "store_true"
    return name, found | ({"type": further} if callable(further) else further)


_TYPES: Mapping[str, Type] = {
    **dict.fromkeys(("DIR", "FILE", "OUT.run", "ASSEMBLY.toml"), path_option),
    **dict.fromkeys(("NAME", "OVERLAY", "RECIPE|PLAN", "RUN", "[NAME=]RUN", "STAGE"), place),
}
"""Metavars of paths, and of names and paths."""

_ENTRIES = {name: (about, options) for name, about, options in _parsed(_TABLE)}
STAGE_OPTIONS = dict(_ENTRIES["STAGE"][1])
"""Option of stages → its settings."""
COMMANDS = {
    name: Command(name, about, _ACTIONS[name], options)
    for name, (about, options) in _ENTRIES.items()
    if name in _ACTIONS
}
FILTER = COMMANDS.pop("translate")
"""The form of ``mmnmt translate`` with ``--from`` and ``--to``; the other one is a stage."""
