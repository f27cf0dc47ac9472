import pytest
import torch
from transformers import AutoModelForCausalLM, Qwen3Config, Qwen3MoeConfig

from tandem.config.schema import TrainConfig
from tandem.data.batch import collate
from tandem.train import LocalTrainEngine
from tandem.types import FinetuneSpec

VOCABULARY = 61


def save_qwen3(path, *, tied=False, seed=0, **changes):
    torch.manual_seed(seed)
    sizes = {
        "vocab_size": VOCABULARY,
        "hidden_size": 32,
        "intermediate_size": 48,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "head_dim": 8,
        "max_position_embeddings": 128,
        "initializer_range": 0.2,
    }
    config = Qwen3Config(**sizes | changes, tie_word_embeddings=tied)
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


def save_experts(path):
    torch.manual_seed(0)
    config = Qwen3MoeConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        moe_intermediate_size=16,
        num_hidden_layers=2,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        num_experts=4,
        num_experts_per_tok=2,
        max_position_embeddings=128,
        initializer_range=0.2,
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(path)
    return str(path)


@pytest.fixture(scope="session")
def model_path(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("models") / "qwen3")


@pytest.fixture(scope="session")
def tied_path(tmp_path_factory):
    return save_qwen3(tmp_path_factory.mktemp("models") / "tied", tied=True)


@pytest.fixture
def make_engine(model_path):
    made = []

    def make(path=None, *, lora=None, seed=0, steps=100, **config):
        config = {"device": "cpu", "max_grad_norm": None, "lr": 1e-3} | config
        engine = LocalTrainEngine(
            TrainConfig(**config), model_path=path or model_path, lora=lora, seed=seed
        )
        engine.initialize(ft_spec=FinetuneSpec(1, steps, 1))
        made.append(engine)
        return engine

    yield make
    for engine in made:
        engine.destroy()


def make_rows(lengths, seed=0):
    """Rows with random ids; all tokens after the first third are trained on, token-mean."""
    generator = torch.Generator().manual_seed(seed)
    rows = []
    for n in lengths:
        mask = torch.arange(n) >= max(1, n // 3)
        rows.append(
            {
                "input_ids": torch.randint(VOCABULARY, (n,), generator=generator),
                "loss_mask": mask,
                "loss_weights": mask.float(),
            }
        )
    total = sum(float(row["loss_weights"].sum()) for row in rows)
    for row in rows:
        row["loss_weights"] = row["loss_weights"] / total
    return rows


def make_batch(lengths, seed=0):
    return collate(make_rows(lengths, seed))


def left_padded(batch):
    """The same rows, padded on the left."""
    batch = batch.clone()
    for b, n in enumerate(batch["attention_mask"].sum(1).tolist()):
        for value in batch.values():
            if value.ndim == 2:
                row = value[b].clone()
                value[b] = torch.cat([row[n:], row[:n]])
    return batch


def nll(outputs, microbatch):
    return -(outputs["train_logprobs"] * microbatch["loss_weights"]).sum(), {}


def engine_gradients(engine):
    return {name: p.grad.clone() for name, p in engine.model.named_parameters()}
