"""One prompt, G completions, one verifiable reward each."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING

from tandem.rollout.group import GroupWorkflow, Trajectory
from tandem.rollout.scoring import Completion
from tandem.rollout.transcript import TokenRow
from tandem.rollout.workflow import Episode, sample_seed
from tandem.types import LLMRequest

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine


@dataclass
class SingleTurnWorkflow(GroupWorkflow):
    """Samples ``group_size`` completions of a prompt at once and scores each when it is done.

    ``data`` needs ``prompt_ids``, or ``prompt`` (text, or chat messages) to make them from. The
    reward sees the text of the sampled ids without special tokens, and the ids. Only sampled
    tokens are in ``loss_mask``, the stop token included.
    """

    async def sample(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> Trajectory:
        request = LLMRequest(
            rid=f"{episode.uid}.{index}",
            input_ids=prompt_ids,
            gconfig=self.generation.new(seed=sample_seed(self.seed, episode.episode_id, index)),
        )
        response = await engine.agenerate(request)
        text = self.tokenizer.decode(response.output_tokens, skip_special_tokens=True)
        row = TokenRow.of(prompt_ids)
        row.add_sampled(response, 0)
        return Trajectory(
            index,
            [row],
            text,
            Completion(episode.get("prompt"), text, prompt_ids, tuple(response.output_tokens)),
            reward=None if response.stop_reason == "abort" else 0.0,
            is_truncated=response.stop_reason == "length",
        )
