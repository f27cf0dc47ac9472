import pytest
import torch
from safetensors import SafetensorError, safe_open
from torch import nn

from tandem.errors import CheckpointError, ConfigError, DataError
from tandem.types import SaveLoadMeta, WeightUpdateMeta
from tandem.weights import expect, open_published
from tests.train import reference
from tests.train.conftest import make_batch, nll, save_experts

IDS = torch.tensor([[5, 7, 11, 2, 3]])


def trained(make_engine, path=None, **config):
    engine = make_engine(path, lr=1e-2, **config)
    engine.train_batch(make_batch([9, 5]), nll)
    return engine


def logits(model):
    with torch.no_grad():
        return model(IDS).logits


def own_logits(engine):
    from tandem.models.packed import PackedContext

    with torch.no_grad(), engine.eval_mode():
        positions = torch.arange(IDS.shape[1])[None]
        return engine.model(IDS, position_ids=positions, ctx=PackedContext([5])).logits


@pytest.mark.parametrize("tied", [False, True])
def test_plain_transformers_loads_an_export_with_equal_logits(
    make_engine, model_path, tied_path, tmp_path, tied
):
    engine = trained(make_engine, tied_path if tied else model_path)
    target = tmp_path / "model"
    engine.save(SaveLoadMeta(str(target)))
    loaded = reference.load(target)
    torch.testing.assert_close(logits(loaded), own_logits(engine), rtol=0, atol=1e-5)
    for name, p in loaded.named_parameters():
        assert torch.equal(p, engine.model.get_parameter(name)), name
    with safe_open(target / "model.safetensors", "pt") as file:
        names = list(file.keys())
    assert ("lm_head.weight" in names) is not tied
    is_tied = loaded.lm_head.weight.data_ptr() == loaded.model.embed_tokens.weight.data_ptr()
    assert is_tied is tied


def test_experts_that_are_one_tensor_in_memory_are_saved_one_by_one(make_engine, tmp_path):
    engine = trained(make_engine, save_experts(tmp_path / "experts"))
    engine.save(SaveLoadMeta(str(tmp_path / "model")))
    with (
        safe_open(tmp_path / "model" / "model.safetensors", "pt") as saved,
        safe_open(tmp_path / "experts" / "model.safetensors", "pt") as source,
    ):
        assert set(saved.keys()) == set(source.keys())
    torch.testing.assert_close(
        logits(reference.load(tmp_path / "model")), own_logits(engine), rtol=0, atol=1e-5
    )


def test_an_untied_head_is_saved_whatever_the_config_says(make_engine, tied_path, tmp_path):
    engine = make_engine(tied_path)
    head = nn.Parameter(engine.model.lm_head.weight.detach() * 1.5)
    engine.model.lm_head.weight = head
    engine.save(SaveLoadMeta(str(tmp_path / "model")))
    loaded = reference.load(tmp_path / "model")
    assert loaded.config.tie_word_embeddings is False
    assert torch.equal(loaded.lm_head.weight, head)
    assert not torch.equal(loaded.model.embed_tokens.weight, head)


def test_the_stream_has_every_tensor_once_in_the_order_of_its_specs(make_engine, tied_path):
    engine = make_engine(tied_path)
    stream, peft_config = engine.get_per_tensor_param()
    assert peft_config is None
    tensors = dict(stream)
    assert "lm_head.weight" not in tensors
    specs = engine.get_param_specs()
    assert [s.name for s in specs] == list(tensors)
    assert all(s.shape == tuple(tensors[s.name].shape) for s in specs)
    assert {s.dtype for s in specs} == {"float32"}


def test_the_caller_chooses_the_dtype(make_engine):
    engine = make_engine()
    stream, _ = engine.get_per_tensor_param("bfloat16")
    assert all(t.dtype == torch.bfloat16 for _, t in stream)
    assert {s.dtype for s in engine.get_param_specs("bfloat16")} == {"bfloat16"}
    with pytest.raises(ConfigError, match="dtype"):
        engine.get_param_specs("int7")


