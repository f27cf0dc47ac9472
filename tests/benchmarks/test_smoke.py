"""The benchmark scripts run, at sizes whose figures mean nothing, and report what they promise."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from transformers import AutoModelForCausalLM, AutoTokenizer

from tandem.config import ModelConfig, TinyModelConfig
from tandem.models.loading import resolve_model

BENCHMARKS = Path(__file__).parents[2] / "benchmarks"
SMALL = "--threads 1 --repeats 2"

pytestmark = pytest.mark.long


def run(tmp_path: Path, script: str, options: str) -> dict:
    path = tmp_path / "figures.json"
    command = [sys.executable, str(BENCHMARKS / script), *options.split(), "--json", str(path)]
    source = str(BENCHMARKS.parent / "src")
    done = subprocess.run(
        command,
        env={**os.environ, "PYTHONPATH": source, "OMP_NUM_THREADS": "1"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stdout
    figures = json.loads(path.read_text())
    assert figures["machine"]["cores"] >= 1
    assert all(math.isfinite(value) for value in numbers(figures))
    return figures


def numbers(value):
    if isinstance(value, dict):
        return [found for child in value.values() for found in numbers(child)]
    if isinstance(value, list):
        return [found for child in value for found in numbers(child)]
    return [value] if isinstance(value, int | float) else []


def test_train_step(tmp_path):
    sizes = "--size tiny --tokens 256 --length 32 --mean 20 --cap 128 --matrix 64"
    figures = run(tmp_path, "train_step.py", f"{sizes} {SMALL}")
    assert set(figures["step"]) == {"equal", "log_normal"}
    assert figures["step"]["log_normal"]["train_batch_over_hand"]["of_minima"] > 0
    assert figures["mfu"]["bfloat16"]["train_batch_mfu"]["median"] > 0
    assert figures["packing"]["equal"]["slots_over_tokens"] == 1.0
    assert figures["packing"]["log_normal"]["slots_over_tokens"] > 1.0
    assert figures["ranks"]["efficiency"]["two"]["of_minima"] > 0
    assert len(figures["scaling"]["length"]["min_ms"]) == 4
    assert figures["loop"]["steps"] == 2


def test_head(tmp_path):
    figures = run(tmp_path, "head.py", f"--shapes 64x4000 --hidden 16 {SMALL}")
    for dtype in ("float32", "bfloat16"):
        assert 0 < figures[f"64x4000 {dtype}"]["peak_ratio"] < 1
        assert figures[f"64x4000 {dtype}"]["loss_difference"] < 1e-2


def test_checkpoint(tmp_path):
    figures = run(tmp_path, "checkpoint.py", f"--size tiny --tokens 256 --length 32 {SMALL}")
    assert figures["saving"]["size_mib"] > 0
    assert figures["saving"]["blocked_over_copy"]["median"] > 0
    assert figures["saving"]["whole_over_raw_write"]["median"] > 0
    assert figures["training"]["steps_beside_a_save"] >= 0


@pytest.mark.skipif(len(os.sched_getaffinity(0)) < 2, reason="two cores to pin to")
def test_overlap(tmp_path):
    small = "warmup.steps=2 warmup.data.size=200 data.size=200 rollout.batch_size=2"
    figures = run(tmp_path, "overlap.py", f"--rounds 1 --steps 2 --threads 1 --set {small}")
    result, step = figures["result"], figures["asynchronous"]
    longer = max(result["generation_ms"], result["training_ms"])
    assert result["of_longer_side"] == pytest.approx(step["wall_ms"] / longer, rel=1e-3)
    busy = step["trainer_cpu_ms"] / step["wall_ms"]
    assert result["trainer_core_idle"] == pytest.approx(1 - busy, abs=1e-3)
    assert result["speed_up"] > 0
    assert len(figures["rounds"]["training"]) == 1
    assert figures["laps"]["perf/generator_idle_share"] <= 1


def test_heldout_loss_is_the_models_mean_cross_entropy(tmp_path):
    tiny = TinyModelConfig(hidden_size=16, num_layers=1, intermediate_size=32)
    model_dir = resolve_model(ModelConfig(tiny=tiny), seed=3, workdir=tmp_path)
    rows = [("2+2=", "4"), ("3*5=", "15"), ("9-9=", "0")]
    data = tmp_path / "rows.jsonl"
    data.write_text("\n".join(json.dumps({"prompt": q, "answer": a}) for q, a in rows))
    plain = "data.chat=false {0}.data.prompt_template=null {0}.data.path=" + str(data)
    options = " ".join(f"{name}.{plain.format(name)}" for name in ("sft", "eval"))
    figures = run(
        tmp_path, "heldout_loss.py", f"gsm8k-sft {model_dir} --set {options} sft.max_length=64"
    )
    found = figures["models"][model_dir]
    model = AutoModelForCausalLM.from_pretrained(model_dir)
    tokenizer = AutoTokenizer.from_pretrained(model_dir)
    nll = []
    for question, answer in rows:
        target = [*tokenizer.encode(answer, add_special_tokens=False), tokenizer.eos_token_id]
        prompt = tokenizer.encode(question, add_special_tokens=False)
        with torch.no_grad():
            logits = model(torch.tensor([[*prompt, *target]])).logits[0].double()
        logprobs = torch.log_softmax(logits, -1)[len(prompt) - 1 : -1]
        nll += (-logprobs[range(len(target)), target]).tolist()
    assert found["tokens"] == len(nll) == 7
    assert found["rows"] == 3
    assert found["loss_per_token"] == pytest.approx(sum(nll) / 7, rel=1e-5)
