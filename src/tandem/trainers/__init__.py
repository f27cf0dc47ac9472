"""The loops a person reads: supervised, on preferences, reinforcement learning, evaluation.

Loss formulas, backends and weight movement are below; parsing of commands is above.
"""

from tandem.trainers.evaluation_run import run_eval
from tandem.trainers.preference import run_dpo
from tandem.trainers.replay import run_replay
from tandem.trainers.reward_model import run_reward
from tandem.trainers.rl import run_rl
from tandem.trainers.sft import run_sft

__all__ = ["run_dpo", "run_eval", "run_replay", "run_reward", "run_rl", "run_sft"]
