"""Who computes which tokens in the next step, and on which pages; knows nothing of models or text.

There are no phases. Every sequence has known tokens, of which `num_computed_tokens` are in the
cache, and each step hands out a budget of tokens: first one to each sequence that lacks just one
(a decode), then chunks to running sequences that lack more, then to new ones while pages last.
A sequence that is admitted gets the pages of all its known tokens, so only decodes ask for more;
when there is none, the youngest running sequence gives its pages back and is computed again later.
Who begins like a sequence that is being computed waits until what they share can be hit, and lets
others pass meanwhile.

A step takes as long as its chunks make it, and its decodes wait for it: a long prompt is not to
stop them. So while any sequence decodes, no prompt takes more than `CHUNK_WORK` of a step, of which
tokens with a long context take more than one each.
"""

from __future__ import annotations

import math
from array import array
from collections import OrderedDict
from collections.abc import Iterable
from itertools import islice
from typing import NamedTuple

from flashpage.cache.block_pool import BlockPool
from flashpage.cache.prefix import PrefixCache, PrefixNode
from flashpage.engine.config import EngineConfig
from flashpage.engine.request import Sequence

CHUNK_WORK = 640
"""tokens of one prompt in a step, at most, while others decode: on an H200 they take about as long
as a step of 32 decodes of a small model (`flashpage bench interference`)"""

MAX_PASSED = 32
"""waiting sequences, at most, that are looked at behind each other in vain"""


class Chunk(NamedTuple):
    """The tokens `start .. end - 1` of a sequence, to be computed in one step.

    `is_last`: no token follows, so that the next one can be sampled. `generation` is the
    sequence's, and tells whether it still holds the pages that the chunk was written to.
    """

    sequence: Sequence
    start: int
    end: int
    is_last: bool
    generation: int

    @property
    def num_tokens(self) -> int:
        """How many tokens the chunk has."""
        return self.end - self.start


