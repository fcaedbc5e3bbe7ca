"""What foreign stacks are told: held against their own parsers where they can be had here, word for word otherwise."""

from __future__ import annotations

import json
import os
import shlex
import subprocess
from pathlib import Path

import pytest

from craton.frameworks import jax_environment, megatron_arguments
from craton.frameworks.errors import FrameworkError
from craton.frameworks.launchers import accelerate_command, accelerate_config, torchrun_command, verl_overrides
from craton.frameworks.megatron import nemo_parallelism
from craton.frameworks.servers import sglang_command, vllm_command
from craton.job import Job, parse_job
from craton.job.layout import Layout
from craton.job.model import model_from_config, model_preset
from craton.job.sections.command import starts_own_ranks

HSDP = Layout(replicate=2, fsdp=4, cp=2, tp=4, micro_batch=1, recompute="full")
NAME = "a name; $(rm -rf /)"


@pytest.fixture
def server(tmp_path: Path) -> Job:
    """A server of a model folder, with a name that a shell must never see."""
    sizes = {"hidden_size": 64, "intermediate_size": 128, "num_hidden_layers": 2, "num_attention_heads": 4}
    config = {"model_type": "llama", "vocab_size": 256, "max_position_embeddings": 16384, **sizes}
    (tmp_path / "model").mkdir()
    (tmp_path / "model" / "config.json").write_text(json.dumps(config))
    return parse_job(
        "name: chat\nkind: serve\nmodel: ./model\ncluster: p5.48xlarge x 2\nserve: {port: 9000, host: 0.0.0.0, "
        "max_length: 8k, memory: 0.85, precision: fp8, kv_precision: fp8, initialize: random, "
        f"served_name: '{NAME}'}}\n",
        folder=tmp_path,
    )


def test_torchrun_understands_its_command() -> None:
    run = pytest.importorskip("torch.distributed.run")
    command = torchrun_command(["train.py", "--lr", "1"], processes_per_node=2)
    assert shlex.join(command) == (
        "torchrun '--nnodes={num_nodes}' --nproc-per-node=2 '--node-rank={node_rank}' "
        "'--master-addr={master_address}' '--master-port={master_port}' train.py --lr 1"
    )
    filled = [word.replace("{node_rank}", "1").replace("{master_port}", "29500") for word in command[1:]]
    given = run.get_args_parser().parse_args(filled)
    assert (given.node_rank, given.master_port, given.training_script, given.max_restarts) == (1, 29500, "train.py", 0)
    assert torchrun_command(["x"])[2] == "--nproc-per-node={gpus_per_node}"


def test_accelerate_reads_its_config(tmp_path: Path) -> None:
    config_args = pytest.importorskip("accelerate.commands.config.config_args", reason="accelerate is not installed")
    file = tmp_path / "accelerate.yaml"
    file.write_text(accelerate_config(HSDP, num_nodes=8))
    config = config_args.load_config_from_file(str(file))
    assert (config.num_machines, config.num_processes, config.mixed_precision) == (8, 64, "bf16")
    assert config.distributed_type.value == "FSDP"
    assert config.fsdp_config["fsdp_version"] == 2
    assert config.parallelism_config == {
        "parallelism_config_dp_replicate_size": 2,
        "parallelism_config_dp_shard_size": 4,
        "parallelism_config_tp_size": 4,
        "parallelism_config_cp_size": 2,
    }


def test_accelerate_launch_understands_its_command(tmp_path: Path) -> None:
    launch = pytest.importorskip("accelerate.commands.launch", reason="accelerate is not installed")
    command = accelerate_command(["train.py", "--lr", "1"], "accelerate.yaml")
    assert starts_own_ranks(command)
    filled = [word.replace("{node_rank}", "1").replace("{master_port}", "29500") for word in command[2:]]
    given = launch.launch_command_parser().parse_args(filled)
    assert (given.config_file, given.machine_rank, given.main_process_port) == ("accelerate.yaml", 1, 29500)
    assert (given.training_script, given.training_script_args) == ("train.py", ["--lr", "1"])


