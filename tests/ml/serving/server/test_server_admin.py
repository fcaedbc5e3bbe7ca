"""Endpoints for those who run the engine, and the metrics that everybody may read."""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import requests
from prometheus_client.parser import text_string_to_metric_families
from prometheus_client.samples import Sample
from scripted_engine import ADMIN, SECONDS, Script, Served
from waiting import wait_until

from craton.ml.serving.messages import Control, EngineReply, Stats, Submit
from craton.orchestration import ServerAddress, ServerWatch

Encode = Callable[[str], list[int]]
ASK: Any = [{"role": "user", "content": "hello"}]


def post(served: Served, path: str, body: Any = None) -> requests.Response:
    return requests.post(served.url + path, json=body, timeout=SECONDS, headers=ADMIN)


def get(served: Served, path: str) -> Any:
    return requests.get(served.url + path, timeout=SECONDS, headers=ADMIN).json()


@pytest.mark.parametrize(
    ("path", "body", "name", "arguments"),
    [
        ("/pause", None, "pause", {"mode": "abort"}),
        ("/pause?mode=keep", None, "pause", {"mode": "keep"}),
        ("/resume", None, "resume", {}),
        ("/sleep?level=2", None, "sleep", {"level": 2}),
        ("/wake_up", None, "wake", {}),
        ("/wake_up?tags=weights", None, "wake", {"tags": ["weights"]}),
        ("/reset_prefix_cache", None, "reset_prefix_cache", {}),
        (
            *("/update_weights", {"folder": "/w", "version": 7, "recompute": True}, "update_weights"),
            {"folder": "/w", "version": 7, "recompute": True},
        ),
        (
            *("/update_weights", {"address": "h:1", "wait_seconds": 5}, "update_weights"),
            {"address": "h:1", "wait_seconds": 5.0, "recompute": False},
        ),
    ],
)
def test_controls_reach_the_engine(served: Served, path: str, body: Any, name: str, arguments: dict[str, Any]) -> None:
    assert post(served, path, body).json()["result"]["name"] == name
    (control,) = served.engine.wait_for(Control)
    assert (control.name, control.arguments) == (name, arguments)


def test_the_state_is_known_at_once(served: Served) -> None:
    watch = ServerWatch(ServerAddress("127.0.0.1", int(served.url.rpartition(":")[2])))
    post(served, "/pause?mode=wait")
    assert get(served, "/is_paused") == {"is_paused": True}
    assert watch.refusal() == "the engine is paused; POST /resume"
    post(served, "/resume")
    assert get(served, "/is_paused") == {"is_paused": False}
    assert watch.refusal() == ""
    post(served, "/sleep")
    assert get(served, "/is_sleeping") == {"is_sleeping": True}
    post(served, "/wake_up?tags=weights")
    assert get(served, "/is_sleeping") == {"is_sleeping": True}, "not before all of it is back"
    post(served, "/wake_up")
    assert get(served, "/is_sleeping") == {"is_sleeping": False}
    served.engine.control = lambda control: EngineReply(control.id, 12)
    assert get(served, "/weights_version") == {"weights_version": 12}


@pytest.mark.parametrize(
    ("path", "body", "status"),
    [
        ("/resume", None, 409),
        ("/sleep", None, 409),
        ("/update_weights", {"folder": "/w"}, 400),
        ("/v1/load_lora_adapter", {"lora_name": "new", "lora_path": "/a"}, 400),
        ("/pause?mode=never", None, 400),
    ],
)
def test_what_the_engine_refuses(served: Served, path: str, body: Any, status: int) -> None:
    served.engine.control = lambda control: EngineReply(control.id, error="not while it is asleep")
    answer = post(served, path, body)
    assert answer.status_code == status
    said = answer.json()["error"]["message"]
    assert said == "not while it is asleep" if "never" not in path else "mode" in said


