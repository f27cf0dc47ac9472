"""Reading a configuration: every problem is reported with its path and what to do."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tandem.config import RLConfig, load_config, resolve_recipe, to_yaml
from tandem.config.parse import parse_yaml
from tandem.errors import ConfigError

BASE: dict[str, Any] = {"model": {"tiny": {}}, "data": {"task": "chain_sum", "size": 10}}


def load(*overrides: str, **sections: Any) -> RLConfig:
    return load_config({**BASE, **sections}, overrides, kind="rl")


def problems(*overrides: str, **sections: Any) -> list[str]:
    with pytest.raises(ConfigError) as caught:
        load(*overrides, **sections)
    assert caught.value.exit_code == 2
    return str(caught.value).split("\n")


def test_override_changes_one_key_and_leaves_the_source_alone() -> None:
    assert load("train.lr=1e-3").train.lr == 0.001
    assert load().train.lr == 1e-5
    assert BASE == {"model": {"tiny": {}}, "data": {"task": "chain_sum", "size": 10}}


@pytest.mark.parametrize("as_override", [True, False])
def test_unknown_key_in_unknown_section_is_named_with_its_leaf_and_the_meant_key(
    as_override: bool,
) -> None:
    found = (
        problems("optimizer.learning_rte=1e-5")
        if as_override
        else problems(optimizer={"learning_rte": 1e-5})
    )
    assert found == [
        "unknown key 'optimizer.learning_rte': did you mean 'train.lr'? "
        "(elsewhere called learning_rate)"
    ]


@pytest.mark.parametrize(
    ("key", "meant"),
    [
        ("trian.lr", "train.lr"),
        ("rollout.generation.temprature", "rollout.generation.temperature"),
        ("train.learning_rate", "train.lr"),
        ("group_size", "rollout.group_size"),
        ("rollout.stop", "rollout.generation.stop"),
        ("rollout.num_generations", "rollout.group_size"),
        ("algorithm.beta", "algorithm.kl_coef"),
        ("warmup.train.max_grad_nrm", "warmup.train.max_grad_norm"),
        ("stepz", "steps"),
    ],
)
def test_suggestion_is_the_likeliest_key_of_the_schema(key: str, meant: str) -> None:
    found = problems(f"{key}=1")
    assert any(f"unknown key {key!r}: did you mean {meant!r}?" in line for line in found), found


def test_key_without_a_likely_meaning_lists_its_neighbours() -> None:
    (found,) = problems("checkpoint.zzz=1")
    assert found == (
        "unknown key 'checkpoint.zzz': known keys: background, every, export_model, keep, "
        "upload_url"
    )


def test_all_problems_are_reported_one_a_line() -> None:
    found = problems("trian.lr=1", "steps=0", "rollout.group_size=x", run={"nam": "a"})
    assert len(found) == 4
    assert sorted(line.split(":")[0] for line in found) == [
        "rollout.group_size",
        "steps",
        "unknown key 'run.nam'",
        "unknown key 'trian.lr'",
    ]


def test_value_error_names_key_and_received_value() -> None:
    assert problems("train.lr=-1")[0].startswith("train.lr: got -1: ")
    assert problems("rollout.generation.top_p=3") == [
        "rollout.generation.top_p: got 3.0, allowed: in (0, 1]"
    ]


def test_labels_of_union_members_do_not_enter_the_path() -> None:
    assert {line.split(":")[0] for line in problems("model.lora.target_modules=3")} == {
        "model.lora.target_modules"
    }


@pytest.mark.parametrize(("text", "value"), [("1e3", 1000), ("12", 12), ("012", 12)])
def test_whole_numbers_are_decimal(text: str, value: int) -> None:
    assert load(f"steps={text}").steps == value


@pytest.mark.parametrize("text", ["1.5", "true", "yes", "", "null", "[1]"])
def test_what_is_no_whole_number_is_refused(text: str) -> None:
    assert problems(f"steps={text}")[0].startswith("steps: got ")


@pytest.mark.parametrize(
    ("text", "value"), [("true", True), ("false", False), ("yes", True), ("no", False)]
)
def test_boolean_words(text: str, value: bool) -> None:
    assert load(f"data.shuffle={text}").data.shuffle is value


@pytest.mark.parametrize("text", ["2024", "no", "1e5", "2024-01-01", "007", "12:30"])
def test_text_keys_take_the_text_verbatim(text: str) -> None:
    assert load(f"data.prompt_template={text}").data.prompt_template == text


def test_text_keys_take_braces_quotes_and_null() -> None:
    assert load("data.prompt_template={question} =").data.prompt_template == "{question} ="
    assert load("data.prompt_template='a: b'").data.prompt_template == "a: b"
    assert load("data.prompt_template=null").data.prompt_template is None
    assert load("data.prompt_template=a=b").data.prompt_template == "a=b"


def test_changing_one_key_of_a_section_keeps_what_its_default_says() -> None:
    config = load("eval.generation.max_new_tokens=8", "rollout.generation.stop=[x]")
    assert config.eval.generation.greedy is True
    assert config.eval.generation.max_new_tokens == 8
    assert config.rollout.generation.max_new_tokens == 64
    assert config.rollout.generation.stop == ("x",)
    assert load("rollout.group_size=4").rollout.generation.max_new_tokens == 64
    sft = {"model": {"tiny": {}}, "sft": {"data": BASE["data"]}}
    assert load_config(sft, ["inference.threads=2"], kind="sft").inference.mode == "inprocess"


def test_key_required_by_an_optional_section_is_still_required() -> None:
    assert problems("warmup.steps=3") == ["warmup.data: this key is required"]


def test_free_form_mappings_take_any_key() -> None:
    assert load("data.task_kwargs.flag=true").data.task_kwargs == {"flag": True}


@pytest.mark.parametrize("item", ["train.lr", "=1", ".lr=1", "train.=1"])
def test_malformed_override_says_what_is_expected(item: str) -> None:
    assert "expected section.key=value" in problems(item)[0]


def test_override_through_a_value_is_refused() -> None:
    assert "steps is the value 3, not a section" in problems("steps=3", "steps.x=1")[0]


def test_cross_field_check_speaks_of_both_keys() -> None:
    (found,) = problems("rollout.batch_size=3", "algorithm.minibatches=2")
    assert "rollout.batch_size (3)" in found
    assert "algorithm.minibatches (2)" in found


def test_transport_must_reach_the_generator() -> None:
    assert "needs inference.mode=inprocess" in problems("inference.transport=inprocess")[0]
    (found,) = problems("inference.mode=inprocess", "inference.transport=shared_memory")
    assert "needs inference.mode=process" in found
    assert load("inference.backend=scripted", "inference.transport=inprocess")


def test_interval_of_rl_is_refused_where_it_does_nothing() -> None:
    stage = {"data": BASE["data"]}
    with pytest.raises(ConfigError, match=r"use sft\.checkpoint_every"):
        load_config({"model": BASE["model"], "sft": stage}, ["checkpoint.every=5"], kind="sft")


def test_missing_section_is_named() -> None:
    with pytest.raises(ConfigError, match=r"^model: this key is required$"):
        load_config({"data": BASE["data"]}, kind="rl")


def test_kind_must_agree_with_the_verb() -> None:
    with pytest.raises(ConfigError, match="'tandem sft', not 'tandem rl'"):
        load_config({**BASE, "kind": "sft"}, kind="rl")


def test_file_problems_name_the_file_and_the_place(tmp_path: Path) -> None:
    path = tmp_path / "run.yaml"
    with pytest.raises(ConfigError, match=r"run\.yaml': No such file"):
        load_config(path)
    for text, message in (
        ("a: [1\nb: 2\n", r"line 2"),
        ("steps: 1\nsteps: 2\n", r"line 2: the key 'steps' appears twice"),
        ("- 1\n", "got list, allowed: a mapping"),
        ("", "got NoneType"),
        ("a: !!python/object/apply:os.getcwd []\n", "line 1"),
    ):
        path.write_text(text)
        with pytest.raises(ConfigError, match=message) as caught:
            load_config(path)
        assert "\n" not in str(caught.value)
        assert "run.yaml" in str(caught.value)


def test_saved_configuration_reads_back_equal(tmp_path: Path) -> None:
    config = load(
        "train.lr=3e-7", "train.max_grad_norm=null", "rollout.generation.stop=['\\n', no]"
    )
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path) == config


def test_saved_configuration_keeps_an_infinite_norm(tmp_path: Path) -> None:
    config = load("train.max_grad_norm=.inf")
    path = tmp_path / "config.yaml"
    path.write_text(to_yaml(config))
    assert load_config(path).train.max_grad_norm == float("inf")


def test_unknown_recipe_is_an_error() -> None:
    with pytest.raises(ConfigError, match="'no-such-recipe'"):
        resolve_recipe("no-such-recipe")


def test_yaml_scalars_follow_version_1_2() -> None:
    text = "a: 010\nb: 0x10\nc: 0o10\nd: 1e-5\ne: .inf\nf: on\ng: 12:30\nh: 2024-01-01\ni:\nj: ~\n"
    assert parse_yaml(text) == {
        "a": 10,
        "b": 16,
        "c": 8,
        "d": 1e-5,
        "e": float("inf"),
        "f": "on",
        "g": "12:30",
        "h": "2024-01-01",
        "i": None,
        "j": None,
    }


def test_yaml_merge_keys_are_not_duplicates() -> None:
    assert parse_yaml("a: &x {k: 1}\nb: {<<: *x, l: 2}")["b"] == {"k": 1, "l": 2}
