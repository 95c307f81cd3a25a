"""Times of exchanges against sums by hand, and against ranks that are counted one by one."""

import math
from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pipeline.errors import ConfigError
from pipeline.estimates.network import (
    CALL_SECONDS,
    LINK_SHARE,
    NETWORK_STEP,
    NVLINK_STEP,
    Cluster,
    Link,
    RankGroup,
    all_gather_seconds,
    all_reduce_seconds,
    all_to_all_seconds,
    data_parallel_group,
    expert_data_group,
    leaving_share,
    link_named,
)
from pipeline.estimates.step_time import DEVICES, device_named

H100 = DEVICES["h100"]
GB = 1e9


def cluster_of(
    nodes: int,
    per_node: int,
    *,
    within: float = 100 * GB,
    between: float = 10 * GB,
    adapters: int = 1,
) -> Cluster:
    """Return a cluster whose exchanges reach these bandwidths."""
    return Cluster(
        H100,
        nodes,
        per_node,
        Link("within", within / LINK_SHARE, NVLINK_STEP),
        Link("between", between / LINK_SHARE, NETWORK_STEP),
        adapters,
    )


def test_two_nodes_of_two_sum_within_nodes_first_if_the_link_between_them_is_slow() -> None:
    """Every GPU sends half within its node and each node half to the other, twice."""
    cluster = cluster_of(2, 2)
    size = 400e6
    transfers = 2 * (200e6 / (100 * GB) + 200e6 / (10 * GB))
    steps = 2 * (NVLINK_STEP + NETWORK_STEP)
    found = all_reduce_seconds(cluster, data_parallel_group(cluster, 4), size)
    assert found == pytest.approx(transfers + steps + CALL_SECONDS)


def test_one_node_sums_on_a_ring() -> None:
    """8 GPUs: each sends 14/8 of the bytes in 14 steps."""
    cluster = cluster_of(1, 8)
    found = all_reduce_seconds(cluster, data_parallel_group(cluster, 8), 800e6)
    assert found == pytest.approx(1400e6 / (100 * GB) + 14 * NVLINK_STEP + CALL_SECONDS)


def test_a_tree_between_nodes_takes_fewer_steps_than_a_ring_of_4096() -> None:
    cluster = cluster_of(512, 8)
    found = all_reduce_seconds(cluster, data_parallel_group(cluster, 4096), 0.0)
    assert found == pytest.approx(2 * (7 * NVLINK_STEP + 9 * NETWORK_STEP) + CALL_SECONDS)


@given(
    nodes=st.integers(1, 512),
    per_node=st.sampled_from([1, 4, 8]),
    size=st.floats(1e3, 1e11),
    adapters=st.integers(1, 8),
)
def test_an_all_reduce_is_a_reduce_scatter_and_an_all_gather(
    nodes: int, per_node: int, size: float, adapters: int
) -> None:
    cluster = cluster_of(nodes, per_node, adapters=adapters)
    group = data_parallel_group(cluster, nodes * per_node)
    both = all_reduce_seconds(cluster, group, size)
    one = all_gather_seconds(cluster, group, size)
    if nodes * per_node == 1:
        assert both == one == 0
    else:
        assert both - CALL_SECONDS == pytest.approx(2 * (one - CALL_SECONDS))


@given(
    nodes=st.integers(1, 64),
    per_node=st.sampled_from([1, 2, 8]),
    size=st.floats(1e6, 1e11),
    factor=st.floats(1.0, 16.0),
)
def test_more_bytes_take_longer_and_faster_links_do_not(
    nodes: int, per_node: int, size: float, factor: float
) -> None:
    cluster = cluster_of(nodes, per_node)
    group = data_parallel_group(cluster, nodes * per_node)
    now = all_reduce_seconds(cluster, group, size)
    assert all_reduce_seconds(cluster, group, factor * size) >= now
    for faster in (
        cluster_of(nodes, per_node, within=100 * GB * factor),
        cluster_of(nodes, per_node, between=10 * GB * factor),
    ):
        assert all_reduce_seconds(faster, group, size) <= now
    if nodes > 1:  # no algorithm sums over nodes with less traffic between them
        assert now >= 2 * (nodes - 1) / nodes * size / (10 * GB)


@given(nodes=st.integers(2, 64), size=st.floats(1e6, 1e11))
def test_twice_the_bandwidth_halves_the_time_of_the_bytes(nodes: int, size: float) -> None:
    slow, fast = (cluster_of(nodes, 8, within=w * GB, between=w * GB) for w in (10, 20))
    group = data_parallel_group(slow, 8 * nodes)
    ranks = 8 * nodes

    def of_bytes(cluster: Cluster, size: float) -> list[float]:
        """Times of one algorithm's bytes: what they add to the steps of the same algorithm."""
        step = replace(cluster.within, step_seconds=0.0)
        free = replace(cluster, within=step, between=replace(cluster.between, step_seconds=0.0))
        return [
            all_reduce_seconds(free, group, size) - CALL_SECONDS,
            all_to_all_seconds(free, ranks=ranks, size=16, sent=size) - CALL_SECONDS,
        ]

    assert of_bytes(slow, size) == pytest.approx([2 * each for each in of_bytes(fast, size)])


