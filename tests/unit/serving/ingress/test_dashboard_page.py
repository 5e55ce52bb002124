"""``/dashboard``: it is served as the status is, needs nothing from elsewhere, and reads what a status has."""

import asyncio
import base64
import hashlib
import json
import re
from collections.abc import Iterable
from typing import Any

import pytest

pytest.importorskip("ray")

from controller import actor
from controller.actor import Controller
from controller.fleet import Fleet
from controller.scaling.allocation import AllocationOptions
from controller.scaling.history import Change
from controller.scaling.signals import ScalingOptions
from protocol.messages import INF, Outcome, Verdict
from protocol.starts import Start
from serving.dispatch.shard_status import merged_status
from serving.ingress.dashboard_page import DASHBOARD, dashboard_page, policy_of
from serving.ingress.replica_status import of_several
from tests.support.fleet_cases import TIGHT, ask, fleet, report
from tests.support.ingress_scene import Ingress
from tests.unit.serving.ingress.test_route_prefix import prefixed

TEXT = dashboard_page().body.decode()
SCRIPT = re.findall(r"<script>(.*?)</script>", TEXT, re.DOTALL)[0]
MARKUP = re.sub(r"<(script|style)>.*?</\1>", "", TEXT, flags=re.DOTALL)


def sha256(element: str) -> str:
    content = TEXT.split(f"<{element}>")[1].split(f"</{element}>")[0]
    return f"'sha256-{base64.b64encode(hashlib.sha256(content.encode()).digest()).decode()}'"


@pytest.mark.parametrize("method", ["GET", "HEAD"])
@pytest.mark.parametrize("root", ["", "/llm"])
def test_it_is_served_below_any_prefix_with_a_policy_for_its_own_script_alone(
    ingress: Ingress, root: str, method: str
) -> None:
    answer = prefixed(ingress, root, method, DASHBOARD)
    assert answer.status_code == 200
    assert answer.headers["content-type"] == "text/html; charset=utf-8"
    assert answer.headers["x-content-type-options"] == "nosniff"
    assert answer.content in (TEXT.encode(), b"" if method == "HEAD" else None)
    rules = dict(rule.split(" ", 1) for rule in answer.headers["content-security-policy"].split("; "))
    assert rules.pop("script-src") == sha256("script")
    assert rules.pop("style-src") == sha256("style")
    assert (rules.pop("connect-src"), rules.pop("img-src")) == ("'self'", "data:")
    assert {"default-src", "base-uri", "form-action", "frame-ancestors"} == set(rules)
    assert set(rules.values()) == {"'none'"}


def test_nobody_else_answers_there(ingress: Ingress) -> None:
    assert prefixed(ingress, "", "POST", DASHBOARD, {}).status_code in (404, 405)
    assert prefixed(ingress, "", "GET", f"{DASHBOARD}/").status_code == 404, "its question would go astray below that"


def test_a_policy_needs_exactly_one_script() -> None:
    with pytest.raises(ValueError, match="unpack"):
        policy_of("<style></style><script>1</script><script>2</script>")


def test_it_refers_to_nothing_elsewhere_and_asks_for_the_status_beside_it() -> None:
    assert not re.findall(r"(?:https?:|wss?:|ftp:)", TEXT)
    assert not re.findall(r"[\"'(=]\s*//\w|@import|url\(", TEXT)
    assert re.findall(r"(?:src|href)=\"([^\"]*)\"", TEXT) == ["data:,"]
    assert re.findall(r"fetch\(([^,)]*)", SCRIPT) == ['"polyslo/status"']


def test_text_of_the_server_is_never_markup_nor_code() -> None:
    makes_markup = r"innerHTML|outerHTML|insertAdjacentHTML|document\.write|DOMParser|srcdoc|setHTML"
    assert not re.findall(rf"{makes_markup}|\beval\b|\bFunction\b", SCRIPT)
    assert "textContent" in SCRIPT
    assert not re.findall(r"\s(?:style|on\w+)=", MARKUP), "the policy forbids them"


