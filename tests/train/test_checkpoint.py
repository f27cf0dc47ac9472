import json
import random

import numpy as np
import pytest
import torch

from tandem.checkpoint import (
    BackgroundWriter,
    read_state,
    read_tensors,
    staging,
    write_state,
    write_tensors,
)
from tandem.config.schema import LoraConfig
from tandem.errors import CheckpointError, ConfigError
from tandem.models.loading import tokenizer_digest
from tandem.train.state import MODEL, OPTIMIZER, STATE
from tests.train.conftest import make_batch, nll, save_qwen3

LENGTHS = [9, 5, 7]


def train(engine, steps):
    losses = []
    for step in steps:
        losses.append(engine.train_batch(make_batch(LENGTHS, seed=step), nll)["loss"])
        engine.lr_scheduler_step()
    return losses


def weights(engine):
    return {name: p.detach().clone() for name, p in engine.model.named_parameters()}


@pytest.mark.parametrize("dropout", [None, 0.3])
def test_a_resumed_run_is_the_same_bit_for_bit(make_engine, tmp_path, dropout):
    lora = None if dropout is None else LoraConfig(rank=4, dropout=dropout)
    config = {"lora": lora, "schedule": "cosine", "warmup_steps": 2, "steps": 8, "lr": 1e-2}
    torch.manual_seed(0)
    straight = make_engine(**config)
    losses = train(straight, range(3))
    straight.set_version(3)
    straight.save_checkpoint(str(tmp_path), global_step=3)
    draws = (random.random(), np.random.rand(), torch.rand(1).item())
    straight.load_checkpoint(str(tmp_path))
    losses += train(straight, range(3, 6))

    torch.manual_seed(99)
    resumed = make_engine(**config)
    resumed.load_checkpoint(str(tmp_path))
    assert (random.random(), np.random.rand(), torch.rand(1).item()) == draws
    resumed.load_checkpoint(str(tmp_path))
    assert train(resumed, range(3, 6)) == losses[3:]
    assert resumed.get_version() == 3
    first, second = weights(straight), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_a_checkpoint_inside_a_staging_is_committed_by_it(make_engine, tmp_path):
    engine = make_engine()
    train(engine, range(2))
    with staging(tmp_path, 2, keep=None) as target:
        engine.save_checkpoint(str(target.path / "policy"), global_step=2)
    found = sorted(p.name for p in (tmp_path / "checkpoints").iterdir())
    assert found == ["step_2"]
    resumed = make_engine()
    resumed.load_checkpoint(str(tmp_path / "checkpoints" / "step_2" / "policy"))
    assert train(resumed, [2]) == train(engine, [2])


def test_only_the_newest_are_kept(make_engine, tmp_path):
    engine = make_engine()
    for step in (1, 2, 3):
        engine.save_checkpoint(str(tmp_path), global_step=step, max_ckpt_to_keep=2)
    found = sorted(p.name for p in (tmp_path / "checkpoints").iterdir() if p.name[0] == "s")
    assert found == ["step_2", "step_3"]


def test_a_copy_goes_to_a_url_and_comes_back(make_engine, tmp_path):
    engine = make_engine()
    train(engine, range(2))
    url = f"file://{tmp_path}/store"
    engine.save_checkpoint(str(tmp_path / "run"), hdfs_path=url, global_step=2)
    expected = train(engine, [2])
    resumed = make_engine()
    local = tmp_path / "local"
    resumed.load_checkpoint(str(local), hdfs_path=f"{url}/step_2", del_local_after_load=True)
    assert train(resumed, [2]) == expected
    assert not local.exists()
    assert (tmp_path / "run" / "checkpoints" / "step_2").is_dir()


def test_nothing_there_is_an_error(make_engine, tmp_path):
    with pytest.raises(CheckpointError, match="no checkpoint"):
        make_engine().load_checkpoint(str(tmp_path))


