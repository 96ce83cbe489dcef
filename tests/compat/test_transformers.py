"""Tiny random models of transformers give with "flashpage" what they give with "sdpa"."""

from __future__ import annotations

import inspect
import subprocess
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import Tensor

from flashpage.compat.sequences import Padding
from flashpage.compat.transformers import MAX_STEP, Attention, padding_of, register
from flashpage.errors import ArgumentError, UnsupportedError

transformers = pytest.importorskip("transformers")
register()

VOCABULARY = 61
SIZES = {
    "vocab_size": VOCABULARY,
    "hidden_size": 32,
    "intermediate_size": 48,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "head_dim": 8,
    "max_position_embeddings": 128,
    "initializer_range": 0.3,  # large enough that attention decides which token comes out
    "pad_token_id": 0,
}
WINDOW = 4
MODELS: dict[str, tuple[str, dict[str, Any]]] = {
    "qwen3": ("Qwen3", {}),
    "llama": ("Llama", {"num_key_value_heads": 1}),
    "mistral, windowed": ("Mistral", {"sliding_window": WINDOW}),
    "qwen2, one layer windowed": (
        "Qwen2",
        {
            "use_sliding_window": True,
            "sliding_window": WINDOW,
            "layer_types": ["full_attention", "sliding_attention"],
        },
    ),
}
PADDINGS = {
    "none": None,
    "left": [[0] * 6 + [1] * 4, [1] * 10, [0] + [1] * 9],
    "right": [[1] * 4 + [0] * 6, [1] * 10, [1] * 9 + [0]],
}


def make(name: str, **changes: Any) -> Any:
    """A model in evaluation mode; each call draws other weights."""
    family, more = MODELS[name]
    config = getattr(transformers, f"{family}Config")(**{**SIZES, **more, **changes})
    config._attn_implementation = "flashpage"
    return getattr(transformers, f"{family}ForCausalLM")(config).eval()


def tokens(batch: int = 3, length: int = 10) -> Tensor:
    return torch.randint(1, VOCABULARY, (batch, length))


def padding(name: str) -> Tensor | None:
    return None if PADDINGS[name] is None else torch.tensor(PADDINGS[name])


def with_both(model: Any, call: Callable[[], Any], other: str = "sdpa") -> tuple[Any, Any]:
    """`call()` with flashpage, then with the other implementation."""
    results = []
    for implementation in ("flashpage", other):
        model.set_attn_implementation(implementation)
        results.append(call())
    model.set_attn_implementation("flashpage")
    return results[0], results[1]


def assert_same(ours: Tensor, theirs: Tensor) -> None:
    torch.testing.assert_close(ours, theirs, rtol=1e-4, atol=1e-4)


@pytest.fixture(params=MODELS)
def model(request: pytest.FixtureRequest) -> Any:
    return make(request.param)


@pytest.mark.parametrize("side", PADDINGS)
@torch.no_grad()
def test_logits(model: Any, side: str):
    ids, mask = tokens(), padding(side)
    ours, theirs = with_both(model, lambda: model(ids, attention_mask=mask).logits)
    real = torch.ones_like(ids) if mask is None else mask
    assert_same(ours[real.bool()], theirs[real.bool()])


@pytest.mark.parametrize("cache", ["dynamic", "static"])
@pytest.mark.parametrize("side", ["none", "left"])
def test_generated_tokens(model: Any, side: str, cache: str):
    """Twice the window, so that sliding caches roll."""
    ids, mask = tokens(), padding(side)

    def generate() -> Tensor:
        return model.generate(
            ids,
            attention_mask=mask,
            max_new_tokens=2 * WINDOW,
            do_sample=False,
            eos_token_id=None,
            cache_implementation=cache,
            disable_compile=True,
        )

    ours, theirs = with_both(model, generate)
    assert torch.equal(ours, theirs)


