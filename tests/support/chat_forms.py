"""Chat templates with the structure of published ones, written for tests, and a tokenizer for them.

Each template has `{% generation %}` markers around what a model of the family generates in a turn, through the end
token. transformers' mask for the marked template is the expected mask; the package gets the template without markers.
"""

import re
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path

from tokenizers import AddedToken, ByteLevelBPETokenizer
from transformers import PreTrainedTokenizerFast

TEMPLATES = Path(__file__).parent / "chat_templates"


@dataclass(frozen=True)
class Form:
    """A template with markers, its end token, and which conversations it writes."""

    marked: str
    eos: str
    calls: bool = True
    several_calls: bool = True
    text_with_calls: bool = True
    tools: bool = True
    thoughts: bool = False
    system: bool = True
    text_arguments: bool = False
    """Whether the template can only write arguments that are JSON text, and needs a content beside them."""
    declared: tuple[str, ...] = ()
    """Further end tokens that the model's generation_config.json names."""

    @property
    def plain(self) -> str:
        """The template without markers."""
        return re.sub(r"\{%- (end)?generation %\}", "", self.marked)


NO_CALLS = {"calls": False, "tools": False}
ONE_CALL = {"several_calls": False, "text_with_calls": False}
DEEPSEEK = {"tools": False, "text_arguments": True}
PROPERTIES = {
    "qwen2.5": ("<|im_end|>", {}),
    "qwen3": ("<|im_end|>", {"thoughts": True}),
    "qwen3-coder": ("<|im_end|>", {}),
    "hermes": ("<|im_end|>", {}),
    "llama-3.1": ("<|eot_id|>", ONE_CALL),
    "mistral-v3": ("</s>", {"text_with_calls": False}),
    "mistral-nemo": ("</s>", {"text_with_calls": False}),
    "mistral-v7": ("</s>", {"text_with_calls": False}),
    "deepseek-v3": ("<|eos|>", DEEPSEEK),
    "deepseek-r1": ("<|eos|>", DEEPSEEK),
    "deepseek-v3.1": ("<|eos|>", DEEPSEEK),
    "gemma-2": ("<end_of_turn>", {**NO_CALLS, "system": False}),
    "gemma-3": ("<end_of_turn>", NO_CALLS),
    "phi-3": ("<|endoftext|>", NO_CALLS),
    "phi-4": ("<|im_end|>", NO_CALLS),
    "glm-4.5": ("<|endoftext|>", {"thoughts": True, "declared": ("<|user|>", "<|observation|>")}),
    "olmo-2": ("<|endoftext|>", NO_CALLS),
    "smollm3": ("<|im_end|>", {}),
    "command-r": ("<|END_OF_TURN|>", {"tools": False}),
    "gpt-oss": ("<|return|>", {**ONE_CALL, "thoughts": True, "declared": ("<|call|>",)}),
    "granite": ("<|end_of_text|>", {}),
}
FORMS = {
    name: Form((TEMPLATES / f"{name}.jinja").read_text(), eos, **properties)
    for name, (eos, properties) in PROPERTIES.items()
}

SPECIAL = [
    "<s>", "</s>", "<|pad|>", "<|im_start|>", "<|im_end|>", "<|im_sep|>", "<|end|>", "<|endoftext|>", "<|eos|>",
    "<|start_header_id|>", "<|end_header_id|>", "<|eot_id|>", "[INST]", "[/INST]", "[AVAILABLE_TOOLS]",
    "[/AVAILABLE_TOOLS]", "[TOOL_CALLS]", "[TOOL_RESULTS]", "[/TOOL_RESULTS]", "[TOOL_CONTENT]", "[SYSTEM_PROMPT]",
    "[/SYSTEM_PROMPT]", "<|User|>", "<|Assistant|>", "<start_of_turn>", "<end_of_turn>", "<|user|>", "<|assistant|>",
    "<|system|>", "<|observation|>", "[gMASK]", "<sop>", "<|START_OF_TURN|>", "<|END_OF_TURN|>", "<|CHATBOT|>",
    "<|USER|>", "<|SYSTEM|>", "<|start|>", "<|message|>", "<|channel|>", "<|call|>", "<|return|>", "<|start_of_role|>",
    "<|end_of_role|>", "<|end_of_text|>", "<|tool_call|>",
]  # fmt: skip


@lru_cache
def base_tokenizer():
    """A byte-level BPE that has learnt to merge over what templates write: line ends, spaces, headers."""
    bpe = ByteLevelBPETokenizer()
    texts = ['assistant\n\n\nuser\n\n  {"name": "add", "arguments": {"a": 1}}\n</tool_call>\n one user: \n\n']
    bpe.train_from_iterator(texts * 40, vocab_size=420, show_progress=False)
    bpe.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    bpe.add_tokens(["<think>", "</think>", "<tool_call>", "</tool_call>"])
    return bpe


def tokenizer_with(template, eos):
    return PreTrainedTokenizerFast(
        tokenizer_object=base_tokenizer()._tokenizer,
        bos_token="<s>",
        eos_token=eos,
        pad_token="<|pad|>",
        chat_template=template,
    )
