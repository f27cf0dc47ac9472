"""Our engines behind the contracts of verl and AReaL, for code that was written against those.

``verl`` and ``areal`` hold the contracts themselves and need neither project; ``verl_0_9`` and
``areal_1_0`` follow the releases where these moved on, and import them. The shift by one token is
in ``alignment``. No training or rollout logic belongs here.
"""
