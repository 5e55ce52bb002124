"""The application's configuration: what is accepted, what each mistake is told, and what becomes of it."""

import re
from pathlib import Path
from typing import Any

import msgspec
import pytest

from controller.options import FleetOptions
from replicas.config import ReplicaConfig
from serving.app import check_cluster
from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.group import Group

H200, SHARED = "h200_sxm__llama-3.1-8b", {"kind": "simulated", "per_process": 3}


def mistake(settings: Any) -> str:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    return str(error.value)


def only(config: AppConfig) -> Group:
    """The group of a fleet of one kind."""
    (group,) = config.replica_groups()
    return group


def test_nothing_configured_is_the_embedded_model() -> None:
    config = AppConfig.read(None)
    assert config == AppConfig.read({}) == AppConfig.read({"model": "embedded", "engine": "vllm"})
    assert (config.model.name, only(config).profile) == ("embedded", "embedded-cpu")


def test_a_model_without_a_profile_finds_its_own() -> None:
    assert only(AppConfig.read({"model": "a/b"})).profile == "auto"
    assert only(AppConfig.read({"engine": {"num_gpus": 1}})).profile == "auto"
    assert only(AppConfig.read({"profile": "auto"})).profile == "embedded-cpu"


@pytest.mark.parametrize(
    ("settings", "told"),
    [
        ({"engin": {}}, "engin: unknown key; did you mean 'engine'?"),
        ({"engine": {"max_num_seq": 8}}, "engine.max_num_seq: unknown key; did you mean 'max_num_seqs'?"),
        (
            {"engine": {"speculation": {"lookup_max": 1}}},
            "engine.speculation.lookup_max: unknown key; did you mean 'pro",
        ),
        ({"ingress": {"zzz": 1}}, "ingress.zzz: unknown key; known: drain_s, limits, max_ongoing"),
        ({"engine": {"kind": "sglang"}}, "engine.kind: input should be 'vllm' or 'simulated', got 'sglang'"),
        ({"engine": {"scheduler": "slow"}}, "engine.scheduler: no scheduler 'slow'; did you mean 'slo'?"),
        ({"engine": {"scheduler_options": {"acceptance": 0.5}}}, "engine.scheduler_options.acceptance: unknown key"),
        (
            {"engine": {"scheduler_options": {"best_effort_share": 1}}},
            "engine.scheduler_options.best_effort_share: set fleet.best_effort_share",
        ),
        ({"engine": {"max_num_seqs": 0}}, "engine.max_num_seqs: input should be greater than 0, got 0"),
        ({"engine": {"max_num_seqs": "64"}}, "engine.max_num_seqs: input should be a valid integer, got '64'"),
        ({"engine": {"kv_cache_gib": -1}}, "engine.kv_cache_gib: input should be greater than or equal to 0"),
        ({"engine": {"max_num_batched_tokens": 8}}, "engine.max_num_batched_tokens: must be at least max_num_seqs"),
        (
            {"engine": {"speculation": {"prompt_lookup_max": 1}}},
            "engine.speculation.prompt_lookup_max: must be at least",
        ),
        (
            {"engine": {"engine_kwargs": {"max_model_len": 9}}},
            "engine.engine_kwargs.max_model_len: set model.max_model_len",
        ),
        (
            {"engine": {"engine_kwargs": {"enable_chunked_prefill": 0}}},
            "engine.engine_kwargs.enable_chunked_prefill: sched",
        ),
        ({"engine": {"engine_kwargs": {"block_size": 9}}}, "engine.engine_kwargs.block_size: set engine.block_size"),
        ({"fleet": {"num_replicas": 2.5}}, "fleet.num_replicas: input should be a valid integer, got 2.5"),
        ({"fleet": {"num_replicas": True}}, "fleet.num_replicas: input should be a valid integer, got True"),
        ({"fleet": {"silent_s": float("nan")}}, "fleet.silent_s: input should be a finite number"),
        ({"fleet": {"seed": -1}}, "fleet.seed: input should be greater than or equal to 0, got -1"),
        ({"fleet": {"seed": 2**70}}, "fleet.seed: input should be less than 2147483648, got"),
        ({"fleet": {"silent_s": 0.1}}, "fleet.silent_s: must exceed report_interval_s (0.15), got 0.1"),
        ({"fleet": {"routing": "roundrobin"}}, "fleet.routing: no policy 'roundrobin'; did you mean 'round_robin'?"),
        ({"fleet": {"overload_status": 200}}, "fleet.overload_status: input should be greater than or equal to 400"),
        ({"fleet": {"best_effort_share": 1.0}}, "fleet.best_effort_share: input should be less than 1"),
        ({"profile": "h200_sxm"}, "profile: unknown profile 'h200_sxm'"),
        ({"engine": "simulated"}, "profile: is needed for the simulated engine"),
        ({"engine": {"device": "timed"}}, "profile: is needed for a timed device"),
        ({"engine": {"per_process": 2}}, "engine.per_process: an engine of kind vllm has a process of its own"),
        ({"engine": SHARED, "profile": H200}, "engine.per_process: 3 does not divide the 2 replicas"),
        (
            {"engine": SHARED, "profile": H200, "fleet": {"num_replicas": 3, "autoscaling": {"max_replicas": 6}}},
            "engine.per_process: must be 1 with fleet.autoscaling",
        ),
        ({"model": {"id": ""}}, "model.id: string should have at least 1 character"),
        (
            {"engine": {"scheduler_options": {"newcomer_share": 5}}},
            "engine.scheduler_options.newcomer_share must lie in (0, 1]",
        ),
        ({"groups": [{"name": "a", "replica": 2}]}, "groups.0.replica: unknown key; did you mean 'num_replicas'?"),
        ({"groups": [{"name": "A 1"}]}, "groups.0.name: string should match pattern"),
        ({"groups": [{"name": "a"}, {"name": "a"}]}, "groups.1.name: 'a' is used twice"),
        ({"groups": [{"name": "a"}], "fleet": {"num_replicas": 2}}, "fleet.num_replicas: each of the groups"),
        ({"groups": [{"name": "a", "engine": {"max_seqs": 1}}]}, "groups.0.engine.max_seqs: unknown key"),
        ({"groups": [{"name": "a", "engine": {"kind": "simulated"}}]}, "groups.0.profile: is needed for"),
        ({"groups": [{"name": "a", "profile": "h100"}]}, "groups.0.profile: unknown profile 'h100'"),
        ({"groups": [{"name": "a", "phase": "encode"}]}, "groups.0.phase: input should be '', 'prefill' or 'decode'"),
        ({"disaggregation": {"prefill": 3}}, "disaggregation.prefill: 3 replicas, but only 2 are bound to no phase"),
        ({"disaggregation": {"prefill": 2}}, "disaggregation: a replica that prefills and one that decodes"),
        ({"groups": [{"name": "a", "phase": "decode"}]}, "disaggregation: a replica that prefills and one"),
        ({"fleet": {"routing": "silos", "roles": "dynamic"}}, "fleet.routing: replicas of silos do not move"),
        ({"fleet": {"prefix_affinity": 1}, "engine": {"enable_prefix_caching": False}}, "fleet.prefix_affinity: needs"),
        ({"fleet": {"roles": "dynamc"}}, "fleet.roles: input should be 'auto', 'static' or 'dynamic'"),
        ([], "configuration: must hold keys and values"),
    ],
)
def test_mistake_names_the_field(settings: Any, told: str) -> None:
    assert mistake(settings).startswith(told)


