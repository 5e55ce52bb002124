"""What a user types behind ``polyslo serve`` becomes an application's ``args``, or one line that names the flag."""

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

pytest.importorskip("vllm")

from serving.config.vllm_arguments import read_words
from serving.config.vllm_check import answer

ROOT = Path(__file__).resolve().parents[4]
OVERRIDES = '{"rope_theta": 1e4}'


def ask(words: list[str], **changed: Any) -> dict[str, Any]:
    return answer({"words": words, "args": {}, "ours": {}, "has_file": False, "is_local": True, "gpus": 0} | changed)


def test_a_model_and_flags_reach_engine_and_ingress() -> None:
    told = ask(["embedded", "--max-model-len", "8k", "--hf-overrides", OVERRIDES])
    assert told["args"] == {
        "model": {"id": "embedded", "max_model_len": 8000},
        "engine": {"engine_kwargs": {"hf_overrides": {"rope_theta": 1e4}}},
        "fleet": {"num_replicas": 1},
    }


def test_an_argument_with_fields_comes_back_as_it_was_typed() -> None:
    words = ["-tp", "2", "--compilation-config", '{"mode": 0}', "--attention-config.backend", "FLASH_ATTN"]
    assert read_words(words) == {
        "tensor_parallel_size": 2,
        "compilation_config": {"mode": 0},
        "attention_config": {"backend": "FLASH_ATTN"},
    }


def test_a_model_alone_takes_the_gpus_of_the_machine() -> None:
    def fleet(*flags: str, gpus: int) -> tuple[Any, Any]:
        args = ask(["embedded", *flags], gpus=gpus, ours={"profile": "embedded-cpu"})["args"]
        return args.get("engine", {}).get("num_gpus"), args["fleet"]["num_replicas"]

    assert fleet(gpus=8) == (1, 8)
    assert fleet("-tp", "2", gpus=8) == (2, 4)
    assert fleet("-tp", "2", "-pp", "2", gpus=8) == (4, 2)
    assert fleet(gpus=0) == (None, 1)
    assert ask(["embedded", "-tp", "4"], gpus=2)["error"].endswith("a replica needs 4 GPUs, and this machine has 2")
    on_cpu = ask(["embedded"], gpus=8, ours={"engine": {"num_gpus": 0}})["args"]
    assert (on_cpu["fleet"]["num_replicas"], on_cpu["engine"]["num_gpus"]) == (1, 0)


@pytest.mark.parametrize(
    ("flag", "value", "bound"),
    [
        ("--tensor-parallel-size", "0", "greater than or equal to 1, got 0"),
        ("--gpu-memory-utilization", "1.7", "less than or equal to 1, got 1.7"),
        ("--stream-interval", "-2", "greater than or equal to 1, got -2"),
    ],
)
def test_a_value_that_vllm_would_refuse_when_an_engine_starts(flag: str, value: str, bound: str) -> None:
    assert ask(["embedded", flag, value]) == {"error": f"{flag}: input should be {bound}"}


def test_flags_and_options_of_ours_replace_what_a_file_says() -> None:
    file = {"model": "other", "fleet": {"num_replicas": 5, "seed": 3}, "engine": {"max_num_seqs": 1}}
    ours = {"fleet": {"num_replicas": 4}}
    told = ask(["embedded", "--max-num-seqs", "8"], args=file, ours=ours, has_file=True)["args"]
    assert told == {
        "model": {"id": "embedded"},
        "fleet": {"num_replicas": 4, "seed": 3},
        "engine": {"max_num_seqs": 8},
    }


def test_secrets_go_to_the_environment_and_not_into_the_application() -> None:
    told = ask(["embedded", "--hf-token", "t0ken", "--api-key", "k3y"])
    assert told["secrets"] == {"HF_TOKEN": "t0ken", "VLLM_API_KEY": "k3y"}
    assert "t0ken" not in json.dumps(told["args"])
    assert "k3y" not in json.dumps(told["args"])
    file = {"model": {"id": "embedded", "server_kwargs": {"api_key": ["0ld"]}}}
    replaced = ask(["--api-key", "k3y"], args=file, has_file=True)
    assert replaced["secrets"] == {"VLLM_API_KEY": "k3y"}
    assert "0ld" not in json.dumps(replaced["args"]), "vLLM would take that one, and no other"
    remote = ask(["embedded", "--hf-token", "t0ken"], is_local=False)
    assert remote["error"].startswith("--hf-token: put it into HF_TOKEN")
    assert "t0ken" not in remote["error"]


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["--max-model-length", "8192"], "--max-model-length: unknown argument; did you mean '--max-model-len'?"),
        (["--max-model-len", "many"], "argument --max-model-len: invalid"),
        (["--max-model-len", "99999"], "model: User-specified max_model_len (99999) is greater"),
        (["--hf-overrides", "{"], "model: hf_overrides: Input should be"),
        (["--dtype", "float9"], "argument --dtype: invalid choice: 'float9'"),
        (["--data-parallel-size", "2"], "--data-parallel-size: replicas are the data parallelism here"),
        (["--runner", "pooling"], "--runner: only text generation is served"),
        (["--ssl-keyfile", "x"], "--ssl-keyfile: has no effect, because Ray Serve listens"),
        (["--scheduler-cls", "a.B"], "--scheduler-cls: is how this project's scheduler"),
        (["--headless"], "--headless: has no effect"),
        (["--enable-expert-parallel"], "--enable-expert-parallel: embedded has no experts; remove it"),
        (["--max-num-seqs", "0"], "--max-num-seqs: input should be greater than 0"),
        (["--api-key=k3y", "k3y2"], "a word belongs to no flag"),
        (["--kv-transfer-config", '{"a": "s3cret"'], "argument --kv-transfer-config: "),
        (["extra"], "a word belongs to no flag"),
    ],
)
def test_mistake_is_one_line_that_names_the_flag(words: list[str], told: str) -> None:
    error = ask(["embedded", *words])["error"]
    assert error.startswith(told)
    assert "\n" not in error


def test_process_answers_on_its_output() -> None:
    question = {"words": ["embedded", "--seed", "x"], "args": {}, "ours": {}, "has_file": False, "is_local": True}
    ended = subprocess.run(
        [sys.executable, "-m", "serving.config.vllm_check"],
        input=json.dumps(question | {"gpus": 0}),
        capture_output=True,
        text=True,
        check=True,
        cwd=ROOT,
    )
    assert json.loads(ended.stdout.splitlines()[-1])["error"].startswith("argument --seed: invalid int value")