@pytest.mark.parametrize(
    ("layout", "kind"),
    [(Layout(), "NO"), (Layout(replicate=8), "MULTI_GPU"), (Layout(fsdp=8), "FSDP"), (Layout(tp=8), "FSDP")],
)
def test_accelerate_shards_only_what_is_sharded(layout: Layout, kind: str) -> None:
    assert f"distributed_type: {kind}\n" in accelerate_config(layout, 1).replace("'NO'", "NO")


def test_jax_finds_its_coordinator() -> None:
    assert jax_environment() == {"JAX_COORDINATOR_ADDRESS": "{master_address}:{master_port}"}
    assert jax_environment(one_gpu_each=True)["JAX_LOCAL_DEVICE_IDS"] == "{local_rank}"


def test_megatron_arguments_of_a_dense_model() -> None:
    layout = Layout(pp=2, fsdp=4, tp=4, vpp=4, micro_batch=2, zero=1, recompute="selective", schedule="interleaved")
    words = shlex.join(megatron_arguments(model_preset("llama-3.1-8b"), layout, 8192, 128))
    assert words == (
        "--tensor-model-parallel-size 4 --pipeline-model-parallel-size 2 --context-parallel-size 1 --num-layers 32 "
        "--hidden-size 4096 --ffn-hidden-size 14336 --num-attention-heads 32 --kv-channels 128 --seq-length 8192 "
        "--max-position-embeddings 131072 --micro-batch-size 2 --global-batch-size 128 "
        "--position-embedding-type rope --rotary-base 500000 --use-rope-scaling --rope-scaling-factor 8 "
        "--normalization RMSNorm --norm-epsilon 1e-05 --disable-bias-linear --swiglu "
        "--untie-embeddings-and-output-weights --sequence-parallel --use-distributed-optimizer "
        "--group-query-attention --num-query-groups 8 --num-layers-per-virtual-pipeline-stage 4 --bf16 "
        "--recompute-activations"
    )


