"""Simulate the training stages of a plan, and describe what was found as text or JSON."""

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from pipeline.config.ds_config import AUTO, load_ds_config, name_for
from pipeline.config.recipe import Recipe, load_recipe
from pipeline.errors import ConfigError
from pipeline.estimates import network, operators, simulation, step_time
from pipeline.estimates.network import Cluster
from pipeline.estimates.simulation import Choice, Simulator
from pipeline.jobs.plan import Task
from pipeline.machine import Gpus
from pipeline.terminal import counted, text_table

PER_UPDATES = 100_000
"""Updates by which choices are compared."""


@dataclass(frozen=True)
class SimulatedStages:
    """Stages whose updates are equal, and what was found for them.

    Attributes:
        recipe: recipe of the first stage.
        updates: stage → number of updates.
        parameters: parameters of the model.
        choices: the best choices of every number of GPUs, fewest GPUs first.
        refused: number of GPUs → why none of its choices can be taken.
    """

    recipe: Recipe
    updates: dict[str, int]
    parameters: int
    choices: Sequence[Choice]
    refused: Mapping[int, str]

    def lines(self) -> Iterator[str]:
        """Yield a title, the table of choices, and why other numbers of GPUs have none."""
        batches = self.recipe.batches
        yield (
            f"{', '.join(self.updates)}: {self.parameters / 1e6:,.0f} M parameters, "
            f"{batches.micro_batches:,} micro-batches of {batches.tokens:,} tokens per update"
        )
        if self.choices:
            yield text_table(_HEAD, [_row(choice) for choice in self.choices])
        for reason, ranks in _merged(self.refused).items():
            yield f"{_listed_ranks(ranks)} cannot serve: {reason}"

    def answers(self) -> Iterator[list[str]]:
        """Yield a row per stage: its updates, the fastest choice, and that of least GPU-hours."""
        fastest = min(self.choices, key=lambda one: one.time.seconds, default=None)
        cheapest = min(self.choices, key=lambda one: one.gpu_hours(1), default=None)
        for name, updates in self.updates.items():
            yield [name, f"{updates:,}", *_answer(fastest, updates), *_answer(cheapest, updates)]

    def to_json(self) -> dict[str, Any]:
        """Return the stages as a JSON object."""
        return {
            "updates": self.updates,
            "parameters": self.parameters,
            "choices": [choice.to_json() for choice in self.choices],
            "refused": self.refused,
        }


def simulate_stages(
    tasks: Sequence[Task],
    cluster: Cluster,
    *,
    sizes_of: Callable[[Recipe], dict[str, int]],
    most: int,
) -> list[SimulatedStages]:
    """Simulate stages of a plan; those that differ in the number of updates only, just once.

    Args:
        tasks: stages that train a translation model.
        cluster: nodes, GPUs and links.
        sizes_of: returns the sizes of a recipe's model that the data decides.
        most: choices to keep per number of GPUs.

    Raises:
        ConfigError: a size is not known, or a ds_config does not exist.
    """
    found: dict[str, SimulatedStages] = {}
    for task in tasks:
        recipe = load_recipe(task.recipe or None, task.overrides)
        key = recipe.model_dump_json(
            include={
                **dict.fromkeys(("model", "batches", "loss", "tokenizer", "shards"), True),
                "training": {"dropout", "attention_dropout", "moe_dropout", "recompute_layers"},
            }
        )
        key += task.planned.ds_config
        if key not in found:
            try:
                found[key] = _simulated(task, recipe, cluster, sizes=sizes_of(recipe), most=most)
            except ConfigError as error:
                raise ConfigError(f"Stage {task.name!r}: {error}") from error
        found[key].updates[task.name] = recipe.training.updates
    return list(found.values())


def _simulated(
    task: Task, recipe: Recipe, cluster: Cluster, *, sizes: dict[str, int], most: int
) -> SimulatedStages:
    has_bfloat16 = cluster.device.has_bfloat16
    name = task.planned.ds_config
    config = load_ds_config(name_for(Gpus(1, has_bfloat16)) if name == AUTO else name)
    simulator = Simulator(
        recipe,
        cluster,
        ds_config=simulation.in_half_precision_of(config, has_bfloat16=has_bfloat16),
        **sizes,
    )
    choices: list[Choice] = []
    refused = {}
    for ranks in simulation.worlds(cluster, micro_batches=recipe.batches.micro_batches):
        try:
            choices += simulator.best(ranks, most=most)
        except ConfigError as error:
            refused[ranks] = str(error)
    return SimulatedStages(recipe, {}, simulator.parameters, choices, refused)


