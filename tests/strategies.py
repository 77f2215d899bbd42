"""Positions at the seams: roaring container borders, varint lengths, first entries; few ids, so operations collide."""

from hypothesis import settings
from hypothesis import strategies as st

from ackstate import Position

ENTRY_ID_MAX = 2**32 - 1
LEDGER_ID_MAX = 2**63 - 1

_BORDERS = [0, 2**7, 2**14, 2**16, 2 * 2**16, 2**21, 2**28, ENTRY_ID_MAX]

ledger_ids = st.sampled_from([0, 3, 127, 128, 3_000_000, LEDGER_ID_MAX])
entry_ids = st.builds(
    lambda border, offset: min(max(border + offset, 0), ENTRY_ID_MAX), st.sampled_from(_BORDERS), st.integers(-4, 6)
)
positions = st.builds(Position, ledger_ids, entry_ids)

few = settings(max_examples=20) if settings.get_current_profile_name() == "ci" else settings()
"""For tests whose examples take long: in CI a tenth of those of all others."""
