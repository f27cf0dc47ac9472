"""Environments: what answers a model between its turns. The contract and the shipped adapters.

The loop that talks to them is ``rollout.multi_turn``; tools are an environment in ``tool_use``.
"""

from tandem.rollout.environments.contract import (
    Environment,
    EnvironmentFactory,
    Step,
    load_environment,
)

__all__ = ["Environment", "EnvironmentFactory", "Step", "load_environment"]
