"""Tests of the texts and bytes of single tokens, with tokenizers that divide characters."""

import random

import pytest
from tokenizers import Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast
from transformers.convert_slow_tokenizer import bytes_to_unicode

from mcore_rl.data.token_texts import INCOMPLETE, TokenTexts, text_of_tokens
from mcore_rl.models.generation.megatron.continuous_batch import RunningSequence, StopStrings

TEXTS = ["日本語の文章です。これは長い。 a b c", "☃☃☃☃☃☃☃☃☃☃", "ab 🙂é☃ z", "日 b", "a", "👩‍👩‍👧 x 👩‍👩‍👧"]
UNKNOWN = 400
"""An id that has no text."""


def byte_level():
    """Each byte is a token, and "he" and " a" too."""
    vocabulary = {character: number for number, character in enumerate(bytes_to_unicode().values())}
    vocabulary |= {"he": 256, "Ġa": 257}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("h", "e"), ("Ġ", "a")]))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.ByteLevel(add_prefix_space=False), decoders.ByteLevel()
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


def byte_fallback():
    """The form of Llama-2's tokenizer: spaces are "▁", and characters that it does not know are bytes."""
    vocabulary = {f"<0x{byte:02X}>": byte for byte in range(256)}
    vocabulary |= {token: 256 + number for number, token in enumerate(["▁", "a", "b", "c", "x", "z", "▁a", "。"])}
    tokenizer = Tokenizer(models.BPE(vocabulary, [("▁", "a")], byte_fallback=True, unk_token=None))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace()
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    tokenizer.decoder = decoders.Sequence(steps)
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer)


KINDS = {"byte level": byte_level(), "byte fallback": byte_fallback()}
pytestmark = pytest.mark.parametrize("kind", KINDS)


def texts_of(kind, ids):
    texts = TokenTexts(KINDS[kind])
    return [texts.add(token, place == len(ids) - 1) for place, token in enumerate(ids)]


@pytest.mark.parametrize("text", TEXTS)
def test_the_texts_of_tokens_are_the_whole_text(kind, text):
    tokenizer = KINDS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    texts, found, spelled = TokenTexts(tokenizer), [], b""
    for token in ids:
        before = texts.length
        likely = texts.of_next(token)
        found.append(texts.add(token))
        assert texts.length == before + len(found[-1]) and (likely == found[-1] or INCOMPLETE in likely)
        spelled += bytes(texts.bytes_of(token, found[-1]))
    assert "".join(found) == text_of_tokens(tokenizer, ids) == text
    assert spelled.decode() == text


def test_tokens_without_a_text_change_nothing(kind):
    ids = KINDS[kind]("a b", add_special_tokens=False)["input_ids"]
    with_others = [*ids[:1], *[UNKNOWN] * 9, *ids[1:]]
    assert "".join(texts_of(kind, with_others)) == text_of_tokens(KINDS[kind], with_others) == "a b"


def test_bytes_that_are_no_characters(kind):
    """With byte-level tokenizers, the texts of any bytes add up to the text of all bytes."""
    generator, tokenizer = random.Random(0), KINDS[kind]
    for _ in range(60):
        parts = [generator.choice([b"\x80" * 20, b"\xf0\x9f", b"\xe2\x98\x83", b"a", b" b", b"\xff"]) for _ in range(9)]
        names = [f"<0x{byte:02X}>" if kind == "byte fallback" else bytes_to_unicode()[byte] for byte in b"".join(parts)]
        texts = texts_of(kind, tokenizer.convert_tokens_to_ids(names))
        if kind == "byte level":
            assert "".join(texts) == text_of_tokens(tokenizer, tokenizer.convert_tokens_to_ids(names))
        assert texts[-1] and len(texts) == len(names)


@pytest.mark.parametrize(("text", "stop", "left"), [
    ("日。本語 b", "。", "本語 b"), ("日。 b", "。", " b"), ("日本。x", "。", "x"), ("ab 🙂 c", "🙂 ", "c"),
    ("a a b", " a", " b"),
])  # fmt: skip
def test_a_stop_string_ends_the_response_where_it_is_complete(kind, text, stop, left):
    tokenizer = KINDS[kind]
    ids = tokenizer(text, add_special_tokens=False)["input_ids"]
    sequence, strings = RunningSequence(0, 0, (1,), 99), StopStrings(("never", stop), tokenizer)
    ends = [strings.end(sequence, token) for token in ids]
    first = ends.index(True)
    assert stop in text_of_tokens(tokenizer, ids[: first + 1]) and stop not in text_of_tokens(tokenizer, ids[:first])
    assert text_of_tokens(tokenizer, ids[first + 1 :]).strip() == left.strip()