# -- what it reads -----------------------------------------------------------------------------------------------------


def busy_fleet() -> Fleet:
    """Two replicas, requests, an alarm of drift, a change of the size."""
    state = fleet(allocation=AllocationOptions(scaling=ScalingOptions(max_replicas=4)), prefix_affinity=1.0)
    for name in "ab":
        state.report(report(name), 0.0)
    for _ in range(100):
        state.admit([asked := ask(TIGHT)], 0.0)
        ended = Outcome(asked.request_id, "tight", "tight", "stop", True, 3.0, 0.1, 9.0, 1.0, 0.1, 50, Verdict.ADMITTED)
        state.on_outcome(ended, 0.0)
    state.allocation.history.note(Change(0.0, "fleet", "1", "2", "demand"))
    return state


async def controllers_page() -> dict[str, Any]:
    """What a controller tells of that fleet, while another replica starts."""
    controller = Controller(clock=lambda: 1.0)
    try:
        controller.fleet = busy_fleet()
        controller.starts.note(Start("c", "engine", 1.0, 0), 1.0)
        page: dict[str, Any] = json.loads(await controller.status())
        return page
    finally:
        for task in controller._tasks:
            task.cancel()
        await asyncio.gather(*controller._tasks, return_exceptions=True)


def keys(*parts: Iterable[str]) -> set[str]:
    return set().union(*parts)


@pytest.fixture
def parts(ingress: Ingress, monkeypatch: pytest.MonkeyPatch) -> dict[str, set[str]]:
    """Keys of each part of a status by the name that the page's script has for that part."""
    monkeypatch.setattr(actor, "warm_up", lambda: None)
    told = asyncio.run(controllers_page())
    page, away = (asked(ingress, monkeypatch, answer) for answer in (merged_status({0: told, 1: told}, {0: INF}), None))
    tier = page["attainment"]["tight"]
    return {
        "status": keys(page, of_several([page])),
        "page": keys(page, away),
        "replica": keys(of_several([page])["replicas"][0], away["replicas"][0]),
        "engine": keys(page["replicas"][0]["engine"]),
        "tier": keys(page["tiers"][0]),
        "counts": keys(tier),
        "recent": keys(tier["window"]),
        "times": keys(tier["window"]["ttft_ms"]),
        "controller": keys(page["controller"]),
        "lengths": keys(page["lengths"]),
        "arrival": keys(page["lengths"]["arrival"]),
        "prefixes": keys(page["prefixes"]),
        "programs": keys(page["programs"]),
        "drift": keys(page["drift"]),
        "alarm": keys(page["drift"]["alarms"][0]),
        "allocation": keys(page["allocation"]),
        "size": keys(page["allocation"]["size"]),
        "change": keys(page["allocation"]["history"][0]),
        "start": keys(of_several([page])["starting"][0]),
        "shard": keys(page["shards"][0]),
        "checkpoints": keys(page["checkpoints"]),
    }


def asked(ingress: Ingress, monkeypatch: pytest.MonkeyPatch, answer: dict[str, Any] | None) -> dict[str, Any]:
    """The status of an ingress whose controller answers so, or not at all."""

    async def status() -> dict[str, Any]:
        if answer is None:
            raise ConnectionError("controller is away")
        return answer

    monkeypatch.setattr(ingress.transport, "status", status)
    monkeypatch.setattr(ingress.ingress_app, "table_error", "version: raise it")
    monkeypatch.setattr(ingress.ingress_app, "_status_s", float("-inf"))
    page: dict[str, Any] = ingress.run(ingress.ask("/polyslo/status", method="GET")).json()
    return page


def test_what_it_reads_is_in_a_status(parts: dict[str, set[str]]) -> None:
    reads = re.findall(r"(?=\b(\w+)\??\.(\w+))", SCRIPT)
    known = {(owner, key) for owner, key in reads if owner in parts}
    assert {owner for owner, _ in known} == set(parts), "each part is shown"
    assert not [f"{owner}.{key}" for owner, key in sorted(known) if key not in parts[owner]]
