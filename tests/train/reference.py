"""A straightforward Hugging Face loop: one unpadded row at a time, stock attention."""

import torch
from transformers import AutoModelForCausalLM


def load(path):
    return AutoModelForCausalLM.from_pretrained(path, attn_implementation="eager").eval()


def logprobs(model, ids, temperature=1.0):
    """Log-probability of every token of one row; 0 for the first."""
    ids = torch.as_tensor(ids)
    logits = model(ids[None], use_cache=False).logits[0].float() / temperature
    chosen = logits[:-1].log_softmax(-1).gather(1, ids[1:, None])[:, 0]
    return torch.cat([torch.zeros(1), chosen])


def gradients(model, rows, temperature=1.0):
    """Loss ``-sum(weight * logprob)`` over all rows, and its gradients by name."""
    model.zero_grad()
    total = 0.0
    for row in rows:
        loss = -(logprobs(model, row["input_ids"], temperature) * row["loss_weights"]).sum()
        loss.backward()
        total += loss.item()
    return total, {name: p.grad.clone() for name, p in model.named_parameters()}
