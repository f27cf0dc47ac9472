"""``tandem bench inference``: every engine takes its turn, and the figures say on what."""

from __future__ import annotations

import json
import re
import sys
import textwrap
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.errors import ConfigError, EngineError
from tandem.testing import inference_speed
from tandem.testing.inference_speed import latencies
from tandem.types import LLMResponse


def invoke(*arguments: object) -> Any:
    return CliRunner().invoke(app, ["bench", "inference", *map(str, arguments)])


def test_rates_and_ratios_of_all_engines_are_written(tiny_model_dir: Path, tmp_path: Path) -> None:
    """The peer process is played by a script that answers as vLLM's does."""
    fake = tmp_path / "python"
    fake.write_text(
        f"#!{sys.executable}\n"
        + textwrap.dedent(
            """
            import json, sys
            assert sys.argv[1].endswith("vllm_peer.py")
            assert json.loads(sys.argv[2])["max_model_len"] == 12
            print(json.dumps({"ready": True}), flush=True)
            for line in sys.stdin:
                assert len(json.loads(line)["prompts"]) == 2
                print(json.dumps({"seconds": 4.0}), flush=True)
            """
        )
    )
    fake.chmod(0o755)
    target = tmp_path / "out.json"
    result = invoke(
        tiny_model_dir,
        *("--concurrent", "2", "--prompt-tokens", 8, "--new-tokens", 4),
        *("--repeats", 2, "--json", target, "--vllm", fake),
    )
    assert result.exit_code == 0, result.exception
    figures = json.loads(target.read_text())
    (row,) = figures["rows"]
    assert (figures["dtype"], figures["repeats"], row["concurrent"]) == ("bfloat16", 2, 2)
    assert row["vllm"] == {"max_tokens_per_s": 2.0, "median_tokens_per_s": 2.0}
    rate = row["tandem"]["median_tokens_per_s"]
    assert row["over_vllm"] == pytest.approx(rate / 2.0, rel=0.5)
    assert row["over_transformers"] > 0
    assert row["latency"]["gap_p50_ms"] <= row["latency"]["gap_p99_ms"]
    assert f"2 (×{row['over_vllm']:.2f})" in result.output


@pytest.mark.parametrize(
    ("products", "used"),
    [("emulated", ["bfloat16", "float32"]), ("vectors", ["bfloat16"] * 2)],
)
def test_transformers_has_its_better_dtype(
    tiny_model_dir: Path, monkeypatch: pytest.MonkeyPatch, products: str, used: list[str]
) -> None:
    monkeypatch.setattr(inference_speed, "bf16_products", lambda: products)
    result = invoke(
        tiny_model_dir,
        *("--concurrent", "1,2", "--prompt-tokens", 8, "--new-tokens", 2, "--repeats", 1),
    )
    assert result.exit_code == 0, result.exception
    assert re.findall(r'"transformers_dtype": "(\w+)"', result.output) == used
    assert (" in float32" in result.output) == (products == "emulated")


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (("--concurrent", "2,x"), "--concurrent"),
        (("--concurrent", "0"), "--concurrent"),
        (("--dtype", "int8"), "--dtype"),
        (("--numerics", "exact"), "--numerics"),
        (("--json", "none/such/out.json"), "--json"),
        (("--prompt-tokens", 100000, "--concurrent", 1), "--prompt-tokens 100000 and --new-tokens"),
        (("--vllm", "/no/such/python", "--no-transformers"), "vllm"),
    ],
)
def test_wrong_options_are_refused(tiny_model_dir: Path, arguments: tuple, words: str) -> None:
    result = invoke(tiny_model_dir, *arguments)
    assert isinstance(result.exception, ConfigError)
    assert words in str(result.exception)


def test_a_peer_that_does_not_start_is_an_error(tiny_model_dir: Path) -> None:
    result = invoke(tiny_model_dir, "--vllm", "/bin/false", "--no-transformers")
    assert isinstance(result.exception, EngineError)
    assert "exit code 1" in str(result.exception)


def test_percentiles_are_of_requests_first_tokens_and_gaps() -> None:
    responses = [
        LLMResponse([1], [2, 3], [0, 0], [0, 0], "length", latency=i / 10, ttft=0.5, itl=[i / 100])
        for i in range(101)
    ]
    found = latencies(responses)
    assert found["request_p50_ms"] == pytest.approx(5000)
    assert found["gap_p95_ms"] == pytest.approx(950)
    assert found["first_token_p99_ms"] == pytest.approx(500)
