"""Advantage estimators: one short file a family, and the table of their names."""

from tandem.algorithms.advantages.assign import assign_advantages, check_advantage
from tandem.algorithms.advantages.table import ADVANTAGES, EXTRA_INPUTS, TOKEN_ADVANTAGES

__all__ = ["ADVANTAGES", "EXTRA_INPUTS", "TOKEN_ADVANTAGES", "assign_advantages", "check_advantage"]
