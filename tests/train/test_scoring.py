import pytest
import torch
from tensordict import TensorDict
from transformers import AutoModelForCausalLM, GPT2Config

from tandem.data.batch import collate
from tandem.errors import CapabilityError, DataError
from tests.train import reference
from tests.train.conftest import VOCABULARY, left_padded, make_batch, make_rows, save_qwen3

LENGTHS = [3, 9, 5, 7]


@pytest.fixture(scope="module")
def expected(model_path):
    """Log-probabilities of each row run alone through the plain model, padded on the right."""
    model = reference.load(model_path)
    with torch.no_grad():
        rows = [reference.logprobs(model, row["input_ids"]) for row in make_rows(LENGTHS)]
    return torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)


def test_scores_equal_the_plain_model_for_every_batch_composition(make_engine, expected):
    batch = make_batch(LENGTHS)
    for config in ({}, {"microbatch_size": 1}, {"max_tokens_per_microbatch": 12}):
        found = make_engine(**config).forward(batch)["train_logprobs"]
        torch.testing.assert_close(found, expected, rtol=0, atol=1e-5)
    engine = make_engine()
    alone = torch.cat([engine.forward(batch[b : b + 1])["train_logprobs"] for b in range(4)])
    torch.testing.assert_close(alone, expected, rtol=0, atol=1e-5)


def test_trained_only_scores_the_trained_tokens_and_leaves_zero_elsewhere(make_engine, expected):
    batch = make_batch(LENGTHS)
    batch["loss_mask"] = torch.zeros_like(batch["attention_mask"])
    batch["loss_mask"][1, 4:9] = True
    batch["loss_weights"] = torch.zeros_like(expected)
    batch["loss_weights"][3, 6] = 0.5
    trained = batch["loss_mask"] | (batch["loss_weights"] != 0)
    for size in (1, 4):
        found = make_engine(microbatch_size=size).forward(batch, trained_only=True)
        torch.testing.assert_close(found["train_logprobs"], expected * trained, rtol=0, atol=1e-5)
        assert (found["entropy"] != 0).equal(trained)


def test_left_padded_scores_come_back_left_padded(make_engine, expected):
    found = make_engine().forward(left_padded(make_batch(LENGTHS)))["train_logprobs"]
    for b, n in enumerate(LENGTHS):
        torch.testing.assert_close(found[b, 9 - n :], expected[b, :n], rtol=0, atol=1e-5)
        assert found[b, : 9 - n].abs().sum() == 0


def test_learned_positions_do_not_see_the_padding(make_engine, tmp_path):
    torch.manual_seed(0)
    config = GPT2Config(
        vocab_size=VOCABULARY, n_embd=32, n_layer=2, n_head=4, n_positions=32, initializer_range=0.2
    )
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    batch = left_padded(make_batch([3, 5]))
    found = make_engine(str(tmp_path)).forward(batch)["train_logprobs"]
    with torch.no_grad():
        plain = reference.logprobs(reference.load(tmp_path), make_rows([3, 5])[0]["input_ids"])
    torch.testing.assert_close(found[0, 2:], plain, rtol=0, atol=1e-5)


def test_scores_of_training_and_scoring_agree_so_the_first_ratio_is_one(make_engine):
    batch = make_batch(LENGTHS)
    old = make_engine(microbatch_size=4).forward(batch)["train_logprobs"]
    for config in ({"microbatch_size": 1}, {}):
        seen = []

        def loss_fn(outputs, microbatch, seen=seen):
            seen.append(outputs["train_logprobs"].detach())
            return (outputs["train_logprobs"] * microbatch["loss_weights"]).sum(), {}

        make_engine(**config).train_batch(batch, loss_fn)
        new, mask = torch.cat(seen), batch["loss_mask"]
        assert ((new - old) * mask).abs().max() <= 1e-5
        assert (new * ~mask).abs().max() == 0  # only trained positions are projected


def test_a_jagged_batch_scores_jagged(make_engine, expected):
    rows = [row["input_ids"] for row in make_rows(LENGTHS)]
    nested = torch.nested.as_nested_tensor(rows, layout=torch.jagged)
    batch = TensorDict({"input_ids": nested}, batch_size=[4])
    found = make_engine(microbatch_size=2).forward(batch)["train_logprobs"]
    assert found.is_nested
    for b, row in enumerate(found.unbind()):
        torch.testing.assert_close(row, expected[b, : LENGTHS[b]], rtol=0, atol=1e-5)


def test_a_segment_of_a_pack_never_sees_another(make_engine):
    engine = make_engine()
    first, second = torch.tensor([3, 4, 5]), torch.tensor([6, 7, 8])
    changed = torch.tensor([9, 4, 5])
    score = lambda *rows: engine.forward(collate([{"input_ids": r} for r in rows]))  # noqa: E731
    before, after = score(first, second), score(changed, second)
    for name in ("train_logprobs", "entropy"):
        assert torch.equal(before[name][1], after[name][1])
        assert not torch.equal(before[name][0], after[name][0])
    torch.testing.assert_close(
        score(second)["train_logprobs"][0], before["train_logprobs"][1], rtol=0, atol=1e-6
    )


