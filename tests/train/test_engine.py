"""Life cycle, modes, placement and the registry."""

import pytest
import torch

from tandem.config.schema import LoraConfig, TrainConfig
from tandem.errors import CapabilityError, ConfigError, EngineError
from tandem.train import EngineRegistry, LocalTrainEngine, TrainEngine, building
from tandem.types import FinetuneSpec
from tests.train.conftest import engine_gradients, make_batch, nll

OFFLOAD = {"offload_params": True, "offload_optimizer": True, "offload_grads": True}


def live_bytes(tensors):
    return sum(tensor.untyped_storage().nbytes() for tensor in tensors)


def parts(engine):
    return {kind: live_bytes(engine._tensors_of(kind)) for kind in ("model", "optimizer", "grad")}


# --- life cycle -----------------------------------------------------------------------------------


def test_initialize_and_destroy_are_idempotent(model_path):
    engine = LocalTrainEngine(TrainConfig(device="cpu"), model_path=model_path)
    with pytest.raises(EngineError, match="initialize"):
        engine.forward(make_batch([3]))
    engine.initialize()
    model = engine.model
    engine.initialize()
    assert engine.model is model
    engine.destroy()
    engine.destroy()
    with pytest.raises(EngineError, match="initialize"):
        engine.train_batch(make_batch([3]), nll)


def test_one_device_is_one_rank(make_engine):
    engine = make_engine()
    assert (engine.get_data_parallel_rank(), engine.get_data_parallel_size()) == (0, 1)
    assert engine.get_data_parallel_group() is None
    assert engine.parallelism_group is None
    assert engine.is_mp_src_rank_with_outputs()
    scheduling = engine.get_scheduling_config()
    assert (scheduling.cpu, scheduling.gpu) == (1, 0)


def test_a_group_address_is_refused(model_path):
    engine = LocalTrainEngine(TrainConfig(device="cpu"), model_path=model_path)
    with pytest.raises(ConfigError, match="addr"):
        engine.initialize(addr="127.0.0.1:1")


def test_what_a_backend_lacks_is_refused_at_construction(model_path):
    class Plain(LocalTrainEngine):
        capabilities = frozenset({"language_model"})

    with pytest.raises(CapabilityError, match="Plain lacks bfloat16, lora, offload"):
        Plain(
            TrainConfig(dtype="bfloat16", offload_grads=True),
            model_path=model_path,
            lora=LoraConfig(),
        )


# --- modes ----------------------------------------------------------------------------------------


def test_modes_set_and_clear_the_mode_even_after_an_exception(make_engine):
    engine = make_engine()
    with engine.train_mode():
        assert engine.mode == "train"
        with engine.eval_mode():
            assert engine.mode == "eval"
            assert not engine.model.training
        assert engine.mode == "train"
        assert engine.model.training
    assert engine.mode is None
    with pytest.raises(KeyError), engine.eval_mode():
        raise KeyError
    assert engine.mode is None
    assert engine.model.training


def test_zero_grad_on_exit(make_engine):
    engine = make_engine()
    with engine.train_mode(zero_grad_on_exit=True):
        engine.forward_backward_batch(make_batch([4]), nll)
    assert all(p.grad is None for p in engine.model.parameters())


# --- offload --------------------------------------------------------------------------------------


def test_everything_is_off_the_device_outside_a_mode(make_engine):
    engine = make_engine(**OFFLOAD)
    assert parts(engine) == {"model": 0, "optimizer": 0, "grad": 0}
    with engine.train_mode():
        engine.train_batch(make_batch([5, 3]), nll)
        assert all(size > 0 for size in parts(engine).values())
    assert parts(engine) == {"model": 0, "optimizer": 0, "grad": 0}
    with engine.eval_mode():
        engine.forward(make_batch([3]))
        assert parts(engine)["model"] > 0
        assert parts(engine)["optimizer"] == 0
    with pytest.raises(KeyError), engine.train_mode():
        raise KeyError
    assert parts(engine) == {"model": 0, "optimizer": 0, "grad": 0}
    with engine.train_mode(disable_auto_offload=True):
        pass
    assert parts(engine)["model"] > 0


@pytest.mark.parametrize("kind", ["params", "optimizer", "grads"])
def test_the_parts_are_independent(make_engine, kind):
    engine = make_engine(**{f"offload_{kind}": True})
    with engine.train_mode():
        engine.train_batch(make_batch([5]), nll)
    away = {name for name, size in parts(engine).items() if size == 0}
    assert away == {{"params": "model", "optimizer": "optimizer", "grads": "grad"}[kind]}


def test_offloading_changes_no_number(make_engine):
    plain, moving = make_engine(), make_engine(**OFFLOAD)
    for step in range(3):
        batch = make_batch([9, 5], seed=step)
        assert plain.train_batch(batch, nll) == moving.train_batch(batch, nll)
    assert torch.equal(
        plain.forward(make_batch([7]))["train_logprobs"],
        moving.forward(make_batch([7]))["train_logprobs"],
    )


