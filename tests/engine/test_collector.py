"""The collector while an engine steps: old objects are spared, new ones are not, nothing leaks."""

from __future__ import annotations

import gc
import time
import weakref

import pytest

from flashpage.engine import collector
from flashpage.engine.collector import old_objects_spared


class Cycle:
    def __init__(self) -> None:
        self.itself = self


def test_old_objects_are_spared_and_new_ones_collected():
    gc.collect()
    assert gc.get_freeze_count() == 0
    old = Cycle()
    old_alive = weakref.ref(old)
    with old_objects_spared():
        assert gc.get_freeze_count() > 1000
        del old
        new_alive = weakref.ref(Cycle())
        gc.collect()
        assert new_alive() is None
        assert old_alive() is not None
    assert gc.get_freeze_count() == 0
    gc.collect()
    assert old_alive() is None


def test_an_exception_ends_it():
    with pytest.raises(KeyError), old_objects_spared():
        raise KeyError
    assert gc.get_freeze_count() == 0


def test_what_the_caller_froze_stays_frozen():
    gc.freeze()
    try:
        frozen = gc.get_freeze_count()
        with old_objects_spared():
            pass
        assert gc.get_freeze_count() >= frozen - 10
    finally:
        gc.unfreeze()


def test_a_loop_does_not_keep_garbage_for_ever(monkeypatch):
    """What dies between the calls, before the collector has counted enough to run by itself."""
    monkeypatch.setattr(collector, "PERIOD", 0.05)
    alive = []
    for _ in range(100):
        alive.append(weakref.ref(Cycle()))
        with old_objects_spared():
            time.sleep(0.001)
    assert sum(ref() is not None for ref in alive) < 90


def test_where_collecting_is_off_it_stays_off():
    gc.disable()
    try:
        with old_objects_spared():
            assert gc.get_freeze_count() == 0
    finally:
        gc.enable()
