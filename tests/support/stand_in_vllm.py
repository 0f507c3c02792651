"""A stand-in for vLLM's server, by transformers: `python tests/support/stand_in_vllm.py MODEL PORT LOG …`.

Every token is drawn from all that is before it by the weights of the moment, in fp32. LOG gets a line for each call.
"""

import argparse
import base64
import hashlib
import io
import json
import os
import signal
import threading
import time
from contextlib import contextmanager, suppress
from http.server import ThreadingHTTPServer
from pathlib import Path
from subprocess import PIPE, Popen
from sys import executable
from tempfile import TemporaryDirectory

import numpy as np
import requests
import torch
from PIL import Image
from ports import free_port
from safetensors.torch import save_file
from signed_handler import SignedHandler
from transformers import AutoConfig, AutoImageProcessor, AutoModelForCausalLM, AutoModelForImageTextToText

from mcore_rl.models.generation.vllm.packed import ROUTE, pack
from mcore_rl.models.generation.vllm.signing import NAME_VARIABLE
from mcore_rl.models.refit import shared_block, transfer
from mcore_rl.models.refit.delta import RefusedUpdate
from mcore_rl.models.refit.host_copy import HostCopy
from mcore_rl.models.refit.transfer import RefitReceiver, decode_refit_info


def told_likeliest(drawn, count):
    """Return the arrays of the likeliest tokens: at each position the sampled token, then `count` likeliest."""
    rows = [(torch.tensor([token]), scores, scores.argsort(descending=True)[:count]) for token, scores in drawn]
    ids = torch.cat([torch.cat((token, likeliest)) for token, _, likeliest in rows])
    values = torch.cat([scores[torch.cat((token, likeliest))] for token, scores, likeliest in rows])
    counts = np.full(len(rows), 1 + count, np.int32)
    logprobs = values.clamp(min=-9999.0).float().numpy()
    return {"likeliest_counts": counts, "likeliest_ids": ids.int().numpy(), "likeliest_logprobs": logprobs}


