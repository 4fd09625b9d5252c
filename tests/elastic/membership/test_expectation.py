"""What is expected is forgotten after a while, unless it is something new."""

from __future__ import annotations

from baguarun.elastic.membership.expectation import Expectation


def test_the_same_is_expected_for_a_while_only() -> None:
    expectation = Expectation(60.0)
    assert not expectation.see(None, 0.0)
    assert expectation.see("a", 100.0)
    assert expectation.see("a", 159.9)
    assert not expectation.see("a", 160.0)
    assert expectation.see("b", 161.0)
    assert not expectation.see(None, 162.0)
    assert expectation.see("b", 300.0)
