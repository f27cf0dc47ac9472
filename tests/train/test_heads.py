"""Value and reward models: what their numbers mean, and every way in and out of files."""

import pytest
import torch
from peft import PeftModel
from transformers import (
    AutoModelForCausalLM,
    AutoModelForSequenceClassification,
    AutoModelForTokenClassification,
    Qwen3Config,
)

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.data.batch import collate
from tandem.errors import CapabilityError, DataError
from tandem.train import EngineRegistry, LocalTrainEngine
from tandem.types import FinetuneSpec, Metric, SaveLoadMeta
from tests.tolerance import tolerance
from tests.train.conftest import VOCABULARY, left_padded, make_batch, make_rows, nll

LENGTHS = [9, 5, 7]
TYPES = ("value_model", "reward_model")
PLAIN = {
    "value_model": AutoModelForTokenClassification,
    "reward_model": AutoModelForSequenceClassification,
}


def squared(outputs, microbatch):
    """Pulls every value and score towards 1; the weights are of tokens or of rows."""
    weights = microbatch["loss_weights"]
    if "values" in outputs:
        error = (outputs["values"] - 1.0) ** 2
        return (weights * error).sum(), {"seen": Metric(error.detach().mean())}
    return (weights.sum(1) * (outputs["scores"] - 1.0) ** 2).sum(), {}


def loss_for(model_type):
    def loss(outputs, microbatch):
        return squared(outputs, microbatch)

    loss.required_outputs = frozenset({"values" if model_type == "value_model" else "scores"})
    return loss


@pytest.fixture
def make_head_engine(model_path):
    made = []

    def make(model_type, path=None, *, lora=None, seed=0, **config):
        config = {"device": "cpu", "max_grad_norm": None, "lr": 1e-2} | config
        engine = EngineRegistry.new(
            model_type,
            "local",
            config=TrainConfig(**config),
            model_path=str(path or model_path),
            lora=lora,
            seed=seed,
        )
        engine.initialize(ft_spec=FinetuneSpec(1, 100, 1))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.destroy()


def head_states(path, model_type, ids):
    """The head at every token of one row, by plain transformers."""
    model = PLAIN[model_type].from_pretrained(path, attn_implementation="eager").eval()
    with torch.no_grad():
        hidden = model.base_model(torch.as_tensor(ids)[None]).last_hidden_state[0]
        return model.score(hidden)[:, 0]


def train(engine, steps=3, lengths=LENGTHS):
    loss = loss_for(engine.model_type)
    return [engine.train_batch(make_batch(lengths), loss) for _ in range(steps)]


def outputs_of(engine, batch=None):
    found = engine.forward(make_batch(LENGTHS) if batch is None else batch)
    return torch.cat([value.flatten() for _, value in sorted(found.items())])


# --- alignment ------------------------------------------------------------------------------------


def test_a_value_is_of_the_state_before_its_token(make_head_engine, tmp_path):
    engine = make_head_engine("value_model")
    engine.save(SaveLoadMeta(str(tmp_path / "m")))
    batch = make_batch(LENGTHS)
    found = engine.forward(batch)
    for b, n in enumerate(LENGTHS):
        states = head_states(tmp_path / "m", "value_model", batch["input_ids"][b, :n])
        assert found["values"][b, 0] == 0.0
        torch.testing.assert_close(found["values"][b, 1:n], states[:-1], rtol=0, atol=1e-5)
        assert not found["values"][b, n:].any()
        torch.testing.assert_close(found["bootstrap_values"][b], states[-1], rtol=0, atol=1e-5)


def test_a_score_is_of_the_last_real_token_and_not_shifted(make_head_engine, tmp_path):
    engine = make_head_engine("reward_model")
    engine.save(SaveLoadMeta(str(tmp_path / "m")))
    batch = make_batch(LENGTHS)
    found = engine.forward(batch)["scores"]
    for b, n in enumerate(LENGTHS):
        states = head_states(tmp_path / "m", "reward_model", batch["input_ids"][b, :n])
        torch.testing.assert_close(found[b], states[-1], rtol=0, atol=1e-5)


