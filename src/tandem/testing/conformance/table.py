"""The checks by name, in the order of the report. The checks themselves do not belong here."""

from __future__ import annotations

from collections.abc import Callable

from tandem.testing.conformance import (
    adapters,
    export,
    gradients,
    invariance,
    optimizer,
    resume,
    state,
    truth,
    uneven,
)
from tandem.testing.conformance.bench import Bench
from tandem.testing.conformance.figure import Figure

Check = Callable[[Bench], Figure]

CHECKS: dict[str, Check] = {
    "oracle: losses": gradients.oracle_losses,
    "oracle: gradients": gradients.oracle_gradients,
    "log-probabilities": truth.logprobs,
    "entropy": truth.entropy,
    "values": truth.values,
    "scores": truth.scores,
    "logits of a hook": truth.hook,
    "scoring calls agree": truth.scoring_calls,
    "no dropout in scoring": truth.no_dropout,
    "losses": gradients.losses,
    "gradients": gradients.gradients,
    "loss_weight_fn": gradients.weighted_means,
    "micro-batch cut": invariance.microbatch_cut,
    "several calls a step": invariance.several_calls,
    "packing": invariance.packing,
    "row order": invariance.row_order,
    "padding and layout": invariance.padding,
    "world size": invariance.world_size,
    "tensor parallelism": invariance.tensor_parallel,
    "sequence parallelism": invariance.sequence_parallel,
    "activation checkpointing": invariance.checkpointing,
    "offload": invariance.offload,
    "zero-weight micro-batch": uneven.zero_weight_microbatch,
    "zero-weight rank": uneven.zero_weight_rank,
    "nothing to train": uneven.nothing_to_train,
    "uneven tokens": uneven.uneven_tokens,
    "unequal micro-batches": uneven.unequal_microbatches,
    "row at the cap": uneven.at_the_cap,
    "row over the cap": uneven.over_the_cap,
    "non-finite gradient": uneven.non_finite,
    "metrics": state.metrics,
    "optimizer steps": optimizer.steps,
    "learning rates": optimizer.learning_rates,
    "train_batch in its parts": optimizer.separate_calls,
    "reference policy": adapters.reference_policy,
    "frozen base": adapters.frozen_base,
    "names of weights": export.names_and_shapes,
    "exported weights": export.is_the_model,
    "tied weights": export.tied,
    "model directory": export.directory,
    "resume": resume.resume,
    "training state": resume.training_state,
    "reshard": resume.reshard,
    "version": resume.version,
    "contexts and modes": state.modes,
    "placement": state.placement,
    "caller's batch": state.batch_untouched,
    "flat memory": state.flat_memory,
    "topology": state.topology,
    "capabilities": state.capabilities,
}
"""Name of a check -> its function."""