@pytest.mark.parametrize("side", ["none", "left"])
@torch.no_grad()
def test_chunks_over_a_dynamic_cache(model: Any, side: str):
    ids, mask = tokens(), padding(side)
    mask = torch.ones_like(ids) if mask is None else mask
    # Padding has no position, and tokens the same one whatever the chunks.
    positions = (mask.cumsum(1) - 1).clamp(min=0)
    parameters = inspect.signature(model.forward).parameters
    name = "cache" if "cache" in parameters else "past_key_values"  # renamed after 5.17

    def in_chunks(*ends: int) -> Tensor:
        cache = transformers.DynamicCache(config=model.config)
        logits, start = [], 0
        for end in ends:
            result = model(
                ids[:, start:end],
                attention_mask=mask[:, :end],
                position_ids=positions[:, start:end],
                **{name: cache},
            )
            logits.append(result.logits)
            start = end
        return torch.cat(logits, 1)[mask.bool()]

    ours, theirs = with_both(model, lambda: in_chunks(3, 7, 8, 10))
    assert_same(ours, theirs)
    assert_same(ours, in_chunks(10))


@torch.no_grad()
def test_packed_rows(model: Any):
    """Sequences of one row, by positions that begin anew or by cu_seqlens: each as if alone."""
    lengths = [3, 1, 6]
    ids = tokens(2, 10)
    one_row = torch.cat([torch.arange(n) for n in lengths])[None]
    alone = torch.cat([model(part).logits for part in ids.split(lengths, dim=1)], 1)
    packed = {"use_cache": False}

    def by_positions(row: Tensor = one_row) -> Tensor:
        return model(ids, position_ids=row, **packed).logits

    ours, theirs = with_both(model, by_positions)
    assert_same(ours, theirs)
    assert_same(ours, alone)
    # Each row cut in its own way.
    mixed = torch.cat([one_row, torch.arange(10)[None]])
    assert_same(by_positions(mixed)[1], model(ids[1:]).logits[0])
    cu_seqlens = torch.tensor([0, 3, 4, 10, 13, 14, 20], dtype=torch.int32)
    given = {
        "cu_seq_lens_q": cu_seqlens,
        "cu_seq_lens_k": cu_seqlens,
        "max_length_q": 6,
        "max_length_k": 6,
    }
    assert_same(model(ids, position_ids=one_row, **given, **packed).logits, alone)


@pytest.mark.parametrize("layout", ["left", "right", "packed"])
def test_gradients_of_a_training_step(model: Any, layout: str):
    ids = tokens()
    inputs: dict[str, Any] = {"use_cache": False}
    labels = ids
    if layout == "packed":
        inputs["position_ids"] = torch.cat([torch.arange(4), torch.arange(6)])[None]
    else:
        inputs["attention_mask"] = mask = padding(layout)
        labels = torch.where(mask.bool(), ids, -100)
    model.train()

    def step() -> list[Tensor]:
        model.zero_grad()
        loss = model(ids, labels=labels, **inputs).loss
        loss.backward()
        return [loss.detach(), *(p.grad.clone() for p in model.parameters())]

    for ours, theirs in zip(*with_both(model, step), strict=True):
        assert_same(ours, theirs)


def test_dropout_is_for_training():
    model = make("qwen3", attention_dropout=0.5)
    ids, mask = tokens(), padding("left")

    def loss(seed: int) -> Tensor:
        torch.manual_seed(seed)
        return model(ids, attention_mask=mask, labels=ids).loss

    assert torch.equal(loss(1), loss(2))
    model.train()
    assert torch.equal(loss(1), loss(1))
    assert not torch.equal(loss(1), loss(2))
    loss(1).backward()
    assert all(p.grad.isfinite().all() for p in model.parameters())