_HEAD = [
    *("GPUs", "EP", "ZeRO", "GiB", "ZeRO GB", "rows GB", "ms/update"),
    *("compute", "optimizer", "all-to-all", "waits", "reduce", "gather"),
    *(f"h/{PER_UPDATES // 1000}k", "GPU h"),
]


def _row(choice: Choice) -> list[str]:
    return [
        f"{choice.ranks:,}",
        str(choice.expert_parallel_size),
        str(choice.zero_stage),
        f"{choice.bytes / 2**30:.1f}",
        f"{choice.sent.zero / 1e9:.2f}",
        f"{choice.sent.rows / 1e9:.2f}",
        f"{1000 * choice.time.seconds:,.0f}",
        *(f"{100 * share:.0f} %" for share in choice.time.shares().values()),
        f"{choice.hours(PER_UPDATES):,.1f}",
        f"{choice.gpu_hours(PER_UPDATES):,.0f}",
    ]


def answers_table(stages: Sequence[SimulatedStages]) -> str:
    """Return the fastest and the cheapest choice of every stage as a table."""
    head = ["stage", "updates", "fastest", "hours", "GPU h", "cheapest", "hours", "GPU h"]
    return text_table(head, [row for one in stages for row in one.answers()])


def _merged(refused: Mapping[int, str]) -> dict[str, list[int]]:
    """Return reason → numbers of GPUs; reasons that differ in that number alone are merged."""
    merged: dict[str, tuple[str, list[int]]] = {}
    for ranks, reason in refused.items():
        pattern = reason.replace(f"{ranks} ranks", "").replace(f"{ranks:,} ranks", "")
        merged.setdefault(pattern, (reason, []))[1].append(ranks)
    return dict(merged.values())


def _listed_ranks(ranks: list[int]) -> str:
    return f"{', '.join(f'{each:,}' for each in ranks)} {'GPU' if ranks == [1] else 'GPUs'}"


def _answer(choice: Choice | None, updates: int) -> list[str]:
    if choice is None:
        return ["none fits", "", ""]
    experts = f", EP {choice.expert_parallel_size}"
    return [
        f"{counted(choice.ranks, 'GPU')}{experts if choice.expert_parallel_size > 1 else ''}, "
        f"ZeRO {choice.zero_stage}",
        f"{choice.hours(updates):,.1f}",
        f"{choice.gpu_hours(updates):,.0f}",
    ]


def assumptions(cluster: Cluster, *, device: str) -> list[str]:
    """Return the assumptions behind the times and choices, one per line."""
    within, between = cluster.within, cluster.between
    return [
        "EP: GPUs that share one copy of the experts. GiB: memory. GB: sent by a GPU per update.",
        "Estimated, not measured. Assumptions:",
        f"- Work takes its least time on one {device.upper()}, as in mmnmt estimate, "
        f"divided by {simulation.EFFICIENCY}: so 8 V100 need MMNMT's 28 h for 100,000 dense "
        "updates.",
        f"  Every micro-batch is full, with sentences of {operators.SENTENCE_LENGTH} tokens; "
        f"{1e6 * step_time.LAUNCH_SECONDS:.3g} µs per launch. {cluster.device.source}.",
        f"- Links reach {100 * network.LINK_SHARE:.0f} % of: {within.bandwidth / 1e9:.4g} GB/s "
        f"each way of a GPU within the node ({within.name}); {cluster.adapters} × "
        f"{between.bandwidth / 1e9:.4g} GB/s each way of a node ({between.name}).",
        f"  {1e6 * network.CALL_SECONDS:.2g} µs per call; {1e6 * within.step_seconds:.2g} µs per "
        f"step within a node, {1e6 * between.step_seconds:.2g} µs between nodes, as NCCL assumes; "
        "the faster of ring and tree.",
        "- DeepSpeed all-reduces gradients, once per update at ZeRO 1 and after each pass at "
        "ZeRO 2; with overlap_comm, behind the backward pass.",
        f"- The rank with the most rows has {simulation.IMBALANCE} times the mean, or the capacity "
        f"factor; {1e6 * simulation.HOST_WAIT_SECONDS:.3g} µs per wait of the host.",
        f"- A run may use {100 * simulation.MEMORY_SHARE:.0f} % of a GPU's memory. No offload.",
        "- Without validation, training states, reading of data, and start of the job.",
    ]
