"""Whose requests they are, by the API key that the server checks."""

import pytest

from serving.request.tenant import GUARDED, tenant_of


def named(path: str = "/v1/completions", **headers: str) -> str:
    return tenant_of(path, [(name.replace("_", "-"), value) for name, value in headers.items()])


def test_a_key_gives_the_same_tenant_again_and_does_not_show_in_it() -> None:
    first = named(Authorization="Bearer secret-of-a")
    assert first == named(authorization="bearer secret-of-a") != named(authorization="Bearer secret-of-b")
    assert len(first) == 16
    assert "secret" not in first


@pytest.mark.parametrize("value", ["", "Bearer", "Bearer ", "Basic secret", "secret"])
def test_what_is_no_bearer_token_names_nobody(value: str) -> None:
    assert named(authorization=value) == ""


def test_where_no_key_is_checked_none_counts() -> None:
    assert named("/invocations", authorization="Bearer anything") == ""


def test_keys_are_checked_where_vllm_does() -> None:
    from vllm.entrypoints.serve.middleware.authenticate import GUARDED_PREFIX

    assert GUARDED == GUARDED_PREFIX
    assert all(named(f"{prefix}/anything", authorization="Bearer secret") for prefix in GUARDED)


def test_keys_of_any_bytes_are_digested() -> None:
    assert len(named(authorization="Bearer \xff\xfe")) == 16
