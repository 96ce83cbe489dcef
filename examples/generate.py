"""Answers a few questions with the default model, all of them in one batch.

python examples/generate.py
"""

from __future__ import annotations

from flashpage import LLM, SamplingParams

QUESTIONS = [
    "What is the capital of France?",
    "Name three primary colours.",
    "Why is the sky blue? Answer in one sentence.",
]


def main() -> None:
    llm = LLM(dtype="float32", max_num_seqs=len(QUESTIONS))  # the same text on any machine
    chats = [[{"role": "user", "content": question}] for question in QUESTIONS]
    outputs = llm.chat(chats, SamplingParams(max_tokens=60, temperature=0.0))
    for question, output in zip(QUESTIONS, outputs, strict=True):
        print(f"{question}\n  {output.text.strip()}")
        print(f"  ({len(output.token_ids)} tokens, ended by {output.finish_reason})\n")


if __name__ == "__main__":
    main()
