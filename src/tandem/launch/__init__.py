"""Several processes as one run: N ranks behind one TrainEngine.

The first rank leads: it runs a trainer, and its engines tell those of the other ranks what to do
(``group``, ``follower``). What an engine computes over ranks is ``train``; starting processes is
a launcher's job (torchrun, Slurm).
"""

from tandem.launch.group import EngineGroup, Leader, current_leader, open_engine
from tandem.launch.session import follow, leading

__all__ = ["EngineGroup", "Leader", "current_leader", "follow", "leading", "open_engine"]
