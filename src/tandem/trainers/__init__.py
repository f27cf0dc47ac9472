"""The loops a person reads: supervised fine-tuning, reinforcement learning, evaluation.

Loss formulas, backends and weight movement are below; parsing of commands is above.
"""

from tandem.trainers.evaluation_run import run_eval
from tandem.trainers.replay import run_replay
from tandem.trainers.rl import run_rl
from tandem.trainers.sft import run_sft

__all__ = ["run_eval", "run_replay", "run_rl", "run_sft"]
