"""The child process of a reward pool: reads completions from stdin, writes scores to stdout.

Started by ``reward_pool`` only. Whatever the user's function prints goes to stderr, so that it
cannot end up between two messages.
"""

from __future__ import annotations

import asyncio
import inspect
import os
import queue
import threading
from typing import Any

from tandem.errors import DataError
from tandem.rollout.frames import encode_frame, read_frame, write_frame
from tandem.rollout.limits import Limits, allow_cpu, apply_limits
from tandem.rollout.rewards import Prepared, reward_function


def main() -> None:
    requests = os.dup(0)
    answers = os.dup(1)
    os.dup2(2, 1)
    os.dup2(os.open(os.devnull, os.O_RDONLY), 0)
    spec = read_frame(requests)
    if spec is None:
        return
    limits = Limits(**spec["limits"])
    try:
        apply_limits(limits)
        function = Prepared(reward_function(spec["name"], spec["kwargs"]))
    except Exception as error:
        write_frame(answers, encode_frame({"error": f"{type(error).__name__}: {error}"}))
        return
    write_frame(answers, encode_frame({"ready": True}))
    inbox: queue.SimpleQueue[Any] = queue.SimpleQueue()
    threading.Thread(target=_read_all, args=(requests, inbox), daemon=True).start()
    while True:
        message = inbox.get()
        allow_cpu(limits.cpu_s)
        write_frame(answers, _answer(function, message))


def _read_all(descriptor: int, inbox: queue.SimpleQueue[Any]) -> None:
    """Ends the process with its parent, also while the function hangs."""
    while (message := read_frame(descriptor)) is not None:
        inbox.put(message)
    os._exit(0)


def _answer(function: Prepared, message: dict[str, Any]) -> bytes:
    try:
        value = function(message["arguments"], message["data"])
        if inspect.isawaitable(value):
            value = asyncio.run(_awaited(value))
        if hasattr(value, "item") and getattr(value, "ndim", None) == 0:
            value = value.item()
        return encode_frame({"value": value})
    except DataError as error:
        return encode_frame({"error": f"its result is {error}"})
    except Exception as error:
        return encode_frame({"error": f"{type(error).__name__}: {error}"})


async def _awaited(value: Any) -> Any:
    return await value


if __name__ == "__main__":
    main()
