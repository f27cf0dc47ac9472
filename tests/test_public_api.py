"""The public names, and what importing them costs."""

from __future__ import annotations

import subprocess
import sys

import tandem

PUBLIC = {
    "EmbeddedInferenceEngine",
    "EngineRegistry",
    "FinetuneSpec",
    "GenerationConfig",
    "InferenceEngine",
    "LLMRequest",
    "LLMResponse",
    "RolloutWorkflow",
    "SaveLoadMeta",
    "Scheduling",
    "ScriptedInferenceEngine",
    "SingleTurnWorkflow",
    "TandemError",
    "TrainEngine",
    "WeightUpdateMeta",
    "__version__",
    "load_config",
    "run_dpo",
    "run_eval",
    "run_reward",
    "run_rl",
    "run_sft",
}


def test_public_names_are_pinned() -> None:
    assert set(tandem.__all__) == PUBLIC


def test_every_public_name_resolves() -> None:
    missing = []
    for name in sorted(PUBLIC):
        try:
            getattr(tandem, name)
        except (ImportError, AttributeError) as error:
            missing.append(f"{name}: {error}")
    assert not missing


def test_importing_tandem_loads_no_heavy_package() -> None:
    code = (
        "import sys, tandem; "
        "print(*sorted({'torch', 'transformers', 'pydantic', 'tensordict'} & set(sys.modules)))"
    )
    result = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, check=True
    )
    assert result.stdout.strip() == ""
