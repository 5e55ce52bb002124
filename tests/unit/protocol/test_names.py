"""A replica's name says where it is."""

import pytest

from protocol.names import group_of, process_of, replica_name


@pytest.mark.parametrize(
    ("group", "number", "count", "name"),
    [("", 0, 1, "x7"), ("big.gpu", 0, 1, "big.gpu/x7"), ("", 2, 3, "x7.2"), ("big.gpu", 2, 3, "big.gpu/x7.2")],
)
def test_names_lead_back_to_group_and_process(group: str, number: int, count: int, name: str) -> None:
    assert replica_name(group, "x7", number, count) == name
    assert (group_of(name), process_of(name)) == (group, "x7")