def test_padding_with_the_end_token_does_not_move_the_score(make_head_engine, tmp_path):
    """B118: 'a b eos' and 'a eos', padded with eos; each is scored at its own end token."""
    eos = 2
    rows = [torch.tensor([5, 6, eos]), torch.tensor([5, eos])]
    batch = collate([{"input_ids": ids} for ids in rows])
    batch["input_ids"][1, 2] = eos
    engine = make_head_engine("reward_model")
    engine.save(SaveLoadMeta(str(tmp_path / "m")))
    expected = [head_states(tmp_path / "m", "reward_model", ids)[-1] for ids in rows]
    found = engine.forward(batch)["scores"]
    torch.testing.assert_close(found, torch.stack(expected), rtol=0, atol=1e-5)
    assert found[0] != found[1]


@pytest.mark.parametrize("model_type", TYPES)
def test_outputs_do_not_depend_on_cut_padding_or_layout(make_head_engine, model_type):
    batch = make_batch(LENGTHS)
    whole = make_head_engine(model_type).forward(batch)
    cut = make_head_engine(model_type, microbatch_size=1).forward(batch)
    shifted = make_head_engine(model_type).forward(left_padded(batch))
    for name, value in whole.items():
        torch.testing.assert_close(cut[name], value, rtol=0, atol=1e-5)
        if value.ndim == 1:
            torch.testing.assert_close(shifted[name], value, rtol=0, atol=1e-5)
    rows = make_rows(LENGTHS)
    jagged = batch.clone().exclude("attention_mask", "loss_mask", "loss_weights")
    jagged["input_ids"] = torch.nested.as_nested_tensor(
        [row["input_ids"] for row in rows], layout=torch.jagged
    )
    for name, value in make_head_engine(model_type).forward(jagged).items():
        assert value.is_nested == (whole[name].ndim == 2)
        for found, expected in zip(value.unbind(), whole[name], strict=True):
            expected = expected[: len(found)] if found.ndim else expected
            torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)


def test_rows_without_tokens_score_nothing(make_head_engine):
    batch = make_batch([4, 3])
    batch["attention_mask"][1] = False
    for model_type in TYPES:
        found = make_head_engine(model_type, microbatch_size=1).forward(batch)
        for value in found.values():
            assert not value[1].any()
            assert value[0].any()


# --- training -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_gradients_are_those_of_a_plain_loop(make_head_engine, tmp_path, model_type):
    engine = make_head_engine(model_type, microbatch_size=2)
    engine.save(SaveLoadMeta(str(tmp_path / "m")))
    engine.forward_backward_batch(make_batch(LENGTHS), loss_for(model_type))
    model = PLAIN[model_type].from_pretrained(tmp_path / "m", attn_implementation="eager").eval()
    for row in make_rows(LENGTHS):
        hidden = model.base_model(row["input_ids"][None]).last_hidden_state[0]
        states = model.score(hidden)[:, 0]
        if model_type == "value_model":
            loss = (row["loss_weights"][1:] * (states[:-1] - 1.0) ** 2).sum()
        else:
            loss = row["loss_weights"].sum() * (states[-1] - 1.0) ** 2
        loss.backward()
    expected = {name: p.grad for name, p in model.named_parameters()}
    scale = sum(float(g.square().sum()) for g in expected.values()) ** 0.5
    for name, parameter in engine.model.named_parameters():
        assert (parameter.grad - expected[name]).abs().max() <= 1e-5 * scale, name


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_training_lowers_the_loss(make_head_engine, model_type, lora, dtype):
    engine = make_head_engine(model_type, lora=lora, dtype=dtype)
    results = train(engine, steps=8)
    assert results[-1]["loss"] < 0.5 * results[0]["loss"]
    assert engine.model.score.weight.dtype == torch.float32