def test_a_checkpoint_of_another_model_is_refused_and_changes_nothing(
    make_engine, tied_path, tmp_path
):
    make_engine().save_checkpoint(str(tmp_path), global_step=1)
    other = make_engine(tied_path)
    before = weights(other)
    with pytest.raises(CheckpointError, match="tied"):
        other.load_checkpoint(str(tmp_path))
    after = weights(other)
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_tied_weights_are_tied_after_a_load(make_engine, tied_path, tmp_path):
    engine = make_engine(tied_path)
    train(engine, range(1))
    engine.save_checkpoint(str(tmp_path), global_step=1)
    resumed = make_engine(tied_path)
    resumed.load_checkpoint(str(tmp_path))
    model = resumed.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()
    assert torch.equal(model.lm_head.weight, engine.model.lm_head.weight)


# --- written in the background --------------------------------------------------------------------


def test_training_that_goes_on_while_it_is_saved_leaves_no_trace_in_the_checkpoint(
    make_engine, tmp_path
):
    engine = make_engine()
    train(engine, range(2))
    with BackgroundWriter() as writer:
        for step in (2, 3):
            with staging(tmp_path, step, keep=None, background=writer) as target:
                engine.save_checkpoint(str(target.path / "policy"), global_step=step)
            after = train(engine, [step])
    resumed = make_engine()
    resumed.load_checkpoint(str(tmp_path / "checkpoints" / "step_3" / "policy"))
    assert train(resumed, [3]) == after
    first, second = weights(engine), weights(resumed)
    assert all(torch.equal(first[name], second[name]) for name in first)


def test_what_the_staging_decides_is_refused_inside_it(make_engine, tmp_path):
    engine = make_engine()
    with staging(tmp_path, 1, keep=None) as target:
        for option in ({"hdfs_path": "memory://bucket"}, {"max_ckpt_to_keep": 2}):
            with pytest.raises(ConfigError, match="staging"):
                engine.save_checkpoint(str(target.path / "policy"), **option)
        engine.save_checkpoint(str(target.path / "policy"))


# --- of another engine ----------------------------------------------------------------------------


def full_state(engine):
    moments = [
        value.clone() for state in engine.optimizer.state.values() for value in state.values()
    ]
    return [*weights(engine).values(), *moments, torch.get_rng_state()]


def assert_refused_and_unchanged(engine, path, *words):
    before, counters = full_state(engine), engine.counters()
    with pytest.raises(CheckpointError) as caught:
        engine.load_checkpoint(str(path))
    for word in words:
        assert word in str(caught.value), word
    after = full_state(engine)
    assert len(after) == len(before)
    assert all(torch.equal(one, two) for one, two in zip(before, after, strict=True))
    assert engine.counters() == counters
    return str(caught.value)


def test_all_that_differs_is_in_one_error(make_engine, tmp_path):
    write_tokenizer(tmp_path / "small", {"a": 0, "b": 1})
    save_qwen3(tmp_path / "small")
    write_tokenizer(tmp_path / "other", {"a": 1, "b": 0})
    save_qwen3(tmp_path / "other", intermediate_size=40, rms_norm_eps=1e-5)
    saved = make_engine(str(tmp_path / "small"))
    train(saved, range(1))
    saved.save_checkpoint(str(tmp_path / "run"), global_step=1)
    other = make_engine(str(tmp_path / "other"))
    train(other, range(1))
    message = assert_refused_and_unchanged(
        other,
        tmp_path / "run",
        "model_config.intermediate_size is 48 in the checkpoint, 40 here",
        "model_config.rms_norm_eps is 1e-06 in the checkpoint, 1e-05 here",
        "tokenizer: the one of",
        "model.layers.0.mlp.up_proj.weight is torch.float32 [48, 32], expected torch.float32 [40",
        "optimizer state 'exp_avg.model.layers.1.mlp.down_proj.weight': shape [32, 48], expected",
    )
    assert "self_attn" not in message
    assert "input_layernorm" not in message


