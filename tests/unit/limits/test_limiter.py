"""The limiter for a broker with its own storage: what it reserves, writes and refuses."""

import pytest

from ackstate import BrokerLimit, CorruptStateError, InvalidPositionError, LedgerMap, Position
from ackstate.limits import AckLimiter, GateLimits, Rule


def positions(*entry_ids):
    return [Position(7, entry_id) for entry_id in entry_ids]


def limiter(count=20, *, stored=None, broker=None, **limits):
    return AckLimiter(LedgerMap.from_counts({7: count}), GateLimits(**limits), stored=stored, broker=broker)


def test_a_failed_write_leaves_the_acks_un_persisted():
    broker = limiter()
    broker.ack(positions(3, 5))
    broker.begin_persist()
    broker.ack(positions(7))
    for is_written in (False, True):
        assert broker.usage().unpersisted_record_bytes == 3 * 14
        broker.end_persist(written=is_written)
        left = 0 if is_written else 3
        assert (broker.usage().unpersisted_record_bytes, broker.redelivery_if_crashed) == (left * 14, left)
        if not is_written:
            broker.begin_persist()


def test_a_restart_continues_at_the_written_state():
    broker = limiter()
    broker.ack(positions(0, 1, 4))
    data = broker.begin_persist()
    broker.end_persist(written=True)
    broker.ack(positions(6))
    again = limiter(stored=data)
    assert (again.mark_delete, str(again.deleted)) == (Position(7, 1), "[(7:3..7:4]]")
    assert again.admit(positions(*range(8))) == positions(2, 3, 5, 6, 7)
    with pytest.raises(CorruptStateError):
        limiter(stored=data[:-1])


def test_at_a_full_range_limit_messages_that_fill_holes_are_sent_and_open_it():
    broker = limiter(max_unacked_ranges=2)
    assert broker.admit(positions(*range(9))) == positions(0, 1)
    broker.give_back(positions(0))
    broker.ack(positions(1, 3))
    assert broker.admit(positions(5)) == []
    (verdict,) = broker.why_blocked()
    assert (verdict.rule, verdict.used, verdict.limit) == (Rule.UNACKED_RANGES, 2, 2)
    woken = []
    broker.when_open(lambda: woken.append("open"))
    assert broker.admit(positions(0, 2, 5)) == positions(0, 2)
    assert (broker.ack(positions(0, 2)), woken) == ([], ["open"])
    assert broker.mark_delete == Position(7, 3)


def test_an_ack_for_which_nothing_is_reserved_is_refused_at_a_limit_and_changes_nothing():
    broker = limiter(max_unacked_ranges=1)
    assert broker.ack(positions(3)) == []
    assert broker.ack(positions(5, 4)) == positions(5)
    assert (broker.is_acked(Position(7, 5)), broker.usage().range_count) == (False, 1)
    broker.change_limits(GateLimits())
    assert broker.ack(positions(5)) == []


def test_an_ack_of_what_was_sent_is_taken_whatever_the_limits_are_now():
    broker = limiter()
    broker.admit(positions(*range(6)))
    broker.change_limits(GateLimits(max_unacked_ranges=1))
    assert broker.ack(positions(1, 3, 5)) == []


def test_an_ack_of_what_the_log_has_trimmed_since_is_refused():
    ledgers = LedgerMap.from_counts({7: 20, 8: 1})
    broker = AckLimiter(ledgers, GateLimits())
    assert broker.admit(positions(3)) == positions(3)
    ledgers.trim(8)
    with pytest.raises(InvalidPositionError):
        broker.ack(positions(3))


def test_the_subscriptions_of_a_broker_share_its_limit():
    shared = BrokerLimit(4, blocked_share=0.5)
    one, other = limiter(broker=shared), limiter(broker=shared)
    assert len(one.admit(positions(*range(9)))) == 4
    assert len(other.admit(positions(*range(9)))) == 2  # its share of a full broker
    one.close()
    assert shared.unacked_messages == 2


def test_calls_out_of_turn_are_refused():
    broker = limiter()
    with pytest.raises(RuntimeError, match="no persist is under way"):
        broker.end_persist(written=True)
    broker.begin_persist()
    with pytest.raises(RuntimeError, match="a persist is under way"):
        broker.begin_persist()
    for call in (broker.admit, broker.ack):
        with pytest.raises(InvalidPositionError):
            call(positions(20))
