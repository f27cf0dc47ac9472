"""verl's own losses, registry and training worker, unchanged, on our engine."""

from __future__ import annotations

from functools import partial

import pytest
import torch
from tensordict import TensorDict

from tests.peers import verl_platform  # noqa: F401 (registers; must come before verl)

# isort: split
from verl.utils import tensordict_utils as tu
from verl.workers.config import (
    ActorConfig,
    CriticConfig,
    EngineConfig,
    FSDPOptimizerConfig,
    HFModelConfig,
    TrainingWorkerConfig,
)
from verl.workers.engine import EngineRegistry as VerlRegistry
from verl.workers.engine_workers import TrainingWorker
from verl.workers.utils.losses import ppo_loss, sft_loss, value_loss

from tandem.algorithms import value as value_algorithm
from tandem.algorithms.aggregation import loss_weights
from tandem.algorithms.objective import PolicyObjective
from tandem.algorithms.sft import sft_loss as our_sft_loss
from tandem.compat import verl_0_9
from tandem.compat.verl import BaseEngine
from tandem.errors import ConfigError
from tests.peers.conftest import (
    LENGTHS,
    PROMPTS,
    assert_same_gradients,
    gradients_of,
    near_policy,
)

ROWS_EACH = [1, 2, 4]


def jagged(batch, name, *, responses_only=False):
    starts = PROMPTS if responses_only else (0,) * len(LENGTHS)
    rows = [batch[name][row, k:n] for row, (k, n) in enumerate(zip(starts, LENGTHS, strict=True))]
    return torch.nested.as_nested_tensor(rows, layout=torch.jagged)


def verl_batch(batch, rows_each, **settings):
    """As verl's trainers build it: whole rows, and per-response tensors, without padding."""
    ids = batch["input_ids"]
    fields = {
        "input_ids": jagged(batch, "input_ids"),
        "responses": jagged(batch, "input_ids", responses_only=True),
        "prompts": torch.nested.as_nested_tensor(
            [ids[row, :k] for row, k in enumerate(PROMPTS)], layout=torch.jagged
        ),
        "position_ids": torch.nested.as_nested_tensor(
            [torch.arange(n) for n in LENGTHS], layout=torch.jagged
        ),
        "loss_mask": jagged(batch, "loss_mask"),
        "response_mask": jagged(batch, "loss_mask", responses_only=True),
    }
    for theirs, ours in (
        ("old_log_probs", "prox_logprobs"),
        ("ref_log_prob", "ref_logprobs"),
        ("advantages", "advantages"),
        ("values", "values"),
        ("returns", "returns"),
    ):
        fields[theirs] = jagged(batch, ours, responses_only=True)
    data = TensorDict(fields, batch_size=[len(LENGTHS)])
    defaults = {
        "temperature": 1.0,
        "use_dynamic_bsz": False,
        "micro_batch_size_per_gpu": rows_each,
        "global_batch_size": len(LENGTHS),
    }
    tu.assign_non_tensor(data, **(defaults | settings))
    return data


def check(view, ours, verl_loss, data, our_loss, batch):
    """verl's loss on the view and ours on the engine itself: the same loss, the same gradients."""
    found = view.forward_backward_batch(data, verl_loss)
    ours.optimizer_zero_grad()
    expected = ours.forward_backward_batch(batch, our_loss)
    assert sum(found["loss"]) == pytest.approx(expected.loss, abs=1e-5, rel=1e-5)
    assert_same_gradients(gradients_of(view.engine), gradients_of(ours))
    return found


@pytest.mark.parametrize("rows_each", ROWS_EACH)
def test_sft_loss(rows_each, make_engine, batch):
    view, ours = BaseEngine(make_engine()), make_engine()
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    batch["temperature"] = torch.full((4,), 0.7)
    data = verl_batch(batch, rows_each, temperature=0.7)
    check(view, ours, partial(sft_loss, None), data, our_sft_loss, batch)


