"""A reward for code: unit tests run against the solution in a completion, all of it contained.

Three processes: this one asks, ``code_worker`` runs the tests, ``code_sandbox`` the solution. Tests
reach the solution by calls with plain values, so that the solution never shares memory with what
judges it, and the verdict comes back on a descriptor of its own.
"""

from __future__ import annotations

import os
import re
import secrets
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping, Sequence
from typing import Any

from tandem.errors import ConfigError, DataError, EngineError, RolloutError
from tandem.rollout.code_worker import START_TIMEOUT_S
from tandem.rollout.frames import encode_frame, read_frame, write_frame

_BLOCK = re.compile(r"```(?:python|py)?[ \t]*\n(.*?)(?:```|\Z)", re.DOTALL)
MIN_MEMORY_MB = 64


def code(
    prompt: Any,
    completion: str,
    prompt_ids: Sequence[int],
    completion_ids: Sequence[int],
    *,
    tests: Any,
    time_s: float = 5.0,
    memory_mb: int = 512,
    contained: bool = True,
    partial: bool = False,
    **data: Any,
) -> float:
    """1 when every test passes, else 0; with ``partial`` the share of tests that pass.

    ``tests`` is a Python text of asserts that use what the solution defines, or a list of such
    texts, or of ``{"input": ..., "output": ...}`` (standard input and output of a script). The
    solution is the last fenced block of the completion, or all of it. Values pass between tests and
    solution as copies, and must be plain data: numbers, text, bytes, lists, tuples, sets, dicts.

    The solutions of all tests have ``time_s`` together and ``memory_mb`` each. ``contained``
    (Linux) takes from them the network, the sight of other processes and the right to write files;
    they can still read files. Without it only time and memory are bounded.

    Raises:
        ConfigError: the kernel does not allow this containment.
        RolloutError: the tests themselves hang or are killed.
    """
    if memory_mb < MIN_MEMORY_MB:
        raise ConfigError(
            f"reward.kwargs.memory_mb: got {memory_mb}, allowed: {MIN_MEMORY_MB} or more; less is "
            "not enough to start Python"
        )
    spec: dict[str, Any] = {
        "code": extract_code(completion),
        "tests": _checked_tests(tests),
        "time_s": time_s,
        "memory_mb": memory_mb,
        "contained": contained,
        "stop_at_first": not partial,
        "nonce": secrets.token_hex(16),
    }
    num_starts = len(spec["tests"]) + 1
    verdict = _judge(spec, time.monotonic() + time_s + num_starts * START_TIMEOUT_S)
    if "refused" in verdict:
        raise ConfigError(
            f"reward code: the solution cannot be contained: {verdict['refused']}; with "
            "reward.kwargs.contained=false it runs with your rights, bounded in time and memory"
        )
    passed, total = int(verdict["passed"]), int(verdict["total"])
    return passed / total if partial else float(passed == total)


def extract_code(completion: str) -> str:
    """The last fenced block, or the whole text when there is none."""
    blocks = _BLOCK.findall(completion)
    return blocks[-1] if blocks else completion


def _checked_tests(tests: Any) -> list[Any]:
    found = [tests] if isinstance(tests, str) else tests
    if not isinstance(found, list) or not found:
        raise DataError(f"reward code: column 'tests': got {tests!r:.80}, allowed: text or a list")
    for test in found:
        is_pair = isinstance(test, Mapping) and all(
            isinstance(test.get(name), str) for name in ("input", "output")
        )
        is_text = isinstance(test, str) and bool(test.strip())
        if is_text:
            _check_syntax(test)
        if not is_text and not is_pair:
            raise DataError(
                f"reward code: column 'tests': got {test!r:.80}, allowed: text that is not empty, "
                "or an object with input and output"
            )
    return list(found)


def _check_syntax(test: str) -> None:
    try:
        compile(test, "tests", "exec")
    except (SyntaxError, ValueError) as error:
        raise DataError(f"reward code: column 'tests': a test is no Python: {error}") from None


def _judge(spec: Mapping[str, Any], deadline: float) -> dict[str, Any]:
    reading, writing = os.pipe()
    with tempfile.TemporaryDirectory(prefix="tandem-code-") as folder:
        try:
            worker = _start(writing, folder)
        finally:
            os.close(writing)
        try:
            assert worker.stdin is not None
            write_frame(worker.stdin.fileno(), encode_frame(dict(spec)))
            verdict = read_frame(reading, deadline)
        except TimeoutError:
            raise RolloutError("reward code: the tests did not end in time") from None
        except EngineError as error:
            raise RolloutError("reward code: the process of the tests died") from error
        finally:
            os.close(reading)
            _kill(worker)
    if not isinstance(verdict, dict) or verdict.get("nonce") != spec["nonce"]:
        raise RolloutError("reward code: the process of the tests died without a verdict")
    return verdict


def _start(verdict: int, folder: str) -> subprocess.Popen[bytes]:
    environment = {
        "PATH": os.environ.get("PATH", os.defpath),
        "PYTHONPATH": os.pathsep.join(os.path.abspath(entry) for entry in sys.path if entry),
        "PYTHONHASHSEED": "0",
        "PYTHONDONTWRITEBYTECODE": "1",
        "LANG": "C.UTF-8",
        "OMP_NUM_THREADS": "1",
    }
    return subprocess.Popen(
        [sys.executable, "-P", "-m", "tandem.rollout.code_worker", str(verdict)],
        pass_fds=(verdict,),
        stdin=subprocess.PIPE,
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        cwd=folder,
        env=environment,
        start_new_session=True,
    )


def _kill(worker: subprocess.Popen[bytes]) -> None:
    """The sandbox is in a session of its own and ends when its socket to the worker closes."""
    if worker.poll() is None:
        os.killpg(worker.pid, signal.SIGKILL)
    worker.wait()
    assert worker.stdin is not None
    worker.stdin.close()
