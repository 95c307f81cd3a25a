"""Let ranks compare what they find at a store on rank 0, without a process group.

In a process group, a rank that never comes or stops on the way makes all others fail, each with an
error about its own connection. At a :class:`Board` rank 0 collects what every rank posts within a
bounded time, so that it can name the ranks that are silent, and their nodes.
"""

import json
import os
import re
import socket
import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from datetime import timedelta
from typing import TYPE_CHECKING, Any

from pipeline.distributed.world import World, refuse_taken_port
from pipeline.errors import RankLost, UserError
from pipeline.terminal import listed

if TYPE_CHECKING:
    from torch.distributed import Store, TCPStore

LONGER = 1.25
"""Factor by which rank 0 waits longer than the others, so that they say first what they lack."""
LEAVING_SECONDS = 5.0
"""Time that rank 0 keeps the store for ranks that still read the outcome."""
_POLL_SECONDS = 0.02


@dataclass(frozen=True)
class Judgment:
    """Problems that rank 0 finds in a round, one line each; without any, a summary."""

    problems: tuple[str, ...]
    summary: str = ""
    is_lost: bool = False
    """Whether the problem is that ranks are missing: another start may succeed."""


class Board:
    """Store on rank 0 at which ranks post what they find and read what is decided.

    Invariant: every wait is bounded, and rank 0 leaves last.
    """

    def __init__(self, world: World, *, patience: float) -> None:
        from torch.distributed import PrefixStore

        self.world, self.node, self.patience = world, node_name(), patience
        self._server = _open(world, patience=patience)
        self.store: Store = PrefixStore("preflight", self._server)
        self.post("place", (self.node, world.local_rank))
        self._firsts: list[int] | None = None

    def post(self, key: str, value: object) -> None:
        """Post this rank's value of a key.

        Raises:
            RankLost: rank 0 has ended, and the store with it.
        """
        try:
            self.store.set(f"{key}/{self.world.rank}", json.dumps(value))
        except RuntimeError as error:  # torch's DistNetworkError
            raise RankLost(
                f"Rank 0 on {self.world.master_address} has ended. Look at what it says."
            ) from error

    def announce(self, key: str, value: object) -> None:
        """Set a key for all ranks."""
        self.store.set(key, json.dumps(value))

    def read(self, key: str, *, seconds: float) -> Any:
        """Return the value of a key; raise TimeoutError if nobody sets it in time."""
        try:
            self.store.wait([key], timedelta(seconds=seconds))
            return json.loads(self.store.get(key))
        except RuntimeError as error:  # torch's DistStoreError, of a time-out as of a lost store
            raise TimeoutError(key) from error

    def round(
        self, number: int, act: Callable[[], Any], judge: Callable[[list[Any]], Judgment]
    ) -> Judgment:
        """Act on every rank, judge on rank 0, and return the judgment on every rank."""
        self.post(f"found/{number}", _attempt(act, node=self.node))
        key = f"judgment/{number}"
        if self.world.rank == 0:
            judgment = self._judge(number, judge)
            self.announce(key, asdict(judgment))
        else:
            try:
                given = self.read(key, seconds=5 * self.patience)
            except TimeoutError:
                problem = f"{self.node}: rank 0 on {self.world.master_address} gives no answer."
                return Judgment((f"{problem} Look at what it says.",), is_lost=True)
            judgment = Judgment(tuple(given["problems"]), given["summary"], given["is_lost"])
        return judgment

    def _judge(self, number: int, judge: Callable[[list[Any]], Judgment]) -> Judgment:
        keys = [f"found/{number}/{rank}" for rank in range(self.world.size)]
        try:
            self.store.wait(keys, timedelta(seconds=LONGER * self.patience))
        except RuntimeError:  # the time is up
            missing = [rank for rank, key in enumerate(keys) if not self.store.check([key])]
            return Judgment(self._describe_missing(missing), is_lost=True)
        found = [json.loads(self.store.get(key)) for key in keys]
        failed = [(entry["node"], entry["problem"]) for entry in found if "problem" in entry]
        return Judgment(merged(failed)) if failed else judge([entry["found"] for entry in found])

    def _describe_missing(self, missing: Sequence[int]) -> tuple[str, ...]:
        ranks_of: dict[str, list[int]] = {}
        for rank in missing:
            ranks_of.setdefault(self.node_of(rank), []).append(rank)
        address = f"{self.world.master_address}:{self.world.master_port}"
        return tuple(
            f"{node}: {_ranks(ranks)} stopped answering. Look at what that node says."
            if node
            else f"{_ranks(ranks)} of {self.world.size} did not reach {address} within "
            f"{LONGER * self.patience:.0f} s. Look at what their nodes say, and whether "
            "the network interface is the right one (GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME)."
            for node, ranks in sorted(ranks_of.items())
        )

    def firsts(self) -> list[int]:
        """Return the first rank of every node; rank 0 is the one to call this first."""
        if self._firsts is None:
            if self.world.rank == 0:
                ranks = range(self.world.size)
                found = [json.loads(self.store.get(f"place/{rank}")) for rank in ranks]
                firsts = [rank for rank, (_, local_rank) in enumerate(found) if local_rank == 0]
                self.announce("firsts", firsts)
            self._firsts = self.read("firsts", seconds=2 * self.patience)
        return self._firsts

    def node_of(self, rank: int) -> str:
        """Return the node of a rank; empty if the rank has not come."""
        key = f"place/{rank}"
        return str(json.loads(self.store.get(key))[0]) if self.store.check([key]) else ""

    def leave(self) -> None:
        """Tell rank 0 that this rank is done; rank 0 waits for all, since it holds the store."""
        with suppress(RuntimeError):
            gone = self.store.add("gone", 1)
            until = time.monotonic() + LEAVING_SECONDS
            while self.world.rank == 0 and gone < self.world.size and time.monotonic() < until:
                time.sleep(_POLL_SECONDS)
                gone = self.store.add("gone", 0)


