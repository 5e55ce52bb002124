"""A real vLLM scheduler without an engine: its steps are played against a model that is a function of the position."""

import contextlib
import itertools
import socket
import zlib
from collections.abc import Callable, Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from protocol.messages import Slo

VOCABULARY = 250
READING_S = 0.001  # what passes between two readings of the benches' clock


def token_at(request_id: str, position: int) -> int:
    """What the played model says at an output position."""
    return zlib.crc32(f"{request_id} {position}".encode()) % VOCABULARY


def accepted_at(request_id: str, position: int, drafts: int) -> int:
    """Of ``drafts`` tokens proposed at an output position, those that the played model accepts."""
    return zlib.crc32(f"{request_id} {position} drafts".encode()) % (drafts + 1)


def check_table(table: np.ndarray, running: list[Any], waiting: list[Any], drafts: dict[str, int]) -> None:
    """The moving columns of a gathered table say what vLLM's requests say, but for ``drafts`` in flight."""
    from replicas.request_rows import EMITTED, KEY

    requests = [*running, *waiting]
    elsewhere = [request.sampling_params.extra_args[KEY][EMITTED] for request in requests]
    here = [len(request._output_token_ids) + request.num_output_placeholders for request in requests]
    unsure = [drafts.get(request.request_id, 0) for request in requests]
    here = [emitted - draft for emitted, draft in zip(here, unsure, strict=True)]
    ending = [made >= request.max_tokens for made, request in zip(here, requests, strict=True)]  # nothing to run
    assert table["emitted_tokens"].tolist() == (np.array(elsewhere) + here - ending).tolist()
    assert (table["output_tokens"] > table["emitted_tokens"]).all()
    assert table["running"].tolist() == [True] * len(running) + [False] * len(waiting)
    computed = table["computed_tokens"][: len(running)].tolist()
    assert computed == [r.num_computed_tokens - u for r, u in zip(running, unsure, strict=False)]


class Bench:
    """One scheduler, the requests given to it and what came out of them. Checks every table that is planned with."""

    def __init__(self, scheduler: Any, clock: Any) -> None:
        self.scheduler, self.clock = scheduler, clock
        gather = scheduler._rows.gather

        def checked(running: list[Any], waiting: list[Any], drafts: bool) -> np.ndarray:
            table = gather(running, waiting, drafts)
            try:
                check_table(table, running, waiting, self.drafts_in_flight)
            except AssertionError as error:  # which the scheduler would take for a failure of its own
                self.wrong.append(error)
            return table

        scheduler._rows.gather = checked
        self.wrong: list[AssertionError] = []  # about tables
        self.outputs: dict[str, list[int]] = {}
        self.finished: set[str] = set()
        self.batches: list[dict[str, int]] = []
        self.link: socket.socket | None = None
        self.preempted: set[str] = set()
        self.drafts_in_flight: dict[str, int] = {}
        self.on_output: Callable[[Any], None] = lambda _output: None  # told every output of vLLM's
        self.on_formed: Callable[[], None] = lambda: None  # called after every step that was formed

    def add(
        self,
        name: str,
        prompt: list[int],
        max_tokens: int,
        slo: Slo,
        age_s: float = 0.0,
        is_bound: bool = False,
        emitted_tokens: int = 0,
    ) -> Any:
        """Queue a request; one that ``is_bound`` waits for its grammar, which nobody compiles.

        The last ``emitted_tokens`` of the prompt were emitted by another replica.
        """
        from vllm import SamplingParams
        from vllm.utils.hashing import sha256
        from vllm.v1.core.kv_cache_utils import get_request_block_hasher
        from vllm.v1.request import Request, RequestStatus

        from replicas.request_rows import to_extra_args

        arrival_s = self.clock.monotonic() - age_s
        params = SamplingParams(
            temperature=0.0,
            max_tokens=max_tokens,
            ignore_eos=True,
            extra_args=to_extra_args(slo, arrival_s, emitted_tokens + max_tokens, emitted_tokens),
        )
        hasher = get_request_block_hasher(self.scheduler.hash_block_size, sha256)
        request = Request(name, prompt, params, None, block_hasher=hasher)
        if is_bound:
            request.structured_output_request = SimpleNamespace(grammar=None, reasoning_ended=True)
            request.status = RequestStatus.WAITING_FOR_STRUCTURED_OUTPUT_GRAMMAR
        self.outputs[name] = []
        self.scheduler.add_request(request)
        return request

    def begin(self) -> Any:
        """Form a step."""
        scheduled = self.scheduler.schedule()
        if self.wrong:
            raise self.wrong[0]
        self.batches.append(dict(scheduled.num_scheduled_tokens))
        self.preempted |= scheduled.preempted_req_ids or set()
        requests = self.scheduler.requests
        scheduled.played = {name for name in self.batches[-1] if not requests[name].is_prefill_chunk}
        self._count_drafts(scheduled, 1)
        for name in scheduled.preempted_req_ids or ():
            self.drafts_in_flight.pop(name, None)
        self.check_integrity()
        self.on_formed()
        return scheduled

    def _count_drafts(self, scheduled: Any, sign: int) -> None:
        for name, drafts in scheduled.scheduled_spec_decode_tokens.items():
            self.drafts_in_flight[name] = max(0, self.drafts_in_flight.get(name, 0) + sign * len(drafts))

    def check_integrity(self) -> None:
        """Every live request is in exactly one queue."""
        scheduler = self.scheduler
        queued = [*scheduler.running, *scheduler.waiting, *scheduler.kv_holding_waiting]
        assert sorted(request.request_id for request in queued) == sorted(scheduler.requests)

    def end(self, scheduled: Any, lost_blocks: frozenset[int] = frozenset()) -> None:
        """Play a step's model run and hand its result back; the KV cache of ``lost_blocks`` has not arrived."""
        from vllm.v1.outputs import KVConnectorOutput, ModelRunnerOutput

        names = list(scheduled.num_scheduled_tokens)
        drafts = {name: len(tokens) for name, tokens in scheduled.scheduled_spec_decode_tokens.items()}
        sampled = [self._sample(name, drafts.get(name, 0)) if name in scheduled.played else [] for name in names]
        self._count_drafts(scheduled, -1)
        places = {name: place for place, name in enumerate(names)}
        played = ModelRunnerOutput(names, places, sampled)
        if lost_blocks:
            played.kv_connector_output = KVConnectorOutput(invalid_block_ids=set(lost_blocks))
        result = self.scheduler.update_from_output(scheduled, played)
        self._empty_link()
        for outputs in result.values():
            for output in outputs.outputs:
                self.outputs[output.request_id] += output.new_token_ids
                self.on_output(output)
                if output.finished:
                    self.finished.add(output.request_id)

    def _empty_link(self) -> None:
        """What a replica does all the time: an engine that idles waits for room."""
        with contextlib.suppress(BlockingIOError):
            while self.link is not None:
                self.link.recv(1 << 20)

    def _sample(self, name: str, drafts: int) -> list[int]:
        if (request := self.scheduler.requests.get(name)) is None:
            return []
        first = request.num_output_tokens
        return [token_at(name, first + i) for i in range(1 + accepted_at(name, first, drafts))]

    def step(self) -> dict[str, int]:
        """One whole step; returns the tokens it gave to each request."""
        self.end(self.begin())
        return self.batches[-1]

    def run(self, steps: int = 10_000) -> None:
        """Step until nothing is left."""
        for _ in range(steps):
            if not self.scheduler.has_unfinished_requests():
                return
            self.step()
        raise AssertionError(f"unfinished after {steps} steps: {list(self.scheduler.requests)}")

    def run_ahead(self, depth: int = 2, steps: int = 10_000) -> None:
        """Like ``run``, with ``depth`` steps in flight at a time."""
        in_flight: list[Any] = []
        for _ in range(steps):
            while self.scheduler.has_unfinished_requests() and len(in_flight) < depth:
                in_flight.append(self.begin())
            if not in_flight:
                return
            self.end(in_flight.pop(0))
        raise AssertionError(f"unfinished after {steps} steps: {list(self.scheduler.requests)}")

    def check_outputs(self, max_tokens: dict[str, int]) -> None:
        """Everybody got exactly the model's tokens."""
        for name, count in max_tokens.items():
            assert self.outputs[name] == [token_at(name, position) for position in range(count)], name


