"""The process that runs unit tests. The solution they call lives in another, ``code_sandbox``.

Started by ``code_reward`` only. The verdict goes out on a descriptor that the solution's process
does not have, with a number that it does not know; exit codes and prints mean nothing.
"""

from __future__ import annotations

import builtins
import os
import signal
import socket
import subprocess
import sys
import time
from typing import Any

from tandem.errors import EngineError
from tandem.rollout.code_values import decode_value, encode_value
from tandem.rollout.containment import close_to_others, die_with_parent
from tandem.rollout.frames import encode_frame, read_frame, write_frame

START_TIMEOUT_S = 30.0


class SolutionError(Exception):
    """The solution did not do what was asked: it hung, died or answered nonsense."""


class Refused(Exception):
    """The solution cannot be contained here."""


class Solution:
    """The solution's process, asked over a socket until ``deadline``.

    Starting it has a deadline of its own: a busy machine is not the solution's fault.
    """

    def __init__(self, spec: dict[str, Any]) -> None:
        ours, theirs = socket.socketpair()
        self._socket = ours
        self.deadline = time.monotonic() + START_TIMEOUT_S
        with theirs:
            self._process = subprocess.Popen(
                [sys.executable, "-P", "-m", "tandem.rollout.code_sandbox", str(theirs.fileno())],
                pass_fds=(theirs.fileno(),),
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                stderr=subprocess.DEVNULL,
                start_new_session=True,
            )
        try:
            write_frame(ours.fileno(), encode_frame(spec))
            answer = self._read()
        except (EngineError, SolutionError) as error:
            # Nothing of the solution has run yet: this is no verdict on it.
            self.close()
            raise Refused(f"the process for it did not start: {error}") from error
        if "refused" in answer:
            self.close()
            raise Refused(str(answer["refused"]))

    def ask(self, request: dict[str, Any]) -> dict[str, Any]:
        try:
            write_frame(self._socket.fileno(), encode_frame(request))
        except EngineError as error:
            raise SolutionError("its process died") from error
        return self._read()

    def _read(self) -> dict[str, Any]:
        try:
            answer = read_frame(self._socket.fileno(), self.deadline)
        except TimeoutError:
            raise SolutionError("it took too long") from None
        except (OSError, EngineError, ValueError) as error:
            raise SolutionError(f"its answer is broken: {error}") from error
        if not isinstance(answer, dict):
            raise SolutionError("its process died")
        return answer

    def value(self, request: dict[str, Any]) -> Any:
        answer = self.ask(request)
        if "raised" in answer:
            raise _exception(str(answer["raised"]), str(answer.get("text", "")))
        try:
            return decode_value(answer["value"])
        except (KeyError, ValueError, TypeError, IndexError, RecursionError) as error:
            raise SolutionError(f"its answer is broken: {error}") from error

    def close(self) -> None:
        if self._process.poll() is None:
            os.killpg(self._process.pid, signal.SIGKILL)
        self._process.wait()
        self._socket.close()


def main() -> None:
    verdict = int(sys.argv[1])
    close_to_others()
    die_with_parent()
    spec = read_frame(0)
    try:
        result = run_tests(spec)
    except Refused as error:
        result = {"refused": str(error)}
    write_frame(verdict, encode_frame({**result, "nonce": spec["nonce"]}))


def run_tests(spec: dict[str, Any]) -> dict[str, Any]:
    """Each test has a solution of its own. Counts those that passed, and why the first did not."""
    passed, reason, left_s = 0, "", float(spec["time_s"])
    sandbox = {key: spec[key] for key in ("code", "time_s", "memory_mb", "contained")}
    for test in spec["tests"]:
        solution = Solution(sandbox)
        started = time.monotonic()
        solution.deadline = started + left_s
        try:
            _run(test, solution)
            passed += 1
        except BaseException as error:
            reason = reason or f"{type(error).__name__}: {error}"
            if spec["stop_at_first"]:
                break
        left_s -= time.monotonic() - started
    return {"passed": passed, "total": len(spec["tests"]), "reason": reason[:500]}


def _run(test: Any, solution: Solution) -> None:
    try:
        if isinstance(test, dict):
            answer = solution.ask({"stdin": test["input"]})
            if "raised" in answer:
                raise SolutionError(f"it raised {answer['raised']}: {answer.get('text')}")
            if _lines(str(answer.get("output"))) != _lines(test["output"]):
                raise SolutionError(f"wrong output {str(answer.get('output'))!r:.200}")
            return
        names = solution.ask({"begin": True})
        if "raised" in names:
            raise SolutionError(f"it raised {names['raised']}: {names.get('text')}")
        scope = _scope(solution, names.get("names"))
        exec(compile(test, "tests.py", "exec"), scope)
    finally:
        solution.close()


def _scope(solution: Solution, kinds: Any) -> dict[str, Any]:
    """The solution's names as the tests see them: functions that ask, values that were fetched."""
    if not isinstance(kinds, dict):
        raise SolutionError("it told no names")
    scope: dict[str, Any] = {"__name__": "tests"}
    for name, kind in kinds.items():
        if kind == "function":
            scope[name] = _proxy(solution, name)
            continue
        try:
            scope[name] = solution.value({"name": name})
        except SolutionError:
            raise
        except Exception:
            # Modules and the like stay where they are; a test that uses one says so.
            continue
    return scope


def _proxy(solution: Solution, name: str) -> Any:
    def call(*args: Any, **kwargs: Any) -> Any:
        return solution.value(
            {"name": name, "args": encode_value(args), "kwargs": encode_value(kwargs)}
        )

    call.__name__ = call.__qualname__ = name
    return call


def _exception(name: str, text: str) -> BaseException:
    """A built-in exception of that name, so that tests can expect it."""
    kind = getattr(builtins, name, None)
    if isinstance(kind, type) and issubclass(kind, Exception):
        try:
            return kind(text)
        except TypeError:
            return SolutionError(f"it raised {name}: {text}")
    return SolutionError(f"it raised {name}: {text}")


def _lines(text: str) -> list[str]:
    return [line.rstrip() for line in text.rstrip().split("\n")]


if __name__ == "__main__":
    main()