def _open(world: World, *, patience: float) -> "TCPStore":
    """Open the store at the world's address, as the process group of the stage will do.

    Raises:
        ConfigError: on rank 0, the port is taken.
        RankLost: elsewhere, rank 0 cannot be reached.
    """
    from torch.distributed import DistNetworkError, TCPStore

    address = f"{world.master_address}:{world.master_port}"
    # torchrun holds a store at this port, and its ranks are all clients of it.
    is_master = world.rank == 0 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True"
    try:
        return TCPStore(
            world.master_address,
            world.master_port,
            is_master=is_master,
            wait_for_workers=False,
            timeout=timedelta(seconds=patience),
        )
    except (DistNetworkError, RuntimeError) as error:
        refuse_taken_port(error, world)
        raise RankLost(
            f"Rank 0 cannot be reached at {address} within {patience:.0f} s. Look at what its node "
            "says, and whether the network interface is the right one (GLOO_SOCKET_IFNAME)."
        ) from error


def _attempt(act: Callable[[], Any], *, node: str) -> dict[str, Any]:
    """Return what an action finds, or its problem."""
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


def merged(found: Iterable[tuple[str, str]]) -> tuple[str, ...]:
    """Return one line per problem, with all nodes that have it."""
    nodes_of: dict[str, dict[str, None]] = {}
    for node, text in found:
        nodes_of.setdefault(text, {})[node] = None
    return tuple(f"{listed(nodes)}: {text}" for text, nodes in nodes_of.items())


def _ranks(ranks: Sequence[int]) -> str:
    return f"{'rank' if len(ranks) == 1 else 'ranks'} {listed(map(str, ranks))}"


def node_name() -> str:
    """Return the name of this node, as the scheduler has it."""
    return os.environ.get("SLURMD_NODENAME") or socket.gethostname()
