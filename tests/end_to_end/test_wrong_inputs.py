"""Tests of wrong inputs: one line with the key or file, the reason and a remedy; exit status 2; no files left.

Most are tried in this process, through the scripts' own entry points, up to where a model would be built.
"""

import importlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import yaml
from broken_inputs import make_everything
from programs import ROOT
from small_models import and_long

from mcore_rl.cli import entry_point
from mcore_rl.cli.main import COMMANDS as OF_MCORE_RL
from mcore_rl.cli.main import main
from mcore_rl.models.policy.megatron_policy import MegatronPolicy
from mcore_rl.simulation import search as simulation

SCRIPTS = ROOT / "scripts"
SECONDS = 5  # of this process's processor, beside the imports: other tests that run at the same time do not count


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    root = tmp_path_factory.mktemp("wrong")
    make_everything(root)
    return root


# ------------------------------------------------------------------ what is wrong with it

COMMANDS = [
    ("sft", ["nowhere.yaml"], "nowhere.yaml: cannot be read (No such file or directory)"),
    ("sft", ["{root}"], "cannot be read (Is a directory)"),
    ("sft", [], "give a configuration file, or --model and --data"),
    ("sft", ["{root}/sft.yaml", "--fast"], "unrecognized arguments: --fast"),
    ("sft", ["{root}/utf16.yaml"], "utf16.yaml: is not UTF-8 text"),
    ("sft", ["{root}/latin.yaml"], "latin.yaml: is not UTF-8 text"),
    ("sft", ["{root}/binary.yaml"], "binary.yaml: is not UTF-8 text"),
    ("sft", ["{root}/nul.yaml"], "nul.yaml: not valid YAML"),
    ("sft", ["{root}/open.yaml"], "open.yaml: not valid YAML"),
    ("sft", ["{root}/list.yaml"], "list.yaml: must be a YAML mapping of sections, found a list"),
    ("sft", ["{root}/empty.yaml"], "output_dir is required; model is required"),
    ("sft", ["{root}/twice.yaml"], "the key trainer is given in line "),
    ("sft", ["{root}/twice_inside.yaml"], "the key lr is given in line "),
    ("sft", ["{root}/no_values.yaml"], "no_values.yaml: model: must be a section of keys, found nothing (null)"),
    ("sft", ["{root}/flat.yaml"], "optimizer: must be a section of keys, found 3"),
    ("sft", ["{root}/grpo.yaml"], "unknown key grpo"),
    ("grpo", ["{root}/grpo.yaml", "--record", "a", "--replay", "b"], "--record and --replay cannot be used together"),
    ("grpo", ["{root}/grpo.yaml", "--record", "{root}/no/where"], "--record {root}/no/where: the directory"),
    ("grpo", ["{root}/grpo.yaml", "--record", "{root}/mine"], "--record {root}/mine: is a directory"),
    ("grpo", ["{root}/grpo.yaml", "--record", "{root}/a_file"], "--record {root}/a_file: exists already"),
    ("grpo", ["{root}/grpo.yaml", "--replay", "nowhere"], "--replay nowhere: cannot be read (No such file"),
    ("grpo", ["{root}/grpo.yaml", "--replay", "{root}/recording.jsonl"], "recording.jsonl: is not a recording of"),
    ("grpo", ["{root}/grpo.yaml", "--replay"], "argument --replay: expected one argument"),
    ("vllm-servers", ["{root}/grpo.yaml", "generation.vllm.python=/no/where"], "generation.vllm.python: not found: /no/where"),
    ("vllm-servers", ["{root}/grpo.yaml", "--hosts", "a,b"], "--node-rank: is missing; --hosts names 2 nodes"),
    ("vllm-servers", ["{root}/grpo.yaml", "--hosts", "a,b", "--node-rank", "2"], "--node-rank 2: --hosts names 2 nodes"),
    ("vllm-servers", ["{root}/grpo.yaml", "--hosts", "a,"], "argument --hosts: must be different addresses"),
    ("vllm-servers", ["{root}/grpo.yaml", "model.path=/no/where"], "model.path: /no/where does not exist"),
    ("report", [], "the following arguments are required: RUN"),
    ("report", ["{root}/nowhere"], "nowhere: is not the output directory of a run"),
    ("report", ["{root}/logs"], "cannot be read (a line is not an object with an integer step)"),
    ("report", ["{root}/an_ended_run", "--output", "{root}/mine"], "mine: exists and was not written by mcore-rl report"),
    ("convert", [], "the following arguments are required: command"),
    ("convert", ["hf-to-torch", "a", "b"], "invalid choice: 'hf-to-torch'"),
    ("convert", ["inspect", "{root}/nowhere"], "nowhere is not a directory"),
    ("convert", ["inspect", "{root}/nothing_here"], "is not a checkpoint and contains none"),
    ("convert", ["to-hf", "{root}/a_run/checkpoints", "{root}/new"], "all checkpoints in .* are damaged or incomplete"),
    ("convert", ["to-hf", "{root}/a_run", "{root}/mine"], "mine exists already"),
    ("convert", ["from-hf", "{root}/nowhere", "{root}/new"], "nowhere does not exist"),
    ("convert", ["from-hf", "{root}/model", "{root}/a_file"], "a_file is not a directory"),
    ("convert", ["from-hf", "{root}/gpt2", "{root}/new"], "model type 'gpt2' is not supported"),
    ("convert", ["from-hf", "{root}/truncated_weights", "{root}/new"], "not a whole safetensors"),
    ("layouts", ["{root}/dpo.yaml", "--layouts", "tp=0"], "--layouts 'tp=0': every size must be at least 1"),
    ("layouts", ["{root}/dpo.yaml", "--layouts", "sp=2"], "--layouts 'sp=2': sp must be 0 or 1"),
    ("layouts", ["{root}/dpo.yaml", "--layouts", "xp=2"], "write KEY=1,2 with one of the keys cp, dp"),
    ("layouts", ["{root}/dpo.yaml", "--layouts", "tp=4", "--max-processes", "2"], "every layout needs more processes"),
    ("layouts", ["{root}/dpo.yaml", "--max-processes", "0"], "must be a whole number of at least 1, got '0'"),
    ("layouts", ["{root}/dpo.yaml", "--steps", "-1"], "argument --steps: "),
    ("layouts", ["{root}/dpo.yaml", "--algorithm", "ppo"], "invalid choice: 'ppo'"),
    ("layouts", ["{root}/dpo.yaml", "model.path={root}/gpt2"], "model type 'gpt2' is not supported"),
    ("ray_dpo", ["{root}/dpo.yaml", "--workers", "0"], "argument --workers: must be a whole number of at least 1"),
    ("ray_dpo", ["{root}/dpo.yaml", "--steps", "0"], "argument --steps: must be a whole number of at least 1"),
    ("make_demo_data", [], "the following arguments are required: directory"),
    ("make_demo_data", ["{root}/a_file"], "a_file is not a directory"),
    ("make_arithmetic_data", ["{root}/a_file"], "a_file is not a directory"),
    ("make_demo_data", ["{root}/mine"], "mine is not empty, and its files will not be overwritten"),
    ("make_arithmetic_data", ["{root}/mine"], "mine is not empty, and its files will not be overwritten"),
]  # fmt: skip