def test_groups_of_equal_experts_share_the_adapters_of_their_node() -> None:
    """With experts over 8 GPUs of 2 nodes, 8 pairs of GPUs sum over one adapter at once."""
    cluster = cluster_of(2, 8)
    group = expert_data_group(cluster, 16, size=8)
    assert (group.ranks, group.per_node, group.nodes, group.groups_per_node) == (2, 1, 2, 8)
    found = all_reduce_seconds(cluster, group, 80e6)
    assert found == pytest.approx(8 * 80e6 / (10 * GB) + 2 * NETWORK_STEP + CALL_SECONDS)


def test_experts_over_two_nodes_send_half_of_their_rows_between_them() -> None:
    """16 ranks: a node sends 8 times half of a rank's rows, to 8 peers in one step."""
    cluster = cluster_of(2, 8, adapters=2)
    found = all_to_all_seconds(cluster, ranks=16, size=16, sent=32e6)
    between = 8 * 16e6 / (20 * GB)
    assert found == pytest.approx(between + NVLINK_STEP + NETWORK_STEP + CALL_SECONDS)


def test_experts_within_a_node_do_not_wait_for_the_link_between_nodes() -> None:
    slow, fast = (cluster_of(4, 8, between=between * GB) for between in (1, 100))
    found = all_to_all_seconds(slow, ranks=32, size=8, sent=80e6)
    assert found == all_to_all_seconds(fast, ranks=32, size=8, sent=80e6)
    assert found == pytest.approx(70e6 / (100 * GB) + NVLINK_STEP + CALL_SECONDS)
    assert all_to_all_seconds(slow, ranks=32, size=1, sent=80e6) == 0


@given(size=st.integers(1, 24), groups=st.integers(1, 12), per_node=st.integers(1, 9))
def test_the_share_of_rows_that_leaves_a_node_is_that_of_ranks_counted_one_by_one(
    size: int, groups: int, per_node: int
) -> None:
    ranks = size * groups
    cluster = cluster_of(math.ceil(ranks / per_node), per_node)
    away = [
        sum(
            other // per_node != rank // per_node
            for other in range(rank // size * size, (rank // size + 1) * size)
        )
        for rank in range(ranks)
    ]
    assert leaving_share(cluster, ranks=ranks, size=size) == max(away) / size


@given(size=st.sampled_from([1, 2, 4, 8, 16, 32]), nodes=st.sampled_from([1, 2, 4, 16]))
def test_groups_of_equal_experts_are_those_of_ranks_counted_one_by_one(
    size: int, nodes: int
) -> None:
    ranks = 8 * nodes
    if ranks % size:
        return
    group = expert_data_group(cluster_of(nodes, 8), ranks, size=size)
    first = range(0, ranks, size)
    assert group.ranks == len(first)
    assert group.nodes == len({rank // 8 for rank in first})
    assert group.groups_per_node == len({rank % size for rank in range(8)})


def test_a_rank_alone_exchanges_nothing() -> None:
    cluster = cluster_of(1, 8)
    assert all_reduce_seconds(cluster, RankGroup(1, 1), 1e9) == 0
    assert all_gather_seconds(cluster, RankGroup(1, 1), 1e9) == 0


def test_links_are_presets_or_numbers() -> None:
    assert link_named("nvlink", H100).bandwidth == 450 * GB
    assert link_named("nvlink", DEVICES["v100"]).bandwidth == 150 * GB
    assert link_named("ib200", H100).bandwidth == 25 * GB
    assert link_named("eth25", H100).is_per_node
    assert link_named("12.5", H100).bandwidth == 12.5 * GB


@pytest.mark.parametrize(
    ("name", "said"),
    [
        ("ib20", "There is no link 'ib20'. Did you mean 'ib200'?"),
        ("token ring", "There is no link 'token ring'. Choose from nvlink, pcie3"),
        ("0", "A link of 0 GB/s cannot be."),
        ("-1", "A link of -1 GB/s cannot be."),
        ("nan", "A link of nan GB/s cannot be."),
        ("inf", "A link of inf GB/s cannot be."),
    ],
)
def test_another_link_is_refused_with_the_nearest_name(name: str, said: str) -> None:
    with pytest.raises(ConfigError, match=said.replace("?", r"\?")):
        link_named(name, H100)


def test_another_device_is_refused_with_the_nearest_name() -> None:
    assert device_named("v100") is DEVICES["v100"]
    with pytest.raises(ConfigError, match=r"There is no device 'h1000'. Did you mean 'h100'\?"):
        device_named("h1000")
