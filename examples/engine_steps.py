"""Drives the engine step by step, as a server does: requests come, one is aborted, all share pages.

Uses random weights, so it needs no download.

    python examples/engine_steps.py
"""

from __future__ import annotations

from flashpage import LLM, SamplingParams

CONFIG = {
    "architectures": ["Qwen3ForCausalLM"],
    "vocab_size": 1000,
    "hidden_size": 128,
    "intermediate_size": 256,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
}


def main() -> None:
    llm = LLM(CONFIG, load_format="dummy", dtype="float32", num_blocks=64, max_num_seqs=4)
    engine = llm.engine
    params = SamplingParams(max_tokens=12, temperature=0.0)
    for i in range(3):
        engine.add_request(f"request-{i}", list(range(10 * i, 10 * i + 40)), params)

    step = 0
    while engine.has_unfinished():
        for output in engine.step():
            if output.finished:
                print(f"step {step:2}: {output.request_id} ended with {output.token_ids}")
        stats = engine.stats()
        print(f"step {step:2}: {stats.num_running} running, {stats.pages_used} pages used")
        if step == 5:
            engine.abort("request-1")
            print("step  5: request-1 aborted, its pages are free at once")
        step += 1


if __name__ == "__main__":
    main()
