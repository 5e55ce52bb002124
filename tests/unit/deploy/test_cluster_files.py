"""What the cluster files say is accepted by Ray, Serve and our own loader, and fits together."""

import json
import subprocess
import tomllib
from pathlib import Path
from typing import Any

import pytest
import yaml
from jsonschema import ValidationError
from packaging.requirements import Requirement
from ray.autoscaler._private.kuberay.autoscaling_config import _derive_autoscaling_config_from_ray_cr
from ray.autoscaler._private.util import prepare_config, validate_config
from ray.serve.schema import ServeDeploySchema

from serving.app import check_cluster
from serving.config.app import AppConfig
from serving.config.tiers import TierTableConfig
from tests.support.serve_files import read_serve_file

ROOT = Path(__file__).resolve().parents[3]
CLUSTERS = ("cluster.yaml", "cluster-local.yaml")
KUBERAY = "deploy/kuberay.yaml"
PROJECT = tomllib.loads((ROOT / "pyproject.toml").read_text())
PACKAGES = {pattern.removesuffix("*") for pattern in PROJECT["tool"]["setuptools"]["packages"]["find"]["include"]}


def document(name: str) -> dict[str, Any]:
    return dict(yaml.safe_load((ROOT / name).read_text()))


@pytest.fixture
def serve_files(tmp_path: Path) -> dict[str, Path]:
    """Every Serve configuration of the project, the one inside the Kubernetes manifest among them."""
    inner = tmp_path / "serve.yaml"
    inner.write_text(document(KUBERAY)["spec"]["serveConfigV2"])
    return {"serve.yaml": ROOT / "serve.yaml", "gpu": ROOT / "deploy/serve-gpu.yaml", "kuberay": inner}


@pytest.mark.parametrize("name", CLUSTERS)
def test_ray_accepts_the_cluster(name: str) -> None:
    accepted = prepare_config(document(name))
    validate_config(accepted)
    assert accepted["available_node_types"][accepted["head_node_type"]]
    with pytest.raises(ValidationError, match="no_such_key"):
        validate_config(accepted | {"no_such_key": 1})


@pytest.mark.parametrize("name", CLUSTERS)
def test_nodes_get_the_whole_project_and_install_it_from_its_locks(name: str) -> None:
    cluster = document(name)
    for there, here in cluster["file_mounts"].items():
        assert (ROOT / here).exists(), here
        assert there == f"~/polyslo/{here}"
    assert PACKAGES | {"requirements", "pyproject.toml", "Makefile"} <= set(cluster["file_mounts"].values())
    (setup,) = [command for command in cluster["setup_commands"] if "make setup" in command]
    assert (ROOT / "requirements" / setup.partition("LOCKS=")[2].split()[0]).exists()


@pytest.mark.parametrize("name", CLUSTERS)
def test_links_in_what_nodes_get_point_to_what_nodes_get(name: str) -> None:
    """Ray's autoscaler reads every mounted file on the head; it ends at one that is not there."""
    mounted = [ROOT / here for here in document(name)["file_mounts"].values()]
    links = [path for folder in mounted for path in folder.rglob("*") if path.is_symlink()]
    assert links
    for link in links:
        assert any(link.resolve().is_relative_to(each) for each in mounted), link


@pytest.mark.parametrize("name", CLUSTERS)
def test_rays_processes_may_hold_many_connections(name: str) -> None:
    cluster = document(name)
    starts = [*cluster["head_start_ray_commands"], *cluster["worker_start_ray_commands"]]
    starts = [command for command in starts if "ray start" in command]
    assert len(starts) == 2
    for command in starts:
        assert "ulimit -n 65536" in command.partition("ray start")[0]


