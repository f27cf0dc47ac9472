"""The command line as a user meets it: help, dry runs, exit codes, messages."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

import tandem.trainers
from tandem.cli import main
from tandem.errors import (
    CheckpointError,
    ConfigError,
    DataError,
    EngineError,
    Preempted,
    RolloutError,
    TrainingDiverged,
    WeightSyncError,
)

RUN = """
model: {tiny: {}}
data: {task: chain_sum, size: 10}
"""


@pytest.fixture
def config_file(tmp_path: Path) -> Path:
    path = tmp_path / "run.yaml"
    path.write_text(RUN)
    return path


class Result:
    def __init__(self, code: int, out: str, err: str) -> None:
        self.code, self.out, self.err = code, out, err


@pytest.fixture
def tandem_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    def run(*arguments: str | Path) -> Result:
        monkeypatch.setattr(sys, "argv", ["tandem", *map(str, arguments)])
        with pytest.raises(SystemExit) as ended:
            main()
        output = capsys.readouterr()
        return Result(int(ended.value.code or 0), output.out, output.err)

    return run


@pytest.mark.parametrize(
    "arguments", [["--help"], ["rl", "--help"], ["rl", "{config}", "--dry-run"]]
)
def test_no_heavy_package_is_loaded_before_work_begins(
    arguments: list[str], config_file: Path
) -> None:
    code = (
        "import sys\n"
        "from tandem.cli import main\n"
        "try: main()\n"
        "except SystemExit as end: assert not end.code, end.code\n"
        "heavy = {'torch', 'transformers', 'tensordict', 'datasets', 'numpy'} & set(sys.modules)\n"
        "sys.exit(','.join(sorted(heavy)) or 0)\n"
    )
    filled = [item.format(config=config_file) for item in arguments]
    result = subprocess.run([sys.executable, "-c", code, *filled], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_help_lists_every_verb(tandem_command: Any) -> None:
    text = tandem_command("--help").out
    for verb in (
        "quickstart",
        "sft",
        "dpo",
        "reward",
        "rl",
        "eval",
        "generate",
        "model",
        "status",
        "doctor",
    ):
        assert f" {verb} " in text


def test_misspelt_verb_is_a_usage_error_with_a_suggestion(tandem_command: Any) -> None:
    result = tandem_command("quickstrat")
    assert result.code == 2
    assert "Did you mean 'quickstart'?" in result.err


def test_dry_run_prints_the_resolved_configuration(tandem_command: Any, config_file: Path) -> None:
    result = tandem_command("rl", config_file, "train.lr=1e-3", "steps=7", "--dry-run")
    assert result.code == 0
    resolved = yaml.safe_load(result.out)
    assert (resolved["train"]["lr"], resolved["steps"], resolved["kind"]) == (0.001, 7, "rl")


@pytest.mark.parametrize("as_override", [True, False])
def test_misspelt_key_ends_with_code_2_and_one_line(
    tandem_command: Any, config_file: Path, as_override: bool
) -> None:
    if as_override:
        result = tandem_command("rl", config_file, "optimizer.learning_rte=1e-5")
    else:
        config_file.write_text(RUN + "optimizer: {learning_rte: 1e-5}\n")
        result = tandem_command("rl", config_file)
    assert result.code == 2
    (line,) = result.err.splitlines()
    assert line.startswith("error: unknown key 'optimizer.learning_rte'")
    assert "learning_rate" in line


def test_missing_file_is_one_line(tandem_command: Any, tmp_path: Path) -> None:
    result = tandem_command("rl", tmp_path / "none.yaml")
    assert result.code == 2
    assert len(result.err.splitlines()) == 1
    assert "none.yaml" in result.err


def test_verbs_call_their_trainer_with_config_and_resume(
    tandem_command: Any, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    calls: list[tuple[str, float, bool]] = []
    monkeypatch.setattr(
        tandem.trainers,
        "run_rl",
        lambda config, resume=False: calls.append(("rl", config.train.lr, resume)),
        raising=False,
    )
    assert tandem_command("rl", config_file, "train.lr=0.5", "--resume").code == 0
    assert tandem_command("rl", config_file).code == 0
    assert calls == [("rl", 0.5, True), ("rl", 1e-5, False)]


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError, 2),
        (DataError, 3),
        (EngineError, 4),
        (TrainingDiverged, 4),
        (WeightSyncError, 4),
        (RolloutError, 5),
        (TimeoutError, 5),
        (CheckpointError, 6),
        (Preempted, 75),
    ],
)
def test_exit_code_tells_errors_apart_and_debug_shows_the_traceback(
    error: type[Exception],
    code: int,
    tandem_command: Any,
    config_file: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    def fail(config: object, resume: bool = False) -> None:
        raise error("what went wrong")

    monkeypatch.setattr(tandem.trainers, "run_rl", fail, raising=False)
    result = tandem_command("rl", config_file)
    assert result.code == code
    label = "stopped" if error is Preempted else "error"
    assert result.err == f"{label}: what went wrong\n"
    result = tandem_command("rl", config_file, "--debug")
    assert result.code == code
    assert "Traceback" in result.err


def test_unexpected_exception_is_a_bug_with_traceback(
    tandem_command: Any, config_file: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fail(config: object, resume: bool = False) -> None:
        raise KeyError("oops")

    monkeypatch.setattr(tandem.trainers, "run_rl", fail, raising=False)
    result = tandem_command("rl", config_file)
    assert result.code == 1
    assert "KeyError: 'oops'" in result.err
    assert "please report it" in result.err.splitlines()[-1]


def test_doctor_reports_versions_and_room(tandem_command: Any) -> None:
    result = tandem_command("doctor")
    assert result.code in (0, 1)
    for name in ("python", "torch", "cores", "free space here", "torch threads", "bfloat16"):
        assert name in result.out
    assert ("no problems found" in result.out) == (result.code == 0)


def test_version(tandem_command: Any) -> None:
    assert tandem_command("--version").out == f"tandem {tandem.__version__}\n"
