"""Facts that a launcher (torchrun, Ray, Slurm) hands to each process in its environment.

The one place that reads them. How many ranks there should be is decided by the launcher; how they
divide the work is ``train.parallel``.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Mapping
from dataclasses import dataclass

from tandem.errors import ConfigError

DEFAULT_PORT = 29500


@dataclass(frozen=True, slots=True)
class LauncherFacts:
    """This process among those that were started together; alone without a launcher."""

    rank: int = 0
    world_size: int = 1
    local_rank: int = 0
    local_world_size: int = 1
    """How many of the processes are on this machine, where the launcher says so."""
    master_addr: str = "127.0.0.1"
    master_port: int = DEFAULT_PORT
    has_agent_store: bool = False
    attempt: int = 0

    @property
    def is_loopback(self) -> bool:
        """Whether all ranks meet on this machine."""
        return self.master_addr in ("localhost", "::1") or self.master_addr.startswith("127.")


def launcher_facts(environment: Mapping[str, str] | None = None) -> LauncherFacts:
    """What the launcher said; ``environment`` None: that of this process.

    Raises:
        ConfigError: a number is malformed, or the rank is not among the ranks.
    """
    found = os.environ if environment is None else environment
    if "RANK" not in found and "WORLD_SIZE" not in found:
        return LauncherFacts()
    rank, world_size = _number(found, "RANK", 0), _number(found, "WORLD_SIZE", 1)
    if not 0 <= rank < world_size:
        raise ConfigError(
            f"RANK, WORLD_SIZE: got {rank}, {world_size}, allowed: 0 <= RANK < WORLD_SIZE; start "
            "the processes with torchrun, or unset both for a single process"
        )
    local_world_size = _number(found, "LOCAL_WORLD_SIZE", 1)
    if local_world_size < 1:
        raise ConfigError(f"LOCAL_WORLD_SIZE: got {local_world_size}, allowed: >= 1")
    return LauncherFacts(
        rank=rank,
        world_size=world_size,
        local_rank=_number(found, "LOCAL_RANK", rank),
        local_world_size=local_world_size,
        master_addr=found.get("MASTER_ADDR", "127.0.0.1"),
        master_port=_number(found, "MASTER_PORT", DEFAULT_PORT),
        has_agent_store=found.get("TORCHELASTIC_USE_AGENT_STORE") == "True",
        attempt=_number(found, "TORCHELASTIC_RESTART_COUNT", 0),
    )


def keep_to_loopback() -> None:
    """Let gloo and nccl listen on the loopback interface only, unless told otherwise."""
    name = next((n for _, n in socket.if_nameindex() if n.startswith("lo")), None)
    if name is not None:
        os.environ.setdefault("GLOO_SOCKET_IFNAME", name)
        os.environ.setdefault("NCCL_SOCKET_IFNAME", name)


def _number(found: Mapping[str, str], name: str, default: int) -> int:
    text = found.get(name, str(default))
    try:
        return int(text)
    except ValueError as error:
        raise ConfigError(
            f"environment variable {name}: got {text!r}, allowed: an integer"
        ) from error
