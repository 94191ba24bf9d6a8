"""The loader: the same text for any ranks, workers and starting step; held-out batches; errors before a run."""

import gzip
import json
import logging
import shutil
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import fields, replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import registry
from components.data import bundled
from components.data.config import DataConfig, SourceConfig, check_data, open_source
from components.data.heldout import SURPLUS, HeldOut
from components.data.loader import TrainData
from components.data.packing import valid_targets
from components.data.shards import SPLITS, ShardError, ShardSet

SHAPE = {"seq_len": 64, "global_batch_size": 16, "local_batch_size": 2}


def equal(a, b):
    return all(
        (x is None and y is None) or torch.equal(x, y)
        for x, y in ((getattr(a, f.name), getattr(b, f.name)) for f in fields(a))
    )


def step_of(config, tokenizer, step, world_size, workers, **changes):
    """All micro-batches of a step, in global order, as `world_size` ranks with `workers` workers give them."""
    config = replace(config, workers=workers)
    ranks = [
        list(TrainData(config, tokenizer, **SHAPE | changes, rank=r, world_size=world_size).micro_batches(step))
        for r in range(world_size)
    ]
    return [batch for turn in zip(*ranks, strict=True) for batch in turn]


@settings(max_examples=8, deadline=None)
@given(step=st.one_of(st.integers(0, 50), st.integers(10**7, 10**8)), seed=st.integers(0, 1000))
def test_a_step_is_the_same_for_any_ranks_and_workers(data_config, tokenizer, step, seed):
    config = replace(data_config, seed=seed)
    alone = step_of(config, tokenizer, step, 1, 0)
    assert torch.cat([b.index for b in alone]).tolist() == list(range(step * 16, step * 16 + 16))
    for world_size, workers in ((1, 2), (2, 0), (2, 4), (4, 1)):
        shared = step_of(config, tokenizer, step, world_size, workers)
        assert len(shared) == len(alone) and all(map(equal, shared, alone))


@pytest.mark.parametrize("workers", [0, 2])
def test_resuming_at_any_step_on_another_rank_count_gives_what_would_have_come(data_config, tokenizer, workers):
    unbroken = TrainData(replace(data_config, workers=workers), tokenizer, **SHAPE)
    steps = [list(unbroken.micro_batches(s)) for s in range(6)]
    for world_size in (1, 2, 4):
        resumed = step_of(data_config, tokenizer, 4, world_size, workers)
        assert all(map(equal, resumed, steps[4]))
    assert all(map(equal, unbroken.micro_batches(1), steps[1])), "going back gives the same too"


def test_the_rows_are_the_text_of_the_sources_in_the_shares_of_their_weights(data_config, tokenizer):
    data = TrainData(replace(data_config, packing="window"), tokenizer, **SHAPE)
    texts = {
        n: np.concatenate([s.shard_tokens(h) for h in s.shards]).astype("<u2").tobytes() for n, s in data.shards.items()
    }
    found = dict.fromkeys(texts, 0)
    for step in range(20):
        for batch in data.micro_batches(step):
            for row in batch.tokens_BT1.numpy().astype("<u2"):
                found[next(n for n, text in texts.items() if row.tobytes() in text)] += 1
    assert found["prose"] / 320 == pytest.approx(0.7, abs=0.02)


def test_documents_start_within_a_window_behind_each_end_id_and_never_at_its_first_token(data_config, tokenizer):
    windows = open_source(data_config.sources["prose"], tokenizer, "train").windows(64)
    for tokens, starts in map(windows.read, range(len(windows))):  # the first window begins a document
        assert starts.tolist() == (np.flatnonzero(tokens[:-1] == tokenizer.end_id) + 1).tolist()


