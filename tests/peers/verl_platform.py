"""A platform of verl for a machine without accelerator: gloo, and no memory to count."""

from __future__ import annotations

import types
from contextlib import contextmanager

import torch
from verl.plugin.platform import PlatformBase, PlatformRegistry


class _Device(types.ModuleType):
    """``torch.cpu`` with the members that verl reads of a device module."""

    def __getattr__(self, name):
        return getattr(torch.cpu, name)

    def max_memory_allocated(self):
        return 0

    def mem_get_info(self):
        return 0, 0

    def get_device_name(self):
        return "CPU"

    max_memory_reserved = memory_allocated = memory_reserved = max_memory_allocated


@PlatformRegistry.register(platform="cpu")
class CPUPlatform(PlatformBase):
    device_name = "cpu"
    vendor_name = "none"
    device_module = _Device("device")

    def is_available(self):
        return True

    def current_device(self):
        return torch.device("cpu")

    def device_count(self):
        return 1

    def set_device(self, device_index):
        pass

    def synchronize(self, device_index=None):
        pass

    def manual_seed(self, seed):
        torch.manual_seed(seed)

    manual_seed_all = manual_seed

    def set_allocator_settings(self, settings):
        pass

    def empty_cache(self):
        pass

    def get_device_capability(self, device_index=0):
        return None, None

    def communication_backend_name(self):
        return "gloo"

    def visible_devices_envvar(self):
        return "CUDA_VISIBLE_DEVICES"

    @contextmanager
    def nvtx_range(self, msg):
        yield

    def profiler_start(self):
        pass

    profiler_stop = profiler_start

    def ray_resource_name(self):
        return "CPU"

    def ray_noset_envvars(self):
        return []

    def is_ipc_supported(self):
        return False

    def cudart(self):
        return None
