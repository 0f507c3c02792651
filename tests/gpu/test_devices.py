"""Tests that a GPU computes the same as the CPU and plain PyTorch. The same tests also run, and must pass, on the
CPU."""

import contextlib
import json
import os
import subprocess
import sys
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from float32 import FORWARD, approx32, assert_close32
from gpu_process import IMPLEMENTATIONS, built_by, changed, run_on
from gpu_process import kind as kind
from layout_cases import STEPS, make_config, make_data, plain_outcome
from programs import ROOT
from small_models import make_model
from transformers import AutoModelForCausalLM

from mcore_rl import platform
from mcore_rl.distributed.batched_data_dict import BatchedDataDict
from mcore_rl.models.generation.sampling import SamplingParams
from mcore_rl.testing.gpus import environment_for, no_gpu
from mcore_rl.testing.layout_check import compare, compute_layout_result

BY_DTYPE = {torch.float32: 1e-5, torch.bfloat16: 2e-2}
"""How far results may be from those in float64, of their norm."""


def assert_near(one, other, dtype, what, size=0.0):
    """Return the difference relative to the expected norm, or to `size` if that is larger."""
    one, other = one.double(), other.double()
    assert torch.isfinite(one).all(), what
    assert (one - other).norm() <= BY_DTYPE[dtype] * max(float(other.norm()), size), what


# ------------------------------------------------------------ the helper itself


def device_seen():
    from mcore_rl import platform

    return platform.device().type


def devices_visible():
    return os.environ.get("CUDA_VISIBLE_DEVICES")


def fail(message):
    raise ValueError(message)


def sleep():
    import time

    time.sleep(60)


@pytest.mark.long
def test_a_function_runs_on_the_cpu_in_a_process_of_its_own():
    assert run_on("cpu", device_seen) == "cpu"
    assert run_on("cpu", devices_visible) == ""
    with pytest.raises(AssertionError, match="ValueError: so it is"):
        run_on("cpu", fail, "so it is")
    with pytest.raises(AssertionError, match=r"sleep took longer than 0[.]5 s"):
        run_on("cpu", sleep, timeout=0.5)


def test_without_a_gpu_there_is_a_reason():
    if torch.version.cuda is None:
        assert no_gpu() == f"torch {torch.__version__} is built without CUDA"
    assert environment_for("cpu")["CUDA_VISIBLE_DEVICES"] == ""


# ------------------------------------------------------------ kernels