@pytest.mark.parametrize("model_type", TYPES)
def test_a_micro_batch_without_weight_adds_no_gradient(make_head_engine, model_type):
    batch, kept = make_batch([6, 4]), make_batch([6, 4])[:1]
    batch["loss_weights"][1] = 0.0
    engine = make_head_engine(model_type, microbatch_size=1)
    engine.forward_backward_batch(batch, loss_for(model_type))
    other = make_head_engine(model_type)
    other.forward_backward_batch(kept, loss_for(model_type))
    for one, two in zip(engine.parameters().values(), other.parameters().values(), strict=True):
        torch.testing.assert_close(one.grad, two.grad, rtol=1e-4, atol=1e-6)


def test_a_loss_gets_what_it_asks_for_and_no_other_kind(make_head_engine):
    engine = make_head_engine("value_model")

    def loss(outputs, microbatch):
        assert set(outputs) == {"values", "bootstrap_values"}
        return outputs["bootstrap_values"].sum(), {}

    loss.required_outputs = frozenset({"values", "bootstrap_values"})
    found = engine.infer_batch(make_batch(LENGTHS), loss)
    assert found.outputs["bootstrap_values"].shape == (3,)
    assert found.loss == pytest.approx(float(found.outputs["bootstrap_values"].sum()), rel=1e-6)
    with pytest.raises(DataError, match=r"train_logprobs.*allowed here: \['values'"):
        engine.train_batch(make_batch(LENGTHS), lambda outputs, microbatch: (0, {}))
    with pytest.raises(DataError, match=r"scores.*allowed: \['values'"):
        engine.forward(make_batch(LENGTHS), outputs=["scores"])
    with pytest.raises(DataError, match="no logits"):
        engine.forward(make_batch(LENGTHS), post_hook=lambda logits, microbatch: logits)


@pytest.mark.parametrize("model_type", TYPES)
def test_offload_changes_no_number(make_head_engine, model_type):
    options = {"offload_params": True, "offload_optimizer": True, "offload_grads": True}
    here, away = make_head_engine(model_type), make_head_engine(model_type, **options)
    train(here)
    with away.train_mode():
        train(away)
    assert all(t.untyped_storage().nbytes() == 0 for t in away._tensors_of("model"))
    assert torch.equal(outputs_of(here), outputs_of(away))


# --- the head's beginning -------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_a_new_head_follows_the_seed_only(make_head_engine, model_type):
    state = torch.get_rng_state()
    first, second, third = (make_head_engine(model_type, seed=seed) for seed in (1, 1, 2))
    assert torch.equal(torch.get_rng_state(), state)
    weights = [engine.model.score.weight for engine in (first, second, third)]
    assert torch.equal(weights[0], weights[1])
    assert not torch.equal(weights[0], weights[2])
    # 32 inputs: variance 1/33, estimated from 32 draws.
    assert 0.1 < float(weights[0].detach().std()) < 0.26
    for engine in (first, second, third):
        assert engine.model.score.bias is None or not engine.model.score.bias.any()


def test_a_critic_may_start_from_a_reward_model(make_head_engine, tmp_path):
    reward = make_head_engine("reward_model")
    train(reward)
    reward.save(SaveLoadMeta(str(tmp_path / "reward")))
    critic = make_head_engine("value_model", tmp_path / "reward", seed=9)
    torch.testing.assert_close(
        critic.forward(make_batch(LENGTHS))["bootstrap_values"],
        reward.forward(make_batch(LENGTHS))["scores"],
        rtol=0,
        atol=1e-5,
    )


def test_a_head_of_another_kind_or_size_is_refused(make_head_engine, model_path, tmp_path):
    make_head_engine("value_model").save(SaveLoadMeta(str(tmp_path / "value")))
    with pytest.raises(DataError, match=r"score\.bias is unexpected"):
        make_head_engine("reward_model", tmp_path / "value")
    with pytest.raises(DataError, match=r"score\.weight is unexpected"):
        LocalTrainEngine(TrainConfig(device="cpu"), model_path=str(tmp_path / "value")).initialize()
    two = AutoModelForSequenceClassification.from_pretrained(model_path, num_labels=2)
    two.save_pretrained(tmp_path / "two")
    with pytest.raises(DataError, match=r"score\.weight has shape \[2, 32\], expected \[1, 32\]"):
        make_head_engine("reward_model", tmp_path / "two")
    with pytest.raises(DataError, match=r"score\.weight is missing"):
        make_head_engine("reward_model").load(SaveLoadMeta(model_path))


