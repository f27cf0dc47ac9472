"""Moving tensors off their device and back without changing their identity.

Which tensors form the model, the optimizer or the gradients is known to ``engine``.
"""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import Tensor


class HostCopy:
    """Host copies of storages whose own memory is given back while they are away.

    Works on storages, so that views, tied weights and references stay valid. While offloaded the
    tensors have no memory: reading them is an error. On a CPU engine the copy is memory of its own.
    """

    def __init__(self) -> None:
        self._away: list[tuple[torch.UntypedStorage, torch.UntypedStorage]] = []
        self.is_offloaded = False

    def offload(self, tensors: Iterable[Tensor]) -> None:
        """Copy to the host and free the device memory. A second call does nothing."""
        if self.is_offloaded:
            return
        storages = {tensor.untyped_storage()._cdata: tensor.untyped_storage() for tensor in tensors}
        for storage in storages.values():
            host = torch.UntypedStorage(storage.nbytes())
            host.copy_(storage)
            storage.resize_(0)
            self._away.append((storage, host))
        self.is_offloaded = True

    def restore(self) -> None:
        """Bring the memory back, bit for bit. Does nothing when not offloaded."""
        for storage, host in self._away:
            storage.resize_(host.nbytes())
            storage.copy_(host)
        self._away.clear()
        self.is_offloaded = False


def own_storage(tensors: Iterable[Tensor]) -> None:
    """Give tensors that live in a memory-mapped file memory of their own."""
    for tensor in tensors:
        if not tensor.untyped_storage().resizable():
            tensor.data = tensor.data.clone()