def test_replicas_that_share_processes_reserve_for_the_processes() -> None:
    engine = SHARED | {"num_cpus": 0.5}
    config = AppConfig.read({"engine": engine, "profile": H200, "fleet": {"num_replicas": 12}})
    (group,) = config.replica_groups()
    assert (config.num_replicas, group.num_processes, config.replica_config(group).per_process) == (12, 4, 3)
    assert config.cores_needed == 4 * 0.5 + config.ingress.num_cpus


def test_every_mistake_is_told_at_once() -> None:
    lines = mistake({"engine": {"kind": "x", "speed": 0}, "fleet": {"replica": 1}}).splitlines()
    assert [line.split(":")[0] for line in lines] == ["engine.kind", "engine.speed", "fleet.replica"]


def test_config_is_frozen() -> None:
    with pytest.raises(ValueError, match="frozen"):
        AppConfig.read({}).fleet.num_replicas = 3


def test_replica_config_carries_every_engine_setting() -> None:
    engine = {
        "scheduler": "vllm",
        "max_num_seqs": 8,
        "max_num_batched_tokens": 512,
        "kv_cache_gib": 0.5,
        "block_size": 32,
        "enable_prefix_caching": False,
        "enforce_eager": False,
        "hang_s": 9.0,
        "engine_kwargs": {"gpu_memory_utilization": 0.8},
        "device": "timed",
        "kv_capacity_tokens": 4096,
        "speed": 2.0,
        "scheduler_options": {"max_iteration_s": 0.5},
        "speculation": {"num_speculative_tokens": 3, "prompt_lookup_min": 1, "prompt_lookup_max": 2},
    }
    names = {"controller_name": "c", "controller_namespace": "n"}
    config = AppConfig.read(
        {
            "model": {"id": "a/b", "max_model_len": 1024, "dtype": "bfloat16", "load_format": "dummy"},
            "engine": engine,
            "profile": "h200_sxm__llama-3.1-8b",
            "fleet": {"report_interval_s": 0.2, "best_effort_share": 0} | names,
        }
    )
    replica = config.replica_config(only(config))
    renamed = {
        "kind",
        "scheduler",
        "scheduler_options",
        "speculation",
        "timed",
        "num_cpus",
        "num_gpus",
        "placement_group_bundles",
        "placement_group_strategy",
    }
    for name in type(config.engine).model_fields.keys() - renamed:
        assert getattr(replica, name) == getattr(config.engine, name), name
    assert (replica.engine, replica.policy) == ("vllm", "vllm")
    assert replica.policy_options == {"max_iteration_s": 0.5, "best_effort_share": 0.0}
    assert (replica.model, replica.max_model_len, replica.dtype) == ("a/b", 1024, "bfloat16")
    assert (replica.num_speculative_tokens, replica.prompt_lookup_min, replica.prompt_lookup_max) == (3, 1, 2)
    assert (replica.load_format, replica.profile, replica.report_interval_s) == ("dummy", "h200_sxm__llama-3.1-8b", 0.2)
    assert (replica.controller_name, replica.controller_namespace) == ("c", "n")


