import json

import pytest
import torch
from peft import PeftModel

from tandem.config.schema import LoraConfig
from tandem.errors import CapabilityError, ConfigError, DataError, EngineError
from tandem.types import SaveLoadMeta
from tests.train import reference
from tests.train.conftest import make_batch, nll

LENGTHS = [9, 5]


def trained(make_engine, lora=None, steps=3, **config):
    engine = make_engine(lora=lora or LoraConfig(rank=4), lr=2e-2, **config)
    for _ in range(steps):
        engine.train_batch(make_batch(LENGTHS), nll)
    return engine


def base_tensors(engine):
    return {
        name: p.detach().clone()
        for name, p in engine.model.named_parameters()
        if ".lora_" not in name
    }


def scores(engine):
    return engine.forward(make_batch(LENGTHS))["train_logprobs"]


def plain_scores(path):
    model, batch = reference.load(path), make_batch(LENGTHS)
    found = torch.zeros(batch["input_ids"].shape)
    with torch.no_grad():
        for b, n in enumerate(LENGTHS):
            found[b, :n] = reference.logprobs(model, batch["input_ids"][b, :n])
    return found


def test_only_the_adapter_trains_and_starts_as_the_base(make_engine, model_path):
    engine = make_engine(lora=LoraConfig(rank=4))
    torch.testing.assert_close(scores(engine), plain_scores(model_path), rtol=0, atol=1e-5)
    assert all(".lora_" in name for name in engine.parameters())
    before = base_tensors(engine)
    engine.train_batch(make_batch(LENGTHS), nll)
    assert all(torch.equal(before[n], p) for n, p in base_tensors(engine).items())


def test_the_base_is_the_reference(make_engine, model_path):
    engine = trained(make_engine)
    moved = scores(engine)
    for context in (engine.disable_adapter(), engine.reference()):
        with context:
            found = scores(engine)
        torch.testing.assert_close(found, plain_scores(model_path), rtol=0, atol=1e-5)
    assert (moved - found).abs().max() > 1e-3
    assert torch.equal(scores(engine), moved)
    engine.train_batch(make_batch(LENGTHS), nll)
    assert not torch.equal(scores(engine), moved)


def test_without_an_adapter_there_is_nothing_to_disable(make_engine):
    engine = make_engine()
    with pytest.raises(EngineError, match="no adapter"), engine.disable_adapter():
        pass
    with engine.disable_adapter(missing_ok=True):
        scores(engine)


def test_a_policy_that_starts_from_an_adapter_has_it_as_reference(make_engine, tmp_path):
    first = trained(make_engine)
    first.save(SaveLoadMeta(str(tmp_path / "adapter"), weight_format="adapter"))
    engine = make_engine(lora=LoraConfig(adapter_path=str(tmp_path / "adapter")), lr=2e-2)
    start = scores(engine)
    torch.testing.assert_close(start, scores(first), rtol=0, atol=1e-6)
    with engine.reference():
        assert torch.equal(scores(engine), start)
    engine.train_batch(make_batch(LENGTHS), nll)
    now = scores(engine)
    assert (now - start).abs().max() > 1e-3
    with engine.reference():
        assert torch.equal(scores(engine), start)
    assert torch.equal(scores(engine), now)


def test_any_number_of_exports_leaves_a_bf16_base_bit_identical(make_engine):
    engine = trained(make_engine, dtype="bfloat16")
    assert engine.model.model.layers[0].self_attn.q_proj.base_layer.weight.dtype == torch.bfloat16
    before = base_tensors(engine)
    for _ in range(100):
        stream, _ = engine.get_per_tensor_param()
        merged = dict(stream)
    assert all(torch.equal(before[n], p) for n, p in base_tensors(engine).items())
    name = "model.layers.0.self_attn.q_proj"
    assert not torch.equal(merged[f"{name}.weight"], before[f"{name}.base_layer.weight"])


def test_a_merged_export_reproduces_the_trained_scores(make_engine, tmp_path):
    engine = trained(make_engine)
    engine.save(SaveLoadMeta(str(tmp_path / "merged")))
    torch.testing.assert_close(plain_scores(tmp_path / "merged"), scores(engine), rtol=0, atol=1e-4)


