"""Several models in one application: what they share, what must differ, and every mistake by the name of its field."""

from pathlib import Path
from typing import Any

import pytest

from serving.config.app import AppConfig
from serving.config.base import ConfigError
from serving.config.live import in_force
from serving.config.model_tables import tables_of
from serving.config.models import models_by_name
from serving.config.serve_file import load_document
from serving.config.vllm_check import told

ROOT = Path(__file__).resolve().parents[4]
CHAT, CODE = {"name": "chat"}, {"name": "code"}
LORA = {"enable_lora": True, "lora_modules": ["poet=/a/poet"]}
BATCH = {"name": "batch", "best_effort": True}


def read(*models: Any, **shared: Any) -> AppConfig:
    return AppConfig.read({**shared, "models": list(models)})


def test_an_entry_has_what_is_shared_key_by_key() -> None:
    simulated = {"engine": "simulated", "profile": "h100_sxm__llama-3.1-8b"}
    scaled = {"num_replicas": 2, "autoscaling": {"max_replicas": 4}}
    real = {"engine": {"kind": "vllm", "num_cpus": 2.0}, "profile": "auto"}
    own = {"fleet": {"autoscaling": {"warm_spares": 1}}, "model": {"id": "a/b", "served_model_name": "b"}}
    chat, code = read(CHAT, CODE | real | own, **simulated, fleet=scaled, engine_kwargs={"max_num_seqs": 8}).each
    assert (chat.engine.kind, code.engine.kind) == ("simulated", "vllm")
    assert [each.engine.max_num_seqs for each in (chat, code)] == [8, 8]
    assert [each.fleet.autoscaling.max_replicas for each in (chat, code)] == [4, 4]
    assert [each.fleet.autoscaling.warm_spares for each in (chat, code)] == [0, 1]
    assert [each.model.name for each in (chat, code)] == ["chat", "b"], "the entry's name, where none is stated"
    assert [each.engine.num_cpus for each in (chat, code)] == [1.0, 2.0]


def test_each_model_has_names_of_its_own() -> None:
    config = read(CHAT, CODE | {"groups": [{"name": "fast"}, {"name": "slow"}]})
    chat, code = config.each
    assert [group.deployment for group in config.replica_groups()] == [
        "Replica-chat",
        "Replica-code-fast",
        "Replica-code-slow",
    ]
    assert chat.replica_config(chat.replica_groups()[0]).controller_name == "polyslo-controller-{application}/chat"
    options = code.fleet_options("shop", "1")
    assert (options.application, options.model) == ("shop", "code")
    assert options.deployments == ("Replica-code-fast", "Replica-code-slow")
    stated = read(CHAT, CODE, fleet={"controller_name": "mine"}).each
    assert [each.fleet.controller_name for each in stated] == ["mine/chat", "mine/code"]


def test_one_model_is_as_it_was() -> None:
    config = AppConfig.read({"model": "embedded"})
    assert config.each == (config,)
    assert [group.deployment for group in config.replica_groups()] == ["Replica"]
    assert config.fleet_options("shop", "1").model == ""


def test_what_all_models_reserve_counts_together() -> None:
    config = read(CHAT, CODE | {"engine": {"num_gpus": 1, "num_cpus": 3.0}}, fleet={"num_replicas": 2})
    assert (config.num_replicas, config.gpus_needed, config.cores_needed) == (4, 2, 2 * 1.0 + 2 * 3.0 + 0.5)