@pytest.mark.parametrize("rows_each", ROWS_EACH)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-sum", "seq-mean-token-mean"])
def test_ppo_loss(mode, rows_each, make_engine, batch):
    view, ours = BaseEngine(make_engine()), make_engine()
    near_policy(batch, ours, "prox_logprobs", "ref_logprobs")
    weights = loss_weights(mode, batch["loss_mask"])
    for key in ("loss_weights", "kl_loss_weights", "entropy_loss_weights"):
        batch[key] = weights
    config = ActorConfig(
        strategy="tandem",
        rollout_n=1,
        use_dynamic_bsz=True,
        clip_ratio_low=0.2,
        clip_ratio_high=0.28,
        clip_ratio_c=3.0,
        loss_agg_mode=mode,
        entropy_coeff=0.01,
        use_kl_loss=True,
        kl_loss_coef=0.05,
        kl_loss_type="low_var_kl",
    )
    objective = PolicyObjective(
        policy_kwargs={"clip_low": 0.2, "clip_high": 0.28, "dual_clip": 3.0},
        kl_coef=0.05,
        kl_estimator="k3",
        kl_gradient="own",
        entropy_coef=0.01,
    )
    data = verl_batch(batch, rows_each, calculate_entropy=True)
    found = check(view, ours, partial(ppo_loss, config), data, objective, batch)
    metrics = found["metrics"]["actor/pg_loss"]
    assert len(metrics.values) == 4 // rows_each


@pytest.mark.parametrize("rows_each", ROWS_EACH)
@pytest.mark.parametrize("mode", ["token-mean", "seq-mean-token-mean"])
def test_value_loss(mode, rows_each, make_engine, batch):
    view, ours = BaseEngine(make_engine("value_model")), make_engine("value_model")
    batch["value_loss_weights"] = loss_weights(mode, batch["loss_mask"])

    def our_loss(outputs, microbatch):
        loss, _ = value_algorithm.value_loss(
            outputs["values"],
            microbatch["values"],
            microbatch["returns"],
            microbatch["loss_mask"],
            clip=0.2,
        )
        return (loss * microbatch["value_loss_weights"]).sum(), {}

    our_loss.required_outputs = frozenset({"values"})
    config = CriticConfig(
        strategy="tandem", use_dynamic_bsz=True, cliprange_value=0.2, loss_agg_mode=mode
    )
    data = verl_batch(batch, rows_each)
    check(view, ours, partial(value_loss, config), data, our_loss, batch)


# --- verl's registry and worker -------------------------------------------------------------------


@pytest.fixture(scope="module")
def one_rank(tmp_path_factory):
    store = tmp_path_factory.mktemp("store") / "file"
    with pytest.MonkeyPatch.context() as patch:
        for name, value in (
            ("RANK", "0"),
            ("WORLD_SIZE", "1"),
            ("LOCAL_RANK", "0"),
            ("MASTER_ADDR", "127.0.0.1"),
            ("MASTER_PORT", "29573"),
        ):
            patch.setenv(name, value)
        torch.distributed.init_process_group(
            "gloo", init_method=f"file://{store}", rank=0, world_size=1
        )
        verl_0_9.register("tandem")
        yield
        torch.distributed.destroy_process_group()


def configurations(model_path, model_type="language_model", **engine):
    model = HFModelConfig(
        path=model_path,
        model_type=model_type,
        load_tokenizer=False,
        use_remove_padding=True,
        enable_gradient_checkpointing=False,
        override_config={"attn_implementation": "sdpa"},
    )
    settings = {
        "strategy": "tandem",
        "dtype": "float32",
        "use_dynamic_bsz": True,
        "max_token_len_per_gpu": 16,
        "infer_max_token_len_per_gpu": 16,
    } | engine
    optimizer = FSDPOptimizerConfig(
        lr=1e-2,
        weight_decay=0.1,
        clip_grad=1.0,
        total_training_steps=10,
        lr_warmup_steps=2,
        lr_scheduler_type="cosine",
    )
    return model, EngineConfig(**settings), optimizer


def make_worker(model_path, **engine):
    model, engine_config, optimizer = configurations(model_path, **engine)
    worker = TrainingWorker(
        TrainingWorkerConfig(
            model_type="language_model",
            model_config=model,
            engine_config=engine_config,
            optimizer_config=optimizer,
        )
    )
    worker.reset()
    return worker


