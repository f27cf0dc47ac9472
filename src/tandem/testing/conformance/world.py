"""Several ranks, each a process of its own, led check by check from here.

A rank that dies or hangs costs its check, not the run: the others are ended and all start again for
the checks that are left. What a rank does is in ``rank``.

    parent                              every rank (``python -m tandem.testing.conformance.rank``)
    start, wait for "ready"        <--  imports, joins the process group
    a task's number to every stdin -->  runs that check, together with the others
    outcomes of all, or deadline   <--  one line of JSON on its own pipe; stdout and stderr: a file
"""

from __future__ import annotations

import json
import os
import selectors
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import TracebackType
from typing import IO, Any, Self

from tandem.errors import EngineError
from tandem.testing.conformance.bench import Bench
from tandem.testing.conformance.figure import Outcome, merge
from tandem.testing.conformance.subject import Subject

START_TIMEOUT_S = 180.0
GRACE_S = 10.0
"""How long the others may take once one rank has failed: they may be waiting for it."""

MAX_STARTS = 5
LOG_TAIL = 40
JOB_FILE, STORE_FILE = "job.json", "store"

Task = tuple[Subject, str]


@dataclass(frozen=True, slots=True)
class Job:
    """Checks to run in order, on subjects of one world size; ``modules`` are imported first."""

    tasks: Sequence[Task]
    modules: tuple[str, ...] = ()
    timeout_s: float = 120.0

    @property
    def world(self) -> int:
        return self.tasks[0][0].world

    def subjects(self) -> list[Subject]:
        """Each subject once, in order of appearance; a rank has a bench for each."""
        found: list[Subject] = []
        for subject, _ in self.tasks:
            if subject not in found:
                found.append(subject)
        return found


def bench_path(scratch: Path, number: int) -> Path:
    return scratch / f"bench_{number}"


def run_ranks(
    job: Job, scratch: Path, on_outcome: Callable[[Outcome], None] | None = None
) -> list[Outcome]:
    """Outcomes of all tasks, in their order.

    Raises:
        EngineError: the ranks do not start.
    """
    outcomes: list[Outcome] = []

    def report(outcome: Outcome) -> None:
        outcomes.append(outcome)
        if on_outcome is not None:
            on_outcome(outcome)

    for start in range(MAX_STARTS):
        with Ranks(job, scratch / f"start_{start}") as ranks:
            ranks.wait_ready()
            while len(outcomes) < len(job.tasks) and ranks.is_intact:
                report(ranks.run(len(outcomes)))
        if len(outcomes) == len(job.tasks):
            return outcomes
    for _, check in job.tasks[len(outcomes) :]:
        report(Outcome.raised(check, f"not run: the ranks were lost {MAX_STARTS} times", ""))
    return outcomes