KEYS = [
    ("sft", "nonsense", "override 'nonsense': write it as section.key=value"),
    ("sft", "=3", "override '=3': write it as section.key=value"),
    ("sft", "optimizer..lr=3", "override 'optimizer..lr=3': write it as section.key=value"),
    ("sft", "seed.x=1", "seed: Input should be a valid integer (got keys)"),
    ("sft", "optimizer.lr=[1", "'[1' is not a YAML value"),
    ("sft", "optimizer.learning_rate=1", "unknown key optimizer.learning_rate; TRL's learning_rate is optimizer.lr here"),
    ("sft", "optimizer.weigth_decay=1", "unknown key optimizer.weigth_decay; did you mean optimizer.weight_decay?"),
    ("sft", "paralel.x=1", "unknown key paralel; did you mean parallel?"),
    ("sft", "dpo.reference=swap", "unknown key dpo"),
    ("sft", "optimizer=3", "optimizer: must be a section of keys, found 3"),
    ("sft", "output_dir=", "output_dir: must not be empty"),
    ("sft", "output_dir=''", "output_dir: must not be empty"),
    ("sft", "data.train=", "data.train: must not be empty"),
    ("sft", "data.train=''", "data.train: must not be empty"),
    ("sft", "model.path=''", "model.path: must not be empty"),
    ("sft", "seed=-1", "seed: .* greater than or equal to 0 (got -1)"),
    ("sft", "seed=99999999999", "seed: .* less than 2147483648"),
    ("sft", "seed=true", "seed: must be a number, not true or false"),
    ("sft", "deterministic=perhaps", "deterministic: .* valid boolean"),
    ("sft", "batch.global_batch_size=0", "batch.global_batch_size: .*got 0"),
    ("sft", "batch.global_batch_size=2.5", "batch.global_batch_size: .*got 2.5"),
    ("sft", "batch.global_batch_size=many", "batch.global_batch_size: .*got 'many'"),
    ("sft", "batch.min_shared_tokens=8", "batch.min_shared_tokens: has no effect with share_prefixes=false"),
    ("distill", "batch={share_prefixes: true}", "batch.share_prefixes: is not supported for distillation"),
    ("sft", "data.cache_dir={root}/a_file", "data.cache_dir: {root}/a_file cannot be written (Not a directory)"),
    ("sft", "data.columns={prompt: question}", "lacks the key question, which data.columns names; the record has "),
    ("sft", "data.max_samples=0", "data.max_samples: "),
    ("sft", "model.moe_router_replay=true", "model.moe_router_replay: needs GRPO or PPO"),
    ("sft", "model.indexer_replay=true", "model.indexer_replay: needs GRPO or PPO, whose samples record the keys"),
    ("sft", "model.mtp_loss_scaling_factor=0.1", "model.mtp_loss_scaling_factor: layers that predict further tokens cannot be trained in llama"),
    ("grpo", "model.indexer_replay=true", "model.indexer_replay: llama has no indexer that chooses keys; leave "),
    ("sft", "batch.micro_batch_size=2", "batch.micro_batch_size: has no effect with packs, whose size is tokens_per_pack"),
    ("sft", "batch={global_batch_size: 2, packing: false, tokens_per_pack: 99}", "batch.tokens_per_pack: has no effect with packing=false"),
    ("sft", "batch.tokens_per_pack=40", "batch.tokens_per_pack=40: must be at least 48, the padded length of the longest possible record"),
    ("dpo", "batch.tokens_per_pack=50", "batch.tokens_per_pack=50: must be at least 96, the padded length of the longest possible record (2 x data"),
    ("sft", "data.overlong=cut", "data.overlong: .*'drop' or 'truncate'.*got 'cut'"),
    ("sft", "data.max_sequence_length=0", "data.max_sequence_length: "),
    ("sft", "data.max_sequence_length=4096", "data.max_sequence_length=4096: the model has 1024 positions"),
    ("sft", "data.chat_template=nowhere.jinja", "data.chat_template: nowhere.jinja is neither a template nor the path of a template file"),
    ("sft", "data.chat_template={root}/template.jinja", "data.chat_template: is not a Jinja template"),
    ("sft", "optimizer.lr=nan", "optimizer.lr: .*finite"),
    ("sft", "optimizer.lr=.inf", "optimizer.lr: .*finite"),
    ("sft", "optimizer.lr=-1e-3", "optimizer.lr: .*greater than or equal to 0"),
    ("sft", "optimizer.lr=30", "optimizer.lr: .*less than 1 (got 30)"),
    ("sft", "optimizer.lr=fast", "optimizer.lr: .*valid number.*got 'fast'"),
    ("sft", "optimizer.lr=null", "optimizer.lr: .*valid number"),
    ("sft", "optimizer.min_lr=0.5", "optimizer.min_lr: must be at most lr"),
    ("sft", "optimizer={lr: 0.1, min_lr: 0.01, schedule: constant}", "optimizer.min_lr: has no effect with schedule=constant"),
    ("sft", "optimizer.adam_beta1=1", "optimizer.adam_beta1: .*less than 1"),
    ("sft", "optimizer.adam_beta2=1.5", "optimizer.adam_beta2: .*less than 1"),
    ("sft", "optimizer.adam_eps=0", "optimizer.adam_eps: .*greater than 0"),
    ("sft", "optimizer.weight_decay=nan", "optimizer.weight_decay: .*finite"),
    ("sft", "optimizer.clip_grad=-1", "optimizer.clip_grad: "),
    ("sft", "optimizer.warmup_steps=-1", "optimizer.warmup_steps: "),
    ("sft", "optimizer.schedule=step", "optimizer.schedule: .*'constant', 'linear', 'cosine', 'inverse_square_root' or 'wsd'"),
    ("sft", "trainer.max_steps=0", "trainer.max_steps: "),
    ("sft", "trainer.max_epochs=0", "trainer.max_epochs: "),
    ("sft", "trainer.validation_interval=2", "trainer.validation_interval: needs validation data"),
    ("sft", "trainer.log_interval=0", "trainer.log_interval: "),
    ("sft", "checkpoint.save_interval=0", "checkpoint.save_interval: "),
    ("sft", "checkpoint.save_minutes=0", "checkpoint.save_minutes: .*greater than 0"),
    ("sft", "checkpoint.keep_every=5", "checkpoint.keep_every: has an effect only with keep_last"),
    ("sft", "checkpoint.overwrite=true", "checkpoint.overwrite: .* set resume=none"),
    ("sft", "checkpoint.on_failure=panic", "checkpoint.on_failure: "),
    ("sft", "checkpoint.resume=nowhere", "checkpoint.resume: nowhere is not a directory"),
    ("sft", "checkpoint.resume={root}/nothing_here", "checkpoint.resume: {root}/nothing_here holds no checkpoint"),
    ("sft", "checkpoint.resume={root}/a_run/checkpoints/iter_0000003", "is damaged or incomplete: manifest.json is missing"),
    ("sft", "logging.wandb=project", "logging.wandb: install the wandb extra"),
    ("sft", "parallel.tensor_model_parallel_size=2", "must divide the number of processes (1); start 2 processes or a multiple"),
    ("sft", "parallel.tensor_model_parallel_size=0", "parallel.tensor_model_parallel_size: "),
    ("sft", "parallel.sequence_parallel=true", "parallel.sequence_parallel: needs tensor_model_parallel_size > 1"),
    ("sft", "parallel.timeout_seconds=0", "parallel.timeout_seconds: "),
    ("sft", "model.dtype=float16", "model.dtype: .*'float32' or 'bfloat16'"),
    ("sft", "model.head=value", "model.head: .*'lm' or 'reward'"),
    ("sft", "model.head=reward", "model.head: only train_rm.py trains a model with head=reward"),
    ("dpo", "model.head=reward", "model.head: only train_rm.py trains a model with head=reward"),
    ("grpo", "model.head=reward", "model.head: only train_rm.py trains a model with head=reward"),
    ("rm", "model.head=lm", "rm.yaml: model.head: must be reward to train a reward model"),
    ("sft", "model.lora.rank=0", "model.lora.rank: .*greater than or equal to 1"),
    ("sft", "model.lora.dropout=1", "model.lora.dropout: .*less than 1"),
    ("sft", "model.lora.r=4", "unknown key model.lora.r; "),
    ("sft", "model.lora=16", "model.lora: must be a section of keys, found 16"),
    ("dpo", "model.lora.target_modules=[q_proj, wk]", "model.lora.target_modules: llama has no wk to adapt; it has q_proj, k_"),
    ("dpo", "model.lora.path={root}/nowhere", "model.lora.path: {root}/nowhere must be a PEFT adapter with adapter_config.json"),
    ("dpo", "model.lora.path={root}/dora", "model.lora.path: {root}/dora/adapter_config.json: use_dora=True is not supported"),
    ("dpo", "model.lora.path={root}/no_tensors", "no_tensors/adapter_model.safetensors cannot be read"),
    ("dpo", "model.lora.path={root}/other_tensors", "model.lora.path={root}/other_tensors: llama has no lm_head to adapt"),
    ("dpo", "model.lora={path: '{root}/other_tensors', rank: 3}", "model.lora.rank=3: the adapter model.lora.path={root}/other_tensors has 2"),
    ("rm", "model.lora.rank=4", "model.lora: is not supported for a reward model, because its new head must be trained too"),
    ("grpo", "batch.global_batch_size=7", "batch.global_batch_size: must be num_prompts_per_step x num_generations_per_prompt (4)"),
    ("grpo", "grpo.num_generations_per_prompt=1", "grpo.num_generations_per_prompt: grpo compares the responses to a prompt; use 2 or more"),
    ("grpo", "grpo.max_new_tokens=48", "grpo.max_new_tokens: must be less than data.max_sequence_length (48)"),
    ("grpo", "grpo.overlong_cache_length=9", "grpo.overlong_cache_length: must be at most max_new_tokens (8)"),
    ("grpo", "grpo={max_new_tokens: null, overlong_cache_length: 49}", "grpo.overlong_cache_length: must be at most data.max_s"),
    ("grpo", "grpo.temperature=0", "grpo.temperature: .*greater than 0"),
    ("grpo", "grpo.top_p=2", "grpo.top_p: .*less than or equal to 1"),
    ("grpo", "loss.ratio_clip=1", "unknown key loss.ratio_clip"),
    ("grpo", "loss=3", "loss: must be a section of keys, found 3"),
    ("grpo", "loss.kl_clamp=nan", "loss.kl_clamp: must be finite"),
    ("grpo", "loss.reference_policy_kl_penalty=.inf", "loss.reference_policy_kl_penalty: must be finite"),
    ("grpo", "loss.ratio_clip_min=-1", "loss.ratio_clip_min: must be at least 0, got -1"),
    ("dpo", "data=", "data: must be a section of keys, found nothing (null)"),
    ("dpo", "dpo.reference_policy_kl_penalty=nan", "dpo.reference_policy_kl_penalty: must be finite"),
    ("dpo", "dpo.reference_policy_kl_penalty=.inf", "dpo.reference_policy_kl_penalty: must be finite"),
    ("dpo", "dpo.label_smothing=0.1", "unknown key dpo.label_smothing; did you mean dpo.label_smoothing?"),
    ("dpo", "dpo={preference_loss_weight: 0}", "dpo: preference_loss_weight and sft_loss_weight are both 0"),
    ("dpo", "dpo={preference_loss: ipo, label_smoothing: 0.1}", "dpo: label_smoothing applies to preference_loss=sigmoid"),
    ("dpo", "dpo.reference=never", "dpo.reference: .*'auto', 'swap' or 'precompute'"),
    ("grpo", "generation.backend=sglang", "generation.backend: .*'megatron' or 'vllm'.*got 'sglang'"),
    ("grpo", "generation.max_token_mult_prob_error=1", "generation.max_token_mult_prob_error: .*greater than 1"),
    ("grpo", "generation.vllm.num_servers=2", "generation.vllm: requires backend=vllm, not megatron"),
    ("grpo", "generation={backend: vllm, cuda_graphs: false}", "generation.cuda_graphs: requires backend=megatron; for vLLM, write vllm.arguments=[--enforce-eager]"),
    ("grpo", "generation={backend: vllm, vllm: {python: /no/where}}", "generation.vllm.python: not found: /no/where; create it with `make install-vllm`"),
    ("grpo", "generation={backend: vllm, vllm: {urls: ['localhost:81']}}", "generation.vllm.urls.0: .*should match pattern"),
    ("grpo", "generation={backend: vllm, vllm: {urls: ['http://a:81', 'http://a:81']}}", "generation.vllm.urls: a server is listed twice"),
    ("grpo", "generation={backend: vllm, vllm: {devices: [0, 0]}}", "generation.vllm.devices: a GPU is listed twice"),
    ("grpo", "generation={backend: vllm, vllm: {num_servers: none}}", "generation.vllm.num_servers"),
    ("grpo", "data.overlong=truncate", "data.overlong: prompts are never truncated"),
    ("grpo", "environment.name=human", "environment.name: "),
    ("grpo", "environment.name=function", "environment.function: must be written module:function"),
    ("grpo", "environment={name: function, function: judge}", "must be written module:function (got 'judge')"),
    ("grpo", "environment={name: function, function: 'nowhere:f'}", "environment.function: ModuleNotFoundError: No module"),
    ("grpo", "environment={name: function, function: 'math:nothing'}", "environment.function: AttributeError"),
    ("grpo", "environment.function=a:b", "environment.function: requires name=function or trl or verl, not exact_match"),
    ("grpo", "environment={name: math, pattern: x}", "environment.pattern: requires name=exact_match or try_again"),
    ("grpo", "environment={name: trl}", "environment.function: must be written module:function"),
    ("grpo", "environment.name=http", "environment.url: must be set with name=http"),
    ("grpo", "environment={name: http, url: 'judge:80'}", "environment.url: "),
    ("grpo", "environment.retries=5", "environment.retries: requires name=http, not exact_match"),
    ("grpo", "environment.name=weighted", "environment.rewards: must name at least one judge if name is weighted"),
    ("grpo", "environment.rewards={a: {name: math}}", "environment.rewards: must name at least one judge if name is weighted"),
    ("grpo", "environment={name: weighted, rewards: {a: {name: weighted}}}", "environment.rewards.a.name: "),
    ("grpo", "environment={name: weighted, rewards: {a: {name: math, weigth: 2}}}", "unknown key environment.rewards.a.weigth; did you mean environment.rewards.a.weight?"),
    ("grpo", "environment={name: weighted, rewards: {a: {name: math, pattern: x}}}", "environment.rewards.a.pattern: requires name=exact_match"),
    ("grpo", "environment={name: weighted, rewards: {a: {name: math, weight: .nan}}}", "environment.rewards.a.weight: "),
    ("grpo", "environment={name: weighted, rewards: {a: {name: math}}, max_turns: 2}", "environment.max_turns: weighted ends every conversation"),
    ("grpo", "environment={name: reward_model, path: x, batch_size: 2}", "environment.batch_size: must be left out for a reward model"),
    ("grpo", "environment.name=agent", "environment.program: must be set if and only if name=agent"),
    ("grpo", "environment.program=a:b", "environment.program: must be set if and only if name=agent"),
    ("grpo", "environment.agent={max_calls: 3}", "environment.agent: requires name=agent, not exact_match"),
    ("grpo", "environment={name: agent, program: a:b, max_turns: 2}", "environment.max_turns: has no effect on an agent's program"),
    ("grpo", "environment={name: agent, program: a:b, agent: {port: 70000}}", "environment.agent.port: "),
    ("grpo", "grpo.max_staleness=1", "grpo.max_staleness: needs generation.backend=vllm"),
    ("grpo", "grpo.max_staleness=-1", "grpo.max_staleness: "),
    ("grpo", "environment.pattern='('", "environment.pattern: '(' is not a regular expression"),
    ("grpo", "environment.max_turns=2", "environment.max_turns: exact_match ends every conversation after one response"),
    ("grpo", "environment.time_limit_seconds=0", "environment.time_limit_seconds: "),
    ("grpo", "environment.max_failed_steps=0", "environment.max_failed_steps: "),
    ("grpo", "environment={name: http, url: 'http://localhost:9/', headers: {Token: 'a ${NOT_SET_ANYWHERE}'}}",
     "environment.headers.Token: the environment variable NOT_SET_ANYWHERE is not set"),
    ("grpo", "environment={name: weighted, rewards: {a: {name: http, url: 'http://localhost:9/', headers: {B: '${:}'}}}}",
     "environment.rewards.a.headers.B: ${:} does not name an environment variable"),
]  # fmt: skip

