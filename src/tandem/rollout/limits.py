"""What a child process may use, set by that child itself. Torch-free and small: workers import it.

Memory and processor time are the kernel's resource limits, the network is left by a namespace of
its own. What the kernel does not grant is an error, never ignored.
"""

from __future__ import annotations

import ctypes
import math
import os
import resource
import sys
from dataclasses import dataclass

_NEW_USER, _NEW_NET = 0x10000000, 0x40000000


@dataclass(frozen=True, slots=True)
class Limits:
    """``memory_mb`` of address space, ``cpu_s`` processor seconds of one call; None: no limit."""

    memory_mb: int | None = None
    cpu_s: float | None = None
    network: bool = True


def apply_limits(limits: Limits) -> None:
    """Bound this process and those that it starts. Call it before any thread is started.

    Raises:
        OSError: the kernel refuses.
    """
    resource.setrlimit(resource.RLIMIT_CORE, (0, 0))
    if limits.memory_mb is not None:
        size = limits.memory_mb << 20
        resource.setrlimit(resource.RLIMIT_AS, (size, size))
    if not limits.network:
        leave_network()


def allow_cpu(seconds: float | None) -> None:
    """From now on ``seconds`` more of processor time, in whole seconds, then SIGXCPU."""
    if seconds is None:
        return
    usage = resource.getrusage(resource.RUSAGE_SELF)
    soft = math.ceil(usage.ru_utime + usage.ru_stime + seconds)
    hard = resource.getrlimit(resource.RLIMIT_CPU)[1]
    if hard != resource.RLIM_INFINITY:
        soft = min(soft, hard)
    resource.setrlimit(resource.RLIMIT_CPU, (soft, hard))


def leave_network() -> None:
    """Move this process into a network namespace without any interface but a dead loopback.

    Raises:
        OSError: not Linux, or the kernel does not let this user do it.
    """
    if sys.platform != "linux":
        raise OSError(f"processes without a network need Linux, this is {sys.platform}")
    libc = ctypes.CDLL(None, use_errno=True)
    # Root may do it at once; others need a user namespace, which gives them the right inside.
    if libc.unshare(_NEW_NET) and libc.unshare(_NEW_NET | _NEW_USER):
        code = ctypes.get_errno()
        raise OSError(code, f"the kernel refuses a network namespace: {os.strerror(code)}")
