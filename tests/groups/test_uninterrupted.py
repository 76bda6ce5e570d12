"""Work in a thread that signal handlers do not cut short."""

import signal
import threading

import pytest

from hpcdist.groups.uninterrupted import Uninterrupted

pytestmark = pytest.mark.local


class Interrupted(Exception):
    """Raised by the handler."""


@pytest.fixture
def alarm():
    """Return what raises in the main thread, soon."""

    def interrupt(*_):
        raise Interrupted

    before = signal.signal(signal.SIGALRM, interrupt)
    yield lambda: signal.pthread_kill(threading.main_thread().ident, signal.SIGALRM)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def left(alarm):
    """Return a work whose wait a handler has ended, what lets it go on, and what it has done."""
    go, done = threading.Event(), []

    def work():
        alarm()
        done.append(go.wait(10))

    one = Uninterrupted(work)
    with pytest.raises(Interrupted):
        one.wait()
    return one, go, done


def test_a_handler_ends_the_wait_and_not_the_work(left):
    one, go, done = left
    assert not one.is_over
    go.set()
    one.wait()
    one.wait()
    assert one.is_over and done == [True], "it ran once, to its end"


def test_settle_waits_for_what_has_begun(left):
    one, go, done = left
    threading.Timer(0.05, go.set).start()
    one.settle()
    assert done == [True]


def test_what_has_not_begun_when_it_settles_never_begins():
    done = []
    one = Uninterrupted(lambda: done.append(1))
    one.settle()
    with pytest.raises(RuntimeError, match="given up before it began"):
        one.wait()
    assert one.is_over and not done


def test_each_wait_raises_the_error():
    def fail():
        raise ValueError("why")

    one = Uninterrupted(fail)
    for _ in range(2):
        with pytest.raises(ValueError, match="why"):
            one.wait()
    one.settle()
    assert isinstance(one.error, ValueError)