MODELS = [
    ("nowhere", "nowhere does not exist; give a Hugging Face model directory, or OWNER/NAME on the hub"),
    ("a_file", "a_file must be a Hugging Face model directory"),
    ("lora", "lora is an adapter (LoRA), not a model; give its base model"),
    ("no_tokenizer", "model.path: no tokenizer found in"),
    ("no_weights", "must hold its weights as safetensors; found none"),
    ("pickles", "found only pickle files (pytorch_model.bin), which are never loaded"),
    ("broken_config", "broken_config/config.json is not JSON"),
    ("nameless_config", "nameless_config/config.json has no model_type"),
    ("gpt2", "model type 'gpt2' is not supported"),
    ("unheard_of", "model type 'unheard-of' is not supported; supported are llama"),
    ("gelu", "activation 'gelu' is not supported"),
    ("five_heads", "five_heads"),
    ("wide", "wide"),
    ("deep", "deep"),
    ("text_size", 'text_size/config.json: hidden_size must be a whole number of at least 1, got "large"'),
    ("no_heads", "no_heads/config.json: num_attention_heads must be a whole number of at least 1, got 0"),
    ("no_positions", "no_positions/config.json: max_position_embeddings must be a whole number of at least 1, got 0"),
    ("narrow_vocabulary", "narrow_vocabulary"),
    ("strange_rope", "longrope"),
    ("truncated_weights", "model.safetensors: is not a whole safetensors file"),
    ("lacks_a_tensor", "model.norm.weight"),
    ("lacks_a_file", "the file missing.safetensors, which model.safetensors.index.json names, is missing"),
    ("two_sets", "two sets of weights: model.safetensors, which transformers reads, and model.safetensors.index.json"),
    ("broken_tokenizer", "model.path: no tokenizer can be loaded from"),
    ("endless", "has no eos_token; set it in tokenizer_config.json"),
]  # fmt: skip