def test_gradients_survive_between_forward_and_step(make_engine):
    plain, moving = make_engine(), make_engine(**OFFLOAD)
    batch = make_batch([9, 5])
    plain.forward_backward_batch(batch, nll)
    with moving.train_mode():
        moving.forward_backward_batch(batch, nll)
    assert parts(moving)["grad"] == 0
    with moving.train_mode():
        mine, other = engine_gradients(plain), engine_gradients(moving)
        assert all(torch.equal(mine[name], other[name]) for name in mine)
        assert moving.optimizer_step() == plain.optimizer_step() > 0


def test_export_works_in_every_state_of_offload_and_restores_it(make_engine, tmp_path):
    engine = make_engine()
    engine.train_batch(make_batch([5]), nll)
    export = lambda: {n: t.clone() for n, t in engine.get_per_tensor_param()[0]}  # noqa: E731
    before = export()
    engine.to("host")
    assert parts(engine) == {"model": 0, "optimizer": 0, "grad": 0}
    away = export()
    assert all(torch.equal(before[name], away[name]) for name in before)
    assert parts(engine)["model"] == 0
    engine.save_checkpoint(str(tmp_path), global_step=1)
    assert parts(engine)["optimizer"] == 0
    assert engine.train_batch(make_batch([5]), nll)["update_successful"] == 1
    assert parts(engine) == {"model": 0, "optimizer": 0, "grad": 0}
    engine.to("device")
    assert all(size > 0 for size in parts(engine).values())
    after = export()
    assert not torch.equal(before["lm_head.weight"], after["lm_head.weight"])


def test_tied_weights_stay_tied_through_offload(make_engine, tied_path):
    engine = make_engine(tied_path)
    engine.to("host", optimizer=False, grad=False)
    engine.to("cpu")
    model = engine.model
    assert model.lm_head.weight.data_ptr() == model.model.embed_tokens.weight.data_ptr()


@pytest.mark.parametrize(
    ("dtype", "products", "warns"),
    [
        ("bfloat16", "emulated", True),
        ("bfloat16", "vectors", False),
        ("bfloat16", "tiles", False),
        ("float32", "emulated", False),
    ],
)
def test_a_processor_that_emulates_bfloat16_is_warned_about(
    model_path, monkeypatch, caplog, dtype, products, warns
):
    monkeypatch.setattr(building, "bf16_products", lambda: products)
    building._warn_of_emulation.cache_clear()
    for _ in range(2):
        config = TrainConfig(dtype=dtype, device="cpu")
        LocalTrainEngine(config, model_path=model_path).initialize()
    assert caplog.text.count("bfloat16 is emulated") == warns


def test_an_unknown_place_is_refused(make_engine):
    with pytest.raises(ConfigError, match="device: got 'cuda:9'"):
        make_engine().to("cuda:9")


# --- registry -------------------------------------------------------------------------------------


@pytest.fixture
def registry(monkeypatch):
    monkeypatch.setattr(EngineRegistry, "_registered", {})
    return EngineRegistry


def test_built_in_engines_are_found_by_name(model_path):
    assert EngineRegistry.get_engine_cls("language_model", "local", "cpu") is LocalTrainEngine
    config = TrainConfig(device="cpu")
    engine = EngineRegistry.new("language_model", "local", config=config, model_path=model_path)
    assert isinstance(engine, LocalTrainEngine)
    engine.initialize(ft_spec=FinetuneSpec(1, 1, 1))
    engine.destroy()


def test_own_engines_register_for_several_backends_and_devices(registry):
    @registry.register("language_model", ["mine", "ours"], device=["cpu", "cuda"])
    class Mine(LocalTrainEngine):
        pass

    for backend in ("mine", "ours"):
        for device in ("cpu", "cuda"):
            assert registry.get_engine_cls("language_model", backend, device) is Mine


def test_a_second_registration_of_a_key_is_an_error(registry):
    class Mine(LocalTrainEngine):
        pass

    registry.register("language_model", "mine", device="cpu")(Mine)
    with pytest.raises(ConfigError, match=r"registered already by .*Mine"):
        registry.register("language_model", "mine", device=["cpu", "cuda"])(Mine)
    with pytest.raises(ConfigError, match=r"registered already by .*LocalTrainEngine"):
        registry.register("language_model", "local", device="cpu")(Mine)


def test_an_unknown_key_lists_what_exists(registry):
    with pytest.raises(ConfigError, match="language_model local cpu"):
        registry.get_engine_cls("language_model", "megatron", "cpu")
    with pytest.raises(ConfigError, match="model type: got 'critic'"):
        registry.register("critic", "mine")(LocalTrainEngine)


def test_the_contract_cannot_be_instantiated(model_path):
    with pytest.raises(TypeError, match="abstract"):
        TrainEngine(TrainConfig(), model_path=model_path)
