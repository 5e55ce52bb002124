"""Devices of one engine: what is derived, what contradicts, and what no cluster could ever hold."""

from typing import Any

import pytest

from serving.app import check_cluster
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.group import SEES_GPUS, Group
from serving.config.parallel import misfit

TIMED = {"device": "timed"}
H200 = "h200_sxm__llama-3.1-8b"


def sizes(tensor: int, pipeline: int) -> dict[str, Any]:
    return {"engine_kwargs": {"tensor_parallel_size": tensor, "pipeline_parallel_size": pipeline}}


def group(engine: dict[str, Any], **more: Any) -> Group:
    (only,) = AppConfig.read({"engine": engine, "profile": H200, **more}).replica_groups()
    return only


def mistake(engine: dict[str, Any]) -> str:
    with pytest.raises(ConfigError) as error:
        AppConfig.read({"engine": engine, "profile": H200})
    return str(error.value)


def test_tensor_parallelism_alone_stays_on_one_node_as_one_reservation() -> None:
    alone = group({"num_gpus": 2, **sizes(2, 1)})
    assert alone.placement == {}
    assert alone.actor_options == {"num_cpus": 1.0, "num_gpus": 2.0}
    assert alone.reserved == {"CPU": 1.0, "GPU": 2.0}


def test_a_pipeline_gets_a_bundle_for_each_gpu_and_the_replica_joins_the_first() -> None:
    piped = group({"num_gpus": 4, "num_cpus": 2, **sizes(2, 2)})
    assert piped.placement["placement_group_strategy"] == "PACK"
    assert piped.placement["placement_group_bundles"] == [{"GPU": 1.0, "CPU": 2.0}] + 3 * [{"GPU": 1.0}]
    assert piped.actor_options == {"num_cpus": 2.0, "num_gpus": 0, "runtime_env": {"env_vars": SEES_GPUS}}
    assert piped.reserved == {"CPU": 2.0, "GPU": 4.0}
    config = AppConfig.read({"engine": {"num_gpus": 4, **sizes(2, 2)}, "profile": H200})
    assert config.replica_config(config.replica_groups()[0]).is_placed
    assert config.gpus_needed == 8.0


def test_a_stated_strategy_spreads_tensor_parallelism_over_nodes() -> None:
    spread = group({"num_gpus": 2, "placement_group_strategy": "STRICT_SPREAD", **sizes(2, 1)})
    assert len(spread.bundles) == 2
    assert spread.placement["placement_group_strategy"] == "STRICT_SPREAD"


def test_stated_bundles_say_how_many_gpus_there_are() -> None:
    bundles = [{"GPU": 1.0, "CPU": 4.0}, {"GPU": 1.0}]
    stated = group({"placement_group_bundles": bundles, **sizes(1, 2)})
    assert stated.engine.runs_on == "gpu"
    assert stated.bundles == [{"GPU": 1.0, "CPU": 5.0}, {"GPU": 1.0}]


def test_one_bundle_of_all_gpus_keeps_a_pipeline_on_one_node_without_ray() -> None:
    packed = group({"placement_group_bundles": [{"GPU": 4.0}], **sizes(2, 2)})
    assert packed.placement == {}
    assert packed.actor_options["num_gpus"] == 4.0


def test_a_group_with_its_kind_of_gpu_asks_for_it_in_every_bundle() -> None:
    own = {"name": "h", "accelerator_type": "H100", "resources": {"disk": 1.0}}
    kind = group({"num_gpus": 2, **sizes(1, 2)}, groups=[own])
    assert kind.bundles == [
        {"accelerator_type:H100": 0.001, "GPU": 1.0, "CPU": 1.0, "disk": 1.0},
        {"accelerator_type:H100": 0.001, "GPU": 1.0},
    ]
    assert "accelerator_type" not in kind.actor_options, "the bundle has it"
    assert kind.actor_options["resources"] == {"disk": 1.0}


@pytest.mark.parametrize(
    ("name", "told"),
    [
        ("CPU", "set engine.num_cpus of the group"),
        ("GPU", "set engine.num_gpus of the group"),
        ("memory", "Ray counts memory itself"),
        ("object_store_memory", "Ray counts memory itself"),
    ],
)
def test_what_ray_counts_itself_is_no_custom_resource(name: str, told: str) -> None:
    with pytest.raises(ConfigError, match=rf"^groups\.0\.resources\.{name}: is no custom resource; {told}"):
        AppConfig.read({"groups": [{"name": "a", "resources": {name: 4}}]})


def test_timed_devices_take_bundles_of_cpus() -> None:
    assert group(TIMED | sizes(2, 2)).bundles == [], "all of them in the engine's own process"
    spread = group(TIMED | sizes(1, 2) | {"placement_group_strategy": "SPREAD"})
    assert spread.bundles == [{"CPU": 2.0}, {"CPU": 1.0}]


