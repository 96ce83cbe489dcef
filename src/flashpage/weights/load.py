"""From a name, path or config to a model that is ready to run, and its tokenizer."""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from flashpage.errors import ArgumentError, CheckpointError
from flashpage.layers.linear import has_fast_bfloat16
from flashpage.models.common import DecoderModel
from flashpage.models.config import ModelConfig
from flashpage.models.quantized import QuantizedDecoder, why_not_quantized
from flashpage.models.registry import build_model
from flashpage.weights import default_model, quantized
from flashpage.weights.assign import assign_weights
from flashpage.weights.dummy import CONFIGS, dummy_tensors
from flashpage.weights.gguf import GGUFFile
from flashpage.weights.gguf_tokenizer import tokenizer_from_gguf
from flashpage.weights.hub import fetch_from_hub
from flashpage.weights.safetensors import (
    read_json,
    read_json_if_present,
    safetensors_tensors,
)
from flashpage.weights.tokenizer import Tokenizer, has_tokenizer, load_tokenizer

logger = logging.getLogger("flashpage")

LOAD_FORMATS = ("auto", "safetensors", "gguf", "dummy")
_DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}

ModelSource = str | os.PathLike[str] | Mapping[str, Any] | None


@dataclass(frozen=True)
class LoadedModel:
    """A model with its weights in place, and the tokenizer that belongs to it, if there is one."""

    name: str
    config: ModelConfig
    model: DecoderModel | QuantizedDecoder
    tokenizer: Tokenizer | None


@dataclass(frozen=True)
class _Checkpoint:
    """What a source offers, before anything large is read.

    Attributes:
        tensors: names and weights, or None for dummy weights.
        load_tokenizer: called only if the caller brings no tokenizer.
        file: where the tensors are, if that is a GGUF file.
    """

    name: str
    config: ModelConfig
    tensors: Iterable[tuple[str, Tensor]] | None
    load_tokenizer: Callable[[], Tokenizer | None]
    file: GGUFFile | None = None


def load_model(
    model: ModelSource = None,
    *,
    dtype: str | torch.dtype = "auto",
    device: str | torch.device = "cpu",
    load_format: str = "auto",
    quantize: str = "auto",
    tokenizer: Tokenizer | str | os.PathLike[str] | None = None,
    seed: int = 0,
) -> LoadedModel:
    """Load a model.

    Args:
        model: a directory with `config.json` and safetensors, a `.gguf` file, an id on the
            Hugging Face Hub, or None for the default model; with `load_format="dummy"` also the
            contents of a `config.json` or its path, or a name of `flashpage.weights.dummy.CONFIGS`.
        dtype: of the weights and activations: "float32", "bfloat16", "float16" or a torch dtype.
            "auto" is bfloat16 on CPUs that have instructions for it and float32 on others, and
            the checkpoint's own dtype on a GPU. With quantised weights, the dtype of the KV cache.
        device: where the model runs.
        load_format: "auto", "safetensors", "gguf", or "dummy" for random weights.
        quantize: "auto" keeps the blocks of a GGUF file as they are on a CPU, if dtype is "auto"
            and the kernels serve model and processor (else why not is logged, and they are
            dequantised); "none" dequantises them; "q8_0", "q4_0" and "q4_1" also quantise matrices
            that come as floats, on a CPU only.
        tokenizer: a `Tokenizer`, or where to load another one from than the model's own.
        seed: of dummy weights; from -2**63 to 2**64 - 1.

    Raises:
        ArgumentError: an unknown dtype, device, load_format or quantize, a device that this machine
            does not have, a quantisation that can not run here, or a seed out of range.
        CheckpointError: the files are missing, damaged or of a kind that is not supported.
        DownloadError: the model has to be fetched and can not be.
    """
    if load_format not in LOAD_FORMATS:
        raise ArgumentError(f"load_format must be one of {LOAD_FORMATS}, got {load_format!r}")
    device = _named_device(device)
    _check_quantize(quantize, device)
    _check_seed(seed)
    chosen = None if dtype == "auto" else _named_dtype(dtype)
    checkpoint = _open(model, load_format)
    wanted = quantize in quantized.TYPES or (
        quantize == "auto"
        and chosen is None
        and device.type == "cpu"
        and checkpoint.file is not None
    )
    # Weights are packed while the tokenizer and the kernels' compiler are loaded.
    with _packing(checkpoint, quantize) if wanted else nullcontext() as items:
        if tokenizer is None:
            tokenizer = checkpoint.load_tokenizer()
        elif not isinstance(tokenizer, Tokenizer):
            tokenizer = load_tokenizer(_as_path(tokenizer, "tokenizer"))
        config = _with_ends_of(checkpoint.config, tokenizer)
        built = _quantized(checkpoint, config, items, chosen, quantize, seed) if wanted else None
    if built is None:
        built = _dense(checkpoint, config, chosen or _automatic_dtype(config, device), device, seed)
    return LoadedModel(checkpoint.name, config, built, tokenizer)