def test_adapters_lead_to_their_model() -> None:
    config = read(CHAT, CODE | {"engine_kwargs": LORA})
    assert models_by_name(config.models) == {"chat": 0, "code": 1, "poet": 1}


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"models": [{}]}, "models.0.name: is required"),
        ({"models": "chat"}, "models: input should be a valid list"),
        ({"models": ["chat"]}, "models.0: must hold keys and values"),
        ({"models": [{"name": "A b"}]}, "models.0.name: string should match pattern"),
        ({"models": [CHAT, CODE, CHAT]}, "models.2.name: 'chat' is used twice"),
        ({"models": [CHAT | {"engine": {"spead": 1}}]}, "models.0.engine.spead: unknown key; did you mean 'speed'?"),
        ({"models": [CHAT | {"modell": "a"}]}, "models.0.modell: unknown key; did you mean 'model'?"),
        ({"modells": [], "models": [CHAT]}, "modells: unknown key; did you mean 'models'?"),
        ({"models": [CHAT | {"ingress": {}}]}, "models.0.ingress: belongs to the whole application"),
        ({"models": [CHAT | {"models": [CODE]}]}, "models.0.models: belongs to the whole application"),
        (
            {"models": [CHAT, CODE | {"model": {"served_model_name": "chat"}}]},
            "models.1.model.served_model_name: clients ask for 'chat' as a model already",
        ),
        (
            {"models": [{"name": "poet"}, CODE | {"engine_kwargs": LORA}]},
            "models.1.model.server_kwargs.lora_modules: clients ask for 'poet' as a model already",
        ),
        (
            {"models": [CHAT, CODE], "engine_kwargs": LORA},
            "models.1.model.server_kwargs.lora_modules: clients ask for 'poet' as a model already",
        ),
        (
            {"models": [CHAT | {"groups": [{"name": "b"}]}, {"name": "chat-b"}]},
            "models.1.name: another model's replicas are called Replica-chat-b too",
        ),
        (
            {"models": [CHAT | {"engine": {"max_num_seqs": 4}, "engine_kwargs": {"max_num_seqs": 4}}]},
            "models.0.engine_kwargs.max_num_seqs: engine.max_num_seqs says it too",
        ),
        ({"models": [CHAT, CODE | {"fleet": {"routing": "x"}}]}, "models.1.fleet.routing: no policy 'x'"),
        ({"name": "chat"}, "name: unknown key"),
    ],
)
def test_mistakes_name_the_entry_and_the_field(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as error:
        AppConfig.read(settings)
    assert str(error.value).startswith(message)


def test_a_mistake_in_what_is_shared_is_named_once_where_it_is_stated() -> None:
    with pytest.raises(ConfigError) as error:
        read(CHAT, CODE, engine={"spead": 1}, fleet={"seed": "x"})
    assert [line.partition(":")[0] for line in str(error.value).splitlines()] == ["engine.spead", "fleet.seed"]
    with pytest.raises(ConfigError, match=r"^models\.0\.fleet\.seed"):
        read(CHAT | {"fleet": {"seed": "x"}}, fleet={"seed": 1})
    with pytest.raises(ConfigError, match=r"^models\.1\.fleet\.num_replicas: each of the groups has its own$"):
        read(CHAT, CODE | {"groups": [{"name": "a"}]}, fleet={"num_replicas": 3})


def test_each_model_has_its_own_tiers() -> None:
    tiers = [
        {"name": "fast", "ttft_ms": 100, "models": ["chat"]},
        {"name": "fast", "ttft_ms": 900, "models": ["code"]},
        {"name": "deep", "e2e_ms": 9000, "models": ["code"]},
        BATCH,
    ]
    table = {"version": 2, "default_tier": "fast", "tiers": tiers, "aliases": {"slow": "deep", "quick": "fast"}}
    chat, code = tables_of(table, read(CHAT, CODE)).values()
    assert [(tier.name, tier.ttft_ms) for tier in chat.tiers] == [("fast", 100), ("batch", None)]
    assert [tier.name for tier in code.tiers] == ["fast", "deep", "batch"]
    assert (chat.aliases, code.aliases) == ({"quick": "fast"}, {"slow": "deep", "quick": "fast"})
    assert chat.version == code.version == 2


@pytest.mark.parametrize(
    ("models", "tier", "message"),
    [
        ([CHAT], {"name": "a", "tpot_ms": 9, "models": ["caht"]}, "tiers.2.models: no model 'caht'"),
        ([CHAT], {"name": "fast", "tpot_ms": 9, "models": ["chat"]}, "of model 'chat': tiers.2.name: 'fast' is used"),
        ([CHAT], {"name": "a", "best_effort": True, "models": ["chat"]}, "of model 'chat': tiers: exactly one must be"),
        ([CHAT, CODE], {"name": "a", "tpot_ms": 9, "num_replicas": 3}, "of model 'chat': tiers: 3 replicas are needed"),
        ([], {"name": "a", "tpot_ms": 9, "models": ["chat"]}, "tiers.2.models: there is only one model"),
    ],
)
def test_tiers_that_do_not_fit_the_models(models: list[Any], tier: dict[str, Any], message: str) -> None:
    table = {"version": 1, "default_tier": "fast", "tiers": [{"name": "fast", "ttft_ms": 100}, BATCH, tier]}
    with pytest.raises(ConfigError) as error:
        tables_of(table, AppConfig.read({"models": models}))
    assert str(error.value).startswith(message)


@pytest.mark.parametrize("own", [[], ["chat"]], ids=["shared tiers", "tiers by model"])
def test_settings_of_the_fleet_change_for_all_models_or_for_one(own: list[str]) -> None:
    tiers = [{"name": "fast", "ttft_ms": 100}, BATCH, {"name": "slow", "ttft_ms": 900, "models": own}]
    live = {"fleet": {"routing": "round_robin", "max_hops": 3}, "fleets": {"chat": {"max_hops": 2}}}
    config = read(CHAT, CODE)
    tables = tables_of({"version": 1, "default_tier": "fast", "tiers": tiers, **live}, config)
    changed = [in_force(each, tables[each.entry].fleet) for each in config.each]
    assert [(each.entry, each.fleet.routing, each.fleet.max_hops) for each in changed] == [
        ("chat", "round_robin", 2),
        ("code", "round_robin", 3),
    ]
    assert [each.fleet.controller_name for each in changed] == [each.fleet.controller_name for each in config.each]
    assert tables["chat"].version == 1


@pytest.mark.parametrize(
    ("models", "live", "message"),
    [
        ([CHAT], {"fleets": {"chta": {"max_hops": 2}}}, "fleets.chta: no such model; did you mean 'chat'?"),
        ([CHAT], {"fleets": {"chat": {"max_hop": 2}}}, "of model 'chat': fleet.max_hop: unknown key"),
        ([], {"fleets": {"chat": {"max_hops": 2}}}, "fleets: there is only one model; state fleet"),
    ],
)
def test_settings_of_no_models_fleet(models: list[Any], live: dict[str, Any], message: str) -> None:
    table = {"version": 1, "default_tier": "fast", "tiers": [{"name": "fast", "ttft_ms": 100}, BATCH], **live}
    with pytest.raises(ConfigError) as error:
        tables_of(table, AppConfig.read({"models": models}))
    assert str(error.value).startswith(message)


def test_flags_count_for_every_model() -> None:
    args = {"engine_kwargs": {"max_num_seqs": 4}, "models": [CHAT, CODE | {"engine": "vllm"}]}
    changed = told(args, {"max_num_seqs": 9}, {"fleet": {"num_replicas": 3}, "engine": {"num_gpus": 1}})
    for each in AppConfig.read(changed).each:
        assert (each.engine.max_num_seqs, each.engine.num_gpus, each.num_replicas) == (9, 1, 3)


def test_the_packaged_example_is_sound() -> None:
    from serving.launch.launch import check_documents

    document = load_document(ROOT / "examples" / "serve-models.yaml")
    (config,) = check_documents(document, "example")
    assert [each.entry for each in config.each] == ["chat", "code"]


def test_a_plain_string_stands_for_its_key_among_several_models_too() -> None:
    shared = {"lengths": {"estimator": "forest", "window": 8000}, "checkpoints": "/data"}
    chat, code = read(CHAT | {"checkpoints": {"period_s": 10.0}}, CODE | {"lengths": "gaussian"}, **shared).each
    assert (chat.checkpoints.uri, chat.checkpoints.period_s) == ("/data", 10.0)
    assert (code.lengths.estimator, code.lengths.window) == ("gaussian", 8000)
