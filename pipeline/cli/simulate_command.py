"""Simulate the training stages of a plan on a cluster: ``mmnmt simulate``."""

import argparse
import json

from pipeline.cli.parser import Command, add_set_option, whole_number
from pipeline.cli.recipe_commands import add_size_options, model_sizes
from pipeline.config.overrides import parse_overrides
from pipeline.config.recipe import Recipe
from pipeline.errors import ConfigError
from pipeline.jobs.plan import load_plan, place_plan, plan_names

MAX_NODES, MAX_DEVICES = 4096, 64
MAX_CHOICES = 1000
SIMULATED = ("pretrain", "finetune")
"""Stages that are simulated; those of extensions train models of their own."""


def _simulate(options: argparse.Namespace) -> int:
    placed = place_plan(
        load_plan(options.plan),
        overlay=options.overlay,
        overrides=parse_overrides(options.overrides),
    ).chosen(only=options.only)
    tasks = [task for task in placed.tasks if task.stage.name in SIMULATED]
    if not tasks:
        raise ConfigError(
            f"Plan {options.plan!r} has no stage to simulate. Name one that runs "
            f"{' or '.join(SIMULATED)}."
        )
    from pipeline.estimates import network, simulated_plan  # once the plan is known to be good

    cluster = network.make_cluster(
        options.device,
        nodes=options.nodes,
        devices_per_node=options.devices_per_node,
        within=options.link_in_node,
        between=options.link,
        adapters=options.adapters,
    )
    stages = simulated_plan.simulate_stages(
        tasks,
        cluster,
        sizes_of=lambda recipe: _sizes(recipe, options),
        most=options.choices,
    )
    if options.json:
        asked = ("device", "nodes", "devices_per_node")
        document = {name: getattr(options, name) for name in asked}
        document["stages"] = [one.to_json() for one in stages]
        print(json.dumps(document, indent=1, ensure_ascii=False))
        return 0
    for one in stages:
        print("\n".join(one.lines()) + "\n")
    print(simulated_plan.answers_table(stages) + "\n")
    print("\n".join(simulated_plan.assumptions(cluster, device=options.device)))
    return 0


def _sizes(recipe: Recipe, options: argparse.Namespace) -> dict[str, int]:
    """Return the sizes of a stage's model; options apply to the stages whose models need them."""
    model = recipe.model
    by_group = model.moe is not None and model.moe.decoder_router == "language_group"
    return model_sizes(
        recipe,
        vocabulary=options.vocabulary,
        groups=options.groups if by_group else None,
        languages=options.languages if model.language_modules is not None else None,
    )


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("plan", help=f"{', '.join(plan_names())}, or PATH.toml")
    parser.add_argument(
        "--nodes", type=whole_number(MAX_NODES), required=True, metavar="N", help="nodes at most"
    )
    parser.add_argument(
        "--devices-per-node",
        type=whole_number(MAX_DEVICES),
        default=8,
        metavar="D",
        help="GPUs of a node (default: 8)",
    )
    parser.add_argument(
        "--device",
        default="h100",
        metavar="GPU",
        help="v100, a100, h100 or h200 (default: %(default)s)",
    )
    links = "nvlink, pcie3, pcie4, pcie5, ib100, ib200, ib400, eth10, eth25, eth100, or GB/s"
    parser.add_argument(
        "--link",
        default="ib400",
        metavar="LINK",
        help=f"adapter between nodes: {links} each way (default: %(default)s)",
    )
    parser.add_argument(
        "--link-in-node",
        default="nvlink",
        metavar="LINK",
        help="link of a GPU to the others of its node, of the same names (default: %(default)s)",
    )
    parser.add_argument(
        "--adapters",
        type=whole_number(MAX_DEVICES),
        metavar="A",
        help="adapters of a node (default: one per GPU; one of Ethernet)",
    )
    parser.add_argument(
        "--choices",
        type=whole_number(MAX_CHOICES),
        default=1,
        metavar="C",
        help="choices to show per number of GPUs, fastest first (default: 1)",
    )
    parser.add_argument(
        "--with", dest="overlay", default="", metavar="OVERLAY", help="overlay for every recipe"
    )
    add_set_option(parser)
    parser.add_argument(
        "--only",
        action="append",
        default=[],
        metavar="STAGE",
        help="simulate STAGE alone (repeatable)",
    )
    add_size_options(parser)


SIMULATE_COMMANDS = (
    Command(
        "simulate",
        "estimate how long a plan trains on a cluster: GPUs, expert-parallel size, ZeRO stage",
        _add_options,
        _simulate,
    ),
)