class Engine:
    """The model, the requests to it, and the responses from its weights."""

    def __init__(self, options):
        self.options, self.config = options, AutoConfig.from_pretrained(options.model)
        self.running, self.lock, self.version = threading.Event(), threading.Lock(), None
        self.running.set()
        self.counts, self.asleep, self.receiver, self.received = {}, False, None, {}

    def count(self, path):
        """Record a call; exit if this call is to fail."""
        with self.lock:
            self.counts[path] = self.counts.get(path, 0) + 1
            with open(self.options.log, "a") as log:
                log.write(json.dumps([time.time(), path]) + "\n")
            number = self.counts[path]
        for where, at, marker in self.options.die:
            if (where, int(at)) == (path, number):
                with suppress(FileExistsError):
                    Path(marker).touch(exist_ok=False)
                    os.kill(os.getpid(), signal.SIGKILL)

    # ------------------------------------------------------------ answers

    def refusal(self, body):
        """Return the status with which a request is refused; 0 for any other request."""
        status, modulus = self.options.refuse
        return status * (modulus > 0 and body["sampling_params"]["seed"] % modulus == 0)

    def generate(self, body):
        sampling, (prompt, images, places) = body["sampling_params"], self.read_images(body)
        assert (sampling["top_p"], sampling["min_p"]) == (1.0, 0.0)
        if self.options.masks:
            assert sampling["top_k"] > 0 and sampling["temperature"] > 0, "as vLLM requires with --return-sampling-mask"
        else:
            assert sampling["top_k"] == 0
        generator = torch.Generator().manual_seed(sampling["seed"])
        ids, all_drawn, spans, reason, masks = list(prompt), [], [], "length", []
        biases = sampling.get("logit_bias", {})
        for index in range(sampling["max_tokens"]):
            time.sleep(self.options.seconds)
            self.running.wait()
            with self.lock:
                assert not self.asleep, "asked in its sleep"
                drawn = self.draw(ids, images, sampling["temperature"], sampling["top_k"], generator, biases)
                (token, scores, mask), version = drawn, self.version
            ids.append(token)
            masks.append(mask)
            all_drawn.append((token, scores))
            if spans and spans[-1][0] == version:
                spans[-1][2] = index + 1
            else:
                spans.append([version, index, index + 1])
            if token in sampling["stop_token_ids"]:
                reason = "stop"
                break
        told = {"finish_reason": reason, "weight_versions": spans}
        logprobs = torch.stack([scores[token] for token, scores in all_drawn]).clamp(min=-9999.0)
        arrays = {"token_ids": np.array(ids[len(prompt) :], np.int32), "logprobs": logprobs.float().numpy()}
        if sampling["logprobs"]:
            arrays |= told_likeliest(all_drawn, sampling["logprobs"])
        if self.options.experts:
            arrays["routed_experts"] = told_experts(self.config, len(ids) - 1)
        if self.options.masks:
            arrays["mask_counts"] = np.array([len(mask) for mask in masks], np.int32)
            arrays["mask_ids"] = np.concatenate(masks).astype(np.int32)
        if body.get("return_token_ids"):
            arrays["prompt_token_ids"], told["image_places"] = np.array(prompt, np.int32), places
        return pack(told, arrays)

    def read_images(self, body):
        """Return the expanded prompt, the model's inputs for its images, and the images' places, as vLLM tells them."""
        parts, ids, places = body.get("content_parts"), list(body["token_ids"]), []
        if not parts:
            return ids, {}, []
        contents = [base64.b64decode(part["url"].removeprefix("data:image/png;base64,")) for part in parts]
        processor = AutoImageProcessor.from_pretrained(self.options.model, backend="pil")
        images = processor(images=[Image.open(io.BytesIO(content)) for content in contents], return_tensors="pt")
        counts = (images["image_grid_thw"].prod(-1) // processor.merge_size**2).tolist()
        start = 0
        for count in counts:
            start = ids.index(self.config.image_token_id, start)
            ids[start : start + 1] = [self.config.image_token_id] * count
            places.append([start, count])
            start += count
        return ids, images, places

    @torch.no_grad()
    def draw(self, ids, images, temperature, top_k, generator, biases):
        kinds = {"mm_token_type_ids": (torch.tensor([ids]) == self.config.image_token_id).long()} if images else {}
        logits = self.model(torch.tensor([ids]), **images, **kinds).logits[0, -1].double()
        for token, bias in biases.items():
            logits[int(token)] += bias
        kept = logits.topk(top_k or len(logits)).indices.sort().values
        scores = torch.full_like(logits, -torch.inf).index_copy(0, kept, logits[kept] / (temperature or 1.0))
        scores = scores.log_softmax(-1)
        token = int(torch.multinomial(scores.exp(), 1, generator=generator)) if temperature else int(scores.argmax())
        return token, scores, kept.tolist()

    # ------------------------------------------------------------ weights

    def init(self, info):
        tensors = decode_refit_info(info["tensors"])
        allowed, sees = self.options.sees, shared_block.sees_probe
        ranks = iter(range(len(info["probes"])))
        # As in another container, or on another GPU.
        transfer.sees_probe = lambda told, device: (allowed is None or next(ranks) in allowed) and sees(told, device)
        transfer.open_block = self.counted(transfer.open_block)
        copy = HostCopy(tensors.values(), info["copy"], info["timeout"]) if info["copy"] else None
        self.receiver = RefitReceiver(self.received.update, tensors, copy=copy)
        self.receiver.join_routes(info["store"], info["probes"], 0, info["timeout"])

    def counted(self, call):
        """Return the function that opens blocks; it records each call as path `map`, and the block's name."""

        def wrapped(handle, *arguments):
            self.note(f"block={handle['shared_memory']}")
            self.count("map")
            return call(handle, *arguments)

        return call if hasattr(call, "is_counted") else setattr(wrapped, "is_counted", True) or wrapped

    def note(self, entry):
        with self.lock, open(self.options.log, "a") as log:
            log.write(json.dumps([time.time(), entry]) + "\n")

    def load(self, version):
        """Load weights from a file, in the format in which transformers reads published weights."""
        with TemporaryDirectory() as directory:
            self.config.save_pretrained(directory)
            tensors = {name: tensor.contiguous() for name, tensor in self.received.items()}
            save_file(tensors, f"{directory}/model.safetensors", metadata={"format": "pt"})
            reads_images = hasattr(self.config, "vision_config")
            kind = AutoModelForImageTextToText if reads_images else AutoModelForCausalLM
            model = kind.from_pretrained(directory, dtype=torch.float32).eval()
        if self.options.experts:
            send_to_told_experts(model)
        with self.lock:
            self.model, self.version = model, version

    def answer(self, path, body):
        if path == ROUTE:
            return self.generate(body)
        if path == "/init_weight_transfer_engine":
            self.init(body["init_info"])
        elif path.startswith("/pause"):
            self.running.clear()
        elif path == "/update_weights":
            assert not self.asleep, "weights for one that sleeps"
            if self.counts[path] in self.options.forget:
                self.receiver.copy.version = -1
            self.receiver.update_weights_from_collective(**body["update_info"])
        elif path == "/finish_weight_update":
            if self.options.digests:
                self.note(f"digest={digest_of(self.received)}")
            else:
                self.load(body["weight_version"])
        elif path == "/resume":
            self.running.set()
        elif path.startswith("/sleep"):
            self.asleep = True
        elif path == "/wake_up":
            self.asleep = False
        elif path == "/is_sleeping":
            return {"is_sleeping": self.asleep}
        elif path.startswith("/server_info"):
            return {"vllm_config": {"model_config": {"return_sampling_mask": self.options.masks}}}
        elif path == "/v1/models":
            return {"data": [{"max_model_len": self.options.length}]}
        elif path == "/get_world_size":
            return {"world_size": 1}
        return {}


def digest_of(tensors):
    """Return a digest of the tensors' names and bits."""
    total = hashlib.sha256()
    for name in sorted(tensors):
        total.update(name.encode() + tensors[name].contiguous().view(-1).view(torch.uint8).numpy().tobytes())
    return total.hexdigest()


def told_experts(config, num_tokens):
    """Return experts [tokens, layers, topk] that no router would choose, each once; dense layers have zeros."""
    place = np.arange(num_tokens)[:, None, None] + 3 * np.arange(config.num_hidden_layers)[None, :, None]
    experts = (place + np.arange(config.num_experts_per_tok)) % config.num_experts
    experts[:, config.mlp_only_layers] = 0
    return experts.astype(np.uint8)


def send_to_told_experts(model):
    def hook_of(layer):
        def hook(module, inputs, outputs):
            logits = outputs[0]
            chosen = torch.tensor(told_experts(model.config, len(logits))[:, layer]).long()
            weights = logits.softmax(-1).gather(1, chosen)
            return logits, weights / weights.sum(-1, keepdim=True), chosen

        return hook

    for name, module in model.named_modules():
        if name.endswith(".mlp.gate"):
            module.register_forward_hook(hook_of(int(name.split(".")[2])))


class Handler(SignedHandler):
    def do_GET(self):
        self.reply(b"")

    def do_POST(self):
        self.reply(self.rfile.read(int(self.headers.get("Content-Length", 0))))

    def reply(self, content):
        engine = self.server.engine
        name = os.environ.get(NAME_VARIABLE, f"@{engine.options.host}:{engine.options.port}")
        if not self.is_signed(content, name) and (self.path != "/health" or "Authorization" in self.headers):
            return self.send_error(401)
        body = json.loads(content or "null")
        if self.path == "/sleep?level=1" and not engine.options.sleeps:
            return self.send_error(404)
        engine.count(self.path)
        status = engine.refusal(body) if self.path == ROUTE else 0
        try:
            answer = {"error": "not this one"} if status else engine.answer(self.path, body)
        except RefusedUpdate as error:
            status, answer = 500, {"error": str(error)}
        content = answer if isinstance(answer, bytes) else json.dumps(answer).encode()
        self.send_response(status or 200)
        self.send_header("Content-Length", str(len(content)))
        self.prove(content)
        self.end_headers()
        with suppress(BrokenPipeError):
            self.wfile.write(content)

    def log_message(self, *_):
        pass


def main():
    parser = argparse.ArgumentParser()
    parser.add_argument("model", type=Path)
    parser.add_argument("port", type=int)
    parser.add_argument("log", type=Path)
    parser.add_argument("--host", default="127.0.0.1")
    parser.add_argument("--length", type=int, default=100, help="tokens of a sequence")
    parser.add_argument("--seconds", type=float, default=0.0, help="before each token")
    parser.add_argument("--experts", action="store_true", help="send tokens to experts of its own, and tell them")
    parser.add_argument("--masks", action="store_true", help="return the tokens that top_k keeps")
    parser.add_argument("--digests", action="store_true", help="only note the digests of the weights, do not load them")
    parser.add_argument("--forget", nargs="*", type=int, default=[], help="updates before which it loses its version")
    parser.add_argument("--sees", nargs="*", type=int, help="ranks whose memory it can read; by default all")
    parser.add_argument("--sleeps", action="store_true", help="has the routes for it")
    parser.add_argument("--refuse", nargs=2, type=int, default=(0, 0), help="a status for seeds that this divides")
    parser.add_argument(
        "--die", nargs=3, action="append", default=[], help="path, at which of its calls, a file of the one that does"
    )
    options = parser.parse_args()
    torch.set_num_threads(1)
    server = ThreadingHTTPServer((options.host, options.port), Handler)
    server.daemon_threads, server.engine = True, Engine(options)
    server.serve_forever()


@contextmanager
def serving(model, directory, *options):
    """Start stand-ins, one for each list of options; return their URLs as an override, their processes, and their
    logs."""
    directory.mkdir(parents=True, exist_ok=True)
    ports = [free_port() for _ in options]
    logs = [directory / f"{port}.jsonl" for port in ports]
    processes = [
        Popen([executable, __file__, model, str(port), log, *map(str, more)], stderr=PIPE, text=True)
        for port, log, more in zip(ports, logs, options, strict=True)
    ]
    urls = [f"http://127.0.0.1:{port}" for port in ports]
    try:
        for url in urls:
            wait_for(url)
        yield f"generation.vllm={{urls: [{','.join(urls)}]}}", processes, logs
    finally:
        for process in processes:
            process.kill()
            process.communicate()


def wait_for(url):
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline:
        with suppress(requests.ConnectionError):
            requests.get(f"{url}/health", timeout=5)
            return
        time.sleep(0.1)
    raise TimeoutError(url)


def calls(log):
    """Return (time, path) of each call."""
    return [tuple(json.loads(line)) for line in log.read_text().splitlines()]


if __name__ == "__main__":
    main()