DATA = [
    ("sft", "nothing.jsonl", "data: {root}/nothing.jsonl does not exist"),
    ("sft", "empty.jsonl", "empty.jsonl is empty"),
    ("sft", "blank.jsonl", "blank.jsonl: holds no records"),
    ("sft", "broken.jsonl", "broken.jsonl, line 3: not valid JSON: Expecting value at column 11"),
    ("sft", "list.jsonl", "list.jsonl, line 1: must be a JSON object, found a list"),
    ("sft", "latin.jsonl", "latin.jsonl, line 1: is not UTF-8 text"),
    ("sft", "utf16.jsonl", "utf16.jsonl, line 1: is not UTF-8 text"),
    ("sft", "data.csv", "data.csv must be a .jsonl, .json or .parquet file"),
    ("sft", "mine", "mine is a directory without a .jsonl, .json or .parquet file"),
    ("sft", "object.json", "object.json, line 1: "),
    ("sft", "truncated.parquet", "truncated.parquet: is not a complete Parquet file"),
    ("sft", "directory.jsonl", "directory.jsonl is a directory without a .jsonl, .json or .parquet file"),
    ("sft", "no_completion.jsonl", "line 1: lacks the key completion; the record has answer, prompt; if another column holds it, set data.columns={completion: COLUMN}"),
    ("sft", "null_completion.jsonl", "line 1: the key completion has no value (null)"),
    ("sft", "no_response.jsonl", "line 1: the record has no response tokens"),
    ("sft", "sharegpt.jsonl", "conversations is ShareGPT's; write it as messages of role and content"),
    ("sft", "alpaca.jsonl", "instruction is Alpaca's; write it (and input) as prompt, output as completion"),
    ("sft", "text.jsonl", "lacks the keys prompt and completion; the record has text"),
    ("sft", "mixed.jsonl", "line 1: a prompt and its response (completion, chosen or rejected) must both be strings or both be lists of messages; found"),
    ("sft", "number.jsonl", "lists of messages; found a number and a number"),
    ("sft", "no_role.jsonl", "line 1: messages, message 1: must have a role and a content; its keys are content"),
    ("sft", "from_value.jsonl", "messages, message 1: must have a role and a content; its keys are from, value"),
    ("sft", "no_content.jsonl", "messages, message 1: has neither content nor tool_calls"),
    ("sft", "image.jsonl", "line 1: the record has images, but the model reads no images; leave them out"),
    ("sft", "weight.jsonl", "messages, message 2: weight must be 0 or 1, got 0.5"),
    ("sft", "user_weight.jsonl", "message 1: has weight 1 and the role user"),
    ("sft", "all_weights_0.jsonl", "line 1: the record has no response tokens: no message of the assistant"),
    ("sft", "only_user.jsonl", "line 1: the record has no response tokens: no message of the assistant"),
    ("sft", "empty_answer.jsonl", "line 1: message 2 (assistant) is empty"),
    ("sft", "messages_text.jsonl", "line 1: messages must be a list of messages, found a text"),
    ("sft", "no_messages.jsonl", "line 1: the record has no response tokens"),
    ("sft", "bad_tools.jsonl", "line 1: tools must be a list, or JSON of a list"),
    ("sft", "unused_tools.jsonl", "line 1: the chat template does not write the record's tools"),
    ("sft", "bad_call.jsonl", "message 2: a tool call must have a function with a name"),
    ("sft", "bad_arguments.jsonl", "message 2: the arguments of the tool call f are not JSON"),
    ("sft", "long.jsonl", "long.jsonl: no record is short enough: 2 of 2 dropped (longer than 48 tokens; the median is 62, the longest 62; data.max_sequence_length=62 keeps all)"),
    ("dpo", "no_rejected.jsonl", "line 1: lacks the key rejected; the record has chosen, prompt"),
    ("dpo", "same.jsonl", "chosen and rejected are the same in every record"),
    ("dpo", "no_prompt.jsonl", "line 1: lacks the key prompt (only records with message lists may leave it out)"),
    ("rm", "same.jsonl", "chosen and rejected are the same in every record"),
    ("grpo", "alpaca.jsonl", "line 1: lacks the key prompt"),
    ("grpo", "prompt_number.jsonl", "line 1: prompt must be a list of messages, found a number"),
    ("grpo", "prompt_empty.jsonl", "line 1: the prompt has no tokens"),
    ("grpo", "prompt_null.jsonl", "line 1: the key prompt has no value (null)"),
    ("grpo", "prompt_list.jsonl", "line 1: prompt must be a list of messages, found a list with a text"),
    ("grpo", "long.jsonl", "no prompt is short enough to leave room for max_new_tokens=8: 2 of 2 dropped (longer than 40 tokens; the median is 60, the longest 60; data.max_sequence_length=68 keeps all"),
    ("grpo", "no_answer.jsonl", "environment.name=exact_match: .*cannot be judged: KeyError: 'answer' (the record has solution)"),
    ("grpo", "verl.jsonl", "KeyError: 'answer' (the record has data_source, reward_model); a record with reward_model has verl's form: set environment.name=verl, and environment.function to"),
]  # fmt: skip

