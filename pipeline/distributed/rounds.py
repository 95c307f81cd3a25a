"""Let ranks compare their findings at a store on rank 0, without a process group.

In a process group, a rank that never comes or stops on the way makes all others fail, each with an
error about its own connection. In :class:`Rounds`, rank 0 collects the finding of every rank within
a bounded time, and names the ranks that are silent, and their nodes.
"""

import json
import os
import re
import socket
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipeline.distributed.watchdog import until
from pipeline.distributed.world import World, refuse_taken_port
from pipeline.errors import RankLost, UserError
from pipeline.terminal import listed

if TYPE_CHECKING:
    from torch.distributed import Store

LONGER = 1.25
"""Factor by which rank 0 waits longer than the others, who then say first what they lack."""
LEAVING_SECONDS = 5.0
"""Time that rank 0 keeps the store for ranks that still read the outcome."""


@dataclass(frozen=True)
class Judgment:
    """Problems that rank 0 finds in a round, one line each; without any, a summary."""

    problems: tuple[str, ...]
    summary: str = ""
    is_lost: bool = False
    """Whether the problem is that ranks are missing: another start may succeed."""


class Rounds:
    """Rounds in which every rank acts and rank 0 judges.

    Invariant: every wait is bounded, and rank 0, which serves the store, leaves last.

    Raises:
        ConfigError: On rank 0, the port is taken.
        RankLost: Elsewhere, rank 0 cannot be reached.
    """

    def __init__(self, world: World, *, patience: float) -> None:
        from torch.distributed import PrefixStore, TCPStore

        self.world, self.node, self.patience = world, node_name(), patience
        self._address = f"{world.master_address}:{world.master_port}"
        # torchrun holds a store at this port, and its ranks are all clients of it.
        has_agent = os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
        try:
            server = TCPStore(
                world.master_address,
                world.master_port,
                is_master=world.rank == 0 and not has_agent,
                wait_for_workers=False,
                timeout=timedelta(seconds=patience),
            )
        except RuntimeError as error:
            refuse_taken_port(error, world)
            raise RankLost(
                f"Rank 0 cannot be reached at {self._address} within {patience:.0f} s. Look at "
                "what its node says, and whether the network interface is the right one "
                "(GLOO_SOCKET_IFNAME)."
            ) from error
        self.store: Store = PrefixStore("preflight", server)
        self._number = 0
        self.post("place", self.node)

    def post(self, key: str, value: object) -> None:
        """Post this rank's value of a key.

        Raises:
            RankLost: Rank 0 has ended, and the store with it.
        """
        try:
            self.store.set(f"{key}/{self.world.rank}", json.dumps(value))
        except RuntimeError as error:  # torch's DistNetworkError
            raise RankLost(
                f"Rank 0 on {self.world.master_address} has ended. Look at what it says."
            ) from error

    def round(self, act: Callable[[], Any], judge: Callable[[list[Any]], Judgment]) -> Judgment:
        """Act on every rank, judge on rank 0, and return the judgment on every rank."""
        self._number += 1
        self.post(f"found/{self._number}", _attempt(act, node=self.node))
        key = f"judgment/{self._number}"
        if self.world.rank == 0:
            judgment = self._judge(judge)
            self.store.set(key, json.dumps(asdict(judgment)))
            return judgment
        try:
            self.store.wait([key], timedelta(seconds=5 * self.patience))
            given = json.loads(self.store.get(key))
        except RuntimeError:  # torch's DistStoreError, of a time-out as of a lost store
            problem = f"{self.node}: rank 0 on {self.world.master_address} gives no answer."
            return Judgment((f"{problem} Look at what it says.",), is_lost=True)
        return Judgment(tuple(given["problems"]), given["summary"], given["is_lost"])

    def _judge(self, judge: Callable[[list[Any]], Judgment]) -> Judgment:
        keys = [f"found/{self._number}/{rank}" for rank in range(self.world.size)]
        try:
            self.store.wait(keys, timedelta(seconds=LONGER * self.patience))
        except RuntimeError:  # the time is up
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return Judgment(self._describe_missing(missing), is_lost=True)
        entries = [json.loads(self.store.get(key)) for key in keys]
        failed = [(entry["node"], entry["problem"]) for entry in entries if "problem" in entry]
        return Judgment(merged(failed)) if failed else judge([entry["found"] for entry in entries])

    def _describe_missing(self, missing: Sequence[int]) -> tuple[str, ...]:
        ranks_of: dict[str, list[int]] = {}
        for rank in missing:
            ranks_of.setdefault(self.node_of(rank), []).append(rank)
        return tuple(
            f"{node}: {_ranks(ranks)} stopped answering. Look at what that node says."
            if node
            else f"{_ranks(ranks)} of {self.world.size} did not reach {self._address} within "
            f"{LONGER * self.patience:.0f} s. Look at what their nodes say, and whether "
            "the network interface is the right one (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
            for node, ranks in sorted(ranks_of.items())
        )

    def node_of(self, rank: int) -> str:
        """Return the node of a rank; empty if the rank has not come."""
        key = f"place/{rank}"
        return str(json.loads(self.store.get(key))) if self.store.check([key]) else ""

    def leave(self) -> None:
        """Tell rank 0 that this rank is done; rank 0 waits for all, since it holds the store."""
        with suppress(RuntimeError):
            self.store.add("gone", 1)
            if self.world.rank == 0:
                until(lambda: self.store.add("gone", 0) >= self.world.size, seconds=LEAVING_SECONDS)


def _attempt(act: Callable[[], Any], *, node: str) -> dict[str, Any]:
    """Return the finding of an action, or its problem."""
    try:
        return {"node": node, "found": act()}
    except UserError as error:
        return {"node": node, "problem": str(error)}
    except (OSError, RuntimeError) as error:
        return {"node": node, "problem": f"{first_line(error)}. Look at what that node says."}


def first_line(error: BaseException) -> str:
    """Return the first line of a message, without the place in C++ code that torch begins with."""
    text = re.sub(r"^\[\S+:\d+\] ", "", str(error).strip().split("\n")[0])
    return text.rstrip(".") or type(error).__name__


def merged(problems: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return one line per problem, with all nodes that have it."""
    nodes_of: dict[str, dict[str, None]] = {}
    for node, text in problems:
        nodes_of.setdefault(text, {})[node] = None
    return tuple(f"{listed(nodes)}: {text}" for text, nodes in nodes_of.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(map(str, ranks))}"


def node_name() -> str:
    """Return the name of this node, as the scheduler has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
