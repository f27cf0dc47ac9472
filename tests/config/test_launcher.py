import pytest

from tandem.config.launcher import LauncherFacts, launcher_facts
from tandem.errors import ConfigError


def test_without_a_launcher_a_process_is_alone_on_loopback():
    facts = launcher_facts({"MASTER_ADDR": "10.0.0.1"})
    assert (facts.rank, facts.world_size, facts.is_loopback) == (0, 1, True)


def test_what_torchrun_says_is_read():
    facts = launcher_facts(
        {
            "RANK": "5",
            "WORLD_SIZE": "8",
            "LOCAL_RANK": "1",
            "LOCAL_WORLD_SIZE": "4",
            "MASTER_ADDR": "10.0.0.1",
            "MASTER_PORT": "1234",
            "TORCHELASTIC_USE_AGENT_STORE": "True",
            "TORCHELASTIC_RESTART_COUNT": "2",
        }
    )
    assert facts == LauncherFacts(5, 8, 1, 4, "10.0.0.1", 1234, has_agent_store=True, attempt=2)
    assert not facts.is_loopback


@pytest.mark.parametrize(
    ("environment", "message"),
    [
        ({"RANK": "2", "WORLD_SIZE": "2"}, "0 <= RANK < WORLD_SIZE"),
        ({"RANK": "1"}, "0 <= RANK < WORLD_SIZE"),
        ({"RANK": "0", "WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "0"}, "LOCAL_WORLD_SIZE: got 0"),
        ({"RANK": "0", "WORLD_SIZE": "two"}, "WORLD_SIZE: got 'two'"),
    ],
)
def test_contradictory_facts_are_refused(environment, message):
    with pytest.raises(ConfigError, match=message):
        launcher_facts(environment)
