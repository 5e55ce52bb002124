"""KV cache handed from one engine to another through files: vLLM's ``ExampleConnector``, made fit for a fleet.

That one stores every prompt it meets under the digest of its tokens, cut off at the first chunk, for ever, and looks
for a file that is not there where a prompt fills its last block. Here a request says what is to be done with it, a
prompt may be computed in chunks, a hand-over is of one request to one reader and gone once it was read, and what cannot
be read is computed again. Imports vllm, which loads it by name.
"""

import contextlib
import logging
import os
import re
import shutil
import time
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from vllm.distributed.kv_transfer.kv_connector.v1.example_connector import (
    ExampleConnector,
    ExampleConnectorMetadata,
    align_to_block_size,
)
from vllm.v1.core.sched.output import SchedulerOutput
from vllm.v1.request import Request

from replicas.kv_transfer import HAND_OVER, LOAD, PARAMS, STORE, make_storage

logger = logging.getLogger("polyslo.kv")

DIGEST = re.compile(r"[0-9a-f]{32}|[0-9a-f]{64}")  # name of a hand-over's folder: vLLM takes MD5, under FIPS SHA-256
KEPT_S = 120.0  # what nobody has fetched by then is removed: its reader is gone, or has computed it anew


def remove_stale(storage: str, now_s: float) -> None:
    """Remove the hand-overs under ``storage`` that nobody has fetched in time, and nothing else."""
    with contextlib.suppress(OSError), os.scandir(storage) as entries:
        for entry in entries:
            if not DIGEST.fullmatch(entry.name) or not entry.is_dir(follow_symlinks=False):
                continue
            with contextlib.suppress(FileNotFoundError):  # its reader was faster
                if now_s - entry.stat().st_mtime > KEPT_S:
                    shutil.rmtree(entry.path, ignore_errors=True)


