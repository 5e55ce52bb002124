"""Claims on CPU cores."""

from pathlib import Path

from replicas.cores import CoreClaim


def test_no_core_is_claimed_twice_and_released_ones_are_free_again(tmp_path: Path) -> None:
    first = CoreClaim(2, tmp_path, {0, 1, 2})
    second = CoreClaim(1, tmp_path, {0, 1, 2})
    too_many = CoreClaim(2, tmp_path, {0, 1, 2})
    assert (first.cores, second.cores, too_many.cores) == ((0, 1), (2,), ())
    first.release()
    again = CoreClaim(2, tmp_path, {0, 1, 2})
    assert again.cores == (0, 1)
    for claim in (second, again):
        claim.release()
    assert CoreClaim(0, tmp_path, {0}).cores == ()
