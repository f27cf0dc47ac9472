"""What turns token ids into token ids: the backend contract and its implementations.

``backend`` is the contract, ``embedded`` the engine over a Hugging Face model, ``scripted`` the
deterministic double. Rollout policy does not belong here.
"""
