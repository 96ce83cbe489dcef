"""What a new token does to its sequence: text, log-probabilities, and whether it ends there."""

from __future__ import annotations

from flashpage.engine.detokenizer import Decoder
from flashpage.engine.outputs import Logprob, TokenLogprobDict
from flashpage.engine.request import Sequence
from flashpage.layers.sampler import TokenLogprobs


def append_token(sequence: Sequence, token_id: int) -> None:
    """Add a generated token; sets `finish_reason` (and `stop_reason`) if it is the last one.

    A stop token's own text is shown only with `include_stop_str_in_output`. Nothing stops a
    sequence before it has more than `min_tokens` tokens, except `max_tokens`. Where a stop string
    cuts the text, it is the reason, whatever else ends the sequence with the same token.

    Whatever the tokenizer raises passes through; the token is counted then, its text lacking.
    """
    token_ids = sequence.token_ids
    token_ids.append(token_id)
    if sequence.looks_back:
        sequence.output_counts[token_id] = sequence.output_counts.get(token_id, 0) + 1
    may_stop = len(token_ids) > sequence.min_length
    if token_id in sequence.end_token_ids and may_stop:
        sequence.finish_reason = "stop"
        sequence.stop_reason = token_id if token_id in sequence.params.stop_token_ids else None
    elif len(token_ids) >= sequence.max_length:
        sequence.finish_reason = "length"
    if sequence.detokenizer is None:
        return
    stop = None
    if sequence.finish_reason != "stop" or sequence.params.include_stop_str_in_output:
        stop = _show(sequence, sequence.detokenizer.push(token_id), may_stop)
    if stop is None and sequence.is_finished:
        stop = flush_text(sequence, may_stop)
    if stop is not None:
        sequence.finish_reason = "stop"
        sequence.stop_reason = stop


def flush_text(sequence: Sequence, may_stop: bool = False) -> str | None:
    """Show the text that was held back, because no more will come.

    Only if it `may_stop` is the text cut at a stop string, which is returned: bytes that did not
    become a character can complete one.
    """
    if sequence.detokenizer is None or sequence.stop_matcher is None:
        return None
    stop = _show(sequence, sequence.detokenizer.flush(), may_stop)
    sequence.text += sequence.stop_matcher.flush()
    return stop


def logprob_dict(row: TokenLogprobs, tokenizer: Decoder | None) -> TokenLogprobDict:
    """Token id -> log-probability: the likeliest first, then the token itself if not among them."""

    def entry(token_id: int, logprob: float, rank: int) -> Logprob:
        text = None
        if tokenizer is not None:
            text = tokenizer.decode([token_id], skip_special_tokens=False)
        return Logprob(logprob, rank, text)

    result = {
        token_id: entry(token_id, logprob, rank)
        for rank, (token_id, logprob) in enumerate(
            zip(row.top_token_ids, row.top_logprobs, strict=True), start=1
        )
    }
    if row.token_id not in result:
        result[row.token_id] = entry(row.token_id, row.logprob, row.rank)
    return result


def _show(sequence: Sequence, piece: str, may_stop: bool) -> str | None:
    """Add to the text what can be shown; returns the stop string at which it was cut."""
    matcher = sequence.stop_matcher
    if matcher is None:
        return None
    shown, stop = matcher.push(piece) if may_stop else (matcher.flush() + piece, None)
    sequence.text += shown
    return stop
