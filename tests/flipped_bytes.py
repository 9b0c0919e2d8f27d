"""Files with random bytes changed: reading them must succeed or be refused in one line."""

from collections.abc import Callable, Sequence

from hypothesis import given, settings
from hypothesis import strategies as st

from isotype.errors import IsotypeError

# bytes that keep a JSON file readable, and any others
_VALUES = st.one_of(st.sampled_from(b'0129-e."[]{},:(+*'), st.integers(0, 255))
_FLIPS = st.lists(st.tuples(st.integers(0, 1 << 20), _VALUES), min_size=1, max_size=3)


def check_flipped_bytes(
    content: bytes,
    count: int,
    write: Callable[[bytes], object],
    attempts: Sequence[Callable[[], object]],
) -> None:
    """Writes `count` copies of `content` with one to three changed bytes, and tries each with every
    function of `attempts`.
    """

    @settings(max_examples=count)
    @given(flips=_FLIPS)
    def check(flips):
        changed = bytearray(content)
        for position, value in flips:
            changed[position % len(changed)] = value
        write(bytes(changed))
        for attempt in attempts:
            try:
                attempt()
            except IsotypeError as refusal:
                assert "\n" not in refusal.message
                assert len(refusal.message) < 2000

    check()