@torch.no_grad()
def test_softcap():
    """Gemma2; transformers has it in eager attention only."""
    config = transformers.Gemma2Config(
        **SIZES, attn_logit_softcapping=1.0, query_pre_attn_scalar=3, sliding_window=WINDOW
    )
    config._attn_implementation = "flashpage"
    model = transformers.Gemma2ForCausalLM(config).eval()
    ids, mask = tokens(), padding("left")

    def both_ways() -> Tensor:
        prefill = model(ids, attention_mask=mask).logits[mask.bool()]
        text = model.generate(ids, max_new_tokens=WINDOW, do_sample=False, eos_token_id=None)
        return torch.cat([prefill, model(text).logits.flatten(0, 1)])

    assert_same(*with_both(model, both_ways, other="eager"))


@pytest.mark.parametrize("side", PADDINGS)
@torch.no_grad()
def test_encoder(side: str):
    """Not causal: padded queries are computed too."""
    config = transformers.BertConfig(
        vocab_size=VOCABULARY,
        hidden_size=32,
        intermediate_size=48,
        num_hidden_layers=2,
        num_attention_heads=4,
        initializer_range=0.3,
    )
    config._attn_implementation = "flashpage"
    model = transformers.BertModel(config).eval()
    ids, mask = tokens(), padding(side)
    states = with_both(model, lambda: model(ids, attention_mask=mask).last_hidden_state)
    assert_same(*states)


@torch.no_grad()
def test_encoder_and_decoder():
    config = transformers.BartConfig(
        vocab_size=VOCABULARY,
        d_model=32,
        encoder_layers=1,
        decoder_layers=2,
        encoder_attention_heads=4,
        decoder_attention_heads=4,
        encoder_ffn_dim=48,
        decoder_ffn_dim=48,
        max_position_embeddings=64,
        init_std=0.3,
        forced_eos_token_id=None,
    )
    config._attn_implementation = "flashpage"
    model = transformers.BartForConditionalGeneration(config).eval()
    ids, mask = tokens(), padding("right")
    for decoder_ids in (tokens(length=4), tokens()):  # as long as the input, too
        assert_same(
            *with_both(
                model,
                lambda x=decoder_ids: model(ids, attention_mask=mask, decoder_input_ids=x).logits,
            )
        )
    generate = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": None, "num_beams": 1}
    assert torch.equal(
        *with_both(model, lambda: model.generate(ids, attention_mask=mask, **generate))
    )


def test_autocast():
    """Projections in bfloat16, rotations in float32, attention in bfloat16 as sdpa has it."""
    model = make("qwen3")
    ids = tokens()
    with torch.autocast("cpu", torch.bfloat16), torch.no_grad():
        ours, theirs = with_both(model, lambda: model(ids).logits)
    assert (ours - theirs).abs().mean() < 0.05 * theirs.abs().mean()


def test_compiled():
    model = make("qwen3")
    ids = tokens()
    with torch.no_grad():
        compiled = torch.compile(model, backend="eager")
        assert_same(compiled(ids).logits, model(ids).logits)


def test_registering_imports_transformers_and_not_before(run: Any):
    script = (
        "import sys, flashpage.compat.transformers as ours\n"
        "assert 'transformers' not in sys.modules\n"
        "ours.register()\n"
        "from transformers import AttentionInterface, AttentionMaskInterface\n"
        "assert 'flashpage' in AttentionInterface() and 'flashpage' in AttentionMaskInterface()\n"
    )
    result: subprocess.CompletedProcess[str] = run("-c", script)
    assert result.returncode == 0, result.stderr


def test_registering_twice_keeps_the_loader_of_others():
    from transformers.integrations import hub_kernels

    load = hub_kernels.load_and_register_attn_kernel
    register()
    assert hub_kernels.load_and_register_attn_kernel is load
    assert load("sdpa") is None
    assert make("llama").config._attn_implementation == "flashpage"


# ---------------------------------------------------------------------------------------------
# The parts alone
# ---------------------------------------------------------------------------------------------


def heads_first(seqlen_q: int = 5, seqlen_k: int = 5, head_dim_v: int = 8) -> tuple[Tensor, ...]:
    q, k = torch.randn(2, 4, seqlen_q, 8), torch.randn(2, 2, seqlen_k, 8)
    return q, k, torch.randn(2, 2, seqlen_k, head_dim_v)


