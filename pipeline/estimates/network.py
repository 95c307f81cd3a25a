"""Estimate the time of exchanges between GPUs: all-reduce, all-gather and all-to-all.

A cluster has equal nodes of equal GPUs, one link between the GPUs of a node, and adapters that
connect the nodes. An exchange takes a call, its steps, and its bytes over the slower link. The
costs of calls and steps and the ring's and tree's numbers of steps are those by which NCCL itself
chooses an algorithm (``src/graph/tuning.cc``).

Legend: n ranks of a group, m nodes that it spans, g of its ranks on a node, S bytes.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass

from pipeline.errors import ConfigError, hint
from pipeline.estimates.step_time import Device, device_named

LINK_SHARE = 0.8
"""Share of a link's nominal bandwidth that an exchange reaches: an assumption."""
CALL_SECONDS = 8.4e-6
"""Time of a call before its first step; NCCL's model, protocol Simple, ring."""
NVLINK_STEP, PCIE_STEP, NETWORK_STEP = 3.4e-6, 5.7e-6, 9.6e-6
"""Seconds per step over a link; NCCL's model, protocol Simple, ring."""
PEERS_AT_ONCE = 8
"""Peers with which a rank of an all-to-all exchanges in one step: an assumption."""
MAX_GIGABYTES = 10**5
"""Largest bandwidth of a link that can be given in GB/s."""


@dataclass(frozen=True)
class Link:
    """A connection of a GPU, or an adapter of a node.

    Attributes:
        name: name of the preset, or the bandwidth as it was given.
        bandwidth: bytes per second each way.
        step_seconds: time of a step of a ring beside its bytes.
        is_per_node: whether a node usually has one, and not one per GPU.
    """

    name: str
    bandwidth: float
    step_seconds: float
    is_per_node: bool = False


NVLINK = "nvlink"
LINKS: dict[str, Link] = {
    link.name: link
    for link in (
        Link("pcie3", 15.75e9, PCIE_STEP),  # PCI-SIG: 16 lanes of 8 GT/s, 128b/130b
        Link("pcie4", 31.5e9, PCIE_STEP),
        Link("pcie5", 63e9, PCIE_STEP),
        Link("ib100", 12.5e9, NETWORK_STEP),  # InfiniBand EDR, 4 lanes: 100 Gbit/s
        Link("ib200", 25e9, NETWORK_STEP),  # HDR
        Link("ib400", 50e9, NETWORK_STEP),  # NDR
        Link("eth10", 1.25e9, NETWORK_STEP, is_per_node=True),
        Link("eth25", 3.125e9, NETWORK_STEP, is_per_node=True),
        Link("eth100", 12.5e9, NETWORK_STEP, is_per_node=True),
    )
}
LINK_NAMES = (NVLINK, *LINKS)


def link_named(name: str, device: Device) -> Link:
    """Return a link: ``nvlink``, which is the GPU's own, a preset, or a number of GB/s each way.

    Raises:
        ConfigError: it is none of these.
    """
    if name == NVLINK:
        return Link(NVLINK, device.nvlink, NVLINK_STEP)
    if name in LINKS:
        return LINKS[name]
    try:
        gigabytes = float(name)
    except ValueError:
        choices = hint(name, LINK_NAMES, otherwise="or give a number of GB/s")
        raise ConfigError(f"There is no link {name!r}{choices}") from None
    if not 0 < gigabytes <= MAX_GIGABYTES:
        raise ConfigError(
            f"A link of {name} GB/s cannot be. Choose more than 0 and at most {MAX_GIGABYTES:,}."
        )
    return Link(f"{gigabytes:g} GB/s", gigabytes * 1e9, NETWORK_STEP)


@dataclass(frozen=True)
class Cluster:
    """Equal nodes of equal GPUs.

    Attributes:
        device: the GPU.
        nodes: number of nodes.
        devices_per_node: GPUs of a node.
        within: link of each GPU to the others of its node.
        between: adapter that connects a node to the others.
        adapters: adapters of a node, which its GPUs share evenly.
    """

    device: Device
    nodes: int
    devices_per_node: int
    within: Link
    between: Link
    adapters: int

    @property
    def devices(self) -> int:
        """Return the number of GPUs."""
        return self.nodes * self.devices_per_node

    @property
    def within_bandwidth(self) -> float:
        """Return the bytes per second that a GPU sends to others of its node."""
        return LINK_SHARE * self.within.bandwidth

    @property
    def between_bandwidth(self) -> float:
        """Return the bytes per second that a node sends to others."""
        return LINK_SHARE * self.adapters * self.between.bandwidth


def make_cluster(
    device: str,
    *,
    nodes: int,
    devices_per_node: int,
    within: str,
    between: str,
    adapters: int | None = None,
) -> Cluster:
    """Return a cluster of a named GPU and links of :func:`link_named`.

    Without a number of adapters, a node has one per GPU, or one of Ethernet.

    Raises:
        ConfigError: there is no such device or link.
    """
    gpu = device_named(device)
    adapter = link_named(between, gpu)
    return Cluster(
        device=gpu,
        nodes=nodes,
        devices_per_node=devices_per_node,
        within=link_named(within, gpu),
        between=adapter,
        adapters=adapters or (1 if adapter.is_per_node else devices_per_node),
    )


