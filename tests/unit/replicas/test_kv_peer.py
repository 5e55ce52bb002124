"""Each engine has ports and names of its own, and says where its KV caches are."""

from pathlib import Path

import pytest

from replicas.config import ReplicaConfig
from replicas.kv_peer import RPC_PORT, KvPeer
from replicas.kv_transfer import LMCACHE, LOAD, MOONCAKE, NIXL_HOST, NIXL_PORT, STORE, TRANSFER
from replicas.ports import PortClaim


def peer(connector: str, **settings: object) -> KvPeer:
    made = KvPeer(ReplicaConfig(kv_connector=connector, **settings))  # type: ignore[arg-type]
    made.open("10.0.0.7")
    return made


@pytest.mark.parametrize("connector", ["", "files", "LMCacheMPConnector"])
def test_what_listens_for_nobody_claims_nothing(connector: str) -> None:
    assert peer(connector).environment == {}


def test_two_engines_on_a_host_listen_each_on_its_own_ports(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(NIXL_HOST, raising=False)
    engines = [peer("NixlConnector", engine_kwargs={"tensor_parallel_size": 2}) for _ in range(2)]
    try:
        first, second = sorted(int(each.environment[NIXL_PORT]) for each in engines)
        assert second - first >= 2, "one for each rank"
        assert {each.environment[NIXL_HOST] for each in engines} == {"10.0.0.7"}
        assert len({each.config.kv_transfer_config["engine_id"] for each in engines}) == 2
        assert engines[0].told("r", None) is None
        assert engines[0].told("r", {"remote_port": 1}) == {"remote_port": 1}
    finally:
        for each in engines:
            each.close()


def test_the_operators_own_network_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(NIXL_HOST, "192.168.0.7")
    engine = peer("NixlConnector")
    assert engine.environment[NIXL_HOST] == "192.168.0.7"
    engine.close()


def test_mooncake_says_nothing_so_the_replica_says_where_the_cache_is() -> None:
    engine = peer(MOONCAKE)
    port = engine.environment["VLLM_MOONCAKE_BOOTSTRAP_PORT"]
    engine_id = engine.config.kv_transfer_config["engine_id"]
    assert engine.told("r", None) == {
        LOAD: True,
        STORE: False,
        TRANSFER: "r",
        "remote_engine_id": engine_id,
        "remote_bootstrap_addr": f"http://10.0.0.7:{port}",
    }
    engine.close()


def test_sockets_of_lmcache_differ_by_engine_and_keep_the_stated_name() -> None:
    engines = [peer(LMCACHE, kv_connector_extra_config={RPC_PORT: "mine"}) for _ in range(2)]
    names = {each.config.kv_connector_extra_config[RPC_PORT] for each in engines}
    assert len(names) == 2
    assert all(name.startswith("mine-") for name in names)


def test_a_port_is_held_until_it_is_given_back(tmp_path: Path) -> None:
    among = range(17990, 18000)
    one = PortClaim(6, tmp_path, among)
    with pytest.raises(OSError, match="no 6 free ports in a row"):
        PortClaim(6, tmp_path, among)
    first, other = one.first, PortClaim(2, tmp_path, among)
    assert other.first >= first + 6
    one.release()
    again = PortClaim(6, tmp_path, among)
    assert again.first == first
    again.release()
    other.release()