def test_a_backend_without_the_model_type_refuses_it(model_path):
    class OnlyTokens(LocalTrainEngine):
        model_type = "value_model"
        capabilities = frozenset({"language_model"})

    with pytest.raises(CapabilityError, match="OnlyTokens lacks value_model"):
        OnlyTokens(TrainConfig(), model_path=model_path)


# --- files ----------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_plain_transformers_reads_what_is_saved(make_head_engine, tmp_path, model_type):
    engine = make_head_engine(model_type)
    train(engine)
    engine.save(SaveLoadMeta(str(tmp_path / "m")))
    batch = make_batch(LENGTHS)
    found = engine.forward(batch)
    model, info = PLAIN[model_type].from_pretrained(tmp_path / "m", output_loading_info=True)
    assert not any(info.values())
    assert model.config.num_labels == 1
    for b, n in enumerate(LENGTHS):
        with torch.no_grad():
            logits = model.eval()(batch["input_ids"][b : b + 1, :n]).logits
        ours = found["scores"][b] if model_type == "reward_model" else found["values"][b, 1:n]
        theirs = logits[0, 0] if model_type == "reward_model" else logits[0, :-1, 0]
        torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    names = {spec.name: spec.shape for spec in engine.get_param_specs()}
    assert names["score.weight"] == (1, 32)
    assert names.keys() == set(model.state_dict())
    again = make_head_engine(model_type, tmp_path / "m", seed=5)
    assert torch.equal(outputs_of(again), outputs_of(engine))
    blank = make_head_engine(model_type, seed=5)
    blank.load(SaveLoadMeta(str(tmp_path / "m")))
    assert torch.equal(outputs_of(blank), outputs_of(engine))


def test_plain_transformers_scores_a_padded_batch_alike(make_head_engine, tmp_path):
    """With a padding token of its own; one that is the end token is left out of the config."""
    batch = make_batch(LENGTHS)
    batch["input_ids"].clamp_(min=3)
    engines = {}
    for pad, eos in ((0, 2), (2, 2)):
        torch.manual_seed(0)
        config = Qwen3Config(
            vocab_size=VOCABULARY,
            hidden_size=32,
            intermediate_size=48,
            num_hidden_layers=1,
            num_attention_heads=4,
            num_key_value_heads=2,
            head_dim=8,
            pad_token_id=pad,
            eos_token_id=eos,
        )
        base = tmp_path / f"base{pad}"
        AutoModelForCausalLM.from_config(config).save_pretrained(base)
        engines[pad] = make_head_engine("reward_model", base)
        engines[pad].save(SaveLoadMeta(str(tmp_path / f"m{pad}")))
    batch["input_ids"][~batch["attention_mask"]] = 0
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m0").eval()
    with torch.no_grad():
        theirs = model(batch["input_ids"], attention_mask=batch["attention_mask"].long()).logits
    torch.testing.assert_close(theirs[:, 0], engines[0].forward(batch)["scores"], rtol=0, atol=1e-5)

    ended = collate([{"input_ids": torch.tensor([5, 6, 2])}])
    model = AutoModelForSequenceClassification.from_pretrained(tmp_path / "m2").eval()
    assert model.config.pad_token_id is None
    with torch.no_grad():
        theirs = model(ended["input_ids"]).logits
    torch.testing.assert_close(theirs[:, 0], engines[2].forward(ended)["scores"], rtol=0, atol=1e-5)