def test_adapters_come_and_go(served: Served) -> None:
    served.engine.control = lambda control: EngineReply(control.id)
    assert post(served, "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "/poet"}).status_code == 200
    assert served.engine.wait_for(Control)[0].arguments == {"name": "poet", "folder": "/poet"}
    assert [model["id"] for model in get(served, "/v1/models")["data"]] == ["scripted", "painter", "poet"]
    assert get(served, "/v1/models")["data"][2]["parent"] == "scripted"
    assert post(served, "/v1/load_lora_adapter", {"lora_name": "poet", "lora_path": "/poet"}).status_code == 400
    assert post(served, "/v1/chat/completions", {"model": "poet", "messages": ASK}).status_code == 200
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 200
    assert post(served, "/v1/unload_lora_adapter", {"lora_name": "poet"}).status_code == 400
    assert post(served, "/v1/chat/completions", {"model": "poet", "messages": ASK}).status_code == 404


def test_without_the_option_there_is_nothing_to_control(start: Callable[..., Served]) -> None:
    served = start()
    for path in ("/pause", "/sleep", "/update_weights", "/v1/load_lora_adapter"):
        assert post(served, path, {}).status_code == 404


def samples(served: Served) -> list[Sample]:
    text = requests.get(served.url + "/metrics", timeout=SECONDS).text
    return [sample for family in text_string_to_metric_families(text) for sample in family.samples]


def values(served: Served) -> dict[tuple[str, str], float]:
    """Metrics by name and one label beside the model's."""
    found = {}
    for sample in samples(served):
        assert sample.labels["model_name"] == "scripted", sample
        others = [value for name, value in sample.labels.items() if name != "model_name"]
        found[sample.name, ",".join(others)] = sample.value
    return found


def test_metrics(start: Callable[..., Served], encode: Encode) -> None:
    served = start(adapters=("painter",))
    served.engine.answer = lambda _: Script(encode("hello world"), cached_tokens=3)
    for extra in ({}, {"stream": True}, {"max_tokens": 1}):
        assert post(served, "/v1/completions", {"prompt": [5] * 10, **extra}).status_code == 200
    served.engine.send(
        Stats(
            running=3,
            waiting=2,
            blocks_used=25,
            blocks=100,
            preemptions=4,
            prefix_queries=200,
            prefix_hits=50,
            host_hits=20,
            drafts=3,
            drafted=10,
            accepted=6,
            draft_tokens=4,
            draft_acceptance=0.8,
            draft_speedup=1.5,
            steps=77,
            step_tokens=5000,
            context_tokens=9000,
            shared_tokens=6000,
            steps_by_tokens=(40, 0, 30, *[0] * 7, 5, 0, 0, 2),
            step_seconds=0.02,
            plan_step_seconds=0.015,
            roofline=0.75,
            tokens_per_second=600,
            weights_version=5,
            state="asleep",
        )
    )
    wait_until(lambda: values(served)["vllm:num_requests_running", ""] == 3)
    found = values(served)
    num_tokens = len(encode("hello world"))
    expected = {
        ("vllm:num_requests_waiting", ""): 2,
        ("vllm:kv_cache_usage_perc", ""): 0.25,
        ("vllm:num_preemptions_total", ""): 4,
        ("vllm:prefix_cache_queries_total", ""): 200,
        ("vllm:prefix_cache_hits_total", ""): 50,
        ("vllm:external_prefix_cache_queries_total", ""): 150,
        ("vllm:external_prefix_cache_hits_total", ""): 20,
        ("vllm:spec_decode_num_drafts_total", ""): 3,
        ("vllm:spec_decode_num_draft_tokens_total", ""): 10,
        ("vllm:spec_decode_num_accepted_tokens_total", ""): 6,
        ("craton_serve_draft_tokens", ""): 4,
        ("craton_serve_draft_mean_length", ""): 3,
        ("craton_serve_draft_acceptance", ""): 0.8,
        ("craton_serve_draft_speedup", ""): 1.5,
        ("vllm:engine_sleep_state", "awake"): 0,
        ("vllm:engine_sleep_state", "weights_offloaded"): 1,
        ("vllm:prompt_tokens_total", ""): 30,
        ("vllm:prompt_tokens_cached_total", ""): 9,
        ("vllm:generation_tokens_total", ""): 2 * num_tokens + 1,
        ("vllm:request_success_total", "stop"): 2,
        ("vllm:request_success_total", "length"): 1,
        ("vllm:time_to_first_token_seconds_count", ""): 3,
        ("vllm:inter_token_latency_seconds_count", ""): 2 * (num_tokens - 1),
        ("vllm:request_time_per_output_token_seconds_count", ""): 2,
        ("vllm:e2e_request_latency_seconds_count", ""): 3,
        ("vllm:request_queue_time_seconds_count", ""): 3,
        ("vllm:request_prefill_time_seconds_count", ""): 3,
        ("vllm:request_decode_time_seconds_count", ""): 3,
        ("vllm:request_inference_time_seconds_count", ""): 3,
        ("vllm:iteration_tokens_total_bucket", "1.0"): 40,
        ("vllm:iteration_tokens_total_bucket", "8.0"): 40,
        ("vllm:iteration_tokens_total_bucket", "16.0"): 70,
        ("vllm:iteration_tokens_total_bucket", "2048.0"): 70,
        ("vllm:iteration_tokens_total_bucket", "4096.0"): 75,
        ("vllm:iteration_tokens_total_bucket", "+Inf"): 77,
        ("vllm:iteration_tokens_total_count", ""): 77,
        ("vllm:iteration_tokens_total_sum", ""): 5000,
        ("vllm:request_prompt_tokens_sum", ""): 30,
        ("vllm:request_generation_tokens_sum", ""): 2 * num_tokens + 1,
        ("vllm:request_params_n_sum", ""): 3,
        ("vllm:request_params_max_tokens_sum", ""): 33,
        ("craton_run_step_seconds", ""): 0.02,
        ("craton_plan_step_seconds", ""): 0.015,
        ("craton_run_tokens_per_second", ""): 600,
        ("craton_plan_tokens_per_second", ""): 800,
        ("craton_serve_roofline", ""): 0.75,
        ("craton_serve_prefix_hit_ratio", "device"): 0.25,
        ("craton_serve_prefix_hit_ratio", "host"): 0.1,
        ("craton_serve_prefix_hit_tokens_total", "host"): 20,
        ("craton_serve_steps_total", ""): 77,
        ("craton_serve_context_tokens_total", ""): 9000,
        ("craton_serve_shared_prefix_tokens_total", ""): 6000,
        ("craton_serve_weights_version", ""): 5,
    }
    assert {key: found.get(key) for key in expected} == expected
    assert ("vllm:lora_requests_info", "1,,") in found
    (info,) = [sample for sample in samples(served) if sample.name == "vllm:cache_config_info"]
    assert info.value == 1
    assert info.labels == {
        "model_name": "scripted",
        "block_size": "16",
        "cache_dtype": "fp8",
        "enable_prefix_caching": "True",
        "gpu_memory_utilization": "0.8",
        "num_gpu_blocks": "100",
        "num_cpu_blocks": "0",
    }


def test_a_request_without_tokens_waits_for_the_admin_request_and_is_not_stalled(
    served: Served, encode: Encode
) -> None:
    watch = ServerWatch(ServerAddress("127.0.0.1", int(served.url.rpartition(":")[2])))
    served.engine.control = lambda control: EngineReply(-1)  # the reply to the update comes later
    served.engine.answer = lambda _: Script(encode("hello world"), hold_at=0)
    with ThreadPoolExecutor() as threads:
        updating = threads.submit(post, served, "/update_weights", {"address": "h:1"})
        (control,) = served.engine.wait_for(Control)
        asking = threads.submit(post, served, "/v1/chat/completions", {"messages": ASK})
        served.engine.wait_for(Submit)
        state = watch.look()
        assert state is not None
        assert (state.stall_seconds, state.admin_seconds > 0) == (0.0, True)
        served.engine.send(EngineReply(control.id, {"version": 8}))
        assert updating.result(SECONDS).status_code == 200
        served.engine.release()
        assert asking.result(SECONDS).status_code == 200
    state = watch.look()
    assert state is not None
    assert (state.stall_seconds, state.admin_seconds) == (0.0, 0.0)


def test_the_times_of_a_request_add_up(start: Callable[..., Served], encode: Encode) -> None:
    served = start()
    served.engine.answer = lambda _: Script(encode("hello world"), hold_at=0)
    with ThreadPoolExecutor() as threads:
        asked = time.monotonic()
        running = threads.submit(post, served, "/v1/completions", {"prompt": [5] * 10, "n": 2})
        served.engine.wait_for(Submit)
        held = time.monotonic()
        wait_until(lambda: time.monotonic() > held + 0.2)
        served.engine.release()
        assert running.result(SECONDS).status_code == 200
        whole = time.monotonic() - asked
    found = values(served)
    counts = {
        name: found[f"vllm:{name}_seconds_count", ""]
        for name in ("request_queue_time", "request_prefill_time", "request_decode_time", "request_inference_time")
    }
    assert list(counts.values()) == [1, 1, 2, 2], "the copies share their prompt"
    sums = {name: found[f"vllm:{name}_seconds_sum", ""] for name in (*counts, "e2e_request_latency")}
    read = sums["request_prefill_time"]
    assert 0.2 <= read <= whole, "nothing came of it while it was held"
    assert 0 <= sums["request_queue_time"] <= whole - read
    assert sums["request_inference_time"] == pytest.approx(2 * read + sums["request_decode_time"], abs=0.01)
    assert sums["e2e_request_latency"] == pytest.approx(
        2 * sums["request_queue_time"] + sums["request_inference_time"], abs=0.01
    )


def test_adapters_in_use_are_shown(served: Served, encode: Encode) -> None:
    served.engine.answer = lambda _: Script(encode("hello world"), hold_at=1)
    stream = served.client().chat.completions.create(model="painter", messages=ASK, stream=True)
    next(iter(stream))
    assert ("vllm:lora_requests_info", "1,painter,") in values(served)
    served.engine.release()
    list(stream)