def test_every_target_of_a_source_is_trained_once_an_epoch(data_config, tokenizer):
    shards = open_source(data_config.sources["prose"], tokenizer, "train")
    windows = shards.windows(64)
    targets = np.concatenate([windows.read(w)[0][1:] for w in range(len(windows))])
    expected = np.concatenate([shards.shard_tokens(s)[1 : (s.tokens - 1) // 64 * 64 + 1] for s in shards.shards])
    assert (targets == expected).all()


def test_a_source_that_repeats_is_warned_of_once(data_config, tokenizer, caplog):
    data = TrainData(data_config, tokenizer, **SHAPE)
    step = next(s for s in range(100_000) if data.epochs(s + 1)["prose"] > 1)
    with caplog.at_level(logging.WARNING):
        for s in (0, step - 1, step, step + 1):
            list(data.micro_batches(s))
    assert [r.message for r in caplog.records if "prose" in r.message] == [
        f"source prose repeats: step {step} begins pass 2 through its text"
    ]


def test_batch_sizes_that_do_not_divide_over_ranks_are_refused(data_config, tokenizer):
    with pytest.raises(ValueError, match="global_batch_size 16 must be a multiple of local_batch_size 2 times 3 ranks"):
        TrainData(data_config, tokenizer, **SHAPE, world_size=3)


@pytest.mark.heavy
def test_one_process_gives_five_million_tokens_a_second(tokenizer, made_source, tmp_path):
    path = made_source(tmp_path / "large", documents=20_000, seed=0)
    config = DataConfig(sources={"a": SourceConfig(path=str(path))}, packing="document", workers=0)
    data = TrainData(config, tokenizer, seq_len=4096, global_batch_size=32, local_batch_size=4)
    begin, tokens = time.process_time(), 0
    for step in range(20):
        tokens += sum(batch.position_BT.numel() for batch in data.micro_batches(step))
    assert tokens / (time.process_time() - begin) > 5e6


# Held out ------------------------------------------------------------------------------------------------------------


def held_out(config, tokenizer, **changes):
    return HeldOut(config, tokenizer, **{"seq_len": 64, "local_batch_size": 2, "number": 5} | changes)


def test_held_out_batches_are_fixed_and_shared_out_evenly_with_surplus_marked(data_config, tokenizer):
    alone = list(held_out(data_config, tokenizer).batches("prose"))
    assert len(alone) == 5 and len({tuple(row.tolist()) for b in alone for row in b.tokens_BT1}) == 10
    other_seed = list(held_out(replace(data_config, seed=99), tokenizer).batches("prose"))
    assert all(map(equal, alone, other_seed))
    (other_size,) = held_out(data_config, tokenizer, local_batch_size=10, number=1).batches("prose")
    assert torch.equal(other_size.tokens_BT1, torch.cat([b.tokens_BT1 for b in alone]))
    held = held_out(data_config, tokenizer)
    for world_size in (2, 4):
        ranks = [list(held.batches("prose", r, world_size)) for r in range(world_size)]
        assert len({len(r) for r in ranks}) == 1, "collectives need as many on every rank"
        counted = [b for turn in zip(*ranks, strict=True) for b in turn if (b.index != SURPLUS).all()]
        assert len(counted) == 5 and all(map(equal, counted, alone))


def test_unigram_entropy_is_that_of_the_trained_targets(data_config, tokenizer):
    held = held_out(data_config, tokenizer)
    targets = torch.cat([b.tokens_BT1[:, 1:][valid_targets(b)] for b in held.batches("code")])
    p = torch.bincount(targets).double() / len(targets)
    assert held.unigram_entropy("code") == pytest.approx(-(p[p > 0] * p[p > 0].log()).sum().item(), rel=1e-12)


# Before a run --------------------------------------------------------------------------------------------------------


def messages(config, tokenizer, **changes):
    facts = {"seq_len": 64, "validation_sources": ["prose"], "validation_sequences": 10} | changes
    return [f"{'.'.join(p.path)}: {p.message}" for p in check_data(config, tokenizer, **facts)]


def with_source(path):
    return DataConfig(sources={"prose": SourceConfig(path=str(path), weight=1.0)})


def test_nothing_is_wrong_with_a_right_recipe(data_config, tokenizer):
    assert messages(data_config, tokenizer) == []


def test_each_thing_wrong_with_the_data_is_one_sentence(data_config, tokenizer, tmp_path):
    good = data_config.sources["prose"].path

    def copy(name):
        return shutil.copytree(good, tmp_path / name)

    (copy("no_shard") / "train-00001.bin").unlink()
    (copy("cut") / "train-00000.bin").write_bytes(b"12")
    (copy("no_manifest") / "manifest.json").unlink()
    (copy("torn") / "manifest.json").write_text('{"format": 1, "shar')
    (copy("future") / "manifest.json").write_text(json.dumps({"format": 99}))
    cases = {
        "nowhere": "does not exist; make it with `python -m recipes.prepare_data",
        "no_shard": "train-00001.bin is missing though the manifest names it",
        "cut": "has 2 bytes, its manifest says",
        "no_manifest": "manifest.json does not exist; prepare the source",
        "torn": "manifest.json cannot be read",
        "future": "has format 99, this version reads 1",
    }
    for name, sentence in cases.items():
        (message,) = messages(with_source(tmp_path / name), tokenizer)
        assert message.startswith("data.sources.prose: ") and sentence in message and "\n" not in message


def test_a_manifest_of_another_tokenizer_is_refused(data_config):
    large = registry.parse_component("tokenizer", {"name": "hymo_bpe_64k"}).build()
    found = messages(data_config, large)
    assert len(found) == 2 and all("was tokenized with HymoBpe4k (4096 ids" in m for m in found)
    with pytest.raises(ShardError, match="the recipe's tokenizer is HymoBpe64k"):
        open_source(data_config.sources["prose"], large, "train")


def test_too_long_sequences_and_too_little_held_out_text_are_found(data_config, tokenizer):
    assert "0 sequences of 1000000, and 1 are needed" in messages(data_config, tokenizer, seq_len=1_000_000)[0]
    assert "[validation] batches" in messages(data_config, tokenizer, validation_sequences=10_000)[0]
    assert 'Did you mean "prose"' in messages(data_config, tokenizer, validation_sources=["prosa"])[0]


# Bundled text --------------------------------------------------------------------------------------------------------


def test_bundled_text_is_tokenized_once_and_no_document_is_in_two_splits(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HYMO_DATA_CACHE", str(tmp_path))
    source = SourceConfig(path="assets/corpus/sotu.jsonl.gz")
    splits = {s: [d.tobytes() for d in open_source(source, tokenizer, s).documents()] for s in SPLITS}
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.bin")}
    shards = open_source(source, tokenizer, "train")
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*.bin")} == before
    everything = [d for documents in splits.values() for d in documents]
    assert len(set(everything)) == len(everything) == shards.manifest.counts["kept"] and all(splits.values())
    assert all(ShardSet.open(shards.folder, s).verify() == [] for s in splits)
    text = tokenizer.decode(next(shards.documents())[:-1].tolist())
    assert text.startswith("Fellow") or " " in text


def test_processes_that_come_together_tokenize_bundled_text_once(tokenizer, tmp_path, monkeypatch):
    """Threads stand for the ranks of a host: a file lock holds between open files, whoever opened them."""
    monkeypatch.setenv("HYMO_DATA_CACHE", str(tmp_path))
    prepare, calls = bundled._prepare, []
    monkeypatch.setattr(bundled, "_prepare", lambda *arguments: (calls.append(arguments), prepare(*arguments)))
    source = SourceConfig(path="assets/corpus/sotu.jsonl.gz")
    with ThreadPoolExecutor(4) as pool:
        opened = list(pool.map(lambda _: open_source(source, tokenizer, "train"), range(4)))
    assert len(calls) == 1 and len({shards.tokens for shards in opened}) == 1


def test_a_preparation_of_bundled_text_that_was_killed_is_done_again(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HYMO_DATA_CACHE", str(tmp_path))
    source = SourceConfig(path="assets/corpus/sotu.jsonl.gz")
    whole = open_source(source, tokenizer, "train")
    (whole.folder / "manifest.json").unlink()
    (whole.folder / "train-00000.bin").write_bytes(b"half")
    assert open_source(source, tokenizer, "train").verify() == []


def test_a_small_text_file_that_is_not_what_it_should_be_is_one_sentence(tokenizer, tmp_path, monkeypatch):
    monkeypatch.setenv("HYMO_DATA_CACHE", str(tmp_path / "cache"))
    whole = gzip.compress(b'{"text": "a"}\n' * 1000)
    cases = {
        "cut": (whole[:-20], "is not whole gzip"),
        "plain": (b'{"text": "a"}', "is not whole gzip"),
        "field": (gzip.compress(b'{"text": "a"}\n{"content": "a"}\n'), 'line 2 is not a JSON object with a "text"'),
        "latin": (gzip.compress('{"text": "ä"}'.encode("latin-1")), "is not whole gzip-compressed UTF-8"),
    }
    for name, (content, sentence) in cases.items():
        (tmp_path / f"{name}.jsonl.gz").write_bytes(content)
        (message,) = messages(with_source(tmp_path / f"{name}.jsonl.gz"), tokenizer, validation_sources=[])
        assert sentence in message
