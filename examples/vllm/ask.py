"""One engine that answers two questions about a long text, and says what it did not compute.

python ask.py MODEL        # with a pool at 127.0.0.1:5110, or CENOTE_VLLM_MASTER
"""

import sys
import time

from vllm import LLM, SamplingParams
from vllm.config import KVTransferConfig

TEXT = "The pool keeps the blocks of a prompt that was computed once, anywhere. " * 60
QUESTIONS = ["What does the pool keep?", "When was the prompt computed?"]


def main() -> None:
    llm = LLM(
        model=sys.argv[1],
        enforce_eager=True,
        max_model_len=2048,
        kv_transfer_config=KVTransferConfig(kv_connector="CenoteStoreConnector", kv_role="kv_both"),
    )
    for question in QUESTIONS:
        began_s = time.monotonic()
        (output,) = llm.generate(
            [f"{TEXT}\n{question}"], SamplingParams(temperature=0, max_tokens=16), use_tqdm=False
        )
        assert output.prompt_token_ids is not None
        print(
            f"{question} {len(output.prompt_token_ids)} tokens, {output.num_cached_tokens} of them"
            f" not computed, {time.monotonic() - began_s:.2f} s",
            flush=True,
        )
    llm.llm_engine.engine_core.shutdown()  # as a service ends: what waits to be saved, is


if __name__ == "__main__":
    main()