def test_megatron_arguments_of_experts_and_what_megatron_has_no_word_for() -> None:
    qwen = model_preset("qwen3-30b-a3b")
    words = shlex.join(megatron_arguments(qwen, Layout(replicate=8, ep=8, precision="fp8"), 4096, 64))
    assert "--num-experts 128 --moe-router-topk 8 --moe-ffn-hidden-size 768 --expert-model-parallel-size 8" in words
    assert "--qk-layernorm" in words
    assert "--bf16 --fp8-format hybrid" in words
    with pytest.raises(FrameworkError, match="`zero: 1`, not `zero: 3`"):
        megatron_arguments(qwen, Layout(fsdp=8), 4096, 64)
    with pytest.raises(FrameworkError, match="latent attention"):
        megatron_arguments(model_preset("deepseek-v3"), Layout(), 4096, 64)
    with pytest.raises(FrameworkError, match="48 layers are not divisible by 10 stages"):
        megatron_arguments(qwen, Layout(pp=5, vpp=2), 4096, 64)


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "--rotary-base 10000"),
        ({"rope_theta": 5e5}, "--rotary-base 500000"),
        ({"rope_parameters": {"rope_type": "default", "rope_theta": 1e6}}, "--rotary-base 1000000"),
        (
            {
                "rope_theta": 5e5,
                "rope_scaling": {
                    "rope_type": "llama3",
                    "factor": 32.0,
                    "low_freq_factor": 1.0,
                    "high_freq_factor": 4.0,
                    "original_max_position_embeddings": 8192,
                },
            },
            "--rotary-base 500000 --use-rope-scaling --rope-scaling-factor 32",
        ),
        ({"rope_scaling": {"type": "linear", "factor": 2.0}}, "uses RoPE scaling linear"),
        (
            {"rope_scaling": {"rope_type": "llama3", "factor": 8.0}},
            "RoPE scaling llama3 with .*'original_sequence': 16384",
        ),
        ({"rope_theta": 10000.5}, "takes an integer, and model has 10000.5"),
        ({"partial_rotary_factor": 0.5}, "partial RoPE .0.5 of a head"),
    ],
)
def test_megatron_turns_positions_as_the_model_does(
    server: Job, fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "model" / "config.json"
    file.write_text(json.dumps({**json.loads(file.read_text()), **fields}))
    shape = server.model_shape
    assert shape is not None
    if not words.startswith("--"):
        with pytest.raises(FrameworkError, match=words):
            megatron_arguments(shape, Layout(), 4096, 64)
        return
    told = shlex.join(megatron_arguments(shape, Layout(), 4096, 64))
    assert f"--position-embedding-type rope {words} --normalization RMSNorm" in told


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({}, "--norm-epsilon 1e-06 --disable-bias-linear --swiglu"),
        ({"rms_norm_eps": 1e-5}, "--norm-epsilon 1e-05 --disable-bias-linear --swiglu"),
        (
            {"model_type": "qwen2", "num_key_value_heads": 2, "rms_norm_eps": 1e-6},
            "--norm-epsilon 1e-06 --disable-bias-linear --add-qkv-bias --swiglu",
        ),
        ({"attention_bias": True}, "has a bias in qkv and output; this Megatron emitter supports a bias only in qkv"),
        ({"mlp_bias": True}, "has a bias in mlp;"),
        ({"model_type": "gpt_neox", "layer_norm_eps": 1e-5}, "has a bias in qkv and output and mlp"),
    ],
)
def test_megatron_has_the_norms_and_biases_of_the_model(
    server: Job, fields: dict[str, object], words: str, tmp_path: Path
) -> None:
    file = tmp_path / "model" / "config.json"
    config = {**json.loads(file.read_text()), **fields}
    file.write_text(json.dumps(config))
    shape = model_from_config(config, source=str(file))
    if not words.startswith("--"):
        with pytest.raises(FrameworkError, match=words):
            megatron_arguments(shape, Layout(), 4096, 64)
        return
    assert f"--normalization RMSNorm {words}" in shlex.join(megatron_arguments(shape, Layout(), 4096, 64))


@pytest.mark.parametrize(("name", "epsilon"), [("qwen3-8b", "1e-06"), ("llama-2-7b", "1e-05"), ("gpt3-1.3b", "1e-05")])
def test_megatron_has_the_epsilon_of_a_preset(name: str, epsilon: str) -> None:
    words = megatron_arguments(model_preset(name), Layout(), 4096, 64)
    assert words[words.index("--norm-epsilon") + 1] == epsilon
    assert "--add-qkv-bias" not in words


@pytest.mark.parametrize(("name", "base"), [("qwen3-8b", "1000000"), ("llama-2-7b", "10000")])
def test_megatron_has_the_rotary_base_of_a_preset(name: str, base: str) -> None:
    words = megatron_arguments(model_preset(name), Layout(), 4096, 64)
    assert words[words.index("--rotary-base") + 1] == base
    assert "--use-rope-scaling" not in words


def test_megatron_shards_the_optimizer_within_a_copy_and_not_over_all_copies() -> None:
    model = model_preset("llama-3.1-8b")
    both = megatron_arguments(model, Layout(replicate=2, fsdp=4, zero=1), 8192, 128)
    assert "--use-distributed-optimizer --num-distributed-optimizer-instances 2" in shlex.join(both)
    for layout in (Layout(fsdp=8, zero=1), Layout(replicate=8)):
        assert "--num-distributed-optimizer-instances" not in megatron_arguments(model, layout, 8192, 128)


def test_nemo_is_told_the_same_parallelism() -> None:
    assert nemo_parallelism(Layout(pp=4, tp=8, cp=2, ep=4, vpp=2, fsdp=4, zero=1)) == {
        "tensor_model_parallel_size": 8,
        "pipeline_model_parallel_size": 4,
        "virtual_pipeline_model_parallel_size": 2,
        "context_parallel_size": 2,
        "expert_model_parallel_size": 4,
        "sequence_parallel": True,
    }


