"""Ctrl-C waits for the end of a step; a second one does not."""

from __future__ import annotations

import signal
import threading

import pytest

from flashpage.engine.interrupt import deferred_interrupt

pytestmark = pytest.mark.usefixtures("ctrl_c")


def test_an_interrupt_comes_at_the_end_of_the_block():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_the_second_interrupt_comes_at_once():
    done = []
    with pytest.raises(KeyboardInterrupt), deferred_interrupt():  # noqa: PT012
        signal.raise_signal(signal.SIGINT)
        signal.raise_signal(signal.SIGINT)
        done.append(True)
    assert not done
    assert signal.getsignal(signal.SIGINT) is signal.default_int_handler


def test_an_error_is_not_hidden():
    with pytest.raises(ValueError, match="mine"), deferred_interrupt():
        raise ValueError("mine")


def test_a_handler_of_the_program_is_left_alone():
    seen = []
    previous = signal.signal(signal.SIGINT, lambda *_: seen.append(True))
    try:
        with deferred_interrupt():
            signal.raise_signal(signal.SIGINT)
            assert seen
    finally:
        signal.signal(signal.SIGINT, previous)


def test_other_threads_may_use_it():
    done = []

    def work():
        with deferred_interrupt():
            done.append(True)

    thread = threading.Thread(target=work)
    thread.start()
    thread.join()
    assert done