def _packing(
    checkpoint: _Checkpoint, quantize: str
) -> AbstractContextManager[Iterator[quantized.Item] | None]:
    """Begin to pack matrices that come quantised, if there are any and the others may come so."""
    file, config = checkpoint.file, checkpoint.config
    if file is None or (quantize == "auto" and quantized.why_not_kept(file, config)):
        return nullcontext()
    return quantized.packing(file, config)


def _dense(
    checkpoint: _Checkpoint,
    config: ModelConfig,
    dtype: torch.dtype,
    device: torch.device,
    seed: int,
) -> DecoderModel:
    built = _allocate(config, dtype, device)
    tensors = checkpoint.tensors
    assign_weights(built, dummy_tensors(built, seed) if tensors is None else tensors)
    built.prepare()
    return built


def _quantized(
    checkpoint: _Checkpoint,
    config: ModelConfig,
    items: Iterable[quantized.Item] | None,
    dtype: torch.dtype | None,
    quantize: str,
    seed: int,
) -> QuantizedDecoder | None:
    """The model with quantised weights, if that is possible; items: those of a GGUF file."""
    chosen = quantize in quantized.TYPES
    reason = why_not_quantized(config)
    if chosen and reason:
        raise ArgumentError(f"quantize = {quantize!r} can not be had here: {reason}")
    if not chosen and checkpoint.file is not None:
        reason = reason or quantized.why_not_kept(checkpoint.file, config)
    if reason:
        logger.warning("the weights of %s are dequantised: %s", checkpoint.name, reason)
        return None
    if chosen and checkpoint.file is not None and quantized.has_blocks(checkpoint.file):
        logger.warning(
            "quantize = %r is for matrices of floats: those that %s has in blocks stay as they are",
            quantize,
            checkpoint.name,
        )
    if items is None:
        items = checkpoint.tensors
    if items is None:
        items = dummy_tensors(build_model(config, torch.float32, "meta"), seed, "cpu")
    return quantized.assemble(
        config,
        items,
        type_name=quantize if chosen else None,
        dtype=dtype or torch.bfloat16,
    )


def _allocate(config: ModelConfig, dtype: torch.dtype, device: torch.device) -> DecoderModel:
    try:
        return build_model(config, dtype, device)
    except (RuntimeError, MemoryError) as error:
        reason = str(error).splitlines()[0] if str(error) else "out of memory"
        raise CheckpointError(
            f"the weights of this config do not fit on {device} in {dtype}: {reason}"
        ) from error


def _open(model: ModelSource, load_format: str) -> _Checkpoint:
    if load_format == "dummy":
        return _open_dummy(model)
    if model is None:
        return _open_gguf(default_model.default_model_path(), default_model.NAME)
    if isinstance(model, Mapping):
        raise ArgumentError("a config alone has no weights: pass load_format='dummy' with it")
    path = _as_path(model)
    if path.is_file():
        return _open_file(path, load_format)
    if not path.is_dir():
        if path.is_absolute() or path.suffix == ".gguf" or len(path.parts) > 2:
            raise CheckpointError(f"{path} is neither a file nor a directory")
        if str(model) in CONFIGS:
            raise ArgumentError(
                f"model {str(model)!r} has no weights: load_format='dummy' "
                "(--load-format dummy) gives it random ones"
            )
        path = fetch_from_hub(str(model))
    return _open_directory(path, Path(model).name, load_format)


def _as_path(source: Any, name: str = "model") -> Path:
    try:
        path = Path(source)
        path.is_file()
    except TypeError:
        kinds = {
            "model": "a path, a Hub id, a config (a dict) or None",
            "tokenizer": "a Tokenizer, a path or None",
        }
        raise ArgumentError(f"{name} must be {kinds[name]}, got {source!r}") from None
    except (ValueError, OSError) as error:  # a NUL byte, a name too long
        raise CheckpointError(f"{name} = {str(source)[:80]!r} is no path: {error}") from None
    return path


def _open_file(path: Path, load_format: str) -> _Checkpoint:
    if load_format == "gguf" or (load_format == "auto" and path.suffix == ".gguf"):
        return _open_gguf(path, path.stem)
    if path.suffix == ".gguf":
        raise CheckpointError(
            f"{path} is a .gguf file, but load_format = 'safetensors' wants the directory that "
            "holds config.json"
        )
    raise CheckpointError(
        f"{path} is not a .gguf file; for safetensors pass the directory that holds config.json, "
        "for random weights of a config load_format='dummy'"
    )


def _open_directory(path: Path, name: str, load_format: str) -> _Checkpoint:
    if not (path / "config.json").is_file():
        files = sorted(path.glob("*.gguf"))
        if load_format != "safetensors" and len(files) == 1:
            return _open_gguf(files[0], files[0].stem)
        raise CheckpointError(
            f"{path} has no config.json{' and several .gguf files: name one' if files else ''}"
        )
    if load_format == "gguf":
        raise CheckpointError(f"{path} is a directory: pass the path of its .gguf file")
    tensors = safetensors_tensors(path)
    return _Checkpoint(name, _hf_config(path), tensors, lambda: _tokenizer_of(path))


