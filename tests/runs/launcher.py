"""Starts ``tandem`` commands as processes that can be killed, from one interpreter that is warm.

A process of its own imports Tandem once and forks for every command, so that a test which needs a
real process pays for the fork only. It answers one JSON line per request on its standard input.
"""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

PATIENCE_S = 120.0


class Launcher:
    """The tests' end. ``start`` returns a ``Started`` command."""

    def __init__(self) -> None:
        import tandem

        source = str(Path(tandem.__file__).resolve().parents[1])
        self._process = subprocess.Popen(
            [sys.executable, __file__],
            stdin=subprocess.PIPE,
            stdout=subprocess.PIPE,
            text=True,
            env={**os.environ, "PYTHONPATH": source},
        )

    def start(
        self,
        log: Path,
        *arguments: str | Path,
        audit: Path | None = None,
        environment: Mapping[str, str] | None = None,
    ) -> Started:
        request = {
            "arguments": [str(item) for item in arguments],
            "log": str(log),
            "environment": dict(environment or {}),
        }
        pid = self.ask(start=request, audit=audit and str(audit))
        return Started(self, pid, log)

    def ask(self, **request: Any) -> Any:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.write(json.dumps(request) + "\n")
        self._process.stdin.flush()
        return json.loads(self._process.stdout.readline())

    def close(self) -> None:
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        self._process.stdin.close()
        self._process.wait()
        self._process.stdout.close()


class Started:
    """A running command; ``log`` has what it wrote on both streams."""

    def __init__(self, launcher: Launcher, pid: int, log: Path) -> None:
        self._launcher, self.pid, self.log = launcher, pid, log
        self._code: int | None = None

    def poll(self) -> int | None:
        """The exit code, negative for a signal; None while it runs."""
        if self._code is None:
            self._code = self._launcher.ask(poll=self.pid)
        return self._code

    def signal_when(self, number: int, condition: Callable[[], bool]) -> int:
        """Send a signal as soon as ``condition`` holds; returns the exit code."""
        self.wait_for(condition)
        os.kill(self.pid, number)
        return self.wait()

    def kill_at(self, moment: float) -> None:
        """Kill it at this time of the monotonic clock unless it has ended by then."""
        while time.monotonic() < moment and self.poll() is None:
            time.sleep(0.002)
        if self.poll() is None:
            os.kill(self.pid, signal.SIGKILL)
        self.wait()

    def wait_for(self, condition: Callable[[], bool]) -> None:
        deadline = time.monotonic() + PATIENCE_S
        while not condition():
            assert self.poll() is None, f"ended too early:\n{self.log.read_text()}"
            assert time.monotonic() < deadline, f"never came to it:\n{self.log.read_text()}"
            time.sleep(0.002)

    def wait(self) -> int:
        deadline = time.monotonic() + PATIENCE_S
        while (code := self.poll()) is None:
            if time.monotonic() > deadline:
                os.kill(self.pid, signal.SIGKILL)
                raise AssertionError(f"did not end:\n{self.log.read_text()}")
            time.sleep(0.01)
        return code


def audit_batches(path: Path) -> None:
    """From now on append the version and the episode ids of every training batch to ``path``.

    Beside it, ``path.RANK`` gets the rows that this rank trained in every optimizer step.
    """
    _audit_rows(path.with_name(f"{path.name}.{os.environ.get('RANK', '0')}"))
    from tandem.rollout.composed import ComposedInferenceEngine

    original = ComposedInferenceEngine.prepare_batch

    def prepare_batch(self: Any, *arguments: Any, **options: Any) -> Any:
        batch = original(self, *arguments, **options)
        line = {
            "version": self.get_version(),
            "episodes": sorted(set(batch["episode_ids"].tolist())),
        }
        with path.open("a") as file:
            file.write(json.dumps(line) + "\n")
        return batch

    ComposedInferenceEngine.prepare_batch = prepare_batch  # type: ignore[method-assign]


def _audit_rows(path: Path) -> None:
    from tandem.train.engine import TrainEngine

    original = TrainEngine.train_batch

    def train_batch(self: Any, batch: Any, *arguments: Any) -> Any:
        result = original(self, batch, *arguments)
        ids, mask = batch["input_ids"], batch["attention_mask"]
        rows = [row[kept].tolist() for row, kept in zip(ids, mask, strict=True)]
        with path.open("a") as file:
            file.write(json.dumps(rows) + "\n")
        return result

    TrainEngine.train_batch = train_batch  # type: ignore[method-assign]


def _serve() -> None:
    import tandem.trainers
    from tandem.cli import main

    assert tandem.trainers
    for line in sys.stdin:
        request = json.loads(line)
        if "poll" in request:
            pid, status = os.waitpid(request["poll"], os.WNOHANG)
            answer = os.waitstatus_to_exitcode(status) if pid else None
        else:
            answer = os.fork()
            if answer == 0:
                _become(request, main)
        print(json.dumps(answer), flush=True)  # noqa: T201


def _become(request: dict[str, Any], main: Callable[[], None]) -> None:
    log = os.open(request["start"]["log"], os.O_WRONLY | os.O_CREAT | os.O_APPEND)
    nothing = os.open(os.devnull, os.O_RDONLY)
    for source, target in ((nothing, 0), (log, 1), (log, 2)):
        os.dup2(source, target)
    os.environ.update(request["start"]["environment"])
    if request["audit"]:
        audit_batches(Path(request["audit"]))
    sys.argv = ["tandem", *request["start"]["arguments"]]
    code: Any = 0
    try:
        main()
    except SystemExit as ended:
        code = ended.code or 0
    finally:
        sys.stdout.flush()
        sys.stderr.flush()
        os._exit(code)


if __name__ == "__main__":
    _serve()