def test_a_machine_that_allows_fewer_connections_gives_all_that_it_allows() -> None:
    (start,) = document("cluster-local.yaml")["worker_start_ray_commands"]
    (raised,) = [part for part in start.split(";") if "ulimit" in part]
    script = f"ulimit -Sn 100; ulimit -Hn 200; {raised} 2>/dev/null; ulimit -n"
    told = subprocess.run(["bash", "-c", script], capture_output=True, text=True, check=True)
    assert told.stdout.split() in (["200"], ["65536"])  # a user with CAP_SYS_RESOURCE may raise what is allowed


def test_the_image_holds_the_whole_project() -> None:
    lines = (ROOT / "deploy/Dockerfile").read_text().splitlines()
    copied = {word for line in lines if line.startswith("COPY") for word in line.split()[2:-1]}
    assert PACKAGES | {"requirements", "pyproject.toml", "Makefile"} <= copied
    assert all((ROOT / word).exists() for word in copied)


def test_serve_and_polyslo_accept_every_serve_file(serve_files: dict[str, Path]) -> None:
    for name, path in serve_files.items():
        ServeDeploySchema.model_validate(yaml.safe_load(path.read_text()))
        config, user_config = read_serve_file(path)
        TierTableConfig.read(user_config).check_fits(config.most_replicas)
        assert config.model.name, name


def test_kubernetes_serves_what_the_cloud_example_serves(serve_files: dict[str, Path]) -> None:
    cloud, kuberay = (yaml.safe_load(serve_files[name].read_text()) for name in ("gpu", "kuberay"))
    assert kuberay.pop("proxy_location") == "EveryNode"  # behind Kubernetes' own load balancer
    assert cloud.pop("proxy_location") == "HeadOnly"
    assert kuberay == cloud


def whole(types: dict[str, dict[str, Any]]) -> dict[str, float]:
    """Ray's resources of a cluster in which every node type has as many nodes as it may have."""
    total: dict[str, float] = {}
    for each in types.values():
        for name, amount in each["resources"].items():
            total[name] = total.get(name, 0.0) + amount * max(each.get("max_workers", 1), 1)
    return total


def fixed(path: Path) -> AppConfig:
    """The application as if no node could be added."""
    (app,) = yaml.safe_load(path.read_text())["applications"]
    return AppConfig.read(app["args"] | {"fleet": {"nodes_on_demand": False}})


def test_the_cloud_cluster_can_grow_to_what_its_application_asks_for(serve_files: dict[str, Path]) -> None:
    types = document("cluster.yaml")["available_node_types"]
    workers = {name: kind for name, kind in types.items() if name != "head"}
    check_cluster(fixed(serve_files["gpu"]), whole(workers))
    assert all(kind["resources"]["GPU"] for kind in workers.values())


def test_kubernetes_can_grow_to_what_its_application_asks_for(serve_files: dict[str, Path]) -> None:
    """As Ray's autoscaler reads the manifest."""
    manifest = document(KUBERAY)
    cluster = manifest["spec"]["rayClusterConfig"]
    spec = {"metadata": {"name": "polyslo", "namespace": "default"}, "spec": cluster}
    types = _derive_autoscaling_config_from_ray_cr(spec)["available_node_types"]
    check_cluster(fixed(serve_files["kuberay"]), whole(types))
    for group in cluster["workerGroupSpecs"]:
        assert group["minReplicas"] <= group["replicas"] <= group["maxReplicas"]
        assert json.loads(json.loads(group["rayStartParams"]["resources"]))


def test_every_pod_has_probes_for_its_start_life_and_readiness() -> None:
    cluster = document(KUBERAY)["spec"]["rayClusterConfig"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        (container,) = group["template"]["spec"]["containers"]
        for probe in ("startupProbe", "livenessProbe", "readinessProbe"):
            command = container[probe]["exec"]["command"]
            assert "local_raylet_healthz" in command[-1]


def test_the_manifest_names_the_pinned_ray() -> None:
    pins = [Requirement(text) for text in PROJECT["project"]["dependencies"]]
    (ray,) = [str(pin.specifier) for pin in pins if pin.name == "ray"]
    assert f"=={document(KUBERAY)['spec']['rayClusterConfig']['rayVersion']}" == ray