JUDGED = "environment={name: reward_model, path: '{root}/%s'%s}"
BESIDE = [
    ("dpo", ["dpo.reference_model={root}/nowhere"], "dpo.reference_model: {root}/nowhere does not exist"),
    ("dpo", ["dpo.reference_model={root}/gelu"], "dpo.reference_model: .*activation 'gelu' is not supported"),
    ("dpo", ["dpo.reference_model={root}/judge"], "dpo.reference_model: {root}/judge is a reward model, where a language"),
    ("dpo", ["dpo.reference_model={root}/five_heads"], "dpo.reference_model: "),
    ("distill", ["distillation.teacher={root}/gpt2"], "distillation.teacher: model type 'gpt2' is not supported|distillation.teacher: {root}/gpt2"),
    ("distill", ["distillation.topk=251"], "distillation.topk=251: the teacher has only 250 tokens"),
    ("ppo", ["critic.path={root}/nowhere"], "critic.path: {root}/nowhere does not exist"),
    ("ppo", ["critic.path={root}/wide"], "critic.path: {root}/wide"),
    ("ppo", ["critic.pretraining_steps=3"], "critic.pretraining_steps=3: must be less than the steps of the run (3)"),
    ("grpo", [JUDGED % ("nowhere", "")], "environment.path: {root}/nowhere does not exist"),
    ("grpo", [JUDGED % ("model", "")], "environment.path: {root}/model is not a reward model: it has no score.weight"),
    ("grpo", [JUDGED % ("judge", ", max_sequence_length: 4096")], "environment.max_sequence_length=4096: the model has 1024 positions.*; the model is environment.path={root}/judge"),
    ("distill", ["distillation.teacher={root}/short"], "data.max_sequence_length=48: the model has 32 positions.*; the model is distillation.teacher={root}/short"),
]  # fmt: skip
"""Other models than the policy."""

