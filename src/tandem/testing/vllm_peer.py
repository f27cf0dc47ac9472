"""Runs in vLLM's environment, not in ours: one JSON line of prompts in, one of seconds out."""

from __future__ import annotations

import json
import os
import sys
import time


def main() -> None:
    answers = os.fdopen(os.dup(1), "w")
    os.dup2(2, 1)
    from vllm import LLM, SamplingParams

    engine = LLM(enforce_eager=True, enable_prefix_caching=False, **json.loads(sys.argv[1]))
    print(json.dumps({"ready": True}), file=answers, flush=True)
    for line in sys.stdin:
        asked = json.loads(line)
        options = SamplingParams(max_tokens=asked["new_tokens"], ignore_eos=True, temperature=1.0)
        prompts = [{"prompt_token_ids": ids} for ids in asked["prompts"]]
        begun = time.perf_counter()
        engine.generate(prompts, options, use_tqdm=False)
        print(json.dumps({"seconds": time.perf_counter() - begun}), file=answers, flush=True)


if __name__ == "__main__":
    main()
