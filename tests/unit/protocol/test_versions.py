"""Processes of two versions speak to each other while a deploy replaces them: what one sends, the other can read.

Messages are arrays of fields. So a later version may add fields at the end, with defaults, and change nothing else.
"""

import importlib
import pkgutil
from collections.abc import Iterator

import msgspec
import pytest

import protocol
from controller.options import FleetOptions

# Fields in their order, those with a default with "?". A new field is one with "?" at the end of its line.
EARLIER = {
    "kept_streams.KeptStream": "tokens times_s age_s ttft_s finish? stop_reason?",
    "links.Link": "address key channel",
    "links.Call": "number method body",
    "links.Answer": "number body error?",
    "links.AdmitCall": "ingress sent_s batch",
    "messages.Slo": "ttft_s? tpot_s? e2e_s? tier? best_effort? max_wait_s? is_tier_open? ttft_slowdown? is_default?",
    "messages.Traits": "app? program? output_hint_tokens? temperature? is_structured?",
    "messages.AdmissionRequest": (
        "request_id prompt_tokens max_tokens slo age_s? emitted_tokens? exclude? can_disaggregate? "
        "transferred_kv_tokens? prefix? group? tenant? prompt_digest? travelled_s? patience_s? traits? "
        "program? adapter? may_hop?"
    ),
    "messages.Admission": "decisions load?",
    "messages.Decision": (
        "request_id verdict replica tier reason predicted_ttft_s? predicted_tpot_s? hops? retry_after_s? "
        "output_tokens? prefill_only? transfer_s? output_bound_tokens? stage? value? ttft_s? margin_s? "
        "is_promoted? chance?"
    ),
    "messages.Progress": (
        "request_id slo age_s prompt_tokens computed_tokens emitted_tokens output_tokens "
        "output_cap_tokens running output_bound_tokens?"
    ),
    "messages.Step": "batch_tokens kv_tokens pairs sequences spec_steps seconds",
    "messages.EngineCounts": (
        "running? waiting? preemptions? prompt_tokens? generation_tokens? prefix_queries? prefix_hits?"
    ),
    "messages.Report": (
        "replica incarnation sequence profile kv_capacity_tokens kv_used_tokens max_running "
        "max_batch_tokens iteration_age_s requests? finished? steps? draining? pid? phase? block_tokens? "
        "max_iteration_s? best_effort_share? best_effort_stretch? planner_failures? counts? positions? "
        "age_s? drafts? acceptance? prefixes? aging_s? newcomer_share? steps_in_flight? "
        "lead_s? lead_share?"
    ),
    "messages.Outcome": (
        "request_id tier_asked tier_served finish met ttft_s tpot_s e2e_s predicted_ttft_s "
        "predicted_tpot_s output_tokens verdict scope? output_cap_tokens? tenant? was_promised? "
        "has_moved? first_token_met? chance?"
    ),
    "messages.Submission": (
        "request_id prompt_tokens emitted_tokens max_tokens slo age_s output_tokens prompt_digest "
        "payload? prefill_only? transfer? output_bound_tokens? tenant? program? value? early_s? "
        "resume_key? sent_tokens?"
    ),
    "messages.Delta": "request_id token_ids finish? stop_reason? extra? transfer? late?",
    "messages.Outputs": "steps busy deltas? load? draining? sent_s?",
    "messages.Rejection": "request_id reason",
    "prefixes.PrefixNews": "since stored? removed?",
    "programs.Program": (
        "id deadline_s? stage? parents? app? tools? model? is_last? is_session? age_s? is_promised? call? position?"
    ),
    "programs.StageGiven": "stage e2e_s left_s stages similarity is_promised",
    "starts.Start": "replica phase seconds downloaded_bytes",
    "shards.ShardReport": "shard replicas",
    "shards.Part": "replicas running deployed unplaced moves? hands?",
    "shards.ShardOrders": "place parts give? size?",
}


def messages() -> Iterator[tuple[str, type[msgspec.Struct]]]:
    for info in pkgutil.iter_modules(protocol.__path__):
        module = importlib.import_module(f"protocol.{info.name}")
        for name, kind in vars(module).items():
            if isinstance(kind, type) and issubclass(kind, msgspec.Struct) and kind.__module__ == module.__name__:
                yield f"{info.name}.{name}", kind


MESSAGES = dict(messages())


def test_every_message_is_known_here() -> None:
    assert MESSAGES.keys() == EARLIER.keys()


@pytest.mark.parametrize("name", sorted(EARLIER))
def test_a_message_of_an_earlier_version_is_read(name: str) -> None:
    kind, earlier = MESSAGES[name], EARLIER[name].split()
    assert kind.__struct_config__.array_like, "fields are told by their place"
    assert not kind.__struct_config__.forbid_unknown_fields, "a later version may send more"
    fields = [f"{field.name}{'' if field.required else '?'}" for field in msgspec.structs.fields(kind)]
    assert fields == earlier


def test_options_of_another_version_are_read() -> None:
    """They are told by their names: what is not known is passed over, and what is not told has its default."""
    told = msgspec.msgpack.encode({"application": "app", "of_a_later_version": [1, 2]})
    assert msgspec.msgpack.decode(told, type=FleetOptions) == FleetOptions(application="app")