TOKENIZERS = [
    ("sft", ["model.path={root}/many_tokens"], "model.path: the tokenizer has 3.* tokens, but the model has only 250"),
    ("dpo", ["dpo.reference_model={root}/no_tokenizer"], "dpo.reference_model: no tokenizer found in {root}/no_tokenizer"),
    ("dpo", ["dpo.reference_model={root}/many_tokens"], "dpo.reference_model: {root}/many_tokens has another vocabulary"),
    ("distill", ["distillation.teacher={root}/many_tokens"], "distillation.teacher: {root}/many_tokens has another vocab"),
    ("ppo", ["critic.path={root}/many_tokens"], "critic.path: {root}/many_tokens has another vocabulary than model.path"),
    ("ppo", ["critic.pretraining_steps=3", "trainer={max_epochs: 1}"], "critic.pretraining_steps=3: must be less than the steps of the run (3)"),
]  # fmt: skip
"""And how many records there are."""

OTHERS = [
    ("sft", ["output_dir={root}/a_file"], "output_dir: {root}/a_file is not a directory"),
    ("sft", ["output_dir={root}/a_file/run"], "output_dir: {root}/a_file is not a directory"),
    ("sft", ["output_dir=/proc/nothing/run"], "output_dir: /proc/nothing/run cannot be written"),
    ("sft", ["output_dir={root}/mine"], "output_dir: {root}/mine holds hf, which no run wrote"),
    ("sft", ["output_dir={root}/model"], "output_dir: {root}/model holds config.json, which no run wrote; choose another"),
    ("sft", ["output_dir={root}/logs"], "output_dir: {root}/logs holds metrics.jsonl, which no run wrote"),
    ("sft", ["output_dir={root}/a_run"], "all checkpoints in {root}/a_run/checkpoints are damaged or incomplete"),
    ("sft", ["output_dir={root}/an_ended_run", "checkpoint.resume=none"], "an_ended_run holds a run, which would be mixed"),
    ("sft", ["output_dir={root}/an_ended_run", "data.train={root}/an_ended_run/samples.jsonl"],
     "data.train: {root}/an_ended_run/samples.jsonl is written by this run"),
    ("sft", ["model.path={root}/no_template", "data.train={root}/chat.jsonl"],
     "chat.jsonl, line 1: messages need a chat template, but the tokenizer has none; set data.chat_template"),
    ("grpo", ["model.path={root}/no_template", "data.train={root}/chat.jsonl"],
     "chat.jsonl, line 1: messages need a chat template, but the tokenizer has none"),
    ("sft", ["model.path={root}/no_tokenizer", "data.train={root}/chat.jsonl"],
     "model.path: no tokenizer found in {root}/no_tokenizer"),
    ("sft", ["data.validation={root}/empty.jsonl"], "empty.jsonl is empty"),
    ("sft", ["data.validation={root}/no_role.jsonl", "trainer.validation_interval=1"], "no_role.jsonl, line 1: messages"),
]  # fmt: skip