def test_defaults_of_replica_and_application_are_the_same() -> None:
    config = AppConfig.read({})
    replica, default = config.replica_config(only(config)), ReplicaConfig()
    own = {"profile", "controller_name", "controller_namespace"}
    differing = {name for name in replica.__struct_fields__ if getattr(replica, name) != getattr(default, name)}
    assert differing <= own


def test_fleet_options_carry_the_fleet_settings() -> None:
    fleet = {"routing": "random", "max_hops": 2, "unattainable": "refuse", "silent_s": 3.0, "seed": 7}
    fleet |= {"length_prior_tokens": 99.0, "best_effort_backlog": 0.5, "prefix_affinity": 0.5}
    fleet |= {"admission": False, "pending": False, "selection": "greedy", "controller_shards": 3}
    config = AppConfig.read({"fleet": fleet, "engine": {"block_size": 16}})
    options = config.fleet_options()
    assert isinstance(options, FleetOptions)
    assert (options.block_tokens, config.marked_block_tokens) == (16, 16)
    assert {name: getattr(options, name) for name in fleet} == fleet
    same = {*FleetOptions.__struct_fields__} & type(config.fleet).model_fields.keys()
    assert same == fleet.keys(), "each of them is tried here"


def test_best_effort_backlog_is_a_positive_multiple() -> None:
    assert AppConfig.read({}).fleet_options().best_effort_backlog == FleetOptions().best_effort_backlog == 2.0
    for wrong in (0, -1.0, "many"):
        with pytest.raises(ConfigError, match=r"fleet\.best_effort_backlog"):
            AppConfig.read({"fleet": {"best_effort_backlog": wrong}})


def test_cores_needed() -> None:
    config = AppConfig.read(
        {"engine": {"num_cpus": 2}, "fleet": {"num_replicas": 3}, "ingress": {"num_replicas": 2, "num_cpus": 0.25}}
    )
    assert config.cores_needed == 6.5