def test_a_smaller_value():
    q, k, v = heads_first(head_dim_v=6)
    module = torch.nn.Module()
    out, weights = Attention()(module, q, k, v, None, scaling=0.3)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, is_causal=True, scale=0.3, enable_gqa=True
    )
    assert weights is None
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("padded", [False, True])
@pytest.mark.parametrize("seqlen_q", [MAX_STEP, MAX_STEP + 1])
def test_steps_and_chunks_over_a_cache(seqlen_q: int, padded: bool):
    seqlen_k = MAX_STEP + 9
    q, k, v = heads_first(seqlen_q, seqlen_k)
    mask = torch.ones(2, seqlen_k, dtype=torch.bool)
    mask[0, :3] = not padded
    out, _ = Attention()(torch.nn.Module(), q, k, v, mask if padded else None)
    visible = mask[:, None, None] & torch.ones(seqlen_q, seqlen_k).tril(seqlen_k - seqlen_q).bool()
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible, enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


def test_a_mask_that_is_written_is_read_again():
    q, k, v = heads_first()
    attention, module = Attention(), torch.nn.Module()
    mask = torch.tensor([[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]])
    first, _ = attention(module, q, k, v, mask)
    mask[0, 3] = 0
    second, _ = attention(module, q, k, v, mask)
    assert first[0, 3].any()
    assert not second[0, 3].any()
    assert torch.equal(second, Attention()(module, q, k, v, mask.clone())[0])


def test_masks_of_inference_mode():
    q, k, v = heads_first()
    with torch.inference_mode():
        attention, module = Attention(), torch.nn.Module()
        mask = torch.tensor([[0, 1, 1, 1, 1], [1, 1, 1, 1, 1]])
        first, _ = attention(module, q, k, v, mask)
        mask[0, 1] = 0
        second, _ = attention(module, q, k, v, mask)
    assert first[0, 1].any()
    assert not second[0, 1].any()


@pytest.mark.parametrize("window", [None, 3])
@pytest.mark.parametrize("seqlen_q", [1, 2])
def test_padding_between_tokens(seqlen_q: int, window: int | None):
    """A prompt padded on the right, and tokens after it."""
    q, k, v = heads_first(seqlen_q, 6)
    mask = torch.tensor([[1, 1, 0, 0, 1, 1], [1, 1, 1, 1, 1, 1]]).bool()
    module = torch.nn.Module()
    if window and seqlen_q > 1:
        with pytest.raises(UnsupportedError, match="no sliding window .here 3. over padding"):
            Attention()(module, q, k, v, mask, sliding_window=window)
        return
    out, _ = Attention()(module, q, k, v, mask, sliding_window=window)
    row, column = torch.arange(6 - seqlen_q, 6)[:, None], torch.arange(6)
    visible = (column <= row) & (column > row - (window or 6))
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible & mask[:, None, None], enable_gqa=True
    )
    torch.testing.assert_close(out, expected.transpose(1, 2))


@pytest.mark.parametrize("window", [2, 7])
@pytest.mark.parametrize("side", ["left", "right"])
def test_windows_of_encoders_over_padding(side: str, window: int):
    """Distances are those of the tokens, wherever the padding is."""
    q, k, v = heads_first(8, 8)
    mask = torch.ones(q.shape[0], 8, dtype=torch.bool)
    mask[0, slice(0, 3) if side == "left" else slice(5, 8)] = False
    module = SimpleNamespace(is_causal=False)
    out, _ = Attention()(module, q, k, v, mask, scaling=0.3, sliding_window=window)
    row, column = torch.arange(8)[:, None], torch.arange(8)
    visible = (column > row - window) & (column < row + window)
    expected = torch.nn.functional.scaled_dot_product_attention(
        q, k, v, attn_mask=visible & mask[:, None, None], scale=0.3, enable_gqa=True
    ).transpose(1, 2)
    torch.testing.assert_close(out[mask], expected[mask])