@pytest.mark.filterwarnings("ignore:.*is_gradient_checkpointing.*:FutureWarning")
def test_an_adapter_file_is_one_that_peft_loads(make_engine, model_path, tmp_path):
    engine = trained(make_engine)
    engine.save(SaveLoadMeta(str(tmp_path / "adapter"), weight_format="adapter"))
    model = PeftModel.from_pretrained(reference.load(model_path), str(tmp_path / "adapter"))
    ids = make_batch(LENGTHS)["input_ids"][0]
    with torch.no_grad():
        found = reference.logprobs(model, ids)
    torch.testing.assert_close(found, scores(engine)[0], rtol=0, atol=1e-5)
    other = make_engine(lora=LoraConfig(rank=4))
    other.load(SaveLoadMeta(str(tmp_path / "adapter")))
    assert torch.equal(scores(other), scores(engine))


def test_names_on_disk_are_those_of_the_base_model(make_engine):
    engine, plain = make_engine(lora=LoraConfig(rank=4)), make_engine()
    assert engine.get_param_specs() == plain.get_param_specs()


def test_the_adapter_alone_can_be_streamed(make_engine):
    engine = make_engine(lora=LoraConfig(rank=4))
    stream, peft_config = engine.get_per_tensor_param(adapter_only=True)
    names = [name for name, _ in stream]
    assert len(names) == len(engine.parameters())
    assert [s.name for s in engine.adapter_specs()] == names
    assert peft_config["r"] == 4


def test_the_seed_fixes_the_adapter_and_leaves_the_global_generator_alone(make_engine):
    state = torch.get_rng_state()
    first, second, third = (
        make_engine(lora=LoraConfig(rank=4), seed=seed).parameters() for seed in (1, 1, 2)
    )
    assert torch.equal(torch.get_rng_state(), state)
    name = next(name for name in first if ".lora_A." in name)
    assert torch.equal(first[name], second[name])
    assert not torch.equal(first[name], third[name])


def test_adapter_dropout_is_used_in_training_only(make_engine):
    engine = trained(make_engine, lora=LoraConfig(rank=4, dropout=0.5))
    assert torch.equal(scores(engine), scores(engine))
    batch = make_batch(LENGTHS)
    first, second = (engine.forward_backward_batch(batch, nll).loss for _ in range(2))
    assert first != second


def test_targets_that_cannot_be_adapted_are_refused(make_engine, tmp_path):
    with pytest.raises(ConfigError, match="target_modules"):
        make_engine(lora=LoraConfig(target_modules=("no_such_layer",)))
    with pytest.raises(CapabilityError, match="lm_head"):
        make_engine(lora=LoraConfig(target_modules=("lm_head", "q_proj")))
    with pytest.raises(ConfigError, match="adapter_path"):
        make_engine(lora=LoraConfig(adapter_path=str(tmp_path)))


def test_an_adapter_of_another_shape_is_refused(make_engine, tmp_path):
    trained(make_engine).save(SaveLoadMeta(str(tmp_path / "a"), weight_format="adapter"))
    with pytest.raises(DataError, match="does not fit"):
        make_engine(lora=LoraConfig(rank=8)).load(SaveLoadMeta(str(tmp_path / "a")))


def test_a_tied_model_with_an_adapter_exports_its_embeddings_once(make_engine, tied_path, tmp_path):
    engine = make_engine(tied_path, lora=LoraConfig(rank=4), lr=2e-2)
    engine.train_batch(make_batch(LENGTHS), nll)
    assert "lm_head.weight" not in {spec.name for spec in engine.get_param_specs()}
    engine.save(SaveLoadMeta(str(tmp_path / "merged")))
    torch.testing.assert_close(plain_scores(tmp_path / "merged"), scores(engine), rtol=0, atol=1e-4)


@pytest.mark.parametrize("option", ["lora_bias", "use_dora"])
def test_an_adapter_that_is_more_than_two_matrices_is_refused(make_engine, tmp_path, option):
    """Merged weights would leave its other part out, and the sampler would be another policy."""
    path = tmp_path / "a"
    trained(make_engine).save(SaveLoadMeta(str(path), weight_format="adapter"))
    file = path / "adapter_config.json"
    file.write_text(json.dumps(json.loads(file.read_text()) | {option: True}))
    with pytest.raises(ConfigError, match=f"{option}=true"):
        make_engine(lora=LoraConfig(adapter_path=str(path)))