def test_a_group_differs_only_in_what_it_says() -> None:
    """Each kind of GPU with its own profile, engine limits and place in the cluster."""
    config = AppConfig.read(
        {
            "model": "a/b",
            "engine": {"num_gpus": 1, "max_num_seqs": 128, "speculation": {"num_speculative_tokens": 3}},
            "profile": "a100_sxm__llama-3.1-8b",
            "groups": [
                {"name": "a100", "num_replicas": 3, "accelerator_type": "A100"},
                {
                    "name": "h100",
                    "profile": "h100_sxm__llama-3.1-8b",
                    "resources": {"fast": 0.5},
                    "engine": {"max_num_seqs": 256, "num_gpus": 2, "engine_kwargs": {"tensor_parallel_size": 2}},
                },
            ],
        }
    )
    slow, fast = config.replica_groups()
    assert (slow.deployment, fast.deployment) == ("Replica-a100", "Replica-h100")
    assert (config.num_replicas, config.gpus_needed) == (4, 5)
    assert slow.actor_options == {"num_cpus": 1.0, "num_gpus": 1, "accelerator_type": "A100"}
    assert fast.actor_options == {"num_cpus": 1.0, "num_gpus": 2, "resources": {"fast": 0.5}}
    settings = {"engine_kwargs", "group", "profile", "max_num_seqs"}
    replicas = [config.replica_config(group) for group in (slow, fast)]
    assert [[getattr(r, name) for name in sorted(settings)] for r in replicas] == [
        [{}, "a100", 128, "a100_sxm__llama-3.1-8b"],
        [{"tensor_parallel_size": 2}, "h100", 256, "h100_sxm__llama-3.1-8b"],
    ]
    assert replicas[1].num_speculative_tokens == 3
    values = [msgspec.structs.asdict(replica) for replica in replicas]
    assert {name for name in values[0] if values[0][name] != values[1][name]} == settings


def test_disaggregation_reaches_every_replica() -> None:
    together = AppConfig.read({})
    assert together.replica_config(only(together)).kv_connector == ""
    apart = AppConfig.read({"disaggregation": {"prefill": 1}})
    replica = apart.replica_config(only(apart))
    assert (replica.phase, replica.kv_connector) == ("", "files")
    assert Path(replica.kv_connector_extra_config["shared_storage_path"]).is_absolute()
    groups = [{"name": "p", "phase": "prefill"}, {"name": "d", "phase": "decode"}]
    other = {"kv_connector": "NixlConnector", "kv_connector_extra_config": {"backends": ["UCX"]}}
    bound = AppConfig.read({"groups": groups, "disaggregation": other})
    replicas = [bound.replica_config(group) for group in bound.replica_groups()]
    assert [replica.phase for replica in replicas] == ["prefill", "decode"]
    assert {replica.kv_connector for replica in replicas} == {"NixlConnector"}
    assert replicas[0].kv_connector_extra_config == {"backends": ["UCX"]}


@pytest.mark.parametrize(
    ("cluster", "told"),
    [
        ({"CPU": 8}, "groups: h100 needs accelerator_type H100; the cluster has none"),
        ({"CPU": 2, "GPU": 2, "accelerator_type:H100": 1}, "needs 2.5 CPU; the cluster has 2"),
        ({"CPU": 8, "GPU": 1, "accelerator_type:H100": 1}, "needs 2 GPU; the cluster has 1"),
        ({"CPU": 8, "GPU": 2, "accelerator_type:H100": 1}, "needs 4 disk; the cluster has 0"),
    ],
)
def test_what_the_cluster_lacks_is_said_at_once(cluster: dict[str, float], told: str) -> None:
    settings: dict[str, Any] = {
        "engine": {"num_gpus": 1},
        "groups": [{"name": "h100", "num_replicas": 2, "accelerator_type": "H100", "resources": {"disk": 2.0}}],
    }
    with pytest.raises(ConfigError, match=re.escape(told)):
        check_cluster(AppConfig.read(settings), cluster)
    check_cluster(AppConfig.read(settings), {"CPU": 3, "GPU": 2, "accelerator_type:H100": 1, "disk": 4})
    check_cluster(AppConfig.read(settings | {"fleet": {"nodes_on_demand": True}}), cluster)


def test_a_group_changes_single_keys_of_a_section_and_keeps_the_others() -> None:
    engine = {"engine_kwargs": {"revision": "abc", "seed": 1}, "scheduler_options": {"aging_s": 9.0}}
    own = {"engine_kwargs": {"seed": 2}, "scheduler_options": {"fairness": 0.5}}
    config = AppConfig.read({"engine": engine, "groups": [{"name": "a"}, {"name": "b", "engine": own}]})
    first, second = (group.engine for group in config.replica_groups())
    assert first.engine_kwargs == {"revision": "abc", "seed": 1}
    assert second.engine_kwargs == {"revision": "abc", "seed": 2}
    assert second.scheduler_options == {"aging_s": 9.0, "fairness": 0.5}
