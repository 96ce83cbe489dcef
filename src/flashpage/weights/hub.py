"""Fetches a model directory from the Hugging Face Hub, or finds it in the Hub's cache."""

from __future__ import annotations

from pathlib import Path

from flashpage.errors import DownloadError, require

_NEEDED = (
    "config.json",
    "generation_config.json",
    "*.safetensors",
    "model.safetensors.index.json",
    "tokenizer.json",
    "tokenizer_config.json",
    "special_tokens_map.json",
    "chat_template.jinja",
    "chat_template.json",
    "tokenizer.model",
    "vocab.json",
    "merges.txt",
)


def fetch_from_hub(model_id: str) -> Path:
    """The local directory of `owner/name`, fetched now if it is not yet there.

    Raises:
        DownloadError: no such model, no network, or no permission.
    """
    require("huggingface_hub", "engine")
    from huggingface_hub import snapshot_download

    try:
        # Only the top level: some repositories repeat the weights in other formats below it.
        path = snapshot_download(model_id, allow_patterns=list(_NEEDED), ignore_patterns=["*/*"])
    except Exception as error:  # the client lets errors of several HTTP libraries through
        reason = str(error).strip().splitlines()
        raise DownloadError(
            f"model {model_id!r} is no local directory or file, and can not be fetched from the "
            f"Hugging Face Hub: {reason[0] if reason else type(error).__name__}. "
            "Check the name and the network (and log in for gated models), or pass the path of a "
            "directory with config.json and .safetensors files, or of a .gguf file"
        ) from error
    return Path(path)
