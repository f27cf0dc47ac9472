"""``status.json`` of a run: what it does at this moment, for whoever looks from outside.

Written by the run about once a second, read by ``tandem status``. What is in it is decided by the
trainer.
"""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

STATUS_FILE = "status.json"


def write_status(run_dir: Path | str, status: Mapping[str, Any]) -> None:
    """Replace the status of a run; a reader sees the old one or the new one."""
    path = Path(run_dir) / STATUS_FILE
    staged = path.with_name(f"{STATUS_FILE}.new")
    staged.write_text(json.dumps(status), encoding="utf-8")
    staged.replace(path)


def read_status(run_dir: Path | str) -> dict[str, Any] | None:
    """The last status of a run; None if there is none that can be read."""
    try:
        status = json.loads((Path(run_dir) / STATUS_FILE).read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return status if isinstance(status, dict) else None


def is_alive(status: Mapping[str, Any]) -> bool:
    """Whether the process that wrote a status on this host still runs."""
    pid = status.get("pid")
    if status.get("host") != os.uname().nodename or not isinstance(pid, int) or pid < 1:
        return False
    try:
        os.kill(pid, 0)
    except ProcessLookupError:
        return False
    except PermissionError:
        pass
    return True
