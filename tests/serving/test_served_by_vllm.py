"""`mcore-rl serve` and `mcore-rl eval` by real vLLM servers: `make test-vllm`."""

import json

import pytest
from ports import free_port
from served_models import served_by_command
from small_models import make_model
from vllm_servers import PYTHON, START_SECONDS
from vllm_servers import vllm_environment as vllm_environment  # a fixture

pytestmark = pytest.mark.vllm


def test_a_model_answers_by_vllm_as_by_the_training_processes(tmp_path):
    make_model("llama", tmp_path / "model", initializer_range=0.1, head_dim=32)
    common = [tmp_path / "model", "model.dtype=float32", "data.max_sequence_length=200"]
    vllm = {"python": str(PYTHON), "port": free_port(), "start_seconds": START_SECONDS}
    by_vllm = ["generation.backend=vllm", f"generation.vllm={json.dumps(vllm)}", f"output_dir={tmp_path / 'out'}"]
    chat = {"messages": [{"role": "user", "content": "say a"}], "max_tokens": 9, "temperature": 0, "logprobs": True}
    text = {"prompt": "say b", "max_tokens": 7, "temperature": 0, "logprobs": 1, "stop": ["zz"]}
    told = []
    for options in ([], by_vllm):
        with served_by_command(*common, *options) as served:
            answers = [served.post("/v1/chat/completions", chat), served.post("/v1/completions", text)]
            random = served.post("/v1/completions", {"prompt": "x", "temperature": 1.3, "top_k": 3, "seed": 1})
            streamed = served.post("/v1/chat/completions", {**chat, "stream": True})
            assert random.status_code == 200 and "[DONE]" in streamed.text, streamed.text
            if options:
                refused = served.post("/v1/completions", {"prompt": "x", "echo": True, "logprobs": 1})
                assert refused.status_code == 400 and "generation.backend=megatron" in refused.text
            told.append([answer.json()["choices"][0] for answer in answers])
            assert served.stop() == 143, served.error
    (chat_here, text_here), (chat_there, text_there) = told
    assert chat_here["message"]["content"] == chat_there["message"]["content"]
    assert text_here["text"] == text_there["text"]
    logprobs = [[token["logprob"] for token in one["logprobs"]["content"]] for one in (chat_here, chat_there)]
    assert logprobs[0] == pytest.approx(logprobs[1], abs=1e-4)