ALGORITHMS = ("sft", "dpo", "rm", "grpo", "ppo", "distill")
"""Their training scripts are tried."""

CASES = [
    *COMMANDS,
    *((script, [f"{{root}}/{script}.yaml", key], message) for script, key, message in KEYS),
    *(("sft", ["{root}/sft.yaml", f"model.path={{root}}/{model}"], message) for model, message in MODELS),
    *((script, [f"{{root}}/{script}.yaml", f"data.train={{root}}/{file}"], message) for script, file, message in DATA),
    *(
        (script, [f"{{root}}/{script}.yaml", *overrides], message)
        for script, overrides, message in (*BESIDE, *TOKENIZERS, *OTHERS)
    ),
]


def snapshot(root):
    return {path: path.stat().st_mtime_ns if path.is_dir() else path.read_bytes() for path in sorted(root.rglob("*"))}


class Accepted(Exception):
    pass


@pytest.fixture
def attempt(monkeypatch, capfd, root):
    """A function that runs a script, or a command of `mcore-rl`, in this process: its status, standard error, and processor seconds."""

    def leave(status):
        raise SystemExit(status)

    def build(*arguments, **options):
        raise Accepted("a model would have been built")

    monkeypatch.setattr(entry_point.os, "_exit", leave)
    monkeypatch.setattr(MegatronPolicy, "__init__", build)
    monkeypatch.setattr(simulation, "simulate", build)
    monkeypatch.chdir(root)

    def run(script, arguments):
        if script in OF_MCORE_RL:
            return ended(lambda: (main([script, *arguments]), sys.exit(0)))
        name = script if (SCRIPTS / f"{script}.py").exists() else f"train_{script}"
        module = importlib.import_module(name)
        monkeypatch.setattr(sys, "argv", [f"{name}.py", *arguments])
        return ended(lambda: start(name, module))

    def ended(program):
        capfd.readouterr()
        started = time.process_time()
        with pytest.raises(SystemExit) as end:
            program()
        return end.value.code, capfd.readouterr().err, time.process_time() - started

    return run


def start(name, module):
    """Run the script as `if __name__ == "__main__"` does, in the module that coverage and monkeypatches use."""
    source = Path(module.__file__).read_text()
    block = source.split('if __name__ == "__main__":\n')[1]
    exec(compile("if True:\n" + block, module.__file__, "exec"), {**vars(module), "__name__": "__main__"})


def test_there_are_many():
    assert len(CASES) >= 150
    assert len({(script, *arguments) for script, arguments, _ in CASES}) == len(CASES)


@pytest.mark.parametrize(
    ("script", "arguments", "message"), CASES, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_a_mistake_is_told_in_one_line(script, arguments, message, attempt, root):
    before = snapshot(root)
    status, told, seconds = attempt(script, [argument.replace("{root}", str(root)) for argument in arguments])
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert_says(told, message.replace("{root}", str(root)))
    assert status == 2
    assert seconds < SECONDS
    assert snapshot(root) == before


OF_A_RUN_ALONE = (
    *("output_dir=", "checkpoint.resume=", "checkpoint.overwrite=", "--record", "--replay"),
    *(
        "function: 'nowhere:f'",
        "function: 'math:nothing'",
        "no_answer.jsonl",
        "verl.jsonl",
        "vllm: {python",
        "headers: {",
    ),
    *("no_weights", "pickles", "lacks_a_file", "logging.wandb="),
)
"""Replace the parts of a run that the simulation does not have: output files, judges, servers, weights, trackers."""

SIMULATED = [
    (script, arguments, message)
    for script, arguments, message in CASES
    if script in ALGORITHMS and arguments and not any(text in " ".join(arguments) for text in OF_A_RUN_ALONE)
]


@pytest.mark.parametrize(
    ("script", "arguments", "message"), SIMULATED, ids=lambda x: x if isinstance(x, str) else " ".join(x)
)
def test_simulating_refuses_the_same(script, arguments, message, attempt, root):
    arguments = [argument.replace("{root}", str(root)) for argument in arguments]
    status, told, _ = attempt("simulate", [*arguments, "--algorithm", script, "--world-size", "1"])
    assert told.startswith("error: ") and told.count("\n") == 1, told
    assert_says(told, message.replace("{root}", str(root)))
    assert status == 2


OF_TOKENIZERS = ("no_tokenizer", "broken_tokenizer", "endless")
SHAPES = [
    *BESIDE,
    *(("sft", [f"model.path={{root}}/{model}"], message) for model, message in MODELS if model not in OF_TOKENIZERS),
]


@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    [case for case in SHAPES if not any(text in " ".join(case[1]) for text in OF_A_RUN_ALONE)],
    ids=lambda x: x if isinstance(x, str) else " ".join(x),
)
def test_of_invented_lengths_models_alone_are_looked_at(script, overrides, message, attempt, root):
    """No records are there."""
    overrides = [override.replace("{root}", str(root)) for override in (*overrides, "data.train=nowhere.jsonl")]
    options = ["--algorithm", script, "--world-size", "1", "--lengths", "40"]
    status, told, _ = attempt("simulate", [str(root / f"{script}.yaml"), *overrides, *options])
    assert_says(told, message.replace("{root}", str(root)))
    assert status == 2 and told.count("\n") == 1


