"""One rank of a checked engine: ``python -m tandem.testing.conformance.rank SCRATCH PIPE``.

Joins the default process group, so that an engine finds one as under torchrun, and runs the checks
whose numbers come on stdin. Who starts and ends ranks is in ``world``.
"""

from __future__ import annotations

import faulthandler
import importlib
import json
import os
import sys
from dataclasses import asdict
from pathlib import Path
from typing import IO, Any

import torch
import torch.distributed as dist

from tandem.testing.conformance.bench import Bench
from tandem.testing.conformance.run import run_check
from tandem.testing.conformance.subject import Subject
from tandem.testing.conformance.world import JOB_FILE, STORE_FILE, Job, bench_path


def main(scratch: Path, pipe: IO[str]) -> None:
    faulthandler.enable()
    job = read_job(scratch)
    torch.set_num_threads(1)
    for module in job.modules:
        importlib.import_module(module)
    _join(job, scratch)
    subjects = job.subjects()
    benches = [
        Bench(subject, bench_path(scratch, number)) for number, subject in enumerate(subjects)
    ]
    _send(pipe, {"ready": True})
    for line in sys.stdin:
        subject, check = job.tasks[int(line)]
        # A rank that hangs says where before the parent ends it.
        faulthandler.dump_traceback_later(0.9 * job.timeout_s)
        outcome = run_check(benches[subjects.index(subject)], check)
        faulthandler.cancel_dump_traceback_later()
        _send(pipe, asdict(outcome))
    dist.destroy_process_group()


def read_job(scratch: Path) -> Job:
    data = json.loads((scratch / JOB_FILE).read_text(encoding="utf-8"))
    tasks = [(Subject(**subject), check) for subject, check in data["tasks"]]
    return Job(tasks, tuple(data["modules"]), data["timeout_s"])


def _join(job: Job, scratch: Path) -> None:
    """The group meets in a file: no port is open beyond gloo's own on the loopback."""
    rank = int(os.environ["RANK"])
    device = job.tasks[0][0].device
    backend = "gloo"
    if device == "cuda":
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
        backend = "cpu:gloo,cuda:nccl"
    store = dist.FileStore(str(scratch / STORE_FILE), job.world)  # type: ignore[attr-defined]
    dist.init_process_group(backend, store=store, rank=rank, world_size=job.world)


def _send(pipe: IO[str], message: dict[str, Any]) -> None:
    pipe.write(json.dumps(message) + "\n")
    pipe.flush()


if __name__ == "__main__":
    with os.fdopen(int(sys.argv[2]), "w", encoding="utf-8") as to_parent:
        main(Path(sys.argv[1]), to_parent)