class Clock:
    """Moves on when it is read, so that a test takes the same decisions on a machine of any speed."""

    def __init__(self) -> None:
        self._readings = itertools.count()
        self.passed_s = 1000.0

    def monotonic(self) -> float:
        return self.passed_s + READING_S * next(self._readings)


@pytest.fixture
def make_bench(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., Bench]]:
    """Benches by policy, KV blocks and engine settings, all on one ``Clock``.

    Their link ends in a socket that is emptied after each step.
    """
    from replicas.config import ReplicaConfig
    from replicas.embedded import ensure_embedded_model

    model = ensure_embedded_model()
    sockets, benches, clock = list[socket.socket](), list[Bench](), Clock()
    monkeypatch.setattr("replicas.vllm_scheduler.time", clock)

    def make(
        policy: str = "slo",
        blocks: int = 512,
        options: dict[str, float] | None = None,
        windows: int = 0,
        is_chunked: bool = True,
        **settings: Any,
    ) -> Bench:
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_DGRAM)
        path = str(tmp_path / f"ticks-{len(sockets)}")
        listener.bind(path)
        listener.setblocking(False)
        sockets.append(listener)
        replica = ReplicaConfig(
            model=str(model), profile="embedded-cpu", policy=policy, policy_options=options or {}, **settings
        )
        benches.append(Bench(_scheduler(replica, path, blocks, windows, is_chunked), clock))
        benches[-1].link = listener
        return benches[-1]

    yield make
    for bench in benches:
        bench.scheduler.shutdown()
    for listener in sockets:
        listener.close()


def _scheduler(replica: Any, path: str, blocks: int, windows: int, is_chunked: bool) -> Any:
    """Of a model with ``windows`` groups of layers with a sliding window beside its full ones."""
    import torch
    from vllm.utils.hashing import sha256
    from vllm.v1.core.kv_cache_utils import init_none_hash
    from vllm.v1.kv_cache_interface import FullAttentionSpec, KVCacheConfig, KVCacheGroupSpec, SlidingWindowSpec
    from vllm.v1.structured_output import StructuredOutputManager

    from replicas.vllm_scheduler import SloScheduler
    from replicas.vllm_settings import engine_config

    config = engine_config(replica, path)
    config.scheduler_config.enable_chunked_prefill = is_chunked
    config.cache_config.num_gpu_blocks = blocks
    init_none_hash(sha256)
    sizes: dict[str, Any] = dict(block_size=replica.block_size, num_kv_heads=1, head_size=1, dtype=torch.float32)
    groups = [KVCacheGroupSpec(["layer"], FullAttentionSpec(**sizes))]
    groups += [KVCacheGroupSpec([f"w{i}"], SlidingWindowSpec(**sizes, sliding_window=1024)) for i in range(windows)]
    kv_cache = KVCacheConfig(num_blocks=blocks, kv_cache_tensors=[], kv_cache_groups=groups)
    return SloScheduler(
        vllm_config=config,
        kv_cache_config=kv_cache,
        structured_output_manager=StructuredOutputManager(config),
        block_size=replica.block_size,
    )
