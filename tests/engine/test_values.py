"""Values from outside: what messages show of them."""

from __future__ import annotations

import pytest

from flashpage.engine.values import MAX_SHOWN, FrozenDict, show


class Unprintable:
    def __repr__(self) -> str:
        raise RuntimeError("no")


def test_messages_can_show_everything():
    assert show("a") == "'a'"
    assert show(10**400) == "1" + "0" * (MAX_SHOWN - 4) + "..."
    assert show(10**5000) == "<int that can not be printed>"
    assert show([10**5000]) == "<list that can not be printed>"
    assert show(Unprintable()) == "<Unprintable that can not be printed>"
    assert len(show("x" * 10**6)) == MAX_SHOWN


def test_a_frozen_dict_is_a_copy_that_stays():
    source = {1: 2}
    frozen = FrozenDict(source)
    source[3] = 4
    assert frozen == {1: 2}
    with pytest.raises(TypeError, match="can not be changed"):
        frozen[3] = 4
    with pytest.raises(TypeError, match="can not be changed"):
        frozen |= {3: 4}
    assert frozen == {1: 2}
