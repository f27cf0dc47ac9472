import torch
from transformers import AutoModelForCausalLM, Qwen3Config

from tandem.train import forward
from tests.memory import peak_bytes
from tests.train.conftest import make_batch, nll


def test_memory_does_not_grow_with_the_number_of_microbatches(make_engine):
    engine = make_engine(microbatch_size=1)
    engine.train_batch(make_batch([60]), nll)  # allocates the optimizer state
    few, many = (
        peak_bytes(lambda n=n: engine.train_batch(make_batch([60] * n), nll)) for n in (2, 12)
    )
    assert many < 1.2 * few


def test_training_never_holds_full_logits(make_engine, tmp_path, monkeypatch):
    vocabulary = 8192
    config = Qwen3Config(
        vocab_size=vocabulary, hidden_size=16, intermediate_size=16, num_hidden_layers=1,
        num_attention_heads=2, num_key_value_heads=1, head_dim=8, max_position_embeddings=1024,
    )  # fmt: skip
    torch.manual_seed(0)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    monkeypatch.setattr(forward, "LOGIT_BUFFER", 1 << 17)
    engine = make_engine(str(tmp_path))
    batch = make_batch([512, 512])
    num_trained = int(batch["loss_mask"].sum())
    full = num_trained * vocabulary * 4
    assert peak_bytes(lambda: engine.train_batch(batch, nll)) < full / 2
    assert peak_bytes(lambda: engine.forward(batch)) < full / 2
