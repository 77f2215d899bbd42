"""How a command line ends: its exit status and its line on standard error."""

from __future__ import annotations

import signal
import time
import weakref

import pytest
import typer

from ackstate.analysis.cli.main import run


def test_an_interrupt_in_a_callback_of_a_weak_reference_is_not_lost(capsys):
    """Python drops all exceptions of such a callback."""
    commands = typer.Typer()
    waited = []

    @commands.command()
    def wait() -> None:
        class Referent: ...

        referent = Referent()
        reference = weakref.ref(referent, lambda _: signal.raise_signal(signal.SIGINT))
        del referent
        assert reference() is None
        waited.append(True)
        time.sleep(60)

    with pytest.raises(SystemExit) as ending:
        run(commands, [], name="wait")
    assert (waited, ending.value.code, capsys.readouterr().err) == ([True], 130, "ackstate: interrupted\n")
