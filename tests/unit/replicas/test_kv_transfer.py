"""Hand-overs of KV caches: what vLLM is told, and that it accepts it."""

import os
import tempfile
from importlib.util import find_spec
from pathlib import Path
from types import SimpleNamespace

import msgspec
import pytest

from protocol.messages import PREFILLED, Slo, Submission
from replicas.engine import LiveRequest
from replicas.kv_transfer import (
    CONNECTORS,
    FILES,
    HAND_OVER,
    LOAD,
    PARAMS,
    STORE,
    clipped_to_prompt,
    connector_config,
    default_storage,
    from_transfer,
    make_storage,
    missing_package,
    prefill_params,
    saved_tokens,
    to_transfer,
)
from replicas.request_rows import to_extra_args


def test_vllm_accepts_our_connector_and_finds_it() -> None:
    from vllm.config import KVTransferConfig
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    from replicas.vllm_kv_files import FilesConnector

    config = KVTransferConfig(**connector_config(FILES, {"shared_storage_path": "/kv"}))
    assert config.is_kv_producer
    assert config.is_kv_consumer
    assert KVConnectorFactory.get_connector_class(config) is FilesConnector
    assert config.get_from_extra_config("shared_storage_path", "") == "/kv"


def test_a_connector_of_vllms_is_taken_by_name() -> None:
    from vllm.config import KVTransferConfig

    config = KVTransferConfig(**connector_config("NixlConnector", {"backends": ["UCX"]}))
    assert (config.kv_connector, config.kv_connector_module_path) == ("NixlConnector", None)
    assert config.kv_connector_extra_config == {"backends": ["UCX"]}


def submission(said: dict[str, object] | None = None, min_tokens: int = 0, **more: object) -> Submission:
    """``said``: what the client has put among the extra arguments."""
    from vllm import SamplingParams
    from vllm.v1.engine import EngineCoreRequest

    from replicas.vllm_codec import encode_request

    sampling = SamplingParams(max_tokens=20, min_tokens=min_tokens, extra_args={"mine": 1} | (said or {}))
    request = EngineCoreRequest("r", [1, 2, 3], None, sampling, None, 0.0, None, None, None)
    return Submission("r", 3, 0, 20, Slo(), 0.0, 20, 0, encode_request(request), **more)  # type: ignore[arg-type]


def test_a_prefill_asks_for_one_token_and_says_that_it_goes_on_elsewhere() -> None:
    from replicas.vllm_engine import to_request

    asked = submission(prefill_only=True)
    params = to_request(asked, LiveRequest(asked, 0.0)).sampling_params
    assert (params.max_tokens, params.extra_args["mine"]) == (1, 1)
    told = params.extra_args[PARAMS]
    assert (told[STORE], told[LOAD], told[HAND_OVER]) == (True, False, "r")
    assert {"remote_engine_id", "remote_block_ids", "remote_host", "remote_port"} <= told.keys(), "NIXL reads these"


def test_a_prefill_of_a_request_with_least_tokens_is_one_that_vllm_can_read() -> None:
    """vLLM's engine checks parameters as it decodes them, and its input thread ended there."""
    from vllm.v1.engine import EngineCoreRequest
    from vllm.v1.serial_utils import MsgpackDecoder, MsgpackEncoder

    from replicas.vllm_engine import to_request

    asked = submission(prefill_only=True, min_tokens=10)
    sent = MsgpackEncoder().encode(to_request(asked, LiveRequest(asked, 0.0)))
    params = MsgpackDecoder(EngineCoreRequest).decode(sent).sampling_params
    assert (params.max_tokens, params.min_tokens) == (1, 1)


