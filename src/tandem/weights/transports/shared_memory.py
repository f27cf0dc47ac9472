"""Two processes of one host: mapped files in /dev/shm (elsewhere in the temporary directory).

Each sender owns one directory, ``tandem-weights-CHANNEL-PID-…``, locked while its process lives. It
is removed by ``release`` and at interpreter exit; one left by a killed process is removed by the
next sender that starts.
"""

from __future__ import annotations

import atexit
import fcntl
import os
import re
import shutil
import tempfile
from collections.abc import Iterable, Sequence
from pathlib import Path

from torch import Tensor

from tandem.checkpoint.scratch import ScratchDirectory, create_scratch, remove_leftovers
from tandem.errors import WeightSyncError
from tandem.types import ParamSpec, WeightUpdateMeta
from tandem.weights.bucket import plan_bucket
from tandem.weights.manifest import FileLocation, Published
from tandem.weights.transports.mapped import fill_file

PREFIX = "tandem-weights-"


def shared_root() -> Path:
    shm = Path("/dev/shm")
    return shm if shm.is_dir() else Path(tempfile.gettempdir())


class SharedMemorySender:
    """Writes versions in turn into two files; one still being read is left to its reader."""

    def __init__(self, channel: str, *, root: Path | None = None) -> None:
        self._root = root or shared_root()
        self._channel = re.sub(r"[^A-Za-z0-9.]+", "_", channel)
        self._scratch: ScratchDirectory | None = None
        self._owner = os.getpid()
        self._newest: Path | None = None
        self._spare: Path | None = None
        self._num_written = 0

    def write(
        self,
        meta: WeightUpdateMeta,
        specs: Sequence[ParamSpec],
        tensors: Iterable[tuple[str, Tensor]],
    ) -> Published:
        plan = plan_bucket(meta, specs, packed=False)
        directory = self._open_directory()
        partial = directory / "partial"
        file = self._take_spare(partial)
        try:
            manifest = fill_file(file, plan, tensors)
            # A new name for every write: a reader that comes late finds nothing, never other bytes.
            target = directory / f"v{meta.version}-{self._num_written}"
            partial.rename(target)
        except OSError as error:
            raise WeightSyncError(
                f"shared memory: cannot write {plan.size_bytes} bytes to {directory}: {error}; "
                "free space there, enlarge /dev/shm or set inference.transport=disk"
            ) from error
        finally:
            partial.unlink(missing_ok=True)
            os.close(file)
        self._num_written += 1
        self._spare, self._newest = self._newest, target
        location = FileLocation(kind="shared_memory", path=str(target), data_start=0)
        return Published(manifest, location)

    def _take_spare(self, partial: Path) -> int:
        """Open ``partial`` for writing, made from the older file if nobody reads that."""
        spare, self._spare = self._spare, None
        if spare is not None:
            file = os.open(spare, os.O_RDWR)
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError:
                spare.unlink()
                os.close(file)
            else:
                spare.rename(partial)
                return file
        return os.open(partial, os.O_RDWR | os.O_CREAT | os.O_EXCL, 0o600)

    def _open_directory(self) -> Path:
        if self._scratch is None:
            remove_leftovers(self._root, PREFIX)
            self._scratch = create_scratch(self._root, f"{PREFIX}{self._channel}")
            atexit.register(self.release)
        return self._scratch.path

    def release(self) -> None:
        """Remove everything of this sender; a reader in the middle keeps its mapping."""
        if self._scratch is None or os.getpid() != self._owner:
            return
        atexit.unregister(self.release)
        shutil.rmtree(self._scratch.path, ignore_errors=True)
        self._scratch.close()
        self._scratch = self._newest = self._spare = None
