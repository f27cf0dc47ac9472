"""Peak of the CPU allocator, for tests of what grows with what."""

import torch


def peak_bytes(function):
    """Peak during ``function`` above what was live before it."""
    with torch.profiler.profile(
        activities=[torch.profiler.ProfilerActivity.CPU], profile_memory=True
    ) as profiled:
        function()
    live = peak = 0
    for event in profiled.profiler.kineto_results.events():
        if event.name() == "[memory]":
            live += event.nbytes()
            peak = max(peak, live)
    return peak