def test_uploaded_weights_arrive_under_their_version(make_engine, tmp_path):
    engine = trained(make_engine)
    meta = WeightUpdateMeta(
        "disk", version=4, incarnation="a", channel="test-export", path=str(tmp_path)
    )
    future = expect(meta)
    engine.upload_weights(meta)
    with open_published(future.result(timeout=10)) as tensors:
        assert set(tensors) == {s.name for s in engine.get_param_specs()}
        assert torch.equal(tensors["lm_head.weight"], engine.model.lm_head.weight)


def test_load_takes_the_weights_of_a_directory(make_engine, tmp_path):
    engine = trained(make_engine)
    engine.save(SaveLoadMeta(str(tmp_path / "model")))
    other = make_engine()
    other.load(SaveLoadMeta(str(tmp_path / "model")))
    assert torch.equal(own_logits(other), own_logits(engine))


def test_with_optim_training_goes_on_as_if_never_stopped(make_engine, tmp_path):
    engine = trained(make_engine)
    engine.save(SaveLoadMeta(str(tmp_path / "model"), with_optim=True))
    other = make_engine(lr=1e-2)
    other.load(SaveLoadMeta(str(tmp_path / "model"), with_optim=True))
    batch = make_batch([6, 3])
    assert engine.train_batch(batch, nll) == other.train_batch(batch, nll)
    assert torch.equal(own_logits(other), own_logits(engine))
    other.save(SaveLoadMeta(str(tmp_path / "bare")))
    with pytest.raises(CheckpointError, match="no training state"):
        other.load(SaveLoadMeta(str(tmp_path / "bare"), with_optim=True))


def test_a_directory_of_another_model_is_refused(make_engine, model_path, tmp_path):
    engine = make_engine()
    other = reference.load(model_path)
    other.resize_token_embeddings(70)
    other.save_pretrained(tmp_path / "resized")
    with pytest.raises(
        DataError, match=r"lm_head.weight has shape \[70, 32\], expected \[61, 32\]"
    ):
        engine.load(SaveLoadMeta(str(tmp_path / "resized")))


def test_an_export_replaces_an_older_one_as_a_whole(make_engine, tmp_path):
    engine = make_engine()
    target = tmp_path / "model"
    engine.save(SaveLoadMeta(str(target)))
    (target / "stale.txt").write_text("old")
    trained_engine = trained(make_engine)
    trained_engine.save(SaveLoadMeta(str(target)))
    assert not (target / "stale.txt").exists()
    assert torch.equal(reference.load(target).lm_head.weight, trained_engine.model.lm_head.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


@pytest.mark.parametrize(
    "error",
    [OSError(28, "No space left on device"), SafetensorError("I/O error: No space left on device")],
)
def test_a_failed_export_leaves_the_older_one(make_engine, tmp_path, error):
    engine = make_engine()
    target = tmp_path / "model"
    engine.save(SaveLoadMeta(str(target)))

    class Broken:
        def save_pretrained(self, path):
            raise error

    with pytest.raises(CheckpointError, match="No space left"):
        trained(make_engine).save(SaveLoadMeta(str(target), tokenizer=Broken()))
    assert torch.equal(reference.load(target).lm_head.weight, engine.model.lm_head.weight)
    assert [p.name for p in tmp_path.iterdir()] == ["model"]


def test_the_tokenizer_travels_with_the_model(make_engine, model_path, tmp_path):
    source = tmp_path / "source"
    make_engine().save(SaveLoadMeta(str(source)))
    (source / "tokenizer.json").write_text("{}")
    make_engine(str(source)).save(SaveLoadMeta(str(tmp_path / "out")))
    assert (tmp_path / "out" / "tokenizer.json").read_text() == "{}"


def test_unknown_formats_are_refused(make_engine, tmp_path):
    for weight_format in ("gguf", "adapter"):
        with pytest.raises(ConfigError, match="weight_format"):
            make_engine().save(SaveLoadMeta(str(tmp_path / "m"), weight_format=weight_format))
