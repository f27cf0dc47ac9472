"""The exception tree. Every error a user can meet is one of these.

A message names the field, the value received, what is allowed and the remedy. Nothing that a user,
a file, the network or a backend supplied is checked with ``assert``.
"""

from __future__ import annotations


class TandemError(Exception):
    """Base of every error raised on purpose. ``exit_code`` is what the CLI exits with."""

    exit_code = 1


class ConfigError(TandemError, ValueError):
    """A configuration value is unknown, out of range, or contradicts another."""

    exit_code = 2


class DataError(TandemError, ValueError):
    """A dataset, a batch or a row is missing something or has the wrong shape."""

    exit_code = 3


class CapabilityError(TandemError, RuntimeError):
    """A backend was asked for something that it does not support."""

    exit_code = 2


class EngineError(TandemError, RuntimeError):
    """A train or inference engine failed or was used in the wrong state."""

    exit_code = 4


class TrainingDiverged(EngineError):
    """Too many optimizer steps in a row had a non-finite gradient."""


class WeightSyncError(TandemError, RuntimeError):
    """A weight update was refused; the old version still serves, as a whole."""

    exit_code = 4


class RolloutError(TandemError, RuntimeError):
    """Rollout cannot deliver: fault budget spent, or a count that can no longer be reached."""

    exit_code = 5


class CheckpointError(TandemError, RuntimeError):
    """A checkpoint cannot be written, read or trusted."""

    exit_code = 6


class StoreError(TandemError, RuntimeError):
    """The trajectory store cannot be written, read or trusted."""

    exit_code = 6


class StallError(TandemError, RuntimeError):
    """Nothing moved for longer than ``run.stall_timeout_s``; the message has all stacks."""

    exit_code = 4


class ReplayDiverged(TandemError, RuntimeError):
    """A replayed step computed another value than the run recorded."""

    exit_code = 7


class Preempted(TandemError):
    """The run was asked to stop (SIGTERM, SIGINT), saved its state and can be resumed."""

    exit_code = 75
