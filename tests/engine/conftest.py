"""A model of arithmetic that reads its history back from the pages, and a tokenizer of bytes."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn

from flashpage.cache.kv_cache import store_kvcache
from flashpage.engine.config import EngineConfig
from flashpage.engine.engine import Engine

PRIME = 16_777_213  # the hash of a history stays exact in float32
VOCAB_SIZE = 260  # 256 bytes, beginning, end, a spare one, and one that poisons
BOS, EOS, SPARE, POISON = 256, 257, 258, 259


class ByteTokenizer:
    """Token id = byte; the special tokens are written as `<256>`."""

    vocab_size = VOCAB_SIZE
    eos_token_ids = (EOS,)
    bos_token_id = BOS

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        return [BOS] * add_special_tokens + list(text.encode())

    def decode(self, ids, skip_special_tokens: bool = True) -> str:
        parts = [
            bytes([i]) if i < 256 else (b"" if skip_special_tokens else b"<%d>" % i) for i in ids
        ]
        return b"".join(parts).decode(errors="replace")

    def apply_chat_template(self, messages, add_generation_prompt: bool = True) -> str:
        text = "".join(f"{m['role']}: {m['content']}\n" for m in messages)
        return text + "assistant: " * add_generation_prompt


class HistoryModel(nn.Module):
    """Logits are a hash of all tokens so far, which are read from the cache: a wrong page, an
    unwritten slot or a lost token changes them all. A history with POISON in it gives NaN."""

    dtype = torch.float32

    def __init__(self) -> None:
        super().__init__()
        self.config = SimpleNamespace(
            vocab_size=VOCAB_SIZE,
            num_layers=1,
            num_q_heads=1,
            num_kv_heads=1,
            hidden_size=4,
            intermediate_size=4,
            head_dim=2,
            eos_token_ids=(EOS,),
            max_position_embeddings=256,
        )
        self.batches: list[int] = []  # tokens of each step
        self.before_forward: Callable[[], None] = lambda: None
        powers = [1]
        for _ in range(1000):
            powers.append(powers[-1] * 31 % PRIME)
        self._powers = torch.tensor(powers)
        generator = torch.Generator().manual_seed(0)
        self._factors = torch.randint(1, PRIME, (VOCAB_SIZE,), generator=generator)

    def forward(
        self, input_ids: Tensor, positions: Tensor, kv_cache, metadata, rows=None
    ) -> Tensor:
        self.batches.append(len(input_ids))
        self.before_forward()
        # Key and value of a token are the token itself and its position.
        kv = torch.stack([input_ids, positions], dim=-1)[:, None].float()
        store_kvcache(kv, kv, kv_cache.k[0], kv_cache.v[0], metadata.slot_mapping)
        hidden = torch.full((len(input_ids), 1), torch.nan)
        for first, last, history in self._histories(kv, kv_cache, metadata):
            assert torch.equal(history[:, 1], torch.arange(len(history)).float()), "wrong pages"
            hidden[first:last, 0] = self.hash(history[:, 0])[len(history) - (last - first) :]
        return hidden if rows is None else hidden[rows]

    def compute_logits(self, hidden: Tensor) -> Tensor:
        mixed = hidden.double() * self._factors % PRIME / PRIME
        logits = (mixed * 40 - 20).float()
        logits[:, POISON] = -torch.inf  # it comes from prompts only
        return logits

    def hash(self, tokens: Tensor) -> Tensor:
        """A number per prefix of `tokens`; NaN from POISON on."""
        terms = (tokens.long() + 1) * self._powers[: len(tokens)]
        values = (terms.cumsum(0) % PRIME).float()
        values[(tokens == POISON).cumsum(0) > 0] = torch.nan
        return values

    def logits_after(self, tokens: list[int]) -> Tensor:
        """`[len(tokens), vocab_size]`, without any cache."""
        return self.compute_logits(self.hash(torch.tensor(tokens))[:, None])

    def greedy(self, prompt: list[int], num_tokens: int, stop: tuple[int, ...] = (EOS,)):
        """The tokens that a greedy request must give, without any cache."""
        tokens = list(prompt)
        while len(tokens) < len(prompt) + num_tokens:
            tokens.append(int(self.logits_after(tokens)[-1].argmax()))
            if tokens[-1] in stop:
                break
        return tokens[len(prompt) :]

    def _histories(self, kv, kv_cache, metadata) -> Iterator[tuple[int, int, Tensor]]:
        """First and last row of each sequence's new tokens, and all its keys."""
        pages = kv_cache.k[0]
        decode = metadata.decode
        if decode is not None:
            for i, length in enumerate(decode.cache_seqlens.tolist()):
                row = decode.start + i
                yield row, row + 1, _read(pages, decode.block_table[i], length)
        for batch in metadata.prefill:
            starts, lengths = batch.cu_seqlens_q.tolist(), batch.cu_seqlens_k.diff().tolist()
            for i, length in enumerate(lengths):
                first, last = batch.start + starts[i], batch.start + starts[i + 1]
                if batch.block_table is None:
                    yield first, last, kv[first:last, 0]
                else:
                    yield first, last, _read(pages, batch.block_table[i], length)


def _read(pages: Tensor, block_table: Tensor, length: int) -> Tensor:
    num_pages = -(-length // pages.shape[1])
    return pages[block_table[:num_pages].long()].flatten(0, 1)[:length, 0]


@pytest.fixture
def tokenizer() -> ByteTokenizer:
    return ByteTokenizer()


@pytest.fixture(scope="session")
def reference() -> HistoryModel:
    """For expectations only: the engine's model is its own."""
    return HistoryModel()


@pytest.fixture
def make_engine() -> Callable[..., Engine]:
    """An engine on a fresh fake model and a pool full of NaN, small enough to run out of pages."""

    def make(
        *,
        tokenizer: ByteTokenizer | None = None,
        eos_token_ids: tuple[int, ...] = (EOS,),
        **options,
    ) -> Engine:
        sizes = {"num_blocks": 64, "block_size": 4, "max_model_len": 128, "max_num_seqs": 8}
        sizes |= {"max_num_batched_tokens": 16, **options}
        model = HistoryModel()
        model.config.eos_token_ids = eos_token_ids
        engine = Engine(model, tokenizer, EngineConfig(**sizes))
        engine.kv_cache.fill_(torch.nan)
        engine.model = model  # for tests that look at its batches or trip it
        return engine

    return make


@pytest.fixture
def run_all() -> Callable[[Engine], dict]:
    """Step until nothing is left, checking the engine after each step; final outputs by id."""

    def run(engine: Engine, max_steps: int = 2000) -> dict:
        final = {}
        for _ in range(max_steps):
            if not engine.has_unfinished():
                return final
            for output in engine.step():
                if output.finished:
                    final[output.request_id] = output
            engine.check()
        raise AssertionError(f"still unfinished after {max_steps} steps: {engine.stats()}")

    return run