def _open_gguf(path: Path, name: str) -> _Checkpoint:
    file = GGUFFile(path)
    config = file.model_config()
    # A file may hold weights alone; a tokenizer of an unknown kind is still an error.
    has_vocabulary = "tokenizer.ggml.model" in file.metadata
    return _Checkpoint(
        name,
        config,
        file.hf_tensors(config),
        lambda: tokenizer_from_gguf(file.metadata) if has_vocabulary else None,
        file,
    )


def _open_dummy(model: ModelSource) -> _Checkpoint:
    if isinstance(model, Mapping):
        return _Checkpoint("dummy", ModelConfig.from_hf(model), None, lambda: None)
    if model is None:
        raise ArgumentError(
            "load_format='dummy' needs a config as model: a dict, the path of a config.json, or "
            f"one of {', '.join(CONFIGS)}"
        )
    if isinstance(model, str) and model in CONFIGS:
        return _Checkpoint(model, ModelConfig.from_hf(CONFIGS[model]), None, lambda: None)
    path = _as_path(model)
    if path.is_file():
        return _Checkpoint(path.stem, ModelConfig.from_hf(read_json(path)), None, lambda: None)
    if not path.is_dir():
        raise CheckpointError(
            f"model = {str(model)!r} is no file or directory, and of the configs that need none "
            f"there are {', '.join(CONFIGS)}"
        )
    return _Checkpoint(path.name, _hf_config(path), None, lambda: _tokenizer_of(path))


def _tokenizer_of(directory: Path) -> Tokenizer | None:
    return load_tokenizer(directory) if has_tokenizer(directory) else None


def _hf_config(directory: Path) -> ModelConfig:
    generation = read_json_if_present(directory / "generation_config.json")
    return ModelConfig.from_hf(read_json(directory / "config.json"), generation)


def _with_ends_of(config: ModelConfig, tokenizer: Tokenizer | None) -> ModelConfig:
    """Let whatever either of them calls an end end the text."""
    if tokenizer is None:
        return config
    bos = () if tokenizer.bos_token_id is None else (tokenizer.bos_token_id,)
    for name, named in (("bos", bos), ("eos", tokenizer.eos_token_ids)):
        for i in named:
            if not 0 <= i < config.vocab_size:
                raise CheckpointError(
                    f"the {name} token of the tokenizer has id {i}, which the model does not have: "
                    f"it must be from 0 to vocab_size - 1 = {config.vocab_size - 1}"
                )
    ids = dict.fromkeys([*config.eos_token_ids, *tokenizer.eos_token_ids])
    return replace(config, eos_token_ids=tuple(ids))


def _named_device(device: str | torch.device) -> torch.device:
    try:
        chosen = torch.device(device)
    except (RuntimeError, TypeError, ValueError):  # malformed; out of range
        chosen = None
    if chosen is None or chosen.type not in ("cpu", "cuda"):
        raise ArgumentError(f"device must be 'cpu', 'cuda' or 'cuda:<index>', got {device!r}")
    if chosen.type == "cuda" and (chosen.index or 0) >= torch.cuda.device_count():
        raise ArgumentError(
            f"device = {str(device)!r} is not there: torch {torch.__version__} finds "
            f"{torch.cuda.device_count()} CUDA devices"
        )
    return chosen


def _check_quantize(quantize: str, device: torch.device) -> None:
    choices = ("auto", "none", *quantized.TYPES)
    if quantize not in choices:
        raise ArgumentError(f"quantize must be one of {choices}, got {quantize!r}")
    if quantize in quantized.TYPES and device.type != "cpu":
        raise ArgumentError(f"quantize = {quantize!r} runs on the CPU only, not on {device}")


def _check_seed(seed: int) -> None:
    # The range is that of torch.Generator.manual_seed.
    if isinstance(seed, bool) or not isinstance(seed, int) or not -(2**63) <= seed < 2**64:
        raise ArgumentError(f"seed must be an integer from -2**63 to 2**64 - 1, got {seed!r}")


def _named_dtype(dtype: str | torch.dtype) -> torch.dtype:
    chosen = _DTYPES.get(dtype) if isinstance(dtype, str) else dtype
    if chosen not in _DTYPES.values():
        raise ArgumentError(f"dtype must be 'auto' or one of {tuple(_DTYPES)}, got {dtype!r}")
    return chosen


def _automatic_dtype(config: ModelConfig, device: torch.device) -> torch.dtype:
    if device.type == "cpu":
        return torch.bfloat16 if has_fast_bfloat16() else torch.float32
    return _DTYPES.get(config.dtype or "", torch.bfloat16)
