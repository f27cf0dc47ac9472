"""``tandem serve`` as a process: it answers, and it ends when it is told to."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from pathlib import Path

import httpx
import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.errors import ConfigError


def test_it_answers_and_ends_on_sigterm(tiny_model_dir: Path) -> None:
    command = [sys.executable, "-m", "tandem", "serve", str(tiny_model_dir), "--port", "0"]
    process = subprocess.Popen(command, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        url = process.stdout.readline().split(" at ")[1].strip()
        body = {"model": "policy", "prompt": "1+1=", "max_tokens": 4, "temperature": 0, "seed": 1}
        answers = [httpx.post(f"{url}/completions", json=body, timeout=60) for _ in range(2)]
        assert answers[0].status_code == 200, answers[0].text
        choice = answers[0].json()["choices"][0]
        assert choice["text"] == answers[1].json()["choices"][0]["text"]
        lines = httpx.post(f"{url}/completions", json=body | {"stream": True}, timeout=60).text
        chunks = [json.loads(line[6:]) for line in lines.split("\n") if line.startswith("data: {")]
        assert "".join(chunk["choices"][0]["text"] for chunk in chunks) == choice["text"]
        assert httpx.post(f"{url}/completions", json=body | {"model": "m"}).status_code == 404
        process.send_signal(signal.SIGTERM)
        assert process.wait(60) == 0
        process.stdout.close()
    finally:
        process.kill()
        process.wait()


@pytest.mark.parametrize("host", ["0.0.0.0", "192.0.2.1", "example"])
def test_an_address_that_others_reach_needs_a_key(host: str, tiny_model_dir: Path) -> None:
    result = CliRunner().invoke(app, ["serve", str(tiny_model_dir), "--host", host])
    assert isinstance(result.exception, ConfigError)
    assert "--api-key" in str(result.exception)
