"""The start of a process: how long ago it was, and the collector meanwhile."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
import time

import pytest

from flashpage.start import collector_paused, seconds_since_start


def run_script(script):
    """What it prints."""
    environment = {**os.environ, "PYTHONPATH": os.pathsep.join(sys.path)}
    result = subprocess.run(
        [sys.executable, "-c", script], capture_output=True, text=True, check=False, env=environment
    )
    assert result.returncode == 0, result.stderr
    return result.stdout


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="needs /proc")
def test_counts_from_the_start_of_the_process():
    script = (
        "import time; time.sleep(0.5)\n"
        "from flashpage.start import seconds_since_start; print(seconds_since_start())"
    )
    began = time.perf_counter()
    seconds = float(run_script(script))
    # The system counts in hundredths.
    assert 0.49 < seconds < time.perf_counter() - began + 0.02


def test_none_where_the_system_does_not_say(monkeypatch):
    def refuse(*args, **options):
        raise FileNotFoundError

    monkeypatch.setattr("pathlib.Path.read_text", refuse)
    assert seconds_since_start() is None


def test_the_collector_rests_and_leaves_alone_what_was_made():
    assert gc.get_freeze_count() == 0
    try:
        with pytest.raises(ValueError, match="mine"), collector_paused():  # noqa: PT012
            assert not gc.isenabled()
            kept = []
            kept.append(kept)
            raise ValueError("mine")
        assert gc.isenabled()
        assert gc.get_freeze_count() > 0
        assert not any(x is kept for x in gc.get_objects())
    finally:
        gc.unfreeze()


def test_a_collector_that_is_off_stays_off():
    gc.disable()
    try:
        with collector_paused():
            pass
        assert not gc.isenabled()
        assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
