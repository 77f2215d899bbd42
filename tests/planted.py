"""Is a model test able to fail? Run its state machine on code with a planted bug and see."""

from __future__ import annotations

import re
from typing import TYPE_CHECKING

import pytest
from hypothesis import Phase, settings
from hypothesis.stateful import run_state_machine_as_test

if TYPE_CHECKING:
    from hypothesis.stateful import RuleBasedStateMachine

_SEARCH = settings(
    max_examples=1_000,
    stateful_step_count=50,
    deadline=None,
    derandomize=True,
    database=None,
    phases=[Phase.generate],
    suppress_health_check=settings().suppress_health_check,
    print_blob=False,
)


def assert_caught(machine: type[RuleBasedStateMachine], *, by: type[BaseException], saying: str | None = None) -> None:
    """Run a machine and expect it to fail with an error that matches; stop at the first failure, do not shrink it.

    A machine is torn down after a failure too, and may fail there again, so the error may be the one before the last.
    """
    with pytest.raises(by) as caught:
        run_state_machine_as_test(machine, settings=_SEARCH)
    errors: list[BaseException] = [caught.value]
    while errors[-1].__context__ is not None:
        errors.append(errors[-1].__context__)
    assert saying is None or any(re.search(saying, str(error)) for error in errors), errors