def check_logprobs(dtype, by_torch):
    """Both ways, whose tiles end inside the vocabulary, with targets in several columns, against float64."""
    from mcore_rl import platform
    from mcore_rl.distributed import logprobs

    device = platform.device()
    logprobs.TILE_SHAPE[device.type] = (256, 1024)
    logprobs.CHUNK_BYTES[device.type] = 10**6
    if by_torch:
        logprobs.tile_steps = lambda *_: logprobs.TORCH_STEPS
    generator = torch.Generator().manual_seed(0)
    tokens, hidden, rows, vocabulary, temperature = 700, 96, 5120, 5003, 0.8
    exact = [
        (torch.randn(size, hidden, generator=generator) * scale).to(dtype).double().requires_grad_()
        for size, scale in ((tokens, 1.0), (rows, 0.3))
    ]
    targets = torch.randint(0, vocabulary, (tokens, 2), generator=generator)
    upstream = torch.randn(tokens, 2, generator=generator).double()
    logits = exact[0] @ exact[1][:vocabulary].T
    right = (logits / temperature).log_softmax(-1).gather(1, targets)
    of_entropy = -((logits / temperature).softmax(-1) * (logits / temperature).log_softmax(-1)).sum(-1)
    loss = (right * upstream).sum() + 0.3 * of_entropy.sum()
    wanted = torch.autograd.grad(loss, (*exact, logits), retain_graph=True)

    for from_hidden in (True, False):
        if from_hidden:
            leaves = [x.detach().to(device, dtype).requires_grad_() for x in exact]
            got, entropy = logprobs.linear_logprobs(
                *leaves, targets.to(device), vocab_size=vocabulary, temperature=temperature, with_entropy=True
            )
            expected = wanted[:2]
        else:  # logits that are rounded before anybody sees them: of these
            rounded = logits.detach().to(dtype).double().requires_grad_()
            scaled = rounded / temperature
            right, of_entropy = (
                scaled.log_softmax(-1).gather(1, targets),
                torch.special.entr(scaled.softmax(-1)).sum(-1),
            )
            expected = torch.autograd.grad((right * upstream).sum() + 0.3 * of_entropy.sum(), rounded)
            leaves = [rounded.detach().to(device, dtype).requires_grad_()]
            got, entropy = logprobs.vocab_parallel_logprobs(
                *leaves, targets.to(device), temperature=temperature, with_entropy=True
            )
        assert got.dtype == entropy.dtype == torch.float32
        torch.testing.assert_close(got.cpu().double(), right, rtol=1e-5, atol=1e-4)
        torch.testing.assert_close(entropy.cpu().double(), of_entropy, rtol=1e-5, atol=1e-4)
        gradients = torch.autograd.grad((got * upstream.to(got)).sum() + 0.3 * entropy.sum(), leaves)
        for number, (one, other) in enumerate(zip(gradients, expected, strict=True)):
            assert one.dtype == dtype and one.device.type == device.type
            assert_near(one.cpu(), other, dtype, (from_hidden, number))

    weight = exact[1].detach().to(device, dtype).requires_grad_()  # what Megatron adds up in fp32 is added to
    weight.main_grad = torch.ones(rows, hidden, device=device)
    once, _ = logprobs.linear_logprobs(
        exact[0].detach().to(device, dtype), weight, targets.to(device), vocab_size=vocabulary, temperature=temperature
    )
    (once * upstream.to(once)).sum().backward()
    logits = exact[0].detach() @ exact[1][:vocabulary].T / temperature
    (wanted,) = torch.autograd.grad((logits.log_softmax(-1).gather(1, targets) * upstream).sum(), exact[1])
    assert_near(weight.main_grad.cpu() - 1, wanted, dtype, "main_grad")


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
@pytest.mark.parametrize("by_torch", [False, True], ids=["default", "torch"])
def test_logprobs(kind, dtype, by_torch):
    if by_torch and kind == "cpu":
        pytest.skip("the CPU computes by torch operations in any case")
    run_on(kind, check_logprobs, dtype, by_torch)


def check_attention(dtype):
    """The kernel for this device and dtype on awkward packs, each rank's part in turn, against plain softmax."""
    import attention_cases
    from attention_cases import HEADS, LONG, expected, in_one_process, layouts

    from mcore_rl import platform
    from mcore_rl.models.megatron.kernels.packed_attention import kernel_of

    attention_cases.DIM = 64  # flash kernels take multiples of 8
    device = platform.device()
    kernel = kernel_of(torch.empty(0, dtype=dtype, device=device))
    for cp in (1, 2):
        for name, layout in layouts(cp).items():
            for window in (None, 7, LONG + 30):
                for heads in ("GQA", "MQA"):
                    wanted = expected(layout, *HEADS[heads], window)
                    got = in_one_process(
                        kernel.attend, kernel.reads_in_place, layout, *HEADS[heads], window, dtype, device
                    )
                    for what, one, other in zip(("output", "query", "key", "value"), got, wanted, strict=True):
                        # The gradient of a segment of one token is 0 except for rounding, because it is a difference.
                        assert_near(one, other, dtype, (cp, name, window, heads, what), float(wanted[0].norm()))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_attention(kind, dtype):
    run_on(kind, check_attention, dtype)