OPTIONS = [
    (["--ranks", ""], "--ranks : write first, last, distinct, stages, or numbers below 8"),
    (["--ranks", "9" * 5000], "--ranks 9999"),
    (["--lengths", "9" * 5000], "--lengths 9999"),
    (["--ranks", "8"], "--ranks 8: write first, last, distinct, stages, or numbers below 8"),
    (["--lengths", ""], "--lengths : write numbers of tokens, at least 2, separated by commas"),
    (["--lengths", "9,x"], "--lengths 9,x: write numbers of tokens"),
    (["--lengths", "99"], "--lengths: the longest is 99, more than data.max_sequence_length=48"),
    (["--response-part", "0.9"], "--response-part: needs --lengths"),
    (
        ["--lengths", "9", "--response-part", "0"],
        "--response-part 0.0: must be a fraction of a sequence, above 0 and at most 1",
    ),
    (["--lengths", "9", "--response-part", "nan"], "--response-part nan: must be a fraction of a sequence, above 0"),
    (["--image-tokens", "64"], "--image-tokens: needs --lengths"),
    (["--lengths", "9", "--image-tokens", "4,x"], "--image-tokens 4,x: write numbers of tokens, separated by commas"),
    (
        ["--hardware", "tpu"],
        "--hardware tpu: must be one of a100, b200, gb200, gb300, h100, h200; for a GPU that a file of yours describes, write FILE:NAME",
    ),
    (["--hardware", "{root}/kinds.yaml:endless"], "kinds.yaml:endless: memory_bytes: Input should be a finite number"),
    (["--search", "--ranks", "first"], "--ranks: needs a single layout; leave out --search"),
    (["--search", "--load-from", "2"], "--load-from: needs a single layout; leave out --search"),
    (
        ["parallel.tensor_model_parallel_size=3"],
        "= 3 must divide the number of processes (8); start 3 processes or a multiple",
    ),
]


@pytest.mark.parametrize(("options", "message"), OPTIONS, ids=lambda x: " ".join(x) if isinstance(x, list) else "")
def test_options_are_looked_at_before_anything_is_read(options, message, attempt, root):
    kinds = yaml.safe_load((Path(simulation.__file__).parent / "hardware.yaml").read_text())
    (root / "kinds.yaml").write_text(yaml.safe_dump({"endless": {**kinds["h100"], "memory_bytes": float("inf")}}))
    options = [option.replace("{root}", str(root)) for option in options]
    arguments = [str(root / "sft.yaml"), "--algorithm", "sft", "--world-size", "8", "data.train=nowhere.jsonl"]
    status, told, _ = attempt("simulate", [*arguments, *options])
    assert_says(told, message)
    assert status == 2 and told.count("\n") == 1


def assert_says(told, message):
    """Check `message`, with `.*` for any text and `|` for alternatives; the token cache must not change the message."""
    assert "data.cache_dir" in message or "data.cache_dir" not in told, told
    for alternative in message.split("|"):
        position = 0
        for part in alternative.split(".*"):
            position = told.find(part, position)
            if position < 0:
                break
        if position >= 0:
            return
    pytest.fail(f"{told!r} does not say {message!r}")


# ------------------------------------------------------------------ under torchrun

TORCHRUN = [
    ("sft", ["optimizer.lr=nan"], "optimizer.lr: "),
    ("sft", ["parallel.tensor_model_parallel_size=3"], "= 3 must divide the number of processes (2)"),
    ("sft", ["output_dir={root}/mine"], "holds hf, which no run wrote"),
    ("sft", ["output_dir={root}/an_ended_run", "checkpoint.resume=none"], "holds a run, which would be mixed"),
    ("sft", ["--fast"], "unrecognized arguments: --fast"),
    ("dpo", ["batch.tokens_per_pack=50"], "must be at least 96, the padded length of the longest possible record"),
    ("rm", ["model.path={root}/lora"], "is an adapter (LoRA), not a model"),
    ("grpo", ["environment.pattern='('"], "'(' is not a regular expression"),
    ("grpo", ["data.train={root}/nothing.jsonl"], "nothing.jsonl does not exist"),
    ("sft", ["checkpoint.resume=nowhere"], "checkpoint.resume: nowhere is not a directory"),
    ("sft", ["data.train={root}/no_role.jsonl"], "no_role.jsonl, line 1: "),
    ("grpo", ["data.train={root}/no_answer.jsonl"], "cannot be judged: KeyError: 'answer'"),
]
"""The last is noticed on the first rank alone, while the others go on to form a process group."""


@pytest.mark.long
@pytest.mark.parametrize(
    ("script", "overrides", "message"),
    and_long(TORCHRUN[:1], TORCHRUN[1:]),
    ids=lambda x: x if isinstance(x, str) else x[0],
)
def test_under_torchrun_the_line_comes_first_and_last(script, overrides, message, root):
    before = snapshot(root)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    command += [ROOT / "scripts" / f"train_{script}.py", root / f"{script}.yaml"]
    command += [override.replace("{root}", str(root)) for override in overrides]
    environment = {**os.environ, "CUDA_VISIBLE_DEVICES": "", "OMP_NUM_THREADS": "1"}
    done = subprocess.run(list(map(str, command)), capture_output=True, text=True, timeout=90, env=environment)
    assert done.returncode == 1, "torchrun's own"
    lines = done.stderr.strip().splitlines()
    (first,) = [line for line in lines if line.startswith("error: ")]
    assert message.replace("{root}", str(root)) in first
    assert not [line for line in lines if line.startswith("[rank ")]
    *_, last, rule = lines
    assert last.strip() == f"traceback : {first}"
    assert set(rule) == {"="}
    assert done.stderr.count("Traceback (most recent call last)") == 1, "torchrun's own"
    assert snapshot(root) == before


def test_help_makes_nothing(attempt, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    for script in ("sft", "grpo", "make_demo_data", "make_arithmetic_data", "report", "convert",
                   "layouts", "simulate", "ray_dpo", "vllm-servers"):  # fmt: skip
        assert attempt(script, ["--help"])[:2] == (0, "")
    assert not list(tmp_path.iterdir())