def test_the_engine_is_in_verls_registry(one_rank, model_path):
    for model_type in ("language_model", "value_model"):
        engine_class = VerlRegistry.get_engine_cls(model_type, "tandem")
        assert issubclass(engine_class, verl_0_9.TandemEngine)
    model, engine_config, optimizer = configurations(model_path, param_offload=True)
    engine = VerlRegistry.new(
        "language_model",
        "tandem",
        model_config=model,
        engine_config=engine_config,
        optimizer_config=optimizer,
        checkpoint_config=None,
    )
    assert engine.is_param_offload_enabled
    assert engine.engine.config.lr == 1e-2
    assert engine.engine.config.warmup_steps == 2
    assert engine.engine.config.schedule == "cosine"
    assert engine.engine.config.max_tokens_per_microbatch == 16


def test_what_our_engine_would_not_do_is_refused(one_rank, model_path):
    model, engine_config, _ = configurations(model_path)
    optimizer = FSDPOptimizerConfig(optimizer="AdamW8bit")
    with pytest.raises(ConfigError, match=r"optim\.optimizer"):
        verl_0_9.TandemEngine(model, engine_config, optimizer)


def test_the_training_worker_drives_the_engine(one_rank, model_path, make_engine, batch, tmp_path):
    worker = make_worker(model_path)
    worker.set_loss_fn(partial(sft_loss, None))
    ours = make_engine(
        lr=1e-2, weight_decay=0.1, max_grad_norm=1.0, schedule="cosine", warmup_steps=2
    )
    ours.destroy()
    from tandem.types import FinetuneSpec

    ours.initialize(ft_spec=FinetuneSpec(1, 10, 1))
    batch["loss_weights"] = loss_weights("token-mean", batch["loss_mask"])
    losses = []
    for _ in range(5):
        data = verl_batch(batch, 4)
        for key in ("use_dynamic_bsz", "micro_batch_size_per_gpu"):
            tu.pop(data, key)
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=None)
        found = tu.get(worker.train_batch(data), "metrics")
        expected = ours.train_batch(batch, our_sft_loss)
        assert found["loss"] == pytest.approx(expected["loss"], rel=1e-4)
        assert found["grad_norm"] == pytest.approx(expected["grad_norm"], rel=1e-4)
        assert found["lr"] == pytest.approx(ours.lr_scheduler_step())
        losses.append(found["loss"])
    assert losses[-1] < losses[0] - 0.05
    data = verl_batch(batch, 4)
    tu.assign_non_tensor(data, compute_loss=False, global_token_num=None)
    scored = worker.infer_batch(data)["log_probs"]
    own = ours.forward(batch.select("input_ids", "attention_mask"))["train_logprobs"]
    for row, (values, n) in enumerate(zip(scored.unbind(), LENGTHS, strict=True)):
        torch.testing.assert_close(values[: n - 1], own[row, 1:n], atol=1e-4, rtol=1e-4)

    worker.save_checkpoint(str(tmp_path / "actor"), global_step=5)
    fresh = make_worker(model_path)
    fresh.load_checkpoint(str(tmp_path / "actor"))
    again = fresh.infer_batch(data)["log_probs"]
    assert torch.equal(again.values(), scored.values())


def test_mini_batches_of_the_worker_are_steps_of_their_own(one_rank, model_path, batch):
    worker = make_worker(model_path)
    worker.set_loss_fn(partial(sft_loss, None))
    data = verl_batch(batch, 1)
    tu.assign_non_tensor(data, mini_batch_size=2, epochs=2, dataloader_kwargs={"shuffle": False})
    metrics = tu.get(worker.train_mini_batch(data), "metrics")
    assert len(metrics["grad_norm"]) == 4
    assert worker.engine.engine.learning_rate == pytest.approx(0.5e-2)


def test_a_delta_has_what_a_step_changed(one_rank, model_path, batch):
    worker = make_worker(model_path)
    worker.set_loss_fn(partial(sft_loss, None))
    engine = worker.engine
    engine.prime_delta_snapshots()
    before = dict(engine.get_per_tensor_param()[0])
    before = {name: tensor.clone() for name, tensor in before.items()}
    for _ in range(2):
        data = verl_batch(batch, 4)
        tu.assign_non_tensor(data, update_lr_scheduler=True, global_token_num=None)
        worker.train_batch(data)
    after = dict(engine.get_per_tensor_param()[0])
    entries, _ = engine.get_per_tensor_param_delta_shard()
    for slots, _, _, index, values, _ in entries:
        ((name, shape),) = slots
        rebuilt = before[name].reshape(-1).clone()
        rebuilt[index.long()] = values
        assert torch.equal(rebuilt.view(shape), after[name])