def test_infer_batch_gives_entropy(make_engine, model_path):
    output = make_engine().infer_batch(make_batch([6]))
    log_probs = reference.load(model_path)(make_rows([6])[0]["input_ids"][None]).logits[0]
    log_probs = log_probs[:-1].log_softmax(-1)
    entropy = -(log_probs.exp() * log_probs).sum(-1)
    assert output.outputs["entropy"][0, 0] == 0
    torch.testing.assert_close(output.outputs["entropy"][0, 1:], entropy, rtol=0, atol=1e-5)


def test_position_ids_of_the_batch_are_used(make_engine, model_path):
    rows = make_rows([5])
    rows[0]["position_ids"] = torch.tensor([0, 1, 7, 8, 20])
    found = make_engine().forward(collate(rows))["train_logprobs"][0]
    ids = rows[0]["input_ids"]
    model = reference.load(model_path)
    with torch.no_grad():
        logits = model(ids[None], position_ids=rows[0]["position_ids"][None]).logits[0]
    plain = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    torch.testing.assert_close(found[1:], plain, rtol=0, atol=1e-5)


# --- hooks ----------------------------------------------------------------------------------------


def test_a_hook_sees_logits_aligned_with_the_tokens(make_engine):
    batch = make_batch(LENGTHS)
    batch["temperature"] = torch.tensor([0.5, 1.0, 2.0, 1.0])
    engine = make_engine(microbatch_size=2)

    def hook(logits, microbatch):
        scores = logits.log_softmax(-1).gather(2, microbatch["input_ids"][..., None])[..., 0]
        return scores * microbatch["attention_mask"]

    found = engine.forward(batch, post_hook=hook)
    expected = engine.forward(batch)["train_logprobs"]
    torch.testing.assert_close(found[:, 1:], expected[:, 1:], rtol=0, atol=1e-5)


def test_a_hook_may_return_rows_end_to_end(make_engine):
    batch = make_batch(LENGTHS)

    def hook(logits, microbatch):
        return microbatch["input_ids"][microbatch["attention_mask"]]

    rows = make_engine(microbatch_size=1).forward(
        batch, output_seqlens=LENGTHS, post_hook=hook, aggregate_fn=list
    )
    assert [row.tolist() for row in rows] == [r["input_ids"].tolist() for r in make_rows(LENGTHS)]


def test_a_hook_result_of_another_length_is_refused(make_engine):
    with pytest.raises(DataError, match="post_hook: expected 4 entries"):
        make_engine().forward(make_batch(LENGTHS), post_hook=lambda logits, _: logits.sum()[None])


# --- modes ----------------------------------------------------------------------------------------


def test_dropout_of_the_model_is_off_and_the_mode_comes_back(make_engine, tmp_path):
    engine = make_engine(save_qwen3(tmp_path / "m", dropout=0.5))
    batch = make_batch(LENGTHS)
    assert engine.model.training
    first, second = (engine.forward(batch)["train_logprobs"] for _ in range(2))
    assert torch.equal(first, second)
    assert engine.model.training
    engine.eval()
    engine.forward(batch)
    assert not engine.model.training


def test_soft_capped_logits_are_refused(make_engine, tmp_path):
    from transformers import Gemma2Config

    config = Gemma2Config(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, head_dim=8, pad_token_id=0,
        bos_token_id=1, eos_token_id=2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="softcapping"):
        make_engine(str(tmp_path))


def test_scaled_logits_are_handled(make_engine, tmp_path):
    from transformers import GraniteConfig

    torch.manual_seed(0)
    config = GraniteConfig(
        vocab_size=VOCABULARY, hidden_size=32, intermediate_size=48, num_hidden_layers=1,
        num_attention_heads=4, num_key_value_heads=2, logits_scaling=4.0, initializer_range=0.2,
        attention_multiplier=0.3, embedding_multiplier=2.0, residual_multiplier=0.5,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    found = make_engine(str(tmp_path)).forward(make_batch([5]))["train_logprobs"][0]
    with torch.no_grad():
        plain = reference.logprobs(reference.load(tmp_path), make_rows([5])[0]["input_ids"])
    torch.testing.assert_close(found, plain, rtol=0, atol=1e-5)


def test_a_model_that_leaks_over_packed_rows_is_refused(make_engine, tmp_path):
    from transformers import MambaConfig

    torch.manual_seed(0)
    config = MambaConfig(
        vocab_size=VOCABULARY, hidden_size=32, state_size=4, num_hidden_layers=1, pad_token_id=0,
        bos_token_id=1, eos_token_id=2, initializer_range=0.2,
    )  # fmt: skip
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path)
    with pytest.raises(CapabilityError, match="cannot be trained with packing"):
        make_engine(str(tmp_path))