def check_losses():
    """Value and gradient by logits of each loss, on this device in fp32 and on the CPU in float64."""
    from mcore_rl import platform
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.config import DPOConfig, GRPOConfig, KTOConfig, SFTConfig
    from mcore_rl.distributed.batched_data_dict import BatchedDataDict
    from mcore_rl.simulation.sequences import Sequences, invented_batch

    common = {
        "output_dir": "unused", "model": {"path": "unused"}, "optimizer": {"lr": 1e-3}, "trainer": {"max_steps": 1},
        "data": {"train": "unused", "max_sequence_length": 64},
    }  # fmt: skip
    sections = {
        SFTConfig: {"batch": {"global_batch_size": 8}},
        DPOConfig: {"batch": {"global_batch_size": 8}, "dpo": {"sft_loss_weight": 0.5}},
        KTOConfig: {"batch": {"global_batch_size": 8}},
        GRPOConfig: {
            "grpo": {"num_prompts_per_step": 2, "num_generations_per_prompt": 4, "max_new_tokens": 8},
            "loss": {"reference_policy_kl_penalty": 0.1, "force_on_policy_ratio": False},
        },
    }
    generator = torch.Generator().manual_seed(0)
    lengths = (40, 3, 64, 17, 2, 33, 50, 9)
    for algorithm, own in sections.items():
        config = algorithm.model_validate({**common, **own})
        batch = invented_batch(config, Sequences(lengths, tuple(max(1, n // 2) for n in lengths)))
        for name, values in batch.items():
            if name.endswith("logprobs") or name == "advantages":
                batch[name] = torch.randn(values.shape, generator=generator) - float(name != "advantages")
        logits = torch.randn(8, 64, 60, generator=generator)
        counts = batch["sample_mask"].sum(), (batch["token_mask"][:, 1:] * batch["sample_mask"][:, None]).sum()
        results = []
        for device, dtype in ((platform.device(), torch.float32), ("cpu", torch.float64)):
            there = {
                name: values.to(device, dtype if values.is_floating_point() else None) for name, values in batch.items()
            }
            leaf = logits.clone().to(device, dtype).requires_grad_()
            loss, metrics = build_loss(config)(
                leaf, BatchedDataDict(there), *(count.to(device, dtype) for count in counts)
            )
            loss.backward()
            results.append((loss.detach().cpu().double(), leaf.grad.cpu().double(), metrics))
        (loss, gradient, metrics), (wanted_loss, wanted_gradient, wanted_metrics) = results
        assert_close32(loss, wanted_loss, FORWARD, scale=1)
        assert_near(gradient, wanted_gradient, torch.float32, algorithm)
        assert wanted_gradient.norm() > 0 and metrics.keys() == wanted_metrics.keys(), algorithm


def test_losses(kind):
    run_on(kind, check_losses)


# ------------------------------------------------------------ the policy


def outcome_of(config, steps):
    return compute_layout_result(config, make_data(), steps)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("family", ["llama", "glm4_moe"])
def test_a_step_in_fp32_equals_plain_pytorch_on_the_cpu(kind, family, implementation, model_of):
    config = built_by(implementation, kind, make_config(model_of(family)), exact=True)
    outcome, plain = run_on(kind, outcome_of, config, STEPS), plain_outcome(config, make_data())
    difference = compare(outcome, plain)
    print(f"{kind}, {family}: {difference}")
    assert difference.within(), difference
    for name in ("loss", "grad_norm"):
        assert outcome.metrics[name] == pytest.approx(plain.metrics[name], rel=1e-5), name


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_a_step_in_bf16_is_as_near_to_fp32_as_the_cpu_is(kind, implementation, model_of):
    config = built_by(implementation, kind, make_config(model_of("llama")))
    half = changed(config, model={"dtype": "bfloat16"})
    local = changed(half, model={"transformer_impl": "local"})
    exact, on_cpu = plain_outcome(config, make_data()), run_on("cpu", outcome_of, local, 1)
    outcome = run_on(kind, outcome_of, half, 1)
    errors = [
        max(float((one.gradients[name].double() - g.double()).norm() / g.norm()) for name, g in exact.gradients.items())
        for one in (outcome, on_cpu)
    ]
    print(f"{kind}: gradients in bf16 differ by {errors[0]:.2e} of their norm, the CPU's by {errors[1]:.2e}")
    assert errors[0] <= 1.5 * errors[1]
    assert outcome.metrics["loss"] == pytest.approx(exact.metrics["loss"], rel=1e-2)


@contextlib.contextmanager
def no_waiting():
    """The host may not wait for the GPU inside; on the CPU there is nothing to wait for."""
    if not torch.cuda.is_available():
        yield
        return
    torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


def train_without_waiting(config):
    """How many microbatches went through the model while the host might not wait."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy import scoring
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, counts = MegatronPolicy(config, 10, rows_per_unit=2), []
    policy.train(make_data(), build_loss(config))  # warm-up: creates objects that are created once
    plain = scoring.run_microbatches

    def run(model, wrapped, microbatches, head, train):
        counts.append(len(microbatches))
        with no_waiting():
            return plain(model, wrapped, microbatches, head, train)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(scoring, "run_microbatches", run)
        policy.train(make_data(), build_loss(config))
        policy.get_logprobs(make_data())
    policy.shutdown()
    return counts


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_the_host_does_not_wait_for_microbatches(kind, dtype, implementation, model_of):
    config = built_by(implementation, kind, make_config(model_of("llama")))
    config = changed(config, model={"dtype": dtype}, batch={"tokens_per_pack": 128})
    counts = run_on(kind, train_without_waiting, config)
    assert len(counts) == 2 and min(counts) > 1


def generate_on(config, params):
    from generation_cases import generate, make_prompts

    prompts = make_prompts()
    rows = zip(prompts["input_ids"].tolist(), prompts["input_lengths"].tolist(), strict=True)
    return [ids[:length] for ids, length in rows], *generate(config, params, greedy=True)


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
def test_greedy_answers_are_those_of_transformers(kind, implementation, tmp_path):
    from generation_cases import LIMIT, NEW_TOKENS

    path = make_model("llama", tmp_path / "model", initializer_range=0.1)
    config = built_by(implementation, kind, changed(make_config(path), data={"max_sequence_length": LIMIT}), True)
    prompts, out, difference = run_on(kind, generate_on, config, SamplingParams(NEW_TOKENS, stop_token_ids=(1,)))
    model = AutoModelForCausalLM.from_pretrained(path, dtype=torch.float32)
    for prompt, row, length in zip(prompts, out["output_ids"], out["unpadded_sequence_lengths"], strict=True):
        ids = torch.tensor([prompt])
        settings = {"do_sample": False, "eos_token_id": 1, "pad_token_id": 0, "max_new_tokens": NEW_TOKENS}
        expected = model.generate(ids, attention_mask=torch.ones_like(ids), **settings)
        assert row[:length].tolist() == expected[0].tolist()
    assert difference < 1e-5


def sample_in_small_blocks(config, replays, deterministic):
    """Return what is sampled from a cache of small blocks, with or without CUDA graphs, and the distance to the
    trainer."""
    from generation_cases import NEW_TOKENS, generate, make_prompts, use_small_blocks

    from mcore_rl.distributed import logprobs
    from mcore_rl.models.generation.megatron import decoder

    use_small_blocks()
    logprobs.CHUNK_BYTES["cuda"] = 2**16
    if not replays:
        decoder.Decoder.can_replay = False
    if deterministic:
        platform.make_deterministic()
    params = SamplingParams(NEW_TOKENS, 0.9, top_p=0.95, top_k=20, seed=3, stop_token_ids=(1, 2, 3), max_kept_tokens=20)
    prompts = BatchedDataDict({name: rows.repeat_interleave(2, 0) for name, rows in make_prompts().items()})
    return generate(config, params, slots=21, prompts=prompts)


@pytest.mark.parametrize("family", ["llama", "qwen3_5"])
def test_cuda_graphs_and_deterministic_kernels_sample_the_same(kind, family, tmp_path):
    from generation_cases import LIMIT, sequences

    path = make_model(family, tmp_path / "model", initializer_range=0.1)
    config = changed(make_config(path), data={"max_sequence_length": LIMIT})
    ways = {"graphs": (True, False), "single launches": (False, False), "deterministic": (True, True)}
    outs = {name: run_on(kind, sample_in_small_blocks, config, *way) for name, way in ways.items()}
    expected, _ = outs["single launches"]
    for name, (out, apart) in outs.items():
        assert sequences(out) == sequences(expected), name
        assert apart < 1e-4, name


def save_and_go_on(config, directory):
    """Return the metrics of a step during which a checkpoint is being written."""
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy, loss_fn = MegatronPolicy(config, 10, rows_per_unit=2), build_loss(config)
    for _ in range(2):
        policy.train(make_data(), loss_fn)
    policy.save_checkpoint(directory, 2, {"step": 2}, wait=False)
    metrics = policy.train(make_data(), loss_fn)
    path = policy.checkpoint.finish()
    policy.shutdown()
    return path, metrics["loss"], metrics["grad_norm"]


def resume(config, path):
    from mcore_rl.algorithms.build_loss import build_loss
    from mcore_rl.models.policy.megatron_policy import MegatronPolicy

    policy = MegatronPolicy(config, 10, rows_per_unit=2)
    damages, restored = policy.checkpoint.verify(path), policy.load_checkpoint(path)
    metrics = policy.train(make_data(), build_loss(config))
    policy.shutdown()
    return damages, restored.state, metrics["loss"], metrics["grad_norm"]


@pytest.mark.parametrize("implementation", IMPLEMENTATIONS)
@pytest.mark.parametrize("offload", [False, True])
def test_a_checkpoint_written_beside_training_resumes(kind, offload, implementation, model_of, tmp_path):
    config = built_by(implementation, kind, make_config(model_of("llama")))
    config = changed(config, optimizer={"offload": offload}, model={"dtype": "bfloat16"})
    path, *went_on = run_on(kind, save_and_go_on, config, tmp_path)
    damages, state, *resumed = run_on(kind, resume, config, path)
    assert (damages, state) == ([], {"step": 2})
    assert resumed == approx32(went_on, FORWARD)


def test_an_offloaded_optimizer_steps_as_one_at_hand(kind, model_of):
    config = changed(make_config(model_of("llama")), model={"dtype": "bfloat16"})
    kept, moved = (
        run_on(kind, outcome_of, changed(config, optimizer={"offload": offload}), STEPS) for offload in (False, True)
    )
    assert compare(moved, kept).within()


def test_weights_go_to_an_engine_on_the_same_device(kind, model_of):
    from refit_cases import CLOSE, share_and_receive

    config = make_config(model_of("llama"))
    expected, again, received, *_, errors, _ = run_on(kind, share_and_receive, config)
    torch.testing.assert_close(received, expected, **CLOSE)
    for one, other in zip(again, expected, strict=True):
        assert_close32(one, other, FORWARD)
    assert len(errors) == 2


# ------------------------------------------------------------ a run


def demo_run(kind, directory, output, *overrides):
    """Metrics of the steps of `train_dpo.py` on the demonstration's model, one process."""
    command = [sys.executable, str(ROOT / "scripts" / "train_dpo.py"), str(ROOT / "configs" / "dpo_cpu.yaml")]
    options = [
        f"output_dir={output}",
        f"model.path={directory}/model",
        f"data.train={directory}/preference_train.jsonl",
    ]
    stop = [
        "data.validation=null",
        "trainer.validation_interval=null",
        "trainer.max_steps=3",
        "checkpoint.export_hf=false",
        "checkpoint.resume=none",
    ]
    ended = subprocess.run(
        [*command, *options, *stop, *overrides], env=environment_for(kind), cwd=directory, capture_output=True,
        text=True, timeout=300,
    )  # fmt: skip
    assert ended.returncode == 0, ended.stdout[-2000:] + ended.stderr[-2000:]
    return [json.loads(line) for line in (output / "metrics.jsonl").read_text().splitlines()]


@pytest.mark.exhaustive
def test_a_run_of_the_demonstration(kind, tmp_path):
    """In fp32 as on the CPU; in bf16 near it; with deterministic kernels the same bits twice."""
    subprocess.run([sys.executable, ROOT / "scripts" / "make_demo_data.py", tmp_path], check=True, timeout=120)
    runs = {
        "exact": ("cpu", "model.dtype=float32"),
        "fp32": (kind, "model.dtype=float32"),
        "bf16": (kind, "model.dtype=bfloat16"),
        "once": (kind, "deterministic=true"),
        "twice": (kind, "deterministic=true"),
    }
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        results = list(pool.map(lambda name: demo_run(runs[name][0], tmp_path, tmp_path / name, runs[name][1]), runs))
    for name in ("loss", "grad_norm"):
        wanted, *found = ([line[name] for line in lines] for lines in results)
        assert found[0] == pytest.approx(wanted, rel=1e-5), name
        assert found[1] == pytest.approx(wanted, rel=0.05), name
        assert found[2] == found[3], name
