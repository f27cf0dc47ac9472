"""The other ranks of a run: each does what the first one tells its engines to do."""

from __future__ import annotations

import logging
from collections.abc import Mapping
from contextlib import AbstractContextManager
from typing import Any

from tandem.config import LoraConfig, TrainConfig
from tandem.errors import WeightSyncError
from tandem.launch.failures import Failures, rebuilt
from tandem.launch.group import Stoppable
from tandem.launch.shares import Share, compute, place_of
from tandem.launch.wire import Wire
from tandem.train import EngineRegistry, TrainEngine
from tandem.types import FinetuneSpec, SaveLoadMeta, WeightUpdateMeta

log = logging.getLogger(__name__)

Options = Mapping[str, Any]

COMPUTED = ("train_batch", "forward_backward_batch", "forward")
MODES = ("train_mode", "eval_mode", "disable_adapter", "reference")
PLAIN = (
    "optimizer_zero_grad",
    "optimizer_step",
    "lr_scheduler_step",
    "set_version",
    "save_checkpoint",
    "load_checkpoint",
)
"""Methods of an engine whose arguments are JSON."""


class Follower:
    """This rank's engines, by the numbers that the first rank gave them."""

    def __init__(self, wire: Wire, failures: Failures, stop: Stoppable) -> None:
        self._wire, self._failures, self._stop = wire, failures, stop
        self._engines: dict[int, TrainEngine] = {}
        self._entered: dict[int, list[AbstractContextManager[Any]]] = {}

    def run(self) -> dict[str, Any]:
        """Follow until the run ends; returns its summary.

        Raises:
            TandemError: what the run ended with, or what failed here.
        """
        try:
            while True:
                message, _ = self._wire.announce(None, flag=self._stop.requested is not None)
                if message["do"] == "end":
                    break
                if message["do"] != "beat":
                    self._do(message)
        except BaseException as error:
            reason = self._failures.explain(error)
            self._failures.report(reason)
            if reason is error:
                raise
            raise reason from error
        finally:
            for engine in self._engines.values():
                engine.destroy()
        if message["error"] is not None:
            raise rebuilt(message["error"], 0)
        summary: dict[str, Any] = message["summary"]
        return summary

    def _do(self, message: Mapping[str, Any]) -> None:
        what, number, options = message["do"], message["engine"], message["options"]
        if what == "open":
            self._open(number, options)
            return
        engine = self._engines[number]
        if what in COMPUTED:
            self._compute(what, engine, options)
        elif what == "enter":
            assert options["mode"] in MODES
            mode = getattr(engine, options["mode"])(**options["options"])
            mode.__enter__()
            self._entered[number].append(mode)
        elif what == "leave":
            self._entered[number].pop().__exit__(None, None, None)
        elif what == "destroy":
            self._engines.pop(number).destroy()
        elif what == "upload_weights":
            _upload(engine, options)
        elif what in ("save", "load"):
            getattr(engine, what)(SaveLoadMeta(**options))
        else:
            assert what in PLAIN
            getattr(engine, what)(**options)

    def _compute(self, what: str, engine: TrainEngine, options: Options) -> None:
        tensors = self._wire.deal(None)
        _, found = compute(what, getattr(engine, what), tensors, Share(**options))
        self._wire.collect(found)

    def _open(self, number: int, options: Options) -> None:
        config = TrainConfig.model_validate(options["config"])
        lora, spec = options["lora"], options["ft_spec"]
        engine = EngineRegistry.new(
            options["model_type"],
            config.backend,
            config=config,
            model_path=options["model_path"],
            lora=None if lora is None else LoraConfig.model_validate(lora),
            seed=options["seed"],
            tokenizer_path=options["tokenizer_path"],
        )
        self._engines[number], self._entered[number] = engine, []
        engine.initialize(ft_spec=None if spec is None else FinetuneSpec(**spec))
        engine._gather_over_all(place_of(engine))


def _upload(engine: TrainEngine, options: Options) -> None:
    try:
        engine.upload_weights(WeightUpdateMeta(**options))
    except WeightSyncError as error:  # raised on all ranks; the first one may try again
        log.warning("%s", error)