@pytest.mark.parametrize(
    ("engine", "told"),
    [
        (
            {"num_gpus": 2, **sizes(2, 2)},
            "engine.num_gpus: tensor_parallel_size 2 x pipeline_parallel_size 2 needs 4 GPUs, got 2",
        ),
        ({"num_gpus": 2}, "engine.num_gpus: tensor_parallel_size 1 x pipeline_parallel_size 1 needs 1 GPUs, got 2"),
        (
            {"placement_group_bundles": [{"GPU": 1.0}] * 3, **sizes(2, 1)},
            "engine.placement_group_bundles: tensor_parallel_size 2 x pipeline_parallel_size 1 needs 2 GPUs, got 3",
        ),
        (
            {"placement_group_bundles": [{"GPU": 2.0}, {"GPU": 2.0}], **sizes(2, 2)},
            "engine.placement_group_bundles.0: one of several has exactly 1 GPU, got 2",
        ),
        (
            {"num_gpus": 1, "placement_group_bundles": [{"GPU": 1.0}] * 2, **sizes(2, 1)},
            "engine.num_gpus: 1, but placement_group_bundles have 2 GPUs; state it once",
        ),
        (sizes(1, 2), "engine.engine_kwargs.pipeline_parallel_size: an engine on a CPU has one stage; set num_gpus"),
        ({"placement_group_strategy": "PACK"}, "engine.placement_group_strategy: an engine on a CPU runs on one node"),
        ({"kind": "simulated", "placement_group_bundles": [{"CPU": 1.0}]}, "engine.placement_group_bundles: the simul"),
        (TIMED | {"placement_group_bundles": [{"CPU": 1.0}], **sizes(2, 1)}, "engine.placement_group_bundles: tensor"),
        (TIMED | {"placement_group_bundles": [{"GPU": 1.0}]}, "engine.placement_group_bundles.0: a timed device is"),
        (
            {"num_gpus": 2, "engine_kwargs": {"pipeline_parallel_size": 2, "async_scheduling": False}},
            "engine.engine_kwargs.async_scheduling: a pipeline needs it; remove it",
        ),
        (
            TIMED | {"speculation": {"num_speculative_tokens": 2}} | sizes(1, 2),
            "engine.speculation: timed devices in a pipeline",
        ),
        ({"placement_group_strategy": "ANYWHERE"}, "engine.placement_group_strategy: input should be"),
        ({"num_gpus": 1, "engine_kwargs": {"data_parallel_size": 2}}, "engine.engine_kwargs.data_parallel_size: repl"),
        ({"num_gpus": 1, "engine_kwargs": {"nnodes": 2}}, "engine.engine_kwargs.nnodes: Ray places workers on nodes"),
    ],
)
def test_what_contradicts_is_one_error_that_names_the_key(engine: dict[str, Any], told: str) -> None:
    assert mistake(engine).startswith(told)


NODES: list[dict[str, float]] = [{"CPU": 4.0, "GPU": 2.0}, {"CPU": 4.0, "GPU": 1.0}]


@pytest.mark.parametrize(
    ("bundles", "strategy", "told"),
    [
        ([{"GPU": 1.0}] * 3, "PACK", ""),
        ([{"GPU": 1.0}] * 3, "STRICT_PACK", "needs one node with 3 GPU; the cluster has none"),
        ([{"GPU": 1.0}] * 2, "STRICT_PACK", ""),
        ([{"GPU": 1.0}] * 2, "STRICT_SPREAD", ""),
        ([{"GPU": 1.0}] * 3, "STRICT_SPREAD", "needs 3 nodes, one for each bundle; the cluster has 2"),
        ([{"GPU": 1.0, "CPU": 8.0}], "PACK", "needs one node with 8 CPU, 1 GPU; the cluster has none"),
        ([{"GPU": 1.0, "accelerator_type:H100": 0.001}], "PACK", ""),  # asked of the whole cluster elsewhere
    ],
)
def test_what_no_placement_can_be_made_of(bundles: list[dict[str, float]], strategy: str, told: str) -> None:
    assert misfit(bundles, strategy, NODES) == told


def test_auto_profiles_are_of_engines_on_one_node() -> None:
    told = "profile: name one for an engine with stages or bundles; auto measures those of one node"
    for engine in ({"num_gpus": 2, **sizes(1, 2)}, {"num_gpus": 2, "placement_group_strategy": "PACK", **sizes(2, 1)}):
        with pytest.raises(ConfigError, match=told):
            AppConfig.read({"engine": engine})
    assert AppConfig.read({"engine": {"num_gpus": 2, **sizes(2, 1)}}).replica_groups()[0].profile == "auto"


def test_a_cluster_with_enough_gpus_on_too_many_nodes_is_told_before_anything_waits() -> None:
    whole = {"CPU": 8.0, "GPU": 3.0}

    def fleet(engine: dict[str, Any], replicas: int) -> AppConfig:
        return AppConfig.read({"engine": engine, "profile": H200, "fleet": {"num_replicas": replicas}})

    with pytest.raises(ConfigError, match=r"^Replica: needs one node with 1 CPU, 3 GPU; the cluster has none; set"):
        check_cluster(fleet({"num_gpus": 3, **sizes(3, 1)}, 1), whole, NODES)
    over_nodes = {"num_gpus": 3, "placement_group_strategy": "PACK", **sizes(3, 1)}
    check_cluster(fleet(over_nodes, 1), whole, NODES)
    with pytest.raises(ConfigError, match=r"^fleet: needs 6 GPU; the cluster has 3"):
        check_cluster(fleet(over_nodes, 2), whole, NODES)
