"""Joining and leaving the process group that the ranks of sharded engines share.

How ranks are laid out in axes is ``mesh``; what ranks tell each other is ``ranks``.
"""

from __future__ import annotations

import os
import socket
from dataclasses import replace
from datetime import timedelta

import torch
import torch.distributed as dist
from torch.distributed import HashStore, PrefixStore, Store, TCPStore  # type: ignore[attr-defined]

from tandem.config.launcher import LauncherFacts, keep_to_loopback, launcher_facts
from tandem.errors import ConfigError, EngineError
from tandem.train.mesh import forget_meshes

_members = 0
"""Engines of this process that use a group made here; the last to leave takes it down."""

_generation = 0
"""Groups made here so far: ranks that meet again must not read what an earlier group left."""

_stores: dict[tuple[str, int], Store] = {}
"""Where this process met the others; kept, since a peer may still talk to it."""


def join(device_type: str, addr: str | None, timeout_s: float) -> bool:
    """Have a default process group: the caller's if there is one, else one of our own.

    Whether it is our own is returned; then ``leave`` is due once.

    ``addr`` (``host:port``) overrides where the launcher says that ranks meet. Without a launcher
    the group has this one process and opens no port for the others.

    Raises:
        ConfigError: ``addr`` is malformed or there is no launcher.
        EngineError: the other ranks did not come.
    """
    global _members
    if dist.is_initialized() and _members == 0:
        return False
    if not dist.is_initialized():
        facts = launcher_facts()
        if addr is not None:
            facts = _redirected(facts, addr)
        try:
            _initialise(facts, device_type, timedelta(seconds=timeout_s))
        except (dist.DistError, RuntimeError) as error:
            raise EngineError(
                f"rank {facts.rank} of {facts.world_size} cannot join its group at "
                f"{facts.master_addr}:{facts.master_port}: {error}"
            ) from error
    _members += 1
    return True


def leave() -> None:
    """The counterpart of a ``join`` that returned True."""
    global _members
    _members -= 1
    if _members == 0 and dist.is_initialized():
        forget_meshes()
        dist.destroy_process_group()


def local_device(name: str) -> torch.device:
    """``cuda`` becomes this process's own device, counted within its machine."""
    if name == "cuda" and torch.cuda.is_available():
        return torch.device("cuda", launcher_facts().local_rank % torch.cuda.device_count())
    return torch.device(name)


def _redirected(facts: LauncherFacts, addr: str) -> LauncherFacts:
    host, _, port = addr.rpartition(":")
    if not host or not port.isdigit():
        raise ConfigError(f"addr: got {addr!r}, allowed: host:port, or None for the launcher's")
    if facts.world_size == 1:
        raise ConfigError(
            f"addr: got {addr!r}, but this process is alone; start the ranks with torchrun, or set "
            "RANK and WORLD_SIZE"
        )
    return replace(facts, master_addr=host, master_port=int(port), has_agent_store=False)


def _initialise(facts: LauncherFacts, device_type: str, timeout: timedelta) -> None:
    global _generation
    if facts.is_loopback:
        keep_to_loopback()
    _generation += 1
    dist.init_process_group(
        "gloo" if device_type == "cpu" else "cpu:gloo,cuda:nccl",
        store=PrefixStore(f"tandem/{facts.attempt}/{_generation}", _store(facts, timeout)),
        rank=facts.rank,
        world_size=facts.world_size,
        timeout=timeout,
    )


def _store(facts: LauncherFacts, timeout: timedelta) -> Store:
    if facts.world_size == 1:
        return HashStore()
    place = (facts.master_addr, facts.master_port)
    if place not in _stores:
        _stores[place] = _connect(facts, timeout)
    return _stores[place]


def _connect(facts: LauncherFacts, timeout: timedelta) -> Store:
    is_host = facts.rank == 0 and not facts.has_agent_store
    # A store given an address still listens on every interface unless it is handed a socket.
    listener = _listen(facts) if is_host else None
    return TCPStore(
        facts.master_addr,
        facts.master_port,
        facts.world_size,
        is_master=is_host,
        timeout=timeout,
        wait_for_workers=False,
        master_listen_fd=None if listener is None else listener.detach(),
    )


def _listen(facts: LauncherFacts) -> socket.socket:
    family = socket.AF_INET6 if ":" in facts.master_addr else socket.AF_INET
    listener = socket.socket(family)
    listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    listener.bind((facts.master_addr, facts.master_port))
    listener.listen(max(128, facts.world_size))
    os.set_inheritable(listener.fileno(), False)
    return listener
