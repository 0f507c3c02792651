"""Load the model of a run in transformers; print a response and its mean log-probability.

python examples/use_the_trained_model.py OUTPUT/hf "PROMPT"
"""

import sys

import torch
from transformers import AutoModelForCausalLM, AutoTokenizer


def main(directory, prompt):
    tokenizer = AutoTokenizer.from_pretrained(directory)
    model = AutoModelForCausalLM.from_pretrained(directory, dtype=torch.float32)
    if tokenizer.chat_template:
        prompt = tokenizer.apply_chat_template(
            [{"role": "user", "content": prompt}], tokenize=False, add_generation_prompt=True
        )
    inputs = tokenizer(prompt, return_tensors="pt", add_special_tokens=not tokenizer.chat_template)
    inputs.pop("token_type_ids", None)
    with torch.no_grad():
        tokens = model.generate(**inputs, max_new_tokens=32, do_sample=False)
        logprobs = model(tokens).logits[:, :-1].log_softmax(-1).gather(2, tokens[:, 1:, None])[0, :, 0]
    answer = tokens[0, inputs["input_ids"].shape[1] :]
    print(repr(tokenizer.decode(answer, skip_special_tokens=True)))
    print(f"{len(answer)} tokens, mean log-probability {logprobs[-len(answer) :].mean():.4f}")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit(__doc__)
    main(*sys.argv[1:])
