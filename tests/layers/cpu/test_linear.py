"""Quantised products in every form that this processor runs, against the float32 product."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from flashpage.attention.cpu.numba_runtime import call, kernels
from flashpage.errors import ArgumentError
from flashpage.layers.cpu import forms
from flashpage.layers.cpu.packing import PackedWeight
from layers.cpu.test_packing import KINDS, pack, raw_rows

pytest.importorskip("numba")
FORMS = forms.available_forms()


def multiply(form: str, weight: PackedWeight, x: Tensor, threads: int = 1) -> Tensor:
    out = torch.full((len(x), weight.groups * 16 + 5), torch.nan)
    came = call(
        kernels("flashpage.layers.cpu.linear").linear,
        threads,
        forms.tag(form),
        weight.address(),
        weight.groups,
        x.data_ptr(),
        len(x),
        x.shape[1],
        out.data_ptr(),
        4 * out.stride(0),
        threads,
        1 << 28,
    )
    assert came
    assert out[:, weight.groups * 16 :].isnan().all(), "wrote beside its columns"
    return out[:, : weight.rows]


def quantised(x: Tensor) -> Tensor:
    """Blocks of 32 rounded to multiples of a power of two, so that 2,047 of them are enough."""
    blocks = x.double().reshape(-1, 32)
    top = blocks.abs().amax(-1, keepdim=True).clamp_min(2.0**-100)
    step = 2.0 ** (torch.frexp(top).exponent - 11)
    return ((blocks / step).round().clamp(-2048, 2047) * step).reshape(x.shape).float()


def unpacked(values: Tensor, scales: Tensor) -> Tensor:
    """What `row_quantize` has written, as floats `[rows, blocks, 32]`.

    values: int8; scales `[rows / 16, blocks, 16, 4]`.
    """
    high, low = values.reshape(-1, scales.shape[1], 2, 32).float().unbind(2)
    per_row = scales[..., 0].transpose(1, 2).reshape(-1, scales.shape[1], 1)[: len(high)]
    return (16 * high + low) * per_row / (1.5 * 2**23)


@pytest.mark.parametrize("type_name", KINDS)
def test_every_form_gives_the_product_and_the_same_bits(type_name: str) -> None:
    weight = pack(type_name, raw_rows(type_name, 53, 256), 256)
    x = torch.randn(45, 256)
    x[2] *= 1e4
    x[3] = 0
    x[4, 32:64] = 0
    dense = weight.dequantize().double()
    rounded = quantised(x).double()
    blocks = x.reshape(45, -1, 32)
    half_steps = blocks.abs().amax(-1, True) / 2048
    assert ((rounded.reshape(blocks.shape) - blocks).abs() <= half_steps).all()
    expected, terms = rounded @ dense.T, rounded.abs() @ dense.abs().T
    first = None
    for form in FORMS:
        out = multiply(form, weight, x)
        assert ((out - expected).abs() <= 4e-6 * terms + 1e-30).all(), form
        first = out if first is None else first
        assert torch.equal(out, first), f"{form} differs from {FORMS[0]}"


@pytest.mark.parametrize("type_name", KINDS)
def test_sums_are_exact_at_the_largest_magnitudes(type_name: str) -> None:
    weight = pack(type_name, raw_rows(type_name, 32, 256), 256)
    weight.blocks.fill_(63 if type_name == "Q6_K" else 255)
    weight.blocks[: len(weight.blocks) // 2] &= torch.randint(256, (1,)).to(torch.uint8)
    x = torch.full((37, 256), 2047.0)
    x[1::4] = -2047
    x[2::4, ::2] = -2047
    x[3::4] *= torch.randint(-1, 2, (256,))
    first = None
    for form in FORMS:
        out = multiply(form, weight, x)
        expected = x.double() @ weight.dequantize().double().T
        terms = x.double().abs() @ weight.dequantize().double().abs().T
        assert ((out - expected).abs() <= 4e-6 * terms + 1e-30).all(), form
        first = out if first is None else first
        assert torch.equal(out, first), f"{form} differs from {FORMS[0]}"


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("type_name", KINDS)
def test_a_row_does_not_depend_on_others(type_name: str, form: str) -> None:
    weight = pack(type_name, raw_rows(type_name, 96, 256), 256)
    x = torch.randn(61, 256)
    together = multiply(form, weight, x, threads=2)
    for start, stop in ((0, 1), (5, 7), (3, 11), (20, 50), (60, 61)):
        assert torch.equal(multiply(form, weight, x[start:stop]), together[start:stop])


@pytest.mark.parametrize("type_name", KINDS)
@pytest.mark.parametrize("rows", [3, 19])
@pytest.mark.parametrize("value", [torch.nan, torch.inf])
def test_what_is_no_number_is_not_hidden(value: float, rows: int, type_name: str) -> None:
    weight = pack(type_name, raw_rows(type_name, 16, 256), 256)
    x = torch.randn(rows, 256)
    x[1, 7] = value
    out = multiply(FORMS[0], weight, x)
    assert not out[1].isfinite().any()
    assert out[[0, *range(2, rows)]].isfinite().all()


def test_a_form_can_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    assert forms.best_form() == FORMS[0]
    monkeypatch.setenv("FLASHPAGE_CPU_FORM", "portable")
    assert forms.best_form() == "portable"
    monkeypatch.setenv("FLASHPAGE_CPU_FORM", "sse9")
    with pytest.raises(ArgumentError, match="FLASHPAGE_CPU_FORM = 'sse9' must be one of amx, "):
        forms.best_form()
    monkeypatch.setenv(
        "FLASHPAGE_CPU_FORM", next(name for name in forms.NAMES if name not in FORMS)
    )
    with pytest.raises(ArgumentError, match="can not be run here: this processor has "):
        forms.best_form()


def test_a_processor_without_dot_products_is_not_served(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(forms, "_features", lambda: {"sse2": True})
    assert forms.available_forms() == ["portable"]
    assert "this processor has none of" in str(forms.why_no_form())
