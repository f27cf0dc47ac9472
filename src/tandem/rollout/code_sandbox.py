"""The process that runs a model's code. It holds no tests and no verdict: it answers calls.

Started by ``code_worker`` only. Its one descriptor leads to the tests' process; whatever the code
writes there can only be a wrong answer.
"""

from __future__ import annotations

import builtins
import io
import math
import os
import resource
import sys
from typing import Any

from tandem.rollout.code_values import decode_value, encode_value
from tandem.rollout.containment import die_with_parent, enter, seal
from tandem.rollout.frames import encode_frame, read_frame, write_frame
from tandem.rollout.limits import Limits, apply_limits

MAX_FILE_BYTES = 1 << 20


def main() -> None:
    channel = int(sys.argv[1])
    die_with_parent()
    spec = read_frame(channel)
    try:
        _limit(spec)
        if spec["contained"] and not _is_inside():
            return
    except OSError as error:
        write_frame(channel, encode_frame({"refused": str(error)}))
        return
    write_frame(channel, encode_frame({"ready": True}))
    _serve(channel, spec["code"])


def _limit(spec: dict[str, Any]) -> None:
    apply_limits(Limits(spec["memory_mb"]))
    cpu_s = math.ceil(spec["time_s"]) + 1
    resource.setrlimit(resource.RLIMIT_CPU, (cpu_s, cpu_s))
    resource.setrlimit(resource.RLIMIT_FSIZE, (MAX_FILE_BYTES, MAX_FILE_BYTES))


def _is_inside() -> bool:
    """Fork: the child is the first process of its namespaces, the parent ends with it."""
    enter()
    child = os.fork()
    if child == 0:
        seal(os.getcwd(), MAX_FILE_BYTES)
        die_with_parent()
        return True
    os.waitpid(child, 0)
    return False


def _serve(channel: int, code: str) -> None:
    names: dict[str, Any] = {"__name__": "__main__", "__builtins__": builtins}
    request = read_frame(channel)
    if "stdin" in request:
        answer = _script(code, names, request["stdin"])
        write_frame(channel, encode_frame(answer))
        return
    try:
        exec(compile(code, "solution.py", "exec"), names)
    except BaseException as error:
        write_frame(channel, encode_frame({"raised": _name_of(error), "text": str(error)}))
        return
    kinds = {
        name: "function" if callable(value) else "value"
        for name, value in names.items()
        if not name.startswith("__")
    }
    write_frame(channel, encode_frame({"names": kinds}))
    while (request := read_frame(channel)) is not None:
        write_frame(channel, encode_frame(_answer(names, request)))


def _answer(names: dict[str, Any], request: dict[str, Any]) -> dict[str, Any]:
    try:
        value = names[request["name"]]
        if "args" in request:
            value = value(*decode_value(request["args"]), **decode_value(request["kwargs"]))
        return {"value": encode_value(value)}
    except BaseException as error:
        return {"raised": _name_of(error), "text": str(error)}


def _script(code: str, names: dict[str, Any], stdin: str) -> dict[str, Any]:
    sys.stdin = io.StringIO(stdin)
    sys.stdout = output = io.StringIO()
    try:
        exec(compile(code, "solution.py", "exec"), names)
    except SystemExit as error:
        if error.code not in (None, 0):
            return {"raised": "SystemExit", "text": str(error)}
    except BaseException as error:
        return {"raised": _name_of(error), "text": str(error)}
    return {"output": output.getvalue()}


def _name_of(error: BaseException) -> str:
    return type(error).__name__


if __name__ == "__main__":
    main()
