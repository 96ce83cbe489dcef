"""Puts tensors under their Hugging Face names into a model's parameters, and checks them all."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from flashpage.errors import CheckpointError
from flashpage.models.common import DecoderModel
from flashpage.models.config import ModelConfig

_SHOWN_NAMES = 10


@dataclass(frozen=True)
class Slot:
    """Where one checkpoint tensor goes: rows `start` to `start + rows` of a parameter."""

    parameter: nn.Parameter
    start: int
    rows: int

    @property
    def target(self) -> Tensor:
        return self.parameter.data.narrow(0, self.start, self.rows)


def checkpoint_slots(model: DecoderModel) -> dict[str, Slot]:
    """Every tensor name that a checkpoint of this model must have, and its place in the model."""
    slots: dict[str, Slot] = {}
    for name, parameter in model.named_parameters():
        prefix = "" if name.startswith("lm_head.") else "model."
        start = 0
        for part, rows in _parts_of(name, parameter, model.config):
            slots[prefix + part] = Slot(parameter, start, rows)
            start += rows
    return slots


def assign_weights(model: DecoderModel, tensors: Iterable[tuple[str, Tensor]]) -> None:
    """Copy every tensor into its place, converting its dtype; one tensor is in memory at a time.

    Raises:
        CheckpointError: tensors missing, unexpected or of a wrong shape (all of them in one
            message), or one that holds NaN or infinity, in the file or in the model's dtype.
    """
    slots = checkpoint_slots(model)
    assignment = Assignment(slots, model.config)
    for raw_name, tensor in tensors:
        name = assignment.place(raw_name, tuple(tensor.shape))
        if name is None:
            continue
        if not tensor.is_floating_point():
            raise CheckpointError(
                f"weight {raw_name} has dtype {tensor.dtype}: "
                "quantised safetensors are not supported"
            )
        target = slots[name].target
        target.copy_(tensor)
        _check_finite(raw_name, tensor, target)
    assignment.report()


class Assignment:
    """Which tensors of a checkpoint have come, and what is wrong with them."""

    def __init__(self, slots: Mapping[str, Slot], config: ModelConfig) -> None:
        self._slots = slots
        self._config = config
        self._missing = dict.fromkeys(slots)
        self._unexpected: list[str] = []
        self._misshapen: list[str] = []

    def place(self, raw_name: str, shape: tuple[int, ...]) -> str | None:
        """The name of the slot that a tensor belongs to; None if to none, or if it does not fit."""
        name = _canonical(raw_name)
        slot = self._slots.get(name)
        if slot is None:
            if not _is_harmless(name, self._config):
                self._unexpected.append(raw_name)
            return None
        self._missing.pop(name, None)
        expected = tuple(slot.target.shape)
        if shape != expected:
            self._misshapen.append(f"{raw_name} {list(shape)} for {list(expected)}")
            return None
        return name

    def report(self) -> None:
        """Raise `CheckpointError` with all that is missing, unexpected or of a wrong shape."""
        _report(list(self._missing), self._unexpected, self._misshapen)


def _parts_of(name: str, parameter: nn.Parameter, config: ModelConfig) -> Iterable[tuple[str, int]]:
    """The checkpoint names, with their rows, that make up one parameter, in order."""
    if ".qkv_proj." in name:
        q_size = config.num_q_heads * config.head_dim
        kv_size = config.num_kv_heads * config.head_dim
        parts = (("q_proj", q_size), ("k_proj", kv_size), ("v_proj", kv_size))
        return [(name.replace("qkv_proj", part), rows) for part, rows in parts]
    if ".gate_up_proj." in name:
        size = config.intermediate_size
        return [(name.replace("gate_up_proj", part), size) for part in ("gate_proj", "up_proj")]
    return [(name, parameter.shape[0])]


def _canonical(name: str) -> str:
    """Checkpoints of the bare decoder, saved without a head, lack the prefix."""
    if name.startswith(("layers.", "embed_tokens.", "norm.")):
        return "model." + name
    return name


def _is_harmless(name: str, config: ModelConfig) -> bool:
    """Old checkpoints store what follows from the config; tied ones may store the head twice."""
    if name.endswith(".rotary_emb.inv_freq"):
        return True
    return name == "lm_head.weight" and config.tie_word_embeddings


def _check_finite(name: str, tensor: Tensor, stored: Tensor) -> None:
    # A sum is finite only if every term is, so the exact test is needed only when it is not:
    # a sum may also overflow by itself.
    if stored.sum(dtype=torch.float32).isfinite() or stored.isfinite().all():
        return
    if tensor.isfinite().all():
        raise CheckpointError(
            f"weight {name} has values too large for {stored.dtype}; load it with another dtype"
        )
    raise CheckpointError(f"weight {name} contains NaN or infinity: the file is damaged")


def _report(missing: Sequence[str], unexpected: Sequence[str], misshapen: Sequence[str]) -> None:
    kinds = (("missing", missing), ("unexpected", unexpected), ("wrong shape", misshapen))
    problems = [f"{kind}: {_listed(names)}" for kind, names in kinds if names]
    if problems:
        raise CheckpointError(f"the weights do not fit the config; {'; '.join(problems)}")


def _listed(names: Sequence[str]) -> str:
    shown = ", ".join(names[:_SHOWN_NAMES])
    rest = len(names) - _SHOWN_NAMES
    return shown if rest <= 0 else f"{shown} and {rest} more"