@dataclass(frozen=True)
class RankGroup:
    """Ranks that exchange, of several such groups that exchange at the same time.

    Attributes:
        ranks: n, number of ranks.
        per_node: g, its ranks on a node.
        groups_per_node: number of groups that share the adapters of a node.
    """

    ranks: int
    per_node: int
    groups_per_node: int = 1

    @property
    def nodes(self) -> int:
        """Return m, the number of nodes that it spans."""
        return math.ceil(self.ranks / self.per_node)


def data_parallel_group(cluster: Cluster, ranks: int) -> RankGroup:
    """Return the group of all ranks, which fill one node after the other."""
    return RankGroup(ranks, min(ranks, cluster.devices_per_node))


def expert_data_group(cluster: Cluster, ranks: int, *, size: int) -> RankGroup:
    """Return the ranks that hold the same experts: every ``size``-th rank."""
    on_node = min(ranks, cluster.devices_per_node)
    count = ranks // size
    return RankGroup(count, min(count, max(on_node // size, 1)), min(size, on_node))


def all_reduce_seconds(cluster: Cluster, group: RankGroup, size: float) -> float:
    """Return the time to sum S bytes over a group: a reduce-scatter and an all-gather."""
    return _faster(cluster, group, size, rounds=2)


def all_gather_seconds(cluster: Cluster, group: RankGroup, size: float) -> float:
    """Return the time until all ranks have all S bytes; a reduce-scatter takes as long."""
    return _faster(cluster, group, size, rounds=1)


def _faster(cluster: Cluster, group: RankGroup, size: float, *, rounds: int) -> float:
    """Return the time of the faster of two algorithms; nothing for a single rank."""
    if group.ranks == 1:
        return 0.0
    algorithms: tuple[Callable[[Cluster, RankGroup, float], float], ...] = (_ring, _by_node)
    seconds = min(algorithm(cluster, group, size) for algorithm in algorithms)
    return CALL_SECONDS + rounds * seconds


def _ring(cluster: Cluster, group: RankGroup, size: float) -> float:
    """Return the time of one round on a ring: n − 1 steps, of which m − 1 leave the node.

    Every rank sends (n − 1)/n · S. As many rings run as a node has adapters.
    """
    n, m, g = group.ranks, group.nodes, group.per_node
    links = [cluster.within_bandwidth] if g > 1 else []
    links += [cluster.between_bandwidth / group.groups_per_node] if m > 1 else []
    steps = (n - m) * cluster.within.step_seconds + (m - 1) * cluster.between.step_seconds
    return (n - 1) / n * size / min(links) + steps


def _by_node(cluster: Cluster, group: RankGroup, size: float) -> float:
    """Return the time of one round that goes within the nodes, then between them by a tree.

    Every rank sends (g − 1)/g · S within its node, and a node (m − 1)/m · S to the others.
    """
    m, g = group.nodes, group.per_node
    within = (g - 1) / g * size / cluster.within_bandwidth
    between = (m - 1) / m * size * group.groups_per_node / cluster.between_bandwidth
    steps = (g - 1) * cluster.within.step_seconds
    return within + between + steps + math.ceil(math.log2(m)) * cluster.between.step_seconds


def all_to_all_seconds(cluster: Cluster, *, ranks: int, size: int, sent: float) -> float:
    """Return the time of an all-to-all in groups of consecutive ranks.

    Args:
        cluster: nodes and links.
        ranks: number of ranks of the run.
        size: number of ranks of a group; it divides ``ranks``.
        sent: bytes of a rank, of which one part in ``size`` stays on it.
    """
    if size == 1:
        return 0.0
    on_node = min(ranks, cluster.devices_per_node)
    near = _least_on_one_node(cluster, ranks, size)
    within = sent * (near - 1) / size / cluster.within_bandwidth
    leaving = sent * leaving_share(cluster, ranks=ranks, size=size)
    between = on_node * leaving / cluster.between_bandwidth
    steps = math.ceil((near - 1) / PEERS_AT_ONCE) * cluster.within.step_seconds
    steps += math.ceil((size - near) / PEERS_AT_ONCE) * cluster.between.step_seconds
    return CALL_SECONDS + max(within, between) + steps


def leaving_share(cluster: Cluster, *, ranks: int, size: int) -> float:
    """Return the share of an all-to-all's bytes that leaves the node, of the rank with the most."""
    return (size - _least_on_one_node(cluster, ranks, size)) / size


def _least_on_one_node(cluster: Cluster, ranks: int, size: int) -> int:
    """Return the fewest ranks of a group of consecutive ranks that share a node."""
    per_node = cluster.devices_per_node
    firsts = range(0, min(ranks, math.lcm(size, per_node)), size)
    return min(
        min(last, node + per_node) - max(first, node)
        for first, last in ((first, first + size) for first in firsts)
        for node in range(first // per_node * per_node, last, per_node)
    )