@pytest.mark.parametrize("name", ["Bloom", "XGLM", "Mpt", "GPTNeo", "Falcon"])
def test_models_with_attention_of_their_own_are_refused(name: str):
    """They would leave out the causal mask, which they leave to the implementation."""
    config = getattr(transformers, f"{name}Config")()
    for key in ("n_layer", "num_layers", "num_hidden_layers", "n_layers"):
        if hasattr(config, key):
            setattr(config, key, 1)
    with pytest.raises(UnsupportedError, match=f"{name}ForCausalLM has attention code of its own"):
        transformers.AutoModelForCausalLM.from_config(config, attn_implementation="flashpage")


def test_an_old_transformers_is_refused(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(sys.modules["transformers"], "__version__", "5.0.0")
    with pytest.raises(UnsupportedError, match="needs transformers 5.4 or newer, found 5.0.0"):
        register()


def test_a_row_of_padding_only():
    q, k, v = heads_first()
    mask = torch.tensor([[0] * 5, [1] * 5])
    out, _ = Attention()(torch.nn.Module(), q, k, v, mask)
    assert not out[0].any()
    assert Padding.of(mask.bool(), 5, True, None).queries.cu_seqlens.tolist() == [0, 0, 5]


def test_what_is_not_served():
    q, k, v = heads_first()
    attention, module = Attention(), torch.nn.Module()
    for name in ("s_aux", "sinks", "position_bias"):
        with pytest.raises(UnsupportedError, match=f"asks for by {name}"):
            attention(module, q, k, v, None, **{name: torch.zeros(4)})
    with pytest.raises(UnsupportedError, match="larger head_dim than query .*, got 9 and 8"):
        attention(module, q, k, torch.randn(2, 2, 5, 9), None)
    with pytest.raises(UnsupportedError, match="output_attentions must be False"):
        attention(module, q, k, v, None, output_attentions=True)
    with pytest.raises(UnsupportedError, match=r"no mask per query; got \(2, 1, 5, 5\)"):
        attention(module, q, k, v, torch.ones(2, 1, 5, 5))
    for shape in ((1, 5), (2, 6)):
        with pytest.raises(ArgumentError, match=r"attention_mask must have shape .* = \(2, 5\)"):
            attention(module, q, k, v, torch.ones(shape))
    with pytest.raises(ArgumentError, match="a column for each of 5 queries"):
        attention(module, q, k, v, torch.ones(2, 4))


def test_a_model_with_sinks_is_refused(monkeypatch: pytest.MonkeyPatch):
    # Where a model has this list, transformers takes one of it instead of us, and says so.
    name = "_compatible_flash_implementations"
    monkeypatch.setattr(transformers.GptOssPreTrainedModel, name, None, raising=False)
    config = transformers.GptOssConfig(
        **SIZES, num_local_experts=2, num_experts_per_tok=1, sliding_window=WINDOW
    )
    config._attn_implementation = "flashpage"
    with pytest.raises(UnsupportedError, match="attention sinks"):
        transformers.GptOssForCausalLM(config).eval()(tokens())


def test_tokens_that_see_later_ones_are_refused():
    """As the tokens of an image do in some models."""
    group = torch.tensor([[-1, 0, 0, -1]])

    def with_image(batch: Tensor, head: Tensor, query: Tensor, key: Tensor) -> Tensor:
        same = (group[batch, query] == group[batch, key]) & (group[batch, query] >= 0)
        return (key <= query) | same

    with pytest.raises(UnsupportedError, match="some tokens see later ones"):
        padding_of(1, 4, 4, mask_function=with_image, allow_is_causal_skip=False)
    with pytest.raises(UnsupportedError, match="not a mask function of the model"):
        padding_of(1, 4, 4, use_vmap=True)


def test_a_mask_of_too_few_positions_is_refused():
    with pytest.raises(ArgumentError, match="each of the 7 positions so far"):
        padding_of(1, 2, 7, q_offset=5, attention_mask=torch.ones(1, 2, dtype=torch.bool))
