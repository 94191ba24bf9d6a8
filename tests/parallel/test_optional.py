"""Optimisations that cannot be switched on: stop, or go on without."""

import pytest

from components.parallel.optional import attempt


def broken() -> None:
    raise RuntimeError("no such device")


def test_what_goes_through_is_on_without_a_word(recwarn):
    assert attempt("compile", "error", lambda: None)
    assert not recwarn


def test_a_failure_stops_with_section_reason_and_remedy():
    with pytest.raises(ValueError, match=r'\[compile\] cannot be switched on: no such device; set .* "plain"'):
        attempt("compile", "error", broken)


def test_a_failure_that_may_run_plain_warns_and_is_off():
    with pytest.warns(UserWarning, match=r"\[compile\] .*no such device; running without"):
        assert not attempt("compile", "plain", broken)