def test_verl_overrides() -> None:
    layout = Layout(replicate=2, fsdp=8, micro_batch=4, recompute="full", offload="optimizer")
    assert verl_overrides("Qwen/Qwen3-8B", layout, num_nodes=2, rollout_tp=2) == [
        "trainer.nnodes=2",
        "trainer.n_gpus_per_node=8",
        "actor_rollout_ref.model.path=Qwen/Qwen3-8B",
        "actor_rollout_ref.model.enable_gradient_checkpointing=True",
        "actor_rollout_ref.actor.strategy=fsdp2",
        "actor_rollout_ref.actor.fsdp_config.fsdp_size=8",
        "actor_rollout_ref.actor.fsdp_config.param_offload=False",
        "actor_rollout_ref.actor.fsdp_config.optimizer_offload=True",
        "actor_rollout_ref.actor.ulysses_sequence_parallel_size=1",
        "actor_rollout_ref.actor.ppo_micro_batch_size_per_gpu=4",
        "actor_rollout_ref.rollout.name=vllm",
        "actor_rollout_ref.rollout.tensor_model_parallel_size=2",
    ]
    with pytest.raises(FrameworkError, match="veRL on FSDP does not support pp 2 and tp 4"):
        verl_overrides("x", Layout(pp=2, tp=4), 1)


def test_vllm_on_one_node_and_on_two(server: Job) -> None:
    one = vllm_command(server, tp=8)
    assert shlex.join(one) == (
        f"vllm serve {server.model} --host 0.0.0.0 --port 9000 --served-model-name '{NAME}' "
        "--max-model-len 8192 --tensor-parallel-size 8 --pipeline-parallel-size 1 --gpu-memory-utilization 0.85 "
        "--max-num-seqs 256 --max-num-batched-tokens 2048 --dtype auto --quantization fp8 --kv-cache-dtype fp8"
    )
    two = vllm_command(server, tp=8, pp=2, num_nodes=2)
    assert two[-8:] == [
        *("--nnodes", "{num_nodes}", "--node-rank", "{node_rank}"),
        *("--master-addr", "{master_address}", "--master-port", "{master_port}"),
    ]


@pytest.mark.parametrize(("node_rank", "headless"), [("0", False), ("1", True)])
def test_only_the_first_node_of_vllm_has_a_head_and_no_value_is_executed(
    server: Job, node_rank: str, headless: bool, tmp_path: Path
) -> None:

    program = tmp_path / "vllm"
    program.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    program.chmod(0o755)
    environment = {"PATH": f"{tmp_path}:{os.environ['PATH']}", "CRATON_NODE_RANK": node_rank}
    command = vllm_command(server, tp=8, pp=2, num_nodes=2)
    words = subprocess.run(command, env=environment, capture_output=True, text=True, check=True).stdout.splitlines()
    assert words[:2] == ["serve", server.model]
    assert NAME in words
    assert (words[-1] == "--headless") is headless


def test_sglang_on_two_nodes(server: Job) -> None:
    words = shlex.join(sglang_command(server, tp=16, num_nodes=2))
    assert words == (
        f"python -m sglang.launch_server --model-path {server.model} --host 0.0.0.0 --port 9000 "
        f"--served-model-name '{NAME}' --context-length 8192 --tp-size 16 --pp-size 1 "
        "--mem-fraction-static 0.85 --max-running-requests 256 --chunked-prefill-size 2048 --dtype auto "
        "--quantization fp8 --kv-cache-dtype fp8_e4m3 --nnodes '{num_nodes}' --node-rank '{node_rank}' "
        "--dist-init-addr '{master_address}:{master_port}'"
    )
    with pytest.raises(FrameworkError, match="a job of kind serve"):
        sglang_command(parse_job("kind: command\ncommand: x\ncluster: local\n"), tp=1)
    preset = "kind: serve\nmodel: llama-3.1-8b\ncluster: local\nserve: {initialize: random}\n"
    with pytest.raises(FrameworkError, match="whose model is a folder or a Hub id"):
        vllm_command(parse_job(preset), tp=1)