def test_nobody_else_reads_what_lies_in_a_folder_that_nobody_chose(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(tempfile, "tempdir", str(tmp_path))
    Path(default_storage()).mkdir(mode=0o755)  # as an earlier version made it
    storage = Path(make_storage(default_storage()))
    assert storage.parent == Path(default_storage())
    assert storage.parent.stat().st_mode & 0o777 == 0o700
    chosen = Path(make_storage(str(tmp_path / "chosen")))
    assert chosen.parent.stat().st_mode & 0o055, "engines of other users may share it"
    monkeypatch.setattr("os.getuid", lambda: os.geteuid() + 1)
    storage.parent.rename(default_storage())  # of the user whom it is taken for now
    with pytest.raises(PermissionError, match="another user"):
        make_storage(default_storage())


@pytest.mark.parametrize("said", [{STORE: True}, {LOAD: True}, {LOAD: True, HAND_OVER: "another"}, "text"])
def test_what_a_client_says_of_transfers_reaches_no_engine(said: object) -> None:
    from replicas.vllm_engine import to_request

    clients = {PARAMS: said, "ec_transfer_params": said}
    for more in ({}, {"prefill_only": True}, {"transfer": to_transfer({LOAD: True, HAND_OVER: "r"})}):
        asked, plain = submission(clients, **more), submission(**more)
        told, expected = (
            to_request(each, LiveRequest(each, 0.0)).sampling_params.extra_args for each in (asked, plain)
        )
        assert told == expected
        assert told["mine"] == 1


def test_what_the_first_engine_said_is_told_the_second() -> None:
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from replicas.vllm_codec import decode_output, handed_over
    from replicas.vllm_engine import to_request

    said = {LOAD: True, HAND_OVER: "r", "remote_block_ids": [[4, 5]], "remote_port": 5600}
    output = EngineCoreOutput("r", [65], finish_reason=FinishReason.LENGTH, kv_transfer_params=said)
    delta = handed_over(output, output.kv_transfer_params)
    assert (delta.finish, delta.token_ids, from_transfer(delta.transfer)) == (PREFILLED, (65,), said)
    shown = decode_output(msgspec.structs.replace(delta, finish=""))
    assert (shown.finish_reason, shown.kv_transfer_params) == (None, None), "nothing of it reaches the client"
    asked = submission(transfer=delta.transfer)
    assert to_request(asked, LiveRequest(asked, 0.0)).sampling_params.extra_args[PARAMS] == said


def test_logprobs_of_the_first_token_are_kept() -> None:
    import numpy as np
    from vllm.v1.engine import EngineCoreOutput, FinishReason
    from vllm.v1.outputs import LogprobsLists

    from replicas.vllm_codec import decode_output, handed_over

    logprobs = LogprobsLists(np.array([[65, 66]]), np.array([[-0.1, -2.0]]), np.array([1]))
    output = EngineCoreOutput("r", [65], new_logprobs=logprobs, finish_reason=FinishReason.LENGTH)
    shown = decode_output(handed_over(output, None))
    assert shown.finish_reason is None
    assert shown.new_logprobs.logprobs.tolist() == [[-0.1, -2.0]]


@pytest.mark.parametrize(
    ("emitted", "computed", "offered", "taken"),
    [
        (1, 0, (65, True), (64, True)),  # all of 65 tokens, of which the other engine has computed 64
        (1, 32, (33, True), (32, True)),
        (1, 64, (1, True), (0, False)),  # nothing is left to wait for
        (0, 0, (65, False), (65, False)),
        (1, 0, (0, False), (0, False)),
        (1, 0, (None, False), (None, False)),  # the connector does not know yet
    ],
)
def test_no_connector_brings_the_token_that_was_emitted_elsewhere(
    emitted: int, computed: int, offered: tuple[int | None, bool], taken: tuple[int | None, bool]
) -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    asked = to_extra_args(Slo(), 0.0, 20, emitted) | {PARAMS: {LOAD: True}}
    request = Request("r", [1] * 65, SamplingParams(max_tokens=20, extra_args=asked), None)
    assert clipped_to_prompt(lambda _request, _computed: offered)(request, computed) == taken


def test_what_was_not_prefilled_elsewhere_takes_what_the_connector_offers() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request(
        "r",
        [1] * 65,
        SamplingParams(max_tokens=20, extra_args=to_extra_args(Slo(), 0.0, 20, 1)),
        None,
    )
    assert clipped_to_prompt(lambda _request, _computed: (65, True))(request, 0) == (65, True)


def test_a_request_that_is_not_the_fleets_has_emitted_nothing_elsewhere() -> None:
    from vllm import SamplingParams
    from vllm.v1.request import Request

    request = Request("r", [1] * 65, SamplingParams(max_tokens=20, extra_args={PARAMS: {LOAD: True}}), None)
    assert clipped_to_prompt(lambda _request, _computed: (65, True))(request, 0) == (65, True)


def test_every_request_is_a_hand_over_of_its_own() -> None:
    assert prefill_params("a")[HAND_OVER] != prefill_params("b")[HAND_OVER]


@pytest.mark.parametrize("prefill_only", [True, False])
def test_a_prefilling_engine_reports_that_nothing_follows_the_first_token(prefill_only: bool) -> None:
    asked = msgspec.structs.replace(submission(), prefill_only=prefill_only)
    progress = LiveRequest(asked, 0.0).to_progress(1.0)
    assert progress.output_cap_tokens == (1 if prefill_only else 20)


def test_only_connectors_of_vllms_have_a_role_of_their_own() -> None:
    from vllm.config import KVTransferConfig

    producer = KVTransferConfig(**connector_config("NixlConnector", {}, "kv_producer", engine_id="e", kv_port=7))
    assert (producer.kv_role, producer.engine_id, producer.kv_port) == ("kv_producer", "e", 7)
    assert producer.kv_load_failure_policy == "recompute"
    assert KVTransferConfig(**connector_config("A", {}, kv_load_failure_policy="fail")).kv_load_failure_policy == "fail"


def test_a_connector_says_which_package_it_needs() -> None:
    assert missing_package(FILES) == missing_package("ExampleConnector") == ""
    for connector, kind in CONNECTORS.items():
        assert missing_package(connector) == ("" if find_spec(kind.module) else kind.package)


def test_every_connector_in_the_table_is_one_of_vllms() -> None:
    from vllm.distributed.kv_transfer.kv_connector.factory import KVConnectorFactory

    assert set(CONNECTORS) <= set(KVConnectorFactory._registry)


@pytest.mark.parametrize(
    ("params", "local", "saved"),
    [
        pytest.param(None, 96, 64, id="the window after a hit is computed again"),
        pytest.param(None, 16, 0, id="a hit no longer than the window saves nothing"),
        pytest.param({LOAD: True}, 96, 136, id="a prefill elsewhere brings the window along"),
    ],
)
def test_tokens_that_need_no_computing(params: dict[str, object] | None, local: int, saved: int) -> None:
    asked = []

    def matched(_request: object, computed_tokens: int) -> tuple[int, bool]:
        asked.append(computed_tokens)
        return 40, True

    assert saved_tokens(SimpleNamespace(kv_transfer_params=params), local, 32, matched) == saved
    assert asked == ([local] if params else []), "a look-up in another store may be expensive"
