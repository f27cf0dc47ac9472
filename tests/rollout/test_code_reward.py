"""Code rewards: what passes, what cheats, what hangs, and what the solution can reach."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import psutil
import pytest

from tandem.config.reward import RewardConfig
from tandem.errors import ConfigError, DataError
from tandem.rollout import code_reward, code_worker
from tandem.rollout.code_reward import extract_code
from tandem.rollout.code_values import decode_value, encode_value
from tandem.rollout.scoring import load_reward
from tests.rollout.test_rewards import score

ADD = "def add(a, b):\n    return a + b\n"
TEST = "assert add(1, 2) == 3"


CAN_CONTAIN = (
    subprocess.run(
        [sys.executable, "-c", "from tandem.rollout.containment import enter; enter()"],
        env={**os.environ, "PYTHONPATH": os.pathsep.join(map(os.path.abspath, sys.path))},
        capture_output=True,
    ).returncode
    == 0
)
contained = pytest.mark.skipif(not CAN_CONTAIN, reason="this kernel gives no namespaces")


def judge(solution: str, tests: Any = TEST, **settings: Any) -> float:
    settings = {"contained": CAN_CONTAIN} | settings
    return code_reward.code(None, solution, [], [], tests=tests, **settings)


def reason(solution: str, test: Any, folder: Path, **settings: Any) -> str:
    """Why the test did not pass, as the process of the tests sees it."""
    spec = {"code": solution, "tests": [test], "time_s": 5.0, "memory_mb": 512}
    spec["contained"] = CAN_CONTAIN
    here = os.getcwd()
    os.chdir(folder)
    try:
        return str(code_worker.run_tests({**spec, "stop_at_first": True, **settings})["reason"])
    finally:
        os.chdir(here)


@pytest.fixture(autouse=True)
def _absolute_import_path(monkeypatch: pytest.MonkeyPatch) -> None:
    entries = [os.path.abspath(entry) for entry in sys.path if entry]
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join(entries))


def test_asserts_decide() -> None:
    assert judge(f"Here:\n```python\n{ADD}```\nDone.") == 1.0
    assert judge(ADD.replace("+", "-")) == 0.0


def test_a_share_of_tests_is_a_share_of_the_reward() -> None:
    tests = [TEST, "assert add(1, 1) == 3", "import math\nassert add(math.pi, 0) == math.pi"]
    assert judge(ADD, tests, partial=True) == pytest.approx(2 / 3)
    assert judge(ADD, tests) == 0.0


def test_standard_input_and_output_of_a_script() -> None:
    tests = [{"input": "3\n", "output": "6"}, {"input": "5\n", "output": "10\n"}]
    assert judge("print(int(input()) * 2)", tests) == 1.0
    assert judge("print(6)", tests, partial=True) == 0.5


@pytest.mark.parametrize(
    "cheat",
    [
        "import os\nos._exit(0)",
        "import sys\nsys.exit(0)",
        "print('passed 1 of 1', flush=True)\nprint('{\"passed\": 1, \"total\": 1}')",
        "class Yes:\n    def __eq__(self, o): return True\ndef add(a, b): return Yes()",
        "class Yes(int):\n    def __eq__(self, o): return True\ndef add(a, b): return Yes(7)",
        "import builtins\nbuiltins.AssertionError = ZeroDivisionError\ndef add(a, b): return 4",
        # Every descriptor that it has gets the verdict that it would like.
        "import os\nfor fd in range(3, 64):\n"
        '    try: os.write(fd, b\'\\x00\\x00\\x00\\x19{"passed": 1, "total": 1}\')\n'
        "    except OSError: pass",
        "import os\nos.kill(os.getppid(), 9)",
        "raise SystemExit",
        "def add(a, b): raise SystemExit",
        "not python",
        "",
    ],
)
def test_what_does_not_add_never_passes(cheat: str) -> None:
    assert judge(cheat) == 0.0


def test_a_solution_that_hangs_is_wrong_and_leaves_nothing_behind() -> None:
    before = {child.pid for child in psutil.Process().children(recursive=True)}
    assert judge("def add(a, b):\n    while True: pass", time_s=1.0) == 0.0
    assert judge("import time\ntime.sleep(600)", time_s=1.0) == 0.0
    assert {child.pid for child in psutil.Process().children(recursive=True)} <= before


def test_exceptions_reach_tests_that_expect_them() -> None:
    test = "try:\n    add(1)\nexcept TypeError as e:\n    assert 'b' in str(e)\nelse:\n    assert 0"
    assert judge(ADD, test) == 1.0


def test_a_checker_gets_the_function_as_an_argument() -> None:
    test = "def check(candidate):\n    assert candidate([1, 2]) == (2, 1)\ncheck(flip)"
    assert judge("def flip(x): return tuple(reversed(x))", test) == 1.0


@contained
def test_a_solution_reaches_no_network_process_or_file(tmp_path: Path) -> None:
    target = tmp_path / "outside"
    folder = tmp_path / "folder"
    folder.mkdir()
    net = "import socket\ndef f(): socket.create_connection(('127.0.0.1', 22), 2)"
    assert "OSError" in reason(net, "f()", folder) or "Unreachable" in reason(net, "f()", folder)
    write = f"def f(): open({str(target)!r}, 'w')"
    assert "Read-only" in reason(write, "f()", folder)
    look = "import os\ndef f(): return os.getpid(), os.listdir('/proc')"
    assert reason(look, "assert f() == (1, [])", folder) == ""
    scratch = "def f():\n    open('a', 'w').write('x')\n    return open('a').read()"
    assert reason(scratch, "assert f() == 'x'", folder) == ""
    assert not list(folder.iterdir())


@contained
def test_a_solution_cannot_undo_its_walls(tmp_path: Path) -> None:
    undo = (
        "import ctypes\ndef f():\n    libc = ctypes.CDLL(None)\n"
        "    return libc.umount(b'/proc'), libc.mount(b'none', b'/', None, 0x1020, None)"
    )
    assert reason(undo, "assert f() == (-1, -1)", tmp_path) == ""


def test_memory_is_bounded(tmp_path: Path) -> None:
    greedy = "def f(): return len(bytearray(1 << 30))"
    assert "MemoryError" in reason(greedy, "f()", tmp_path)


def test_a_process_that_does_not_start_is_no_verdict_on_the_solution(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "tandem").mkdir()
    (tmp_path / "tandem" / "__init__.py").write_text("raise SystemExit(1)")
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    with pytest.raises(code_worker.Refused, match="did not start"):
        reason(ADD, TEST, tmp_path)
    with pytest.raises(ConfigError, match="memory_mb"):
        judge(ADD, memory_mb=1)


def test_tests_that_are_none_are_refused() -> None:
    for tests in (None, [], [3], [{"input": "x"}], "", [" "], "assert ("):
        with pytest.raises(DataError, match="'tests'"):
            judge(ADD, tests)


def test_the_last_block_is_the_solution() -> None:
    assert extract_code("```\na\n```\ntext\n```py\nb\n```") == "b\n"
    assert extract_code("a = 1") == "a = 1"
    assert extract_code("```python\na = 1") == "a = 1"


def test_plain_values_cross_unchanged_and_others_do_not() -> None:
    value = {
        "a": [1, 2.5, float("inf"), None, True, "é\ud800"],
        (1, 2): {3, 4},
        b"\x00": frozenset({1j}),
        2**5000: -0.0,
    }
    assert decode_value(encode_value(value)) == value
    with pytest.raises(TypeError, match="object cannot leave"):
        encode_value(object())


@pytest.mark.skipif(CAN_CONTAIN, reason="this kernel gives namespaces")
def test_containment_that_is_refused_is_an_error_and_no_verdict() -> None:
    with pytest.raises(ConfigError, match="contained=false"):
        judge(ADD, contained=True)


def test_it_is_a_reward_by_name() -> None:
    kwargs = {"time_s": 3.0, "contained": CAN_CONTAIN}
    reward = load_reward(RewardConfig(name="code", kwargs=kwargs))
    assert score(reward, ADD, tests=TEST) == 1.0
