"""Shows a reply as it is written, then a second turn that finds the first one in the cache.

python examples/stream.py
"""

from __future__ import annotations

from flashpage import LLM, SamplingParams


def reply(llm: LLM, messages: list[dict[str, str]]) -> str:
    """Print the model's turn piece by piece, and what the prefix cache saved."""
    text = ""
    for piece in llm.stream(messages, SamplingParams(max_tokens=80, temperature=0.0)):
        print(piece.text, end="", flush=True)
        text += piece.text
        output = piece.output
    print(
        f"\n  [{output.num_cached_tokens} of {len(output.prompt_token_ids)} prompt tokens cached]"
    )
    return text


def main() -> None:
    llm = LLM(max_num_seqs=1)
    messages = [{"role": "user", "content": "Name a large animal that lives in the sea."}]
    messages.append({"role": "assistant", "content": reply(llm, messages)})
    messages.append({"role": "user", "content": "What does it eat?"})
    reply(llm, messages)


if __name__ == "__main__":
    main()
