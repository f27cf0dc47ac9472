import random

import numpy as np
import pytest
import torch

from tandem.checkpoint import staging
from tandem.config.schema import LoraConfig
from tandem.errors import CheckpointError
from tests.train.conftest import make_batch, nll

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
