"""An actor that outlives deploys makes room for a later deploy's code, for one ingress at a time, and for no other."""

from functools import partial
from pathlib import Path

import pytest

from controller import upgrade
from controller.deploys import ApplicationClash
from controller.upgrade import UPGRADE_S, Greeting, Upgrade, code_id

GREETED = {"code": "old code", "number": 2, "is_over": True, "is_heir": False}


def greeted(actor: Upgrade, deploy: str, code: str, asker: str, told: int = 0, now_s: float = 0.0) -> Greeting:
    return actor.greet("app", deploy, told, code, asker, now_s)


def old() -> Upgrade:
    """It runs the code of a deploy that it knows."""
    actor = Upgrade("old code")
    assert not greeted(actor, "first", "old code", "i0")["is_over"]
    return actor


def test_one_ingress_of_a_later_deploy_with_other_code_is_the_upgrader() -> None:
    actor = old()
    assert greeted(actor, "second", "new code", "i1") == GREETED | {"is_heir": True}
    assert greeted(actor, "second", "new code", "i2") == GREETED
    assert greeted(actor, "second", "new code", "i1", 2, UPGRADE_S - 1.0)["is_heir"], "it may ask again"
    assert greeted(actor, "second", "new code", "i2", 2, UPGRADE_S)["is_heir"], "but has no more time for that"


def test_another_upgrader_is_chosen_where_the_first_one_is_gone() -> None:
    actor = old()
    greeted(actor, "second", "new code", "i1")
    assert not greeted(actor, "second", "new code", "i2", now_s=UPGRADE_S - 1.0)["is_heir"]
    assert greeted(actor, "second", "new code", "i2", now_s=UPGRADE_S)["is_heir"]
    assert not greeted(actor, "second", "new code", "i1", now_s=UPGRADE_S)["is_heir"]


def test_only_ingresses_of_deploys_after_the_one_that_started_it_end_an_actor() -> None:
    actor = Upgrade("new code", started_by=2)
    assert not greeted(actor, "first", "old code", "i0", told=1)["is_over"], "though no later one has spoken yet"
    assert greeted(actor, "second", "new code", "i1", told=2) == GREETED | {
        "code": "new code",
        "is_over": False,
    }
    assert not greeted(actor, "second", "same deploy, other node", "i2", told=2)["is_over"]
    assert greeted(actor, "third", "newer code", "i3")["is_over"]


def test_the_same_code_is_never_over_and_a_deploy_back_to_earlier_code_is_a_later_deploy() -> None:
    actor = old()
    assert not greeted(actor, "second", "old code", "i1")["is_over"]
    follower = Upgrade("new code", started_by=2)
    greeted(follower, "second", "new code", "i1", told=2)
    assert greeted(follower, "third", "old code", "i2")["is_over"]


def test_another_application_ends_nothing() -> None:
    actor = old()
    with pytest.raises(ApplicationClash, match=r"fleet\.controller_name"):
        actor.greet("other", "second", 0, "new code", "i1", 1.0)
    assert not greeted(actor, "first", "old code", "i0", told=1)["is_over"]


def test_the_digest_changes_with_every_source_of_the_packages_named(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("controller/upgrade.py", "controller/a.py", "profiles/gpu.json", "serving/b.py", "controller/x.md"):
        path = tmp_path / name
        path.parent.mkdir(exist_ok=True)
        path.write_text("1")
    monkeypatch.setattr(upgrade, "__file__", str(tmp_path / "controller" / "upgrade.py"))
    digest = partial(code_id.__wrapped__, "controller", "profiles")
    before = digest()
    assert before == digest()
    for name, changes in {
        "controller/a.py": True,
        "profiles/gpu.json": True,
        "serving/b.py": False,
        "controller/x.md": False,
    }.items():
        (tmp_path / name).write_text("2")
        assert (digest() != before) == changes, name
        (tmp_path / name).write_text("1")
    (tmp_path / "controller/a.py").rename(tmp_path / "controller/c.py")
    assert digest() != before
