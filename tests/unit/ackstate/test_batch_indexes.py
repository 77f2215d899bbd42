import pytest

from ackstate import Position
from ackstate.batch_indexes import BatchIndexes

P = Position
WORD_MAX, WORD_MIN = 2**63 - 1, -(2**63)


def held(*batches):
    indexes = BatchIndexes()
    for position, words in batches:
        indexes.ack(position, words)
    return indexes


def test_the_last_ack_of_a_batch_completes_it():
    indexes = BatchIndexes()
    assert not indexes.ack(P(3, 7), [0b110])
    assert not indexes.ack(P(3, 7), [0b101])
    assert indexes.get(P(3, 7)) == (0b100,)
    assert indexes.ack(P(3, 7), [0b011])
    assert P(3, 7) not in indexes
    assert indexes.get(P(3, 7)) is None
    assert indexes == BatchIndexes()


@pytest.mark.parametrize(
    ("given", "kept"),
    [
        ([-1], (-1,)),
        ([WORD_MIN], (WORD_MIN,)),
        ([WORD_MAX], (WORD_MAX,)),
        ([0, 1], (0, 1)),
        ([0, WORD_MIN, 0, 0], (0, WORD_MIN)),
        ([5, -2, 0], (5, -2)),
    ],
)
def test_words_are_as_java_has_them(given, kept):
    assert held((P(3, 7), given)).get(P(3, 7)) == kept


def test_a_missing_word_is_acked():
    indexes = held((P(3, 7), [-1, -1, -1]))
    assert not indexes.ack(P(3, 7), [-1, 0b10])
    assert indexes.get(P(3, 7)) == (-1, 0b10)


def test_batches_up_to_a_position_are_forgotten():
    indexes = held(*((P(ledger, entry), [1]) for ledger in (2, 3, 4) for entry in (0, 7, 9)))
    assert indexes.remove_at_most(P(3, 7)) == 5
    assert indexes.remove_at_most(P(3, 8)) == 0
    assert [position for position, _ in indexes.items()] == [P(3, 9), P(4, 0), P(4, 7), P(4, 9)]


@pytest.mark.parametrize(
    ("position", "words", "error", "text"),
    [
        (P(3, -1), [1], ValueError, "entry id of ledger 3 must be in .* got -1"),
        (P(3, 2**32), [1], ValueError, str(2**32)),
        (P(-1, 0), [1], ValueError, "ledger id must be in .* got -1"),
        (P(2**63, 0), [1], ValueError, str(2**63)),
        (P(3, 7.0), [1], TypeError, "7.0"),
        (P(3, 7), [2**63], ValueError, str(2**63)),
        (P(3, 7), [1, WORD_MIN - 1], ValueError, str(WORD_MIN - 1)),
        (P(3, 7), [0, 1.5], TypeError, "1.5"),
        (P(3, 7), ["1"], TypeError, "'1'"),
        (P(3, 7), [None], TypeError, "None"),
        (P(3, 7), 1, TypeError, "int"),
    ],
)
def test_a_refused_call_changes_nothing(position, words, error, text):
    indexes = held((P(2, 0), [1]), (P(3, 7), [0b11]))
    with pytest.raises(error, match=text):
        indexes.ack(position, words)
    assert indexes == held((P(2, 0), [1]), (P(3, 7), [0b11]))