class Ranks:
    """The processes of one start; a context that leaves none of them behind."""

    def __init__(self, job: Job, scratch: Path) -> None:
        self.job, self.scratch = job, scratch
        self.is_intact = True
        self._processes: list[subprocess.Popen[bytes]] = []
        self._pipes: list[IO[bytes]] = []
        self._selector = selectors.DefaultSelector()

    def __enter__(self) -> Self:
        for number, subject in enumerate(self.job.subjects()):
            Bench(subject, bench_path(self.scratch, number)).write_models()
        (self.scratch / JOB_FILE).write_text(json.dumps(asdict(self.job)), encoding="utf-8")
        port = _free_port()
        try:
            for rank in range(self.job.world):
                self._start(rank, port)
        except BaseException:
            self._end()
            raise
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        trace: TracebackType | None,
    ) -> None:
        self._end()

    def wait_ready(self) -> None:
        """Wait until every rank has imported its modules and joined the group."""
        replies = self._collect(START_TIMEOUT_S)
        if len(replies) < self.job.world:
            self.is_intact = False
            missing = sorted(set(range(self.job.world)) - replies.keys())
            raise EngineError(
                f"rank {missing[0]} of {self.job.world} did not start "
                f"({self._exit(missing[0])}); its last lines:\n{self._log(missing[0])}"
            )

    def run(self, number: int) -> Outcome:
        """Run one task on all ranks; afterwards they may not be intact."""
        _, check = self.job.tasks[number]
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):  # its end is seen below, with what it said
                process.stdin.write(f"{number}\n".encode())
                process.stdin.flush()
        replies = self._collect(self.job.timeout_s)
        found = {rank: Outcome.from_json(reply) for rank, reply in replies.items()}
        missing = sorted(set(range(self.job.world)) - found.keys())
        self.is_intact = not missing
        dead = [rank for rank in missing if self._processes[rank].poll() is not None]
        # A rank that died comes first: what the others raise then is that it was gone.
        if dead:
            return self._lost(check, dead[0])
        for rank, outcome in found.items():  # in the order in which they came
            if outcome.trace:
                return replace(outcome, detail=f"rank {rank}: {outcome.detail}")
        if missing:
            return self._lost(check, missing[0])
        return merge(list(found.values()))

    def _lost(self, check: str, rank: int) -> Outcome:
        detail = f"rank {rank} {self._exit(rank)}"
        return Outcome.raised(check, detail, f"{detail}; its last lines:\n{self._log(rank)}")

    def _collect(self, timeout_s: float) -> dict[int, dict[str, Any]]:
        """One reply of every rank, or what there is at the deadline or after a failure's grace."""
        replies: dict[int, dict[str, Any]] = {}
        ended: set[int] = set()
        deadline = time.monotonic() + timeout_s
        while len(replies) + len(ended) < self.job.world:
            left = deadline - time.monotonic()
            if left <= 0:
                break
            for key, _ in self._selector.select(left):
                rank: int = key.data
                line = self._pipes[rank].readline()
                if not line:
                    self._selector.unregister(self._pipes[rank])
                    ended.add(rank)
                    with suppress(subprocess.TimeoutExpired):
                        self._processes[rank].wait(GRACE_S)  # its exit code is reported
                else:
                    replies[rank] = json.loads(line)
                if not line or replies[rank].get("trace"):
                    deadline = min(deadline, time.monotonic() + GRACE_S)
        return replies

    def _start(self, rank: int, port: int) -> None:
        read, write = os.pipe()
        self._pipes.append(os.fdopen(read, "rb", buffering=0))
        self._selector.register(self._pipes[-1], selectors.EVENT_READ, rank)
        command = [sys.executable, "-m", "tandem.testing.conformance.rank"]
        with (self.scratch / f"rank_{rank}.log").open("wb") as log:
            process = subprocess.Popen(
                [*command, str(self.scratch), str(write)],
                stdin=subprocess.PIPE,
                stdout=log,
                stderr=subprocess.STDOUT,
                env=os.environ | _environment(rank, self.job.world, port),
                pass_fds=(write,),
            )
        self._processes.append(process)
        os.close(write)

    def _end(self) -> None:
        for process in self._processes:
            assert process.stdin is not None
            with suppress(BrokenPipeError):
                process.stdin.close()
        for process in self._processes:
            if not self.is_intact:
                process.kill()
            try:
                process.wait(GRACE_S)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
        self._selector.close()
        for pipe in self._pipes:
            pipe.close()

    def _exit(self, rank: int) -> str:
        code = self._processes[rank].poll()
        return "does not answer" if code is None else f"died with exit code {code}"

    def _log(self, rank: int) -> str:
        text = (self.scratch / f"rank_{rank}.log").read_text(encoding="utf-8", errors="replace")
        return "\n".join(text.strip().splitlines()[-LOG_TAIL:])


def _environment(rank: int, world: int, port: int) -> dict[str, str]:
    """What torchrun would set, one thread a rank, and the import path of this process."""
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world),
        "LOCAL_WORLD_SIZE": str(world),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "TOKENIZERS_PARALLELISM": "false",
        "GLOO_SOCKET_IFNAME": "lo0" if sys.platform == "darwin" else "lo",
        "PYTHONPATH": os.pathsep.join(path or os.getcwd() for path in sys.path),
    }


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port: int = probe.getsockname()[1]
        return port
