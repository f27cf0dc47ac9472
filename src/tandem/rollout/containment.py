"""Linux namespaces for a process that runs code nobody has read. Used by ``code_sandbox`` alone.

Inside: no network, no other process, every file read-only but one small folder, no capabilities.
The kernel is shared: this keeps mistakes and cheats in, it is no virtual machine.
"""

from __future__ import annotations

import ctypes
import os
import signal
import struct
import sys
from typing import Any

_NEW_MOUNTS, _NEW_USER, _NEW_PID, _NEW_NET = 0x00020000, 0x10000000, 0x20000000, 0x40000000
_PRIVATE_TREE = (1 << 14) | (1 << 18)
_NO_SUID, _NO_DEVICES, _READ_ONLY = 2, 4, 1
_MOUNT_SETATTR, _HERE, _RECURSIVE = 442, -100, 0x8000
_PARENT_DEATH_SIGNAL, _SET_DUMPABLE, _NO_NEW_RIGHTS = 1, 4, 38
_CAPABILITY_VERSION = 0x20080522
_NOBODY = 65534


def enter() -> None:
    """New namespaces for this process and, for processes and mounts, for its next child.

    Raises:
        OSError: not Linux, or the kernel does not let this user do it.
    """
    if sys.platform != "linux":
        raise OSError(f"containment needs Linux, this is {sys.platform}")
    user, group = os.geteuid(), os.getegid()
    _checked("unshare", _libc().unshare(_NEW_USER | _NEW_MOUNTS | _NEW_PID | _NEW_NET))
    for name, text in (
        ("setgroups", "deny"),
        ("uid_map", f"{_NOBODY} {user} 1"),
        ("gid_map", f"{_NOBODY} {group} 1"),
    ):
        with open(f"/proc/self/{name}", "w", encoding="ascii") as file:
            file.write(text)


def seal(folder: str, size_bytes: int) -> None:
    """In the child: ``folder`` is empty memory of ``size_bytes``, all else read-only, no way back.

    Raises:
        OSError: the kernel refuses a part of it.
    """
    libc = _libc()
    _checked("mount", libc.mount(b"none", b"/", None, _PRIVATE_TREE, None))
    read_only = struct.pack("QQQQ", _READ_ONLY, 0, 0, 0)
    code = libc.syscall(_MOUNT_SETATTR, _HERE, b"/", _RECURSIVE, read_only, len(read_only))
    _checked("mount_setattr", code)
    safe = _NO_SUID | _NO_DEVICES
    options = f"size={size_bytes}".encode()
    _checked("mount", libc.mount(b"tmpfs", os.fsencode(folder), b"tmpfs", safe, options))
    # What it shows of other processes would let their memory be read.
    _checked("mount", libc.mount(b"tmpfs", b"/proc", b"tmpfs", safe | _READ_ONLY, b"size=4k"))
    _checked("prctl", libc.prctl(_NO_NEW_RIGHTS, 1, 0, 0, 0))
    header = struct.pack("Ii", _CAPABILITY_VERSION, 0)
    _checked("capset", libc.capset(header, bytes(24)))
    os.chdir(folder)


def die_with_parent() -> None:
    """Be killed when the process that started this one ends, however it ends."""
    if sys.platform == "linux":
        _checked("prctl", _libc().prctl(_PARENT_DEATH_SIGNAL, signal.SIGKILL, 0, 0, 0))


def close_to_others() -> None:
    """Hide this process's memory and descriptors from others of the same user."""
    if sys.platform == "linux":
        _checked("prctl", _libc().prctl(_SET_DUMPABLE, 0, 0, 0, 0))


def _libc() -> Any:
    return ctypes.CDLL(None, use_errno=True)


def _checked(what: str, result: int) -> None:
    if result:
        code = ctypes.get_errno()
        raise OSError(code, f"{what}: {os.strerror(code)}")
