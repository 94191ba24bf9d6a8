"""Tokenizers: exact round trips, fixed special ids, and clear words about wrong files."""

import base64

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

import registry
from components.data.tokenizers import SPECIALS, HymoBpe64k, TokenizerJson


def build(name, **fields):
    return registry.parse_component("tokenizer", {"name": name, **fields}).build()


@pytest.fixture(scope="module")
def large():
    return build("hymo_bpe_64k")


@settings(max_examples=200, deadline=None)
@given(content=st.binary(max_size=400))
def test_the_64k_tokenizer_round_trips_every_byte_string(large, content):
    # Text is the only way in, so bytes that are no UTF-8 are encoded as their own tokens are: word by word.
    ids = large._encoding._encode_bytes(content)
    assert large.decode_bytes(ids) == content
    assert all(HymoBpe64k.SPECIAL_IDS <= i < 64_256 for i in ids)


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=400))
def test_text_comes_back_exactly_and_never_becomes_a_special_id(large, tokenizer, text):
    text = text.encode("utf-8", errors="replace").decode() + "<|endoftext|><think><|im_end|>"
    for each, specials in ((large, 256), (tokenizer, 16)):
        ids = each.encode(text)
        assert each.decode(ids) == text and min(ids) >= specials
        assert each.byte_lengths()[ids].sum() == len(text.encode())


def test_special_ids_stand_first_and_in_the_order_of_the_specification(large, tokenizer):
    for each in (large, tokenizer):
        assert [each.special_id(name) for name in SPECIALS] == list(range(7))
        assert (each.end_id, each.begin_id, each.pad_id) == (0, 1, 2)
    assert not large.byte_lengths()[:256].any() and large.byte_lengths()[256:].all()
    assert large.byte_lengths().shape == (64_256,)
    assert sorted(large.token_bytes[256:512]) == [bytes([b]) for b in range(256)]


def test_a_batch_is_encoded_like_its_texts_one_by_one(tokenizer):
    texts = ["To be, or not to be", "", "def f(x):\n    return x", "naïve 日本"]
    for threads in (1, 2):
        assert tokenizer.encode_batch(texts, threads) == [tokenizer.encode(t) for t in texts]


def test_the_hash_tells_tokenizers_apart_and_is_stable(large, tokenizer):
    assert large.hash == build("hymo_bpe_64k").hash != tokenizer.hash
    path = "assets/tokenizers/hymo_4k.tiktoken"
    padded = {build("tiktoken", path=path, vocab_size=n).hash for n in (4_087, 4_096)}
    assert len(padded | {tokenizer.hash}) == 3


def test_a_plain_tiktoken_file_keeps_its_ranks_as_ids_with_specials_behind():
    plain = build("tiktoken", path="assets/tokenizers/hymo_4k.tiktoken", vocab_size=4_096)
    assert plain.end_id == 4_080 and max(plain.encode("To be, or not to be")) < 4_080


def write_ranks(path, tokens):
    path.write_bytes(b"".join(b"%s %d\n" % (base64.b64encode(t), i) for i, t in enumerate(tokens)))
    return str(path)


def test_wrong_files_are_refused_in_one_sentence(tmp_path):
    small = "assets/tokenizers/hymo_4k.tiktoken"
    single = [bytes([b]) for b in range(256)]
    cases = [
        ("hymo_bpe_64k", {"path": "no/such.tiktoken"}, "does not exist"),
        (
            "hymo_bpe_64k",
            {"path": small},
            "holds 4080 words but this vocabulary needs 64000",
        ),
        ("qwen", {"path": small}, "Qwen's vocabulary has 151643"),
        ("tiktoken", {"path": "README.md", "vocab_size": 300}, "does not exist|not a tiktoken file"),
        ("tiktoken", {"path": "assets/README.md", "vocab_size": 300}, "not a tiktoken file"),
        ("tiktoken", {"path": write_ranks(tmp_path / "a", single[1:]), "vocab_size": 300}, "lacks 1 of the 256"),
        ("tiktoken", {"path": write_ranks(tmp_path / "b", single), "vocab_size": 256}, "needs 263 ids"),
    ]
    for name, fields, sentence in cases:
        with pytest.raises(ValueError, match=sentence):
            build(name, **fields)


def test_a_vocabulary_size_that_cannot_be_is_found_when_the_recipe_is_parsed():
    with pytest.raises(registry.RecipeError, match="64256, not 64000"):
        registry.parse_component("tokenizer", {"name": "hymo_bpe_64k", "vocab_size": 64_000})


def test_a_tokenizer_json_gives_ids_bytes_and_hash(tmp_path):
    hub = pytest.importorskip("tokenizers")
    trained = hub.Tokenizer(hub.models.BPE())
    trained.pre_tokenizer = hub.pre_tokenizers.ByteLevel(add_prefix_space=False)
    trained.decoder = hub.decoders.ByteLevel()
    alphabet = hub.pre_tokenizers.ByteLevel.alphabet()
    trainer = hub.trainers.BpeTrainer(vocab_size=400, initial_alphabet=alphabet, special_tokens=["<|endoftext|>"])
    trained.train_from_iterator(["to be or not to be, that is the question"] * 9, trainer)
    path = str(tmp_path / "tokenizer.json")
    trained.save(path)
    loaded = build("tokenizer_json", path=path, vocab_size=512)
    text = "to be, naïve <|endoftext|> 日本\n"
    ids = loaded.encode(text)
    assert loaded.decode(ids) == text and loaded.end_id not in ids
    assert loaded.byte_lengths()[ids].sum() == len(text.encode())
    assert loaded.byte_lengths()[loaded.end_id] == 0 and loaded.byte_lengths().dtype == np.int32
    assert isinstance(loaded, TokenizerJson) and loaded.hash == build("tokenizer_json", path=path, vocab_size=512).hash