def write_tokenizer(path, vocabulary, **extra):
    path.mkdir(exist_ok=True)
    content = {"model": {"vocab": vocabulary}, "padding": None, **extra}
    (path / "tokenizer.json").write_text(json.dumps(content))


def test_the_same_tokenizer_in_another_form_is_the_same(make_engine, tmp_path):
    path = save_qwen3(tmp_path / "model")
    write_tokenizer(tmp_path / "model", {"a": 0, "b": 1})
    make_engine(path).save_checkpoint(str(tmp_path / "run"), global_step=1)
    content = {"padding": {"length": 4}, "model": {"vocab": {"b": 1, "a": 0}}}
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(content, indent=3))
    make_engine(path).load_checkpoint(str(tmp_path / "run"))


def test_a_tokenizer_without_a_json_file_is_told_apart_by_its_vocabulary(tmp_path):
    assert tokenizer_digest(str(tmp_path)) is None
    found = set()
    for text in ("a b", "b a"):
        (tmp_path / "vocab.txt").write_text(text)
        found.add(tokenizer_digest(str(tmp_path)))
    assert len(found) == 2


def test_a_config_that_changes_no_shape_is_refused(make_engine, tmp_path):
    make_engine().save_checkpoint(str(tmp_path / "run"), global_step=1)
    other = make_engine(save_qwen3(tmp_path / "other", rms_norm_eps=1e-5))
    assert_refused_and_unchanged(other, tmp_path / "run", "rms_norm_eps")


def test_another_adapter_is_refused(make_engine, tmp_path):
    lora = LoraConfig(rank=4, alpha=8.0)
    make_engine(lora=lora).save_checkpoint(str(tmp_path), global_step=1)
    other = make_engine(lora=lora.model_copy(update={"alpha": 16.0}))
    assert_refused_and_unchanged(other, tmp_path, "adapter.alpha is 8.0 in the checkpoint, 16.0")
    assert_refused_and_unchanged(make_engine(), tmp_path, "adapter is {", "lora_A", "is unexpected")


def test_another_learning_rate_is_no_other_engine(make_engine, tmp_path):
    make_engine(lr=1e-3).save_checkpoint(str(tmp_path), global_step=1)
    make_engine(lr=1e-4).load_checkpoint(str(tmp_path))


@pytest.mark.parametrize(
    ("file", "change", "complaint"),
    [
        (MODEL, lambda t: t.pop("lm_head.weight"), "lm_head.weight is missing"),
        (MODEL, lambda t: t.update(x=torch.ones(1)), "x is unexpected"),
        (MODEL, lambda t: t.update({"model.norm.weight": torch.ones(31)}), "model.norm.weight is"),
        (
            OPTIMIZER,
            lambda t: t.pop("exp_avg_sq.model.norm.weight"),
            "optimizer state 'exp_avg_sq.model.norm.weight': missing",
        ),
        (
            OPTIMIZER,
            lambda t: t.update({"exp_avg.nothing": torch.ones(1)}),
            "optimizer state 'exp_avg.nothing': no such parameter",
        ),
    ],
    ids=["missing", "unexpected", "shape", "moment missing", "moment of nothing"],
)
def test_a_file_that_lacks_something_is_refused(make_engine, tmp_path, file, change, complaint):
    engine = make_engine()
    train(engine, range(1))
    engine.save_checkpoint(str(tmp_path), global_step=1)
    folder = tmp_path / "checkpoints" / "step_1"
    tensors = read_tensors(folder / file)
    change(tensors)
    write_tensors(folder / file, tensors)
    train(engine, range(1))
    assert_refused_and_unchanged(engine, folder, complaint)


def test_a_state_of_an_older_format_is_refused(make_engine, tmp_path):
    engine = make_engine()
    engine.save_checkpoint(str(tmp_path), global_step=1)
    folder = tmp_path / "checkpoints" / "step_1"
    state = read_state(folder / STATE)
    write_state(folder / STATE, state | {"format": 1})
    assert_refused_and_unchanged(engine, folder, "format 1, allowed: 2")
