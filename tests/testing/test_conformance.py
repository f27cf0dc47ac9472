"""The kit on engines that are right, its table, its file and its verb."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from typer.testing import CliRunner

from tandem.cli import app
from tandem.errors import ConfigError
from tandem.testing.conformance import CHECKS, Outcome, Part, run
from tandem.testing.conformance.figure import count, merge
from tandem.testing.conformance.reference import aggregate

WITHOUT_RANKS = {
    "world size",
    "tensor parallelism",
    "sequence parallelism",
    "zero-weight rank",
    "uneven tokens",
    "unequal micro-batches",
}
"""What one rank cannot show."""

OF_LANGUAGE = {"log-probabilities", "entropy", "logits of a hook", "tied weights"}
OF_OTHER_TYPES = {
    "language_model": {"values", "scores"},
    "value_model": OF_LANGUAGE | {"scores"},
    "reward_model": OF_LANGUAGE | {"values"},
}


def verdicts(report):
    return {outcome.check: outcome.verdict for outcome in report.outcomes}


def test_the_local_engine_conforms():
    report = run("local", device="cpu")
    assert report.failed == []
    assert list(verdicts(report)) == list(CHECKS)
    skipped = {outcome.check for outcome in report.outcomes if outcome.verdict != "pass"}
    adapters = {"reference policy", "frozen base"}
    assert skipped == WITHOUT_RANKS | adapters | {"values", "scores"}
    assert all(outcome.detail for outcome in report.outcomes)


@pytest.mark.long
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("lora", [False, True], ids=["full", "lora"])
@pytest.mark.parametrize("model_type", ["language_model", "value_model", "reward_model"])
def test_the_local_engine_conforms_with(model_type, lora, dtype):
    report = run("local", device="cpu", model_type=model_type, lora=lora, dtype=dtype)
    assert report.failed == []
    skipped = {outcome.check for outcome in report.outcomes if outcome.verdict != "pass"}
    assert skipped == WITHOUT_RANKS | OF_OTHER_TYPES[model_type] | (
        set() if lora else {"reference policy", "frozen base"}
    )


@pytest.mark.parametrize("model_type", ["language_model", "value_model", "reward_model"])
def test_adapters_conform_where_they_differ(model_type):
    names = ["gradients", "reference policy", "frozen base", "exported weights"]
    report = run("local", device="cpu", model_type=model_type, lora=True, checks=names)
    assert set(verdicts(report).values()) == {"pass"}


def test_an_unknown_option_is_refused_by_name():
    for options, message in (
        ({"backend": "lokal"}, "no train engine"),
        ({"checks": ["gradient"]}, "check: got 'gradient'"),
        ({"model_type": "policy"}, "model_type: got 'policy'"),
        ({"dtype": "float16"}, "dtype: got 'float16'"),
        ({"world": 0}, "world: got 0"),
        ({"modules": ["no.such.module"]}, "no.such.module"),
        ({"train": {"lr_rate": 1.0}}, "unknown key 'lr_rate'"),
    ):
        with pytest.raises(ConfigError, match=message):
            run(**{"backend": "local", "device": "cpu", **options})


def test_a_figure_fails_over_its_tolerance_and_when_it_is_not_a_number():
    assert Part("", 1e-6, 1e-6).passed
    assert not Part("", 1.1e-6, 1e-6).passed
    assert not Part("", math.nan, 1.0).passed
    outcome = Outcome.measured("c", [Part("a", 0.5, 1.0), Part("b", 2e-3, 1e-3), count("n", [])])
    assert (outcome.verdict, outcome.detail, outcome.figure) == ("fail", "b", 2e-3)
    named = count("problems", ["first", "second"])
    assert (named.name, named.value, named.passed) == ("problems: first", 2.0, False)


def test_the_worst_rank_is_the_outcome():
    ranks = [Outcome.measured("c", [Part("a", value, 1.0)]) for value in (0.1, 3.0, 0.2)]
    assert merge(ranks).verdict == "fail"
    assert merge(ranks).figure == 3.0
    raised = Outcome.raised("c", "KeyError", "trace")
    assert merge([ranks[0], raised]) is raised
    skipped = Outcome.skipped("c", "why")
    assert merge([skipped, skipped]) == skipped
    assert Outcome.from_json(json.loads(json.dumps({
        "check": "c", "verdict": "fail", "figure": 3.0, "tolerance": 1.0, "detail": "a",
        "trace": "", "parts": [{"name": "a", "value": 3.0, "tolerance": 1.0}],
    }))) == ranks[1]  # fmt: skip


def test_the_reference_aggregates_as_the_definitions_read():
    import torch

    loss = torch.tensor([[9.0, 1.0, 2.0, 3.0], [9.0, 10.0, 9.0, 9.0], [9.0, 9.0, 9.0, 9.0]])
    mask = torch.tensor([[0, 1, 1, 1], [0, 1, 0, 0], [0, 0, 0, 0]]).bool()
    expected = {
        "token-mean": 16 / 4,
        "token-sum": 16.0,
        "seq-mean-token-sum": (6 + 10) / 2,
        "seq-mean-token-mean": (2 + 10) / 2,
        "seq-mean-token-sum-norm": (6 + 10) / 8 / 2,
    }
    for mode, value in expected.items():
        assert float(aggregate(loss, mask, mode, horizon=8)) == pytest.approx(value)


def conformance(*arguments: str):
    return CliRunner().invoke(app, ["conformance", *arguments, "--device", "cpu"])


def test_the_verb_prints_the_table_and_writes_every_figure(tmp_path: Path):
    file = tmp_path / "report.json"
    result = conformance(
        "--backend", "local", "--check", "entropy", "--check", "values", "--json", str(file)
    )
    assert result.exit_code == 0, result.output
    for text in ("entropy", "1e-05", "pass", "not applicable", "1 pass, 0 fail, 1 not applicable"):
        assert text in result.output
    report = json.loads(file.read_text())
    assert report["passed"] is True
    entropy, values = report["checks"]
    assert entropy["check"] == "entropy"
    assert 0 <= entropy["figure"] <= entropy["tolerance"] == 1e-5
    assert (values["verdict"], values["detail"]) == (
        "not applicable",
        "a language_model has no values",
    )


def test_the_verb_fails_with_a_check(tmp_path: Path):
    file = tmp_path / "report.json"
    result = conformance(
        "--backend", "NegatesEntropy", "--module", "tests.testing.mutants",
        "--check", "entropy", "--check", "version", "--json", str(file),
    )  # fmt: skip
    assert result.exit_code == 1
    assert "1 pass, 1 fail" in result.output
    assert [c["verdict"] for c in json.loads(file.read_text())["checks"]] == ["fail", "pass"]


def test_the_verb_changes_the_train_section():
    refused = conformance("--backend", "local", "model.path=x")
    assert isinstance(refused.exception, ConfigError)
    misspelt = conformance("--backend", "local", "train.microbatch=1")
    assert isinstance(misspelt.exception, ConfigError)
    accepted = conformance(
        "--backend", "local", "train.gradient_checkpointing=true", "--check", "gradients"
    )
    assert accepted.exit_code == 0
    assert "gradient_checkpointing=True" in accepted.output
