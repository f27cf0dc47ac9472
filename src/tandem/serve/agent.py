"""Agents: any program that speaks OpenAI's API as a workflow."""

from __future__ import annotations

import asyncio
import inspect
import json
import os
import signal
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Literal

from tandem.config.objects import load_object
from tandem.errors import CapabilityError, ConfigError
from tandem.rollout.group import GroupWorkflow, Trajectory
from tandem.rollout.scoring import Completion, RewardError, checked_score
from tandem.rollout.threads import call_user
from tandem.rollout.tool_calls import ToolFormat
from tandem.rollout.workflow import Episode, SampleError, sample_seed

if TYPE_CHECKING:
    from tandem.rollout.engine import InferenceEngine
    from tandem.serve.gateway import Gateway
    from tandem.serve.session import Session

_CALLS_OF_A_SAMPLE = 64
"""Samples of one request have seeds of their own: turn ``number * 64 + index``."""


@dataclass
class AgentWorkflow(GroupWorkflow):
    """Runs an agent ``group_size`` times for each prompt and trains on what the model answered it.

    ``agent`` is a function, or its name: ``agent(base_url, api_key, data)``, async or not, with the
    columns of the row. Or it is a ``command``, a list of words: it finds ``OPENAI_BASE_URL`` and
    ``OPENAI_API_KEY`` in its environment and the row as JSON on its standard input.

    ``scored_by`` says what makes the reward: what the ``agent`` returns (a number, or None: cannot
    be scored), the ``reward`` function, which sees the last answer, or ``both`` added. An agent
    that raises, exits with another code than 0, takes longer than ``agent_timeout_s`` or asks for
    nothing loses the sample.

    Tokens are trained on as samples of ``generation``, so a request with other sampling options is
    refused; with ``override_sampling`` they are replaced.
    """

    agent: str | Callable[..., Any] | None = None
    command: Sequence[str] = ()
    scored_by: Literal["agent", "reward", "both"] = "agent"
    agent_timeout_s: float = 240.0
    override_sampling: bool = False
    tool_format: ToolFormat = "auto"
    _gateways: list[Gateway] = field(default_factory=list, init=False, repr=False)

    def __post_init__(self) -> None:
        super().__post_init__()
        name = "rollout.workflow_kwargs"
        if (self.agent is None) == (not self.command):
            raise ConfigError(f"{name}: give exactly one of agent and command")
        if self.scored_by not in ("agent", "reward", "both"):
            raise ConfigError(
                f"{name}.scored_by: got {self.scored_by!r}, allowed: agent, reward, both"
            )
        if self.command and self.scored_by != "reward":
            raise ConfigError(
                f"{name}.scored_by: got {self.scored_by!r}, allowed with a command: reward; a "
                "program's exit code and prints are no reward"
            )
        self._function = self._load()
        self._gateways.append(_new_gateway())

    def _load(self) -> Callable[..., Any]:
        if self.agent is None:
            return self._run_command
        found = self.agent
        if isinstance(found, str):
            found = load_object(found, field="rollout.workflow_kwargs.agent")
        if not callable(found):
            raise ConfigError(
                f"rollout.workflow_kwargs.agent: got a {type(found).__name__}, allowed: a function"
            )
        return found

    @property
    def is_scored_by_reward(self) -> bool:
        return self.scored_by != "agent"

    @property
    def has_turns(self) -> bool:
        return True

    async def sample(
        self, engine: InferenceEngine, episode: Episode, prompt_ids: tuple[int, ...], index: int
    ) -> Trajectory:
        session = self._session(engine, episode, index)
        gateway = self._gateways[0]
        base_url = gateway.open(session)
        try:
            result = await self._run(base_url, session.key, episode)
        finally:
            gateway.end(session)
        return self._trajectory(session, episode, index, result)

    def close(self) -> None:
        """End the server that agents talk to. Idempotent."""
        self._gateways[0].close()

    def _session(self, engine: InferenceEngine, episode: Episode, index: int) -> Session:
        from tandem.serve.session import Session

        def seed_of(number: int, sample: int) -> int:
            turn = number * _CALLS_OF_A_SAMPLE + sample
            return sample_seed(self.seed, episode.episode_id, index, turn)

        return Session(
            engine,
            self.tokenizer,
            self.generation,
            f"{episode.uid}.{index}",
            seed_of,
            sampling="replaced" if self.override_sampling else "fixed",
            tool_format=self.tool_format,
        )

    async def _run(self, base_url: str, key: str, episode: Episode) -> float | None:
        function = self._function
        try:
            result = await call_user(
                lambda: function(base_url=base_url, api_key=key, data=dict(episode)),
                is_async=inspect.iscoroutinefunction(function),
                timeout_s=self.agent_timeout_s,
            )
        except (ConfigError, CapabilityError, SampleError):
            raise
        except TimeoutError as error:
            raise SampleError(
                f"the agent did not end within {self.agent_timeout_s:g} s (agent_timeout_s)"
            ) from error
        except (Exception, SystemExit, KeyboardInterrupt) as error:
            raise SampleError(f"the agent raised {type(error).__name__}: {error}") from error
        if self.scored_by == "reward":
            return 0.0
        try:
            return checked_score(result)
        except RewardError as error:
            raise SampleError(f"the agent's result: {error}") from error

    async def _run_command(self, base_url: str, api_key: str, data: Mapping[str, Any]) -> None:
        environment = {**os.environ, "OPENAI_BASE_URL": base_url, "OPENAI_API_KEY": api_key}
        process = await asyncio.create_subprocess_exec(
            *self.command,
            stdin=asyncio.subprocess.PIPE,
            stdout=asyncio.subprocess.DEVNULL,
            stderr=asyncio.subprocess.PIPE,
            env=environment,
            start_new_session=True,
        )
        try:
            _, errors = await process.communicate(json.dumps(data, default=str).encode())
        finally:
            _kill_group(process.pid)
            await process.wait()
        if process.returncode != 0:
            said = errors.decode("utf-8", "replace").strip()[-500:]
            raise SampleError(f"the agent's command ended with code {process.returncode}: {said}")

    def _trajectory(
        self, session: Session, episode: Episode, index: int, result: float | None
    ) -> Trajectory:
        nodes, rows = session.tree.in_order(), session.tree.rows()
        if not nodes:
            raise SampleError("the agent got no completion")
        last = nodes[-1]
        if result is not None:
            rows[-1].reward_last(result)
        sampled = tuple(last.response.output_tokens)
        text = self.tokenizer.decode(list(sampled), skip_special_tokens=True)
        turns = [node.spoken for node in nodes]
        return Trajectory(
            index,
            rows,
            "\n---\n".join(turns),
            Completion(episode.get("prompt"), text, last.asked.context, sampled, {"turns": turns}),
            reward=result,
            is_truncated=last.response.stop_reason == "length",
            num_splits=session.tree.num_splits,
        )


def _new_gateway() -> Gateway:
    try:
        from tandem.serve.gateway import Gateway
    except ImportError as error:
        raise CapabilityError(
            f"workflow agent: {error.name} is not installed; install it with: "
            "pip install 'tandem-rl[serve]'"
        ) from error
    return Gateway()


def _kill_group(leader: int) -> None:
    """End a command and whatever it left running."""
    with suppress(ProcessLookupError):
        os.killpg(leader, signal.SIGKILL)
