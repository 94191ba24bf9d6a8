"""A request to stop: remembered at the first signal, obeyed at once at the second interrupt."""

import os
import signal

import pytest

from components.checkpoint.signals import StopRequest


@pytest.fixture
def stop():
    request = StopRequest()
    yield request
    request.close()


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGINT])
def test_a_signal_is_remembered_and_stops_nothing(stop, number):
    assert stop.flag == 0.0
    os.kill(os.getpid(), number)
    assert stop.flag == 1.0


def test_a_second_interrupt_stops_at_once(stop):
    os.kill(os.getpid(), signal.SIGINT)
    with pytest.raises(KeyboardInterrupt):
        os.kill(os.getpid(), signal.SIGINT)


def test_closing_gives_back_the_handlers_that_were_there():
    before = signal.getsignal(signal.SIGTERM)
    StopRequest().close()
    assert signal.getsignal(signal.SIGTERM) is before
