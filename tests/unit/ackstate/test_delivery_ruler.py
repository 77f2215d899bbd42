from ackstate import Position
from ackstate.delivery_ruler import MARKS_MAX, DeliveryRuler

P = Position


def test_an_answer_is_not_taken_back_when_its_mark_is_dropped():
    ruler = DeliveryRuler(2_560)
    for entry in range(MARKS_MAX):
        ruler.record(P(3, entry), entry)
    assert ruler.old_up_to(2_598) == P(3, 38)
    ruler.record(P(3, MARKS_MAX), MARKS_MAX)
    assert 38 not in ruler.times
    assert len(ruler.times) < 20
    assert ruler.old_up_to(2_598) == P(3, 38)
    assert ruler.old_up_to(1_000) is None, "by a clock that went back"
    assert ruler.old_up_to(2_598) == P(3, 38)
    ruler.set_back(100)
    assert ruler.old_up_to(2_498) == P(3, 38)
    ruler.clear()
    assert ruler.old_up_to(2_598) is None
