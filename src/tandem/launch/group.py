"""N ranks behind one TrainEngine: the first rank's engine takes whole batches.

Whatever it is told to do it announces, deals every rank its rows, and gathers what they give; what
the other ranks do with it is ``follower``. Trainers open their engines here and know of no ranks.
"""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Collection, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Protocol

import torch
from tensordict import TensorDict
from torch import Tensor

from tandem.algorithms.objective import Recorder
from tandem.config import LoraConfig, TrainConfig
from tandem.data.batch import WEIGHT_KEYS, check_batch, to_padded
from tandem.data.packing import deal_rows
from tandem.errors import CapabilityError, EngineError, WeightSyncError
from tandem.launch.failures import Failures, describe
from tandem.launch.losses import from_json, to_json
from tandem.launch.shares import Share, compute, place_of
from tandem.launch.wire import Tensors, Wire
from tandem.train import EngineRegistry, TrainEngine
from tandem.types import BatchOutput, FinetuneSpec, LossFn, SaveLoadMeta, WeightUpdateMeta

log = logging.getLogger(__name__)

BEAT_S = 5.0
"""How often an idle leader shows that it is there."""

SCORED_KEYS = (
    "input_ids",
    "attention_mask",
    "position_ids",
    "loss_mask",
    "temperature",
    "candidate_ids",
    *WEIGHT_KEYS,
)
"""What a pass without a loss reads of a batch."""


class Stoppable(Protocol):
    """Who is told that another rank was asked to stop, or is gone."""

    requested: str | None

    def fail(self, error: BaseException) -> None: ...


class Leader:
    """What the first rank tells the others, one command at a time."""

    def __init__(self, wire: Wire, failures: Failures, *, timeout_s: float) -> None:
        self.wire = wire
        self.stop: Stoppable | None = None
        self._failures = failures
        self._lock = threading.RLock()
        self._is_inside = False
        self._is_broken = False
        self._num_engines = 0
        self._ended = threading.Event()
        self._interval_s = min(BEAT_S, timeout_s / 4)
        self._beats = threading.Thread(target=self._beat, name="tandem-leader", daemon=True)
        self._beats.start()

    def next_engine(self) -> int:
        self._num_engines += 1
        return self._num_engines

    @contextmanager
    def command(
        self,
        message: Mapping[str, Any],
        shares: Sequence[Tensors] | None = None,
        *,
        is_cleanup: bool = False,
    ) -> Iterator[None]:
        """Announce a command; the block does the first rank's own part of it.

        Within another command nothing is announced: the other ranks do as their engines do. After
        a failure the ranks are out of step, and only what is ``is_cleanup`` goes on, alone.
        """
        with self._lock:
            if self._is_inside or (self._is_broken and is_cleanup):
                yield
                return
            if self._is_broken:
                raise EngineError("the ranks are out of step after an error before this one")
            self._is_inside = True
            try:
                self._announce(message)
                if shares is not None:
                    self.wire.deal(shares)
                yield
            except WeightSyncError:  # raised by all ranks, which may be told to try again
                raise
            except BaseException as error:
                self._is_broken = True
                reason = self._failures.explain(error)
                if reason is error:
                    raise
                raise reason from error
            finally:
                self._is_inside = False

    def finish(self, summary: Mapping[str, Any]) -> None:
        """Let the other ranks go: the run is over."""
        self._stop_beating()
        with self.command({"do": "end", "error": None, "summary": dict(summary)}):
            pass

    def fail(self, error: BaseException) -> None:
        """Let the other ranks go with what the run ended with, wherever they are."""
        self._stop_beating()
        self._failures.report(error)
        message = {"do": "end", "error": describe(error), "summary": None}
        try:
            with self.command(message, is_cleanup=True):
                pass
        except EngineError as lost:  # what the run ended with says more
            log.warning("%s", lost)

    def _stop_beating(self) -> None:
        self._ended.set()
        self._beats.join()

    def _announce(self, message: Mapping[str, Any]) -> None:
        _, is_stopped = self.wire.announce(message)
        if is_stopped and self.stop is not None and self.stop.requested is None:
            self.stop.requested = "a signal to another rank"

    def _beat(self) -> None:
        while not self._ended.wait(self._interval_s):
            if not self._lock.acquire(blocking=False):
                continue
            try:
                if not self._is_broken:
                    self._announce({"do": "beat"})
            except RuntimeError as error:
                self._is_broken = True
                if self.stop is not None:
                    self.stop.fail(self._failures.explain(error))
            finally:
                self._lock.release()


