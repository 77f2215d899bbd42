"""Which consumers does the limit on their own unacked messages keep back?"""

from __future__ import annotations

from typing import TYPE_CHECKING, final

from limits.rule_state import RuleState
from limits.rules import Rule

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping


@final
class ConsumerStates:
    """The rule on a consumer's unacked messages, kept only for consumers that it is closed for.

    Attributes:
        closed: Those, by name, the longest closed first.
        opened: The state of each other consumer.
        blocked_count: How often the rule has closed, for whichever consumer.
    """

    __slots__ = ("_limit", "blocked_count", "closed", "opened")

    def __init__(self) -> None:
        self._limit = 0
        self.closed: dict[str, RuleState] = {}
        self.opened = RuleState(Rule.CONSUMER_UNACKED_MESSAGES)
        self.blocked_count = 0

    def change(self, limit: int) -> None:
        """Take another limit, 0 meaning none."""
        self._limit = limit
        self.opened = self._new_state()
        for state in self.closed.values():
            state.change(limit, mark=limit // 2)
        self._drop_opened()

    def state(self, consumer: str) -> RuleState:
        """Return the state of a consumer; `keep` it if it may have changed."""
        return self.closed.get(consumer, self.opened)

    def keep(self, consumer: str, state: RuleState) -> None:
        """Keep the state of a consumer as long as it is closed, and no longer."""
        if state is not self.opened:
            if not state.is_closed:
                del self.closed[consumer]
        elif state.is_closed:
            self.closed[consumer] = state
            self.blocked_count += 1
            self.opened = self._new_state()

    def refresh(self, unacked: Mapping[str, int] | Callable[[str], int]) -> None:
        """Open the rule for those whose use has fallen."""
        for name, state in self.closed.items():
            state.open_at(unacked(name) if callable(unacked) else unacked.get(name, 0))
        self._drop_opened()

    def forget(self, consumer: str) -> None:
        """Open the rule for a consumer, who is gone."""
        self.closed.pop(consumer, None)

    def _drop_opened(self) -> None:
        self.closed = {name: state for name, state in self.closed.items() if state.is_closed}

    def _new_state(self) -> RuleState:
        state = RuleState(Rule.CONSUMER_UNACKED_MESSAGES)
        # At half, where the rule of the subscription opens below half: as Pulsar's Consumer has it.
        state.change(self._limit, mark=self._limit // 2)
        return state