class FilesConnector(ExampleConnector):
    """Stores the prompt of a request that says ``do_remote_decode``, loads that of one with ``do_remote_prefill``.

    One instance plans in the scheduler, another moves tensors in the worker.
    """

    def __init__(self, vllm_config: Any, *args: Any, **kwargs: Any) -> None:
        super().__init__(vllm_config, *args, **kwargs)
        if vllm_config.parallel_config.world_size > 1:
            raise ValueError("the files connector serves engines of one GPU or CPU: tensor-parallel ones need another")
        self._storage_path: str = make_storage(self._storage_path)
        self._storing: dict[str, tuple[list[int], str]] = {}  # prompt under way -> its tokens and hand-over
        self._readable: dict[str, str] = {}  # request that continues here -> folder of its files; "": not all there
        self._layers = vllm_config.model_config.get_num_layers_by_block_type(vllm_config.parallel_config)
        self._swept_s = self._kept_s = 0.0
        self._cache: Any = None  # the scheduler's KV cache manager
        self._unread: set[int] = set()  # blocks that the step under way should have read

    # -- in the scheduler -------------------------------------------------------------------------------------------

    def bind_kv_cache_manager(self, kv_cache_manager: Any) -> None:
        self._cache = kv_cache_manager

    def get_num_new_matched_tokens(self, request: Request, num_computed_tokens: int) -> tuple[int, bool]:
        """Tokens of the prompt, in whole blocks, that the hand-over brings beyond what is cached here."""
        params = request.kv_transfer_params or {}
        if not params.get(LOAD) or request.num_preemptions:
            return 0, False
        prompt = self._prefilled(request)
        if not self._is_readable(request.request_id, prompt, params[HAND_OVER]):
            return 0, False
        return max(0, align_to_block_size(len(prompt), self._block_size) - num_computed_tokens), False

    def _is_readable(self, request_id: str, prompt: list[int], hand_over: str) -> bool:
        """Whether its files are there, and still are: a request may wait for longer than they are kept."""
        folder = self._readable.get(request_id)
        if folder is None:
            folder = self._folder(prompt, hand_over)
            self._readable[request_id] = folder if self._is_whole(folder) else ""
        elif folder and not os.path.isdir(folder):
            self._readable[request_id] = ""
        return bool(self._readable[request_id])

    @staticmethod
    def _prefilled(request: Request) -> list[int]:
        """The prompt as the storing engine had it: the token that it emitted has joined it since."""
        return list(request.prompt_token_ids or [])[:-1]

    def _is_whole(self, folder: str) -> bool:
        """Whether every layer's file can be read to its end."""
        try:
            files = os.listdir(folder)
            for name in files:
                with safe_open(os.path.join(folder, name), framework="pt"):
                    pass
        except (OSError, SafetensorError):
            return False
        return len(files) == self._layers

    def _folder(self, prompt: list[int], hand_over: str) -> str:
        known = torch.tensor(prompt)[: align_to_block_size(len(prompt), self._block_size)]
        return str(self._generate_foldername_debug(known, [hand_over]))

    def build_connector_meta(self, scheduler_output: SchedulerOutput) -> ExampleConnectorMetadata:
        meta = ExampleConnectorMetadata()
        for new in scheduler_output.scheduled_new_reqs:
            params = (getattr(new.sampling_params, "extra_args", None) or {}).get(PARAMS) or {}
            if request := self._requests_need_load.pop(new.req_id, None):
                tokens, blocks = self._prefilled(request), new.block_ids[0]
                meta.add_request(tokens, blocks, self._block_size, False, [params[HAND_OVER]])
            elif params.get(STORE) and len(new.prompt_token_ids or []) > self._block_size:
                self._storing[new.req_id] = list(new.prompt_token_ids or []), params[HAND_OVER]
        cached = scheduler_output.scheduled_cached_reqs
        computed = {new.req_id: new.num_computed_tokens for new in scheduler_output.scheduled_new_reqs}
        computed |= dict(zip(cached.req_ids, cached.num_computed_tokens, strict=True))
        for request_id in self._storing.keys() & computed.keys():
            tokens, hand_over = self._storing[request_id]
            if computed[request_id] + scheduler_output.num_scheduled_tokens[request_id] >= len(tokens):
                del self._storing[request_id]  # its last chunk is in this step
                blocks = self._cache.get_block_ids(request_id)[0]
                meta.add_request(tokens, blocks, self._block_size, True, [hand_over])
        for request_id in scheduler_output.finished_req_ids:
            self._storing.pop(request_id, None)
            self._readable.pop(request_id, None)
        self._requests_need_load.clear()
        self._keep_waited_for(time.time())
        return meta

    def _keep_waited_for(self, now_s: float) -> None:
        """Make hand-overs young that requests wait to read, which may take longer than others keep them."""
        if 0.0 <= now_s - self._kept_s < KEPT_S / 4:
            return
        self._kept_s = now_s
        for folder in filter(None, self._readable.values()):
            with contextlib.suppress(OSError):  # it was read
                os.utime(folder)

    def request_finished(self, request: Request, block_ids: list[int]) -> tuple[bool, dict[str, Any] | None]:
        """What the engine that goes on needs to know; the blocks themselves may be freed at once."""
        params = request.kv_transfer_params or {}
        self._sweep(time.time())
        return False, {LOAD: True, HAND_OVER: params[HAND_OVER]} if params.get(STORE) else None

    def _sweep(self, now_s: float) -> None:
        if 0.0 <= now_s - self._swept_s < KEPT_S / 4:
            return
        self._swept_s = now_s
        remove_stale(self._storage_path, now_s)

    # -- in the worker ----------------------------------------------------------------------------------------------

    def save_kv_layer(self, layer_name: str, kv_layer: torch.Tensor, attn_metadata: Any, **kwargs: Any) -> None:
        """Store one layer. Where that fails, as on a full disk, the hand-over lacks it and its reader computes anew."""
        try:
            super().save_kv_layer(layer_name, kv_layer, attn_metadata, **kwargs)
        except (OSError, SafetensorError) as error:
            logger.error("%s of a hand-over not stored: %s", layer_name, error)
            for request in self._get_connector_metadata().requests:
                if request.is_store:
                    folder = self._generate_foldername_debug(request.token_ids, request.mm_hashes)
                    shutil.rmtree(folder, ignore_errors=True)

    def start_load_kv(self, forward_context: Any, **kwargs: Any) -> None:
        """Fill the blocks of every request that continues here; what was read is removed.

        Where a file breaks off, the requests of this step compute their prompts.
        """
        loaded = [request for request in self._get_connector_metadata().requests if not request.is_store]
        try:
            super().start_load_kv(forward_context, **kwargs)
        except (OSError, SafetensorError) as error:
            logger.error("hand-overs not read: %s", error)
            for request in loaded:
                self._unread.update((request.slot_mapping // self._block_size).tolist())
        for request in loaded:
            folder = self._generate_foldername_debug(request.token_ids, request.mm_hashes)
            shutil.rmtree(folder, ignore_errors=True)

    def get_block_ids_with_load_errors(self) -> set[int]:
        """The blocks that could not be read since the last call."""
        unread, self._unread = self._unread, set()
        return unread