@pytest.mark.parametrize("model_type", TYPES)
@pytest.mark.parametrize("lora", [None, LoraConfig(rank=4)], ids=["full", "lora"])
def test_a_checkpoint_resumes_bit_for_bit(make_head_engine, tmp_path, model_type, lora):
    engine = make_head_engine(model_type, lora=lora)
    train(engine)
    engine.save_checkpoint(str(tmp_path), global_step=3)
    train(engine)
    resumed = make_head_engine(model_type, lora=lora, seed=7)
    resumed.load_checkpoint(str(tmp_path))
    train(resumed)
    assert torch.equal(outputs_of(resumed), outputs_of(engine))


# --- adapters -------------------------------------------------------------------------------------


@pytest.mark.parametrize("model_type", TYPES)
def test_an_adapter_trains_with_its_whole_head(make_head_engine, model_type):
    engine = make_head_engine(model_type, lora=LoraConfig(rank=4))
    names = set(engine.parameters())
    head = {name for name in names if name.startswith("score.")}
    assert head == {f"score.{key}" for key, _ in engine.model.score.named_parameters()}
    assert all(".lora_" in name for name in names - head)
    assert not any("score" in name for name in names - head)
    before = outputs_of(engine)
    train(engine)
    after = outputs_of(engine)
    with engine.disable_adapter():
        assert torch.equal(outputs_of(engine), before)
    assert torch.equal(outputs_of(engine), after)
    assert not torch.equal(before, after)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
@pytest.mark.parametrize("model_type", TYPES)
def test_peft_reads_the_adapter_with_its_head(make_head_engine, model_path, tmp_path, model_type):
    engine = make_head_engine(model_type, lora=LoraConfig(rank=4))
    train(engine)
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), weight_format="adapter"))
    engine.save(SaveLoadMeta(str(tmp_path / "merged")))
    base = PLAIN[model_type].from_pretrained(model_path, num_labels=1)
    model = PeftModel.from_pretrained(base, str(tmp_path / "adapter")).eval()
    ids = make_batch(LENGTHS)["input_ids"][:1, :9]
    with torch.no_grad():
        theirs = model(input_ids=ids).logits.flatten()[-1]
    name = "scores" if model_type == "reward_model" else "bootstrap_values"
    ours = engine.forward(make_batch(LENGTHS))[name][0]
    torch.testing.assert_close(ours, theirs, rtol=0, atol=1e-5)
    merged = make_head_engine(model_type, tmp_path / "merged")
    atol = 10 * tolerance(torch.float32)["atol"]
    torch.testing.assert_close(outputs_of(merged), outputs_of(engine), rtol=1e-4, atol=atol)
    config = LoraConfig(adapter_path=str(tmp_path / "adapter"))
    again = make_head_engine(model_type, lora=config, seed=3)
    start = outputs_of(again)
    assert torch.equal(start, outputs_of(engine))
    train(again)
    with again.reference():
        assert torch.equal(outputs_of(again), start)


@pytest.mark.parametrize("model_type", TYPES)
def test_a_head_on_a_language_models_adapter_is_new(
    make_head_engine, make_engine, tmp_path, model_type
):
    policy = make_engine(lora=LoraConfig(rank=4), lr=2e-2)
    policy.train_batch(make_batch(LENGTHS), nll)
    policy.save(SaveLoadMeta(str(tmp_path / "policy"), weight_format="adapter"))
    policy.save(SaveLoadMeta(str(tmp_path / "merged")))
    started = LoraConfig(adapter_path=str(tmp_path / "policy"))
    engine = make_head_engine(model_type, lora=started)
    torch.testing.assert_close(
        outputs_of(engine),
        outputs_of(make_head_engine(model_type, tmp_path / "merged")),
        rtol=1e-4,
        atol=10 * tolerance(torch.float32)["atol"],
    )
    train(engine)
    engine.save(SaveLoadMeta(str(tmp_path / "head"), weight_format="adapter"))
    again = make_head_engine(model_type, lora=LoraConfig(adapter_path=str(tmp_path / "head")))
    assert torch.equal(outputs_of(again), outputs_of(engine))
