"""The plain form of restore keys, which users and other programs keep."""

from __future__ import annotations

import json

import pytest

from energon_bridge.core.stream.lane_state import BatchKey, RowKey, batch_key, pack_key, read_key, samples_of

A = ("0123456789abcdef", 7, 0, 0)
B = ("fedcba9876543210", 8, 2, 1)


@pytest.mark.parametrize(
    ("plain", "named", "samples"),
    [
        (A, RowKey((A,)), (A,)),
        (("Pack", 1, (A, B)), RowKey((A, B), 1), (A, B)),
        (("Batch", 3, 40, (A, B)), BatchKey(3, 40, (RowKey((A,)), RowKey((B,)))), (A, B)),
        (
            ("Batch", -1, 4, (("Pack", 0, (A, B)), A), 2),
            BatchKey(-1, 4, (RowKey((A, B), 0), RowKey((A,))), 2),
            (A, B, A),
        ),
    ],
)
def test_a_key_is_read_as_it_was_made_and_after_json(plain, named, samples):
    assert read_key(plain) == read_key(json.loads(json.dumps(plain))) == named
    assert named.samples == samples


def test_keys_are_written_as_they_were_in_older_runs():
    pack = pack_key(1, [A, B])
    assert pack == RowKey((A, B), 1).plain == ("Pack", 1, (A, B))
    assert RowKey((A,)).plain == A
    assert batch_key(3, 40, [A, pack], None) == ("Batch", 3, 40, (A, ("Pack", 1, (A, B))))
    assert batch_key(3, 41, [A], 1) == ("Batch", 3, 41, (A,), 1)
    assert [*samples_of(A), *samples_of(pack)] == [A, A, B]


@pytest.mark.parametrize(
    "key",
    [
        (),
        "abc",
        7,
        A[:3],
        (7, *A[1:]),
        (*A[:3], "0"),
        ("Pack", 0),
        ("Pack", "0", (A,)),
        ("Pack", 0, A),
        ("Batch", 0, 0),
        ("Batch", 0, "0", (A,)),
        ("Batch", 0, 0, 5),
        ("Batch", 0, 0, (A[:2],)),
        ("Batch", 0, 0, (("Batch", 0, 0, (A,)),)),
    ],
)
def test_what_is_no_key_is_refused(key):
    with pytest.raises(LookupError, match="is not a restore key of this package: expected"):
        read_key(key)