_current: Leader | None = None


def current_leader() -> Leader | None:
    """The leader of this process's run, if other ranks follow it."""
    return _current


@contextmanager
def installed(leader: Leader) -> Iterator[None]:
    """Make it the current one."""
    global _current
    _current = leader
    try:
        yield
    finally:
        _current = None


def open_engine(
    model_type: str,
    config: TrainConfig,
    *,
    model_path: str,
    lora: LoraConfig | None = None,
    seed: int = 0,
    tokenizer_path: str | None = None,
    ft_spec: FinetuneSpec | None = None,
) -> TrainEngine:
    """An initialised engine: on all ranks if there are several and it can be, else on this one."""
    kind = EngineRegistry.get_engine_cls(model_type, config.backend, config.device)
    leader = current_leader()
    if leader is not None and kind.spans_ranks:
        kind = type(f"{kind.__name__}Group", (EngineGroup, kind), {"leader": leader})
    engine = kind(
        config, model_path=model_path, lora=lora, seed=seed, tokenizer_path=tokenizer_path
    )
    engine.initialize(ft_spec=ft_spec)
    return engine


@dataclass(frozen=True, slots=True)
class Dealt:
    """How the rows of a batch were dealt: those of each rank, and which ranks answer for theirs."""

    rows: list[list[int]]
    answers: list[bool]
    shares: list[Tensors]

    def joined(self, found: Sequence[Tensors]) -> Tensors:
        """What the ranks gave for their rows, in the order of the whole batch."""
        num_rows = 1 + max((row for rows in self.rows for row in rows), default=-1)
        whole: Tensors = {}
        for rows, does_answer, tensors in zip(self.rows, self.answers, found, strict=True):
            if not does_answer:
                continue
            index = torch.tensor(rows, dtype=torch.int64)
            for name, part in tensors.items():
                if name not in whole:
                    whole[name] = part.new_zeros(num_rows, *part.shape[1:])
                whole[name][index] = part.to(whole[name].device)
        return whole


