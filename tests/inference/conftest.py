"""A tiny model with a peaked distribution, and an independent way to score sequences with it."""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import pytest
import torch
from torch import Tensor
from transformers import AutoModelForCausalLM, PreTrainedModel

from tandem.config import InferenceConfig
from tandem.inference.embedded.backend import EmbeddedBackend
from tandem.inference.embedded.build import build_core
from tandem.inference.embedded.core import EmbeddedCore
from tandem.models.loading import load_causal_lm, load_tokenizer
from tandem.types import GenerationConfig, LLMRequest, LLMResponse
from tandem.weights import Published
from tandem.weights.bucket import go_on

Scorer = Callable[[Sequence[int], Sequence[int], float], list[float]]
MakeCore = Callable[..., EmbeddedCore]


@pytest.fixture(scope="session")
def model_dir(tiny_model_dir: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The tiny model with larger weights: peaked and dependent on context, so mistakes show."""
    model = load_causal_lm(str(tiny_model_dir), dtype=torch.float32, device="cpu")
    with torch.no_grad():
        for name, item in model.named_parameters():
            if item.dim() == 2:
                item.mul_(12.0 if "embed" in name else 6.0)
    return _save(model, tiny_model_dir, tmp_path_factory.mktemp("peaked") / "model")


@pytest.fixture(scope="session")
def other_weights(model_dir: Path) -> Mapping[str, Tensor]:
    """Another set of weights of the same model, as it travels: on-disk names, tied once."""
    model = load_causal_lm(str(model_dir), dtype=torch.float32, device="cpu")
    generator = torch.Generator().manual_seed(11)
    return {
        name: (item + 0.3 * item.std() * torch.randn(item.shape, generator=generator)).detach()
        for name, item in model.named_parameters()
    }


@pytest.fixture(scope="session")
def other_model_dir(
    model_dir: Path, other_weights: Mapping[str, Tensor], tmp_path_factory: pytest.TempPathFactory
) -> Path:
    model = load_causal_lm(str(model_dir), dtype=torch.float32, device="cpu")
    target = tmp_path_factory.mktemp("other") / "model"
    with torch.no_grad():
        for name, item in model.named_parameters():
            item.copy_(other_weights[name])
    return _save(model, model_dir, target)


@pytest.fixture(scope="session")
def reference(model_dir: Path) -> PreTrainedModel:
    """The same weights under the attention of transformers itself, without any cache."""
    return AutoModelForCausalLM.from_pretrained(
        model_dir, dtype=torch.float32, attn_implementation="eager"
    ).eval()


@pytest.fixture(scope="session")
def score(reference: PreTrainedModel) -> Scorer:
    return lambda prompt, output, temperature=1.0: score_with(
        reference, prompt, output, temperature
    )


@pytest.fixture(scope="session")
def make_core(model_dir: Path) -> MakeCore:
    def make(path: Path = model_dir, **changes: object) -> EmbeddedCore:
        return build_core(InferenceConfig(**changes), str(path), "inc")

    return make


@pytest.fixture
def core(make_core: MakeCore) -> EmbeddedCore:
    return make_core()


def score_with(
    model: PreTrainedModel, prompt: Sequence[int], output: Sequence[int], temperature: float = 1.0
) -> list[float]:
    ids = torch.tensor([[*prompt, *output]])
    with torch.no_grad():
        logits = model(ids, use_cache=False).logits[0].double() / temperature
    rows = logits.log_softmax(-1)[len(prompt) - 1 : -1]
    return rows.gather(1, torch.tensor(output)[:, None])[:, 0].tolist()


def request(ids: Sequence[int], rid: str = "r", **options: object) -> LLMRequest:
    return LLMRequest(rid, tuple(ids), GenerationConfig(**options))


def run(core: EmbeddedCore, requests: Sequence[LLMRequest]) -> list[LLMResponse]:
    """Run all to their ends; an error of any of them is raised."""
    for ticket, item in enumerate(requests):
        core.add(ticket, item)
    return drain(core, len(requests))


def drain(core: EmbeddedCore, count: int) -> list[LLMResponse]:
    outcomes = {}
    while len(outcomes) < count:
        for item in core.step():
            if isinstance(item.outcome, Exception):
                raise item.outcome
            outcomes[item.ticket] = item.outcome
    return [outcomes[ticket] for ticket in sorted(outcomes)]


def commit(core: EmbeddedCore, published: Published) -> None:
    """Between two steps of ``core``, in this thread."""
    core.exchange(core.weights.fill(published, go_on)).release()


def _save(model: PreTrainedModel, tokenizer_source: Path, target: Path) -> Path:
    model.save_pretrained(target)
    load_tokenizer(str(tokenizer_source)).save_pretrained(target)
    return target


@pytest.fixture
def make_backend(model_dir: Path) -> Iterator[Callable[..., EmbeddedBackend]]:
    """In-process backends, closed at the end; none leaves a thread that fills weights."""
    opened: list[EmbeddedBackend] = []

    def make(**changes: object) -> EmbeddedBackend:
        backend = EmbeddedBackend(InferenceConfig(**changes), str(model_dir), "inc")
        opened.append(backend)
        backend.start()
        return backend

    yield make
    for backend in opened:
        backend.close()
    assert not [item for item in threading.enumerate() if item.name.startswith("tandem-weights")]
