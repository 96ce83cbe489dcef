"""What a caller may ask of one generation, checked field by field; the names are vLLM's."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from flashpage.engine.values import FrozenDict, show
from flashpage.errors import RequestError

# Below this temperature the likeliest token wins every draw; as in vLLM it is taken outright.
GREEDY_TEMPERATURE = 1e-5
# Far beyond any use (here all tokens are equally likely already), and safe in float32.
MAX_TEMPERATURE = 1e9
REPETITION_PENALTIES = (1e-9, 1e9)
MAX_CONTINUATIONS = 10_000


@dataclass(frozen=True, kw_only=True)
class SamplingParams:
    """How to continue a prompt. Raises `RequestError` for a value that is out of its range.

    Really frozen: lists and mappings are copied, to tuples and a dict that refuses changes.

    Attributes:
        max_tokens: tokens to generate at most; 0 only scores the prompt (with `prompt_logprobs`),
            None goes on to the engine's `max_model_len`.
        min_tokens: no stop of any kind before this many tokens.
        temperature: 0 is greedy; at most 1e9, where all tokens are equally likely.
        top_k: draw among the k likeliest tokens; 0 or -1 is off.
        top_p: draw among the likeliest tokens that reach this mass, in (0, 1]; 1 is off.
        min_p: draw among tokens at least this fraction as likely as the likeliest; 0 is off.
        presence_penalty, frequency_penalty: taken from the logit of a generated token, once, and
            for each time it was generated; in [-2, 2].
        repetition_penalty: positive logits of tokens in the prompt or generated are divided by it,
            negative ones multiplied; in [1e-9, 1e9], 1 is off.
        logit_bias: token id -> added to its logit, in [-100, 100].
        seed: the same seed gives the same text whatever else runs; None follows the engine's seed.
        n: how many continuations, each with a seed of its own derived from `seed`; at most 10,000.
        stop: text (or texts) at whose first appearance generation ends.
        stop_token_ids: tokens that end generation, besides the model's end-of-text tokens.
        ignore_eos: go on after the model's end-of-text tokens.
        logprobs: report the log-probability of each generated token and of this many of the
            likeliest; of the raw logits, before penalties and temperature. None reports nothing.
        prompt_logprobs: the same for each prompt token.
        include_stop_str_in_output: keep the stop text at the end of the text.
        skip_special_tokens: leave special tokens out of the text.
    """

    max_tokens: int | None = 16
    min_tokens: int = 0
    temperature: float = 1.0
    top_k: int = 0
    top_p: float = 1.0
    min_p: float = 0.0
    presence_penalty: float = 0.0
    frequency_penalty: float = 0.0
    repetition_penalty: float = 1.0
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    n: int = 1
    stop: str | Sequence[str] = ()
    stop_token_ids: Sequence[int] = ()
    ignore_eos: bool = False
    logprobs: int | None = None
    prompt_logprobs: int | None = None
    include_stop_str_in_output: bool = False
    skip_special_tokens: bool = True

    def __post_init__(self) -> None:
        if self.max_tokens is not None:
            _check_int("max_tokens", self.max_tokens, low=0)
        _check_int("min_tokens", self.min_tokens, low=0)
        if self.max_tokens is not None and self.min_tokens > self.max_tokens:
            raise RequestError(
                f"min_tokens = {show(self.min_tokens)} is more than "
                f"max_tokens = {show(self.max_tokens)}"
            )
        _check_number("temperature", self.temperature, low=0, high=MAX_TEMPERATURE)
        _check_int("top_k", self.top_k, low=-1)
        _check_number("top_p", self.top_p, low=0, high=1, open_low=True)
        _check_number("min_p", self.min_p, low=0, high=1)
        _check_number("presence_penalty", self.presence_penalty, low=-2, high=2)
        _check_number("frequency_penalty", self.frequency_penalty, low=-2, high=2)
        low, high = REPETITION_PENALTIES
        _check_number("repetition_penalty", self.repetition_penalty, low=low, high=high)
        self._freeze_logit_bias()
        if self.seed is not None:
            _check_int("seed", self.seed)
        _check_int("n", self.n, low=1, high=MAX_CONTINUATIONS)
        self._freeze_stop()
        stop_token_ids = _token_id_tuple("stop_token_ids", self.stop_token_ids)
        object.__setattr__(self, "stop_token_ids", stop_token_ids)
        for name in ("logprobs", "prompt_logprobs"):
            if getattr(self, name) is not None:
                _check_int(name, getattr(self, name), low=0)
        for name in ("ignore_eos", "include_stop_str_in_output", "skip_special_tokens"):
            if not isinstance(getattr(self, name), bool):
                raise RequestError(f"{name} = {show(getattr(self, name))} must be True or False")

    @property
    def is_greedy(self) -> bool:
        """Whether the likeliest token is always taken."""
        return self.temperature < GREEDY_TEMPERATURE

    @property
    def stop_strings(self) -> tuple[str, ...]:
        """`stop` as a tuple."""
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop)

    def _freeze_logit_bias(self) -> None:
        if not isinstance(self.logit_bias, Mapping):
            raise RequestError(
                f"logit_bias must map token ids to numbers, not {show(self.logit_bias)}"
            )
        logit_bias = FrozenDict(self.logit_bias)
        _token_id_tuple("logit_bias", list(logit_bias))
        for token_id, bias in logit_bias.items():
            _check_number(f"logit_bias[{show(token_id)}]", bias, low=-100, high=100)
        object.__setattr__(self, "logit_bias", logit_bias)

    def _freeze_stop(self) -> None:
        rule = "must be a non-empty string or a list of them"
        if not isinstance(self.stop, (str, list, tuple)):
            raise RequestError(f"stop = {show(self.stop)} {rule}")
        stop = self.stop if isinstance(self.stop, str) else tuple(self.stop)
        for text in (stop,) if isinstance(stop, str) else stop:
            if not isinstance(text, str) or not text:
                raise RequestError(f"stop = {show(self.stop)} {rule}")
        object.__setattr__(self, "stop", stop)


def _check_int(name: str, value: Any, low: int | None = None, high: int | None = None) -> None:
    # bool is an int in Python, but `n=True` is a mistake.
    if isinstance(value, bool) or not isinstance(value, int):
        raise RequestError(f"{name} = {show(value)} must be an integer")
    if low is not None and value < low:
        raise RequestError(f"{name} = {show(value)} must be at least {low}")
    if high is not None and value > high:
        raise RequestError(f"{name} = {show(value)} must be at most {high}")


def _check_number(name: str, value: Any, low: float, high: float, open_low: bool = False) -> None:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise RequestError(f"{name} = {show(value)} must be a number")
    # Comparisons are exact for integers that no float can hold, and false for NaN.
    if not ((low < value if open_low else low <= value) and value <= high):
        bracket = "(" if open_low else "["
        raise RequestError(f"{name} = {show(value)} must be in {bracket}{low:g}, {high:g}]")


def _token_id_tuple(name: str, token_ids: Any) -> tuple[int, ...]:
    if not isinstance(token_ids, (list, tuple)):
        raise RequestError(f"{name} = {show(token_ids)} must be a list of token ids")
    for token_id in token_ids:
        if isinstance(token_id, bool) or not isinstance(token_id, int) or token_id < 0:
            raise RequestError(f"{name}: {show(token_id)} is not a token id (an integer from 0)")
    return tuple(token_ids)