class EngineGroup(TrainEngine):
    """Mixed into the first rank's engine: every call is one of all ranks, batches are whole.

    A batch's rows are dealt so that ranks have nearly equal numbers of tokens; which rank has a row
    changes no result, because normalisation is in the batch's weights.
    """

    leader: Leader

    def initialize(self, addr: str | None = None, ft_spec: FinetuneSpec | None = None) -> None:
        if self._model is not None:
            return
        self._number = self.leader.next_engine()
        opening = {
            "model_type": self.model_type,
            "config": self.config.model_dump(mode="json"),
            "model_path": self.model_path,
            "lora": None if self.lora is None else self.lora.model_dump(mode="json"),
            "seed": self.seed,
            "tokenizer_path": self.tokenizer_path,
            "ft_spec": None if ft_spec is None else asdict(ft_spec),
        }
        with self._told("open", opening):
            super().initialize(addr, ft_spec)
            self._places: list[tuple[int, bool]] = self._gather_over_all(place_of(self))

    def destroy(self) -> None:
        if self._model is not None:
            with self._told("destroy", is_cleanup=True):
                super().destroy()

    # --- modes --------------------------------------------------------------------------------

    @contextmanager
    def train_mode(
        self, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = False
    ) -> Iterator[TrainEngine]:
        options = {
            "disable_auto_offload": disable_auto_offload,
            "zero_grad_on_exit": zero_grad_on_exit,
        }
        with self._entered("train_mode", options), super().train_mode(**options):
            yield self

    @contextmanager
    def eval_mode(
        self, *, disable_auto_offload: bool = False, zero_grad_on_exit: bool = False
    ) -> Iterator[TrainEngine]:
        options = {
            "disable_auto_offload": disable_auto_offload,
            "zero_grad_on_exit": zero_grad_on_exit,
        }
        with self._entered("eval_mode", options), super().eval_mode(**options):
            yield self

    @contextmanager
    def disable_adapter(self, missing_ok: bool = False) -> Iterator[None]:
        options = {"missing_ok": missing_ok}
        with self._entered("disable_adapter", options), super().disable_adapter(**options):
            yield

    @contextmanager
    def reference(self) -> Iterator[None]:
        with self._entered("reference", {}), super().reference():
            yield

    # --- batches ------------------------------------------------------------------------------

    def train_batch(
        self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: Any = None
    ) -> dict[str, float]:
        _refuse(loss_weight_fn)
        check_batch(input_)
        recorder = loss_fn if isinstance(loss_fn, Recorder) else None
        objective = loss_fn if recorder is None else recorder.objective
        share = Share(to_json(objective), records=recorder is not None)
        result, found = self._computed("train_batch", input_, share, super().train_batch)
        if recorder is not None:
            recorder.record(input_["rows"], found["train_logprobs"])
        return result

    def forward_backward_batch(
        self,
        data: TensorDict,
        loss_fn: LossFn | None,
        loss_weight_fn: Any = None,
        forward_only: bool = False,
        *,
        return_outputs: bool | None = None,
    ) -> BatchOutput:
        _refuse(loss_weight_fn)
        check_batch(data)
        options = {"forward_only": forward_only, "return_outputs": return_outputs}
        share = Share(to_json(loss_fn), options=options)
        compute_own = super().forward_backward_batch
        result, found = self._computed("forward_backward_batch", data, share, compute_own)
        return BatchOutput(found, result.loss, result.metrics)

    def eval_batch(self, input_: TensorDict, loss_fn: LossFn, loss_weight_fn: Any = None) -> float:
        _refuse(loss_weight_fn)
        options = {"forward_only": True, "return_outputs": False}
        return self.forward_backward_batch(input_, loss_fn, **options).loss

    def forward(
        self,
        input_: TensorDict,
        output_seqlens: Sequence[int] | None = None,
        post_hook: Callable[[Tensor, TensorDict], Any] | None = None,
        aggregate_fn: Callable[[list[Any]], Any] = torch.cat,
        *,
        outputs: Collection[str] | None = None,
        trained_only: bool = False,
    ) -> Any:
        if output_seqlens is not None:
            raise CapabilityError("output_seqlens: allowed on several ranks: None")
        options: dict[str, Any] = {}
        if post_hook is None:
            options = {"outputs": outputs and list(outputs), "trained_only": trained_only}
        share = Share(to_json(post_hook), options=options)
        check_batch(input_)
        batch = input_.select(*SCORED_KEYS, strict=False)
        _, found = self._computed("forward", batch, share, super().forward)
        if post_hook is None:
            return TensorDict(dict(found), batch_size=input_.batch_size)
        return aggregate_fn(list(zip(*found.values(), strict=True)))

    def _computed(
        self, method: str, batch: TensorDict, share: Share, compute_own: Callable[..., Any]
    ) -> tuple[Any, Tensors]:
        """The method on every rank's rows; the own result, and the tensors of all rows."""
        padded, layout = to_padded(batch)
        dealt = self._deal(padded, share)
        with self._told(method, share.to_json(), dealt.shares):
            result, own = compute(method, compute_own, dealt.shares[0], share)
            found = dealt.joined(self.leader.wire.collect(own))
        tokens = padded["input_ids"].shape
        return result, {
            name: layout.restore(value) if value.shape[:2] == tokens else value
            for name, value in found.items()
        }

    def _deal(self, batch: TensorDict, share: Share) -> Dealt:
        key = getattr(from_json(share.function), "keep_together", None)
        parts = deal_rows(
            batch["attention_mask"].sum(1).tolist(),
            self.get_data_parallel_size(),
            groups=None if key is None else batch[key].tolist(),
        )
        rows = [parts[data_rank] for data_rank, _ in self._places]
        shares = []
        for part in rows:
            index = torch.tensor(part, dtype=torch.int64)
            shares.append({str(name): value[index] for name, value in batch.items()})
        return Dealt(rows, [does_answer for _, does_answer in self._places], shares)

    # --- everything else ----------------------------------------------------------------------

    def optimizer_zero_grad(self) -> None:
        with self._told("optimizer_zero_grad"):
            super().optimizer_zero_grad()

    def optimizer_step(self) -> float:
        with self._told("optimizer_step"):
            return super().optimizer_step()

    def lr_scheduler_step(self) -> float:
        with self._told("lr_scheduler_step"):
            return super().lr_scheduler_step()

    def set_version(self, version: int) -> None:
        with self._told("set_version", {"version": version}):
            super().set_version(version)

    def upload_weights(self, meta: WeightUpdateMeta) -> None:
        with self._told("upload_weights", asdict(meta)):
            super().upload_weights(meta)

    def save(self, meta: SaveLoadMeta) -> None:
        with self._told("save", _plain(meta)):
            super().save(meta)

    def load(self, meta: SaveLoadMeta) -> None:
        with self._told("load", _plain(meta)):
            super().load(meta)

    def save_checkpoint(
        self,
        local_path: str,
        hdfs_path: str | None = None,
        global_step: int = 0,
        max_ckpt_to_keep: int | None = None,
    ) -> None:
        places = {"local_path": local_path, "hdfs_path": hdfs_path}
        options = {"global_step": global_step, "max_ckpt_to_keep": max_ckpt_to_keep}
        with self._told("save_checkpoint", places | options):
            super().save_checkpoint(local_path, hdfs_path, global_step, max_ckpt_to_keep)

    def load_checkpoint(
        self, local_path: str, hdfs_path: str | None = None, del_local_after_load: bool = False
    ) -> None:
        options = {
            "local_path": local_path,
            "hdfs_path": hdfs_path,
            "del_local_after_load": del_local_after_load,
        }
        with self._told("load_checkpoint", options):
            super().load_checkpoint(local_path, hdfs_path, del_local_after_load)

    @contextmanager
    def _told(
        self,
        what: str,
        options: Mapping[str, Any] | None = None,
        shares: Sequence[Tensors] | None = None,
        *,
        is_cleanup: bool = False,
    ) -> Iterator[None]:
        message = {"do": what, "engine": self._number, "options": dict(options or {})}
        with self.leader.command(message, shares, is_cleanup=is_cleanup):
            yield

    @contextmanager
    def _entered(self, mode: str, options: Mapping[str, Any]) -> Iterator[None]:
        with self._told("enter", {"mode": mode, "options": dict(options)}):
            pass
        try:
            yield
        finally:
            with self._told("leave", is_cleanup=True):
                pass


def _refuse(loss_weight_fn: Any) -> None:
    if loss_weight_fn is not None:
        raise CapabilityError(
            "loss_weight_fn: allowed on several ranks: None; put loss_weights into the batch"
        )


def _plain(meta: SaveLoadMeta) -> dict[str, Any]:
    """Without tokenizer and processor, which the first rank alone writes."""
    return {
        "path": meta.path,
        "weight_format": meta.weight_format,
        "with_optim": meta.with_optim,
        "base_model_path": meta.base_model_path,
    }