class Scheduler:
    """The waiting queue, the running list, and the pages of the running."""

    def __init__(self, config: EngineConfig) -> None:
        self.config = config
        self._block_size = config.block_size
        self.pool = BlockPool(config.num_blocks)
        self.prefix_cache = (
            PrefixCache(self.pool, config.block_size) if config.enable_prefix_caching else None
        )
        self.waiting: OrderedDict[int, Sequence] = OrderedDict()  # by id(sequence), first come
        self.running: list[Sequence] = []  # in the order of admission
        self.num_preemptions = 0
        self.num_preempted_tokens = 0
        self.num_computed_tokens = 0
        self.num_computed_prompt_tokens = 0
        self.num_lookup_tokens = 0
        self.num_hit_tokens = 0

    def add(self, sequences: Iterable[Sequence]) -> None:
        """Queue new sequences."""
        for sequence in sequences:
            self.waiting[id(sequence)] = sequence

    def add_first(self, sequences: list[Sequence]) -> None:
        """Queue sequences before all that wait: their request was admitted before."""
        for sequence in reversed(sequences):
            self.waiting[id(sequence)] = sequence
            self.waiting.move_to_end(id(sequence), last=False)

    def schedule(self) -> list[Chunk]:
        """The chunks of the next step, at most `max_num_batched_tokens` tokens together."""
        chunks: list[Chunk] = []
        prompts: list[Sequence] = []
        block_size, new_tuple = self._block_size, tuple.__new__
        for sequence in list(self.running):  # a decode may take the pages of those at its end
            start = sequence.num_computed_tokens
            num_left = sequence.length - start
            if num_left > 1:
                prompts.append(sequence)
            elif num_left == 1 and (start + 1 < sequence.max_length or not sequence.num_pending):
                # Else the pending token is its last. Who was preempted has no pages.
                has_room = start < len(sequence.block_ids) * block_size
                if has_room or self._make_room(sequence, 1):
                    # As `Chunk(...)`, in 0.6 of the time: there is one of each decode.
                    chunk = (sequence, start, start + 1, True, sequence.generation)
                    chunks.append(new_tuple(Chunk, chunk))
        others_decode = bool(chunks)
        budget = self.config.max_num_batched_tokens - len(chunks)
        for sequence in prompts:
            num_tokens = min(self._chunk_size(sequence, others_decode), budget)
            if num_tokens > 0 and self._make_room(sequence, num_tokens):
                chunks.append(_chunk(sequence, num_tokens))
                budget -= num_tokens
        while budget > 0 and (sequence := self._admit()) is not None:
            num_tokens = min(self._chunk_size(sequence, others_decode), budget)
            chunks.append(_chunk(sequence, num_tokens))
            budget -= num_tokens
        return chunks

    def launched(self, chunks: list[Chunk]) -> None:
        """Take note that chunks are being computed: what follows them can be scheduled."""
        for sequence, start, end, _, _ in chunks:
            sequence.num_computed_tokens = end
            if start < sequence.num_prompt_tokens:
                self.num_computed_prompt_tokens += min(end, sequence.num_prompt_tokens) - start
        self.num_computed_tokens += sum(chunk.end - chunk.start for chunk in chunks)

    def commit(self, chunk: Chunk) -> None:
        """Take note that a chunk which ends a block is in the cache: full blocks can be hit."""
        sequence, _, end, _, generation = chunk
        block_size = self._block_size
        if self.prefix_cache is None or generation != sequence.generation:
            return
        sequence.num_committed_tokens = end
        chain = sequence.cache_chain
        for i in range(len(chain), end // block_size):
            parent = chain[-1] if chain else self.prefix_cache.root
            tokens = sequence.token_ids[i * block_size : (i + 1) * block_size]
            node = self.prefix_cache.insert(parent, tokens, sequence.block_ids[i])
            if node is None:
                break
            if node.block_id != sequence.block_ids[i]:
                # Someone computed the same tokens first: hold that block instead of a copy.
                self.pool.touch([node.block_id])
                self.pool.free([sequence.block_ids[i]])
                block_ids = sequence.block_ids[:]
                block_ids[i] = node.block_id
                sequence.block_ids = block_ids
            chain.append(node)

    def remove(self, sequence: Sequence, poisoned: bool = False) -> None:
        """Take a sequence out at once, with its pages; does nothing if it is not in.

        `poisoned` says that what it computed can not be trusted, and must never be hit.
        """
        if self.waiting.pop(id(sequence), None) is not None or not sequence.is_running:
            return
        if poisoned and self.prefix_cache is not None:
            for block_id in sequence.block_ids[sequence.num_hit_blocks :]:
                self.prefix_cache.forget(block_id)
        self.running.remove(sequence)
        self._release(sequence)

    def check(self) -> None:
        """Prove the promises of queue, pages and cache; `AssertionError` if broken."""
        holders = [sequence.block_ids for sequence in self.running]
        self.pool.check(holders)
        if self.prefix_cache is not None:
            self.prefix_cache.check(holders)
        assert len(self.running) <= self.config.max_num_seqs
        for sequence in self.running:
            assert sequence.is_running
            assert id(sequence) not in self.waiting
            assert not sequence.is_finished
            assert sequence.num_computed_tokens >= 0
            # A prompt that is only scored has nothing left while its last step runs.
            assert sequence.num_uncomputed_tokens > 0 or not sequence.generates
            assert len(sequence.block_ids) * self.config.block_size >= sequence.num_computed_tokens
        for sequence in self.waiting.values():
            assert not sequence.is_running
            assert not sequence.block_ids, "a waiting sequence holds pages"
            assert not sequence.is_finished
            assert sequence.num_computed_tokens == 0

    def _chunk_size(self, sequence: Sequence, others_decode: bool) -> int:
        """How many of a prompt's tokens a step may compute, if its budget is large enough."""
        num_tokens = sequence.num_uncomputed_tokens
        if not others_decode:
            return num_tokens
        work = float(CHUNK_WORK)
        if self.config.attention_context is not None:
            # n tokens from a context c on do n (1 + (c + n / 2) / a) work.
            a, c = self.config.attention_context, sequence.num_computed_tokens
            work = math.sqrt((a + c) ** 2 + 2 * a * work) - (a + c)
        return min(num_tokens, max(int(work), 1))

    def _admit(self) -> Sequence | None:
        """Let the first waiting sequence run, if there are a place and pages for it.

        Only those whose beginning is under way let others pass.
        """
        if not self.waiting or len(self.running) >= self.config.max_num_seqs:
            return None
        for sequence in islice(self.waiting.values(), MAX_PASSED + 1):
            if sequence.num_pending:
                return None  # preempted while a step ran; that step's token is its last known one
            hits = (
                self.prefix_cache.match(sequence.token_ids, sequence.num_skippable_tokens)
                if self.prefix_cache is not None
                else []
            )
            if not self._is_under_way(sequence, hits):
                break
        else:
            return None
        hit_blocks = [node.block_id for node in hits]
        num_new = self.config.num_pages(sequence.num_tokens) - len(hits)
        num_left = self.pool.num_available - self.pool.count_unheld(hit_blocks) - num_new
        # A page for each who runs already, lest the newcomer be preempted by their next tokens.
        if num_left < len(self.running):
            return None

        del self.waiting[id(sequence)]
        self.running.append(sequence)
        sequence.is_running = True
        self.pool.touch(hit_blocks)
        sequence.block_ids = array("i", hit_blocks + self.pool.allocate(num_new))
        sequence.cache_chain = hits
        sequence.num_hit_blocks = len(hits)
        sequence.num_computed_tokens = len(hits) * self.config.block_size
        if self.prefix_cache is not None:
            self.num_lookup_tokens += sequence.num_tokens
        self.num_hit_tokens += sequence.num_computed_tokens
        if sequence.request.num_cached_tokens is None:
            sequence.request.num_cached_tokens = sequence.num_computed_tokens
        return sequence

    def _is_under_way(self, sequence: Sequence, hits: list[PrefixNode]) -> bool:
        """Whether a running sequence is just computing the next block that this one lacks.

        To wait until what they share is there takes no longer than to compute it again.
        """
        start = len(hits) * self._block_size
        end = start + self._block_size
        if self.prefix_cache is None or end > sequence.num_skippable_tokens:
            return False
        wanted = sequence.token_ids[start:end]
        return any(
            len(other.cache_chain) == len(hits)
            and other.num_committed_tokens < end
            and (not hits or other.cache_chain[-1] is hits[-1])
            and other.token_ids[start:end] == wanted
            for other in self.running
        )

    def _make_room(self, sequence: Sequence, num_tokens: int) -> bool:
        """Get the pages for a running sequence's next tokens, from the youngest if need be.

        Returns False if the sequence does not run any more: it was, or is, the youngest. Only
        decodes lack a page, and they come in the order of admission, so whoever is preempted has
        no chunk in this step yet. Nor can it be admitted again at once: it needs all that it gave.
        """
        num_computed = sequence.num_computed_tokens + num_tokens
        if sequence.is_running and num_computed <= len(sequence.block_ids) * self._block_size:
            return True
        needed = self.config.num_pages(num_computed)
        while sequence.is_running:
            num_missing = needed - len(sequence.block_ids)
            if num_missing <= 0:
                return True
            if num_missing <= self.pool.num_available:
                sequence.block_ids.extend(self.pool.allocate(num_missing))
                return True
            self._preempt(self.running[-1])
        return False

    def _preempt(self, sequence: Sequence) -> None:
        self.running.remove(sequence)
        self.num_preemptions += 1
        self.num_preempted_tokens += sequence.num_computed_tokens
        self._release(sequence)
        self.add_first([sequence])

    def _release(self, sequence: Sequence) -> None:
        sequence.is_running = False
        self.pool.free(sequence.block_ids)
        sequence.block_ids = array("i")
        sequence.cache_chain = []
        sequence.num_hit_blocks = 0
        sequence.num_computed_tokens = 0
        sequence.num_committed_tokens = 0
        sequence.generation += 1


def _chunk(sequence: Sequence, num_tokens: int) -> Chunk:
    start = sequence.num_computed_tokens
    end = start + num_tokens
    is_last = num_tokens == sequence.num_uncomputed_tokens
    return Chunk(sequence, start, end, is_last, sequence.generation)
