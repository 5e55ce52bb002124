from typing import Any

import pytest

from planning.limits import LIMITS, make_limits


def test_a_record_of_the_fleet_dtype() -> None:
    limits = make_limits(1000, max_running=7)
    assert limits.dtype == LIMITS
    assert limits["max_running"] == 7


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("kv_capacity_tokens", 0),
        ("max_iteration_s", float("inf")),
        ("acceptance", 1.0),
        ("best_effort_share", -0.1),
        ("slack_margin", -1.0),
    ],
)
def test_what_makes_no_sense_is_named(field: str, value: float) -> None:
    arguments: dict[str, Any] = {"kv_capacity_tokens": 1000}
    with pytest.raises(ValueError, match=field):
        make_limits(**(arguments | {field: value}))
