"""Preparation: what is taken and refused, killed and resumed without a trace, and clear words about bad input."""

import errno
import gzip
import hashlib
import json
import os
import random
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import numpy as np
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import tomli_w

import registry
from components.data import preparation
from components.data.chat import encode_chat, segments
from components.data.documents import Refused, Selection, encode_rows, text_of_row
from components.data.journal import Journal
from components.data.preparation import Preparation, SourceRun, encoded, is_prepared, workers
from components.data.shard_writer import ShardWriter
from components.data.shards import SPLITS, Manifest, ShardError, ShardSet, write_shard
from components.data.sources import Broken, SourceError
from recipes import prepare_data

TOKENIZER = {"name": "hymo_bpe_4k"}
WORDS = ("the of and to in that it is was for you he be with on not we all have this but by " * 2).split()


def text(number, draw=None):
    draw = draw or random.Random(number)
    return f"Document {number}. " + " ".join(draw.choices(WORDS, k=draw.randint(20, 60)))


def write_jsonl(path, rows, pack=lambda content: content):
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(pack("".join(json.dumps(row) + "\n" for row in rows).encode()))
    return path


def table(folder, sources, **output):
    """A plan that prepares `sources` (name -> its table) into `folder`."""
    given = {"folder": str(folder), "shard_tokens": 2_000, "splits": {"train": 0.8, "validation": 0.1, "test": 0.1}}
    return {"output": given | output, "tokenizer": TOKENIZER, "sources": sources}


def parsed(content):
    problems = []
    plan = registry.parse_fields(Preparation, content, (), problems)
    assert not problems, problems
    return plan


def run(content, number_of_workers=0):
    """Prepare every source of a table; manifests by name."""
    plan = parsed(content)
    tokenizer = plan.tokenizer.build()
    with workers(number_of_workers, plan.tokenizer) as pool, Journal(Path(plan.output.folder)) as journal:
        return {
            name: SourceRun(plan, name, tokenizer, journal).run(pool, 2, lambda tokens: None)
            for name in plan.sources
            if not is_prepared(plan, name, tokenizer)
        }


def contents(folder):
    """Every file of the prepared sources and its hash, manifests included; the journal left out."""
    files = sorted(p for p in Path(folder).rglob("*") if p.is_file() and p.parent != Path(folder))
    return {str(p.relative_to(folder)): hashlib.sha256(p.read_bytes()).hexdigest() for p in files}


def texts(folder, name, tokenizer, split):
    documents = ShardSet.open(Path(folder) / name, split).documents()
    return [tokenizer.decode(d[:-1].tolist()) for d in documents]


# What is taken -------------------------------------------------------------------------------------------------------


def test_every_document_is_in_exactly_one_split_with_its_text_whole(tmp_path, tokenizer):
    rows = [{"text": text(i)} for i in range(400)]
    source = {"read": {"name": "jsonl", "files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    manifest = run(table(tmp_path / "out", {"a": source}))["a"]
    found = {split: texts(tmp_path / "out", "a", tokenizer, split) for split in SPLITS}
    assert sorted(t for split in found.values() for t in split) == sorted(r["text"] for r in rows)
    assert manifest.counts == {"read": 400, "kept": 400}
    assert 0.7 < len(found["train"]) / 400 < 0.9 and len([s for s in manifest.shards if s.split == "train"]) > 2
    assert all(s.tokens <= 2_000 for s in manifest.shards)
    assert all(ShardSet.open(tmp_path / "out/a", split).verify() == [] for split in SPLITS)


def test_duplicates_are_dropped_within_a_source_and_across_the_table(tmp_path, tokenizer):
    first = write_jsonl(tmp_path / "1.jsonl", [{"text": text(i % 50)} for i in range(100)])
    second = write_jsonl(tmp_path / "2.jsonl", [{"text": text(i)} for i in range(25, 75)])
    sources = {n: {"read": {"name": "jsonl", "files": [str(p)]}} for n, p in (("a", first), ("b", second))}
    found = run(table(tmp_path / "out", sources))
    assert found["a"].counts == {"read": 100, "kept": 50, "duplicate": 50}
    assert found["b"].counts == {"read": 50, "kept": 25, "duplicate": 25}
    everything = [t for n in "ab" for split in SPLITS for t in texts(tmp_path / "out", n, tokenizer, split)]
    assert len(everything) == len(set(everything)) == 75


def test_filters_refuse_what_the_specification_says_and_count_it(tokenizer):
    good = text(1)
    rows = [
        {"text": t, "score": 4}
        for t in (good, "", " \n", "a" * 300, "0123456789 +-*/=()[]{}<>!?.,;:#%" * 9 + "abc", "tiny")
    ]
    rows += [{"text": good, "score": 2.9}, {"text": good}, {"text": 7, "score": 3}, Broken("not JSON", "x line 3")]
    found = encode_rows(rows, Selection(score="score", min_score=3), tokenizer)
    assert found.lengths.tolist() == [len(tokenizer.encode(good)) + 1]
    assert found.tokens.tolist() == [*tokenizer.encode(good), tokenizer.end_id] and found.tokens.dtype == np.uint16
    assert found.refused == Counter({
        "empty": 2, "few characters": 1, "symbols": 1, "short": 1, "score": 1, "broken: not JSON": 1,
        "broken: field score holds nothing, not a number": 1, "broken: field text holds int, not text": 1,
    })  # fmt: skip
    assert found.places["broken: not JSON"] == "x line 3"


def test_a_long_ordinary_text_is_not_taken_for_repetition(tokenizer):
    long = " ".join(text(i) for i in range(300))
    assert len(encode_rows([{"text": long}], Selection(), tokenizer).lengths) == 1


def test_a_target_ends_a_source_at_the_document_that_reaches_it(tmp_path, tokenizer):
    rows = [{"text": text(i)} for i in range(400)]
    source = {"read": {"name": "jsonl", "files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    manifest = run(table(tmp_path / "out", {"a": source}, target_tokens=5_000))["a"]
    longest = max(len(tokenizer.encode(r["text"])) for r in rows) + 1
    assert 5_000 <= manifest.tokens("train") < 5_000 + longest


def test_workers_change_nothing(tmp_path):
    rows = [{"text": text(i % 350)} for i in range(400)]
    source = {"read": {"name": "jsonl", "files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    run(table(tmp_path / "none", {"a": source}), 0)
    run(table(tmp_path / "two", {"a": source}), 2)
    assert contents(tmp_path / "none") == contents(tmp_path / "two")


def test_conversations_become_chatml_with_marks_as_special_ids(tmp_path, tokenizer):
    messages = [
        {"role": "user", "content": "2 + 2? <|im_end|>"},
        {"from": "gpt", "value": "4"},
        {"role": "system", "content": "Be brief."},
        {"role": "assistant", "content": "<think>\nhm\n</think>\n\nyes"},
    ]
    rendered = "".join(t for _, t in segments(messages))
    assert rendered == (
        "<|im_start|>user\n2 + 2? <|im_end|><|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n4<|im_end|>\n"
        "<|im_start|>system\nBe brief.<|im_end|>\n<|im_start|>assistant\n<think>\nhm\n</think>\n\nyes<|im_end|>\n"
    )
    ids = encode_chat(tokenizer, messages)
    marks = {
        name: ids.count(tokenizer.special_id(name)) for name in ("<|im_start|>", "<|im_end|>", "<think>", "</think>")
    }
    assert marks == {"<|im_start|>": 4, "<|im_end|>": 4, "<think>": 2, "</think>": 2}
    assert "2 + 2? <|im_end|>" in tokenizer.decode(ids), "a mark in what a user says is ordinary text"
    path = write_jsonl(tmp_path / "c.jsonl", [{"messages": messages}, {"messages": [{"role": "tool", "content": "x"}]}])
    source = {"read": {"name": "jsonl", "files": [str(path)]}, "select": {"messages": "messages"}}
    manifest = run(table(tmp_path / "out", {"chat": source}))["chat"]
    assert manifest.counts["kept"] == 1 and manifest.counts["broken: a message has role 'tool' and str content"] == 1


# Sources -------------------------------------------------------------------------------------------------------------


def make_sources(folder):
    """The same 90 documents in every form that can be read; tables by name."""
    rows = [{"text": text(i), "score": 3.5} for i in range(90)]
    zstd = pa.Codec("zstd")
    packed = {
        "plain": lambda c: c,
        "gz": gzip.compress,
        "zst": lambda c: zstd.compress(c, asbytes=True),
    }
    tables = {}
    for name, pack in packed.items():
        for part in range(3):
            write_jsonl(folder / name / f"{part}.{name}", rows[part * 30 : part * 30 + 30], pack)
        tables[name] = {"name": "jsonl", "files": [str(folder / name / "*")]}
    (folder / "hub").mkdir()
    for part in range(3):
        columns = {k: [r[k] for r in rows[part * 30 : part * 30 + 30]] for k in ("text", "score")}
        pq.write_table(pa.table(columns), folder / "hub" / f"train-{part}.parquet", row_group_size=7)
    tables["hub"] = {"name": "hub", "path": str(folder / "hub")}
    tables["parquet"] = {"name": "parquet", "files": [str(folder / "hub" / "*.parquet")]}
    (folder / "code" / "deep").mkdir(parents=True)
    for number, row in enumerate(rows):
        (folder / "code" / ("deep" if number >= 45 else "") / f"{number:03d}.py").write_text(row["text"])
    (folder / "code" / "other.txt").write_text("left out")
    tables["code_folder"] = {"name": "code_folder", "folder": str(folder / "code"), "extensions": [".py"]}
    tables["txt"] = {"name": "txt", "files": [str(folder / "code" / "**" / "*.py")]}
    return tables


def test_every_kind_of_source_gives_the_same_documents_and_resumes_at_every_chunk(tmp_path, monkeypatch):
    monkeypatch.setattr("components.data.sources.CHUNK_ROWS", 8)
    for name, read in make_sources(tmp_path).items():

        def build(read=read):
            return registry.parse_component("source", read).build()

        chunks = list(build().chunks())
        rows = [row["text"] for chunk in chunks for row in chunk.rows]
        assert rows == [text(i) for i in range(90)], name
        for number in (0, 4, len(chunks) - 1):
            position = json.loads(json.dumps(chunks[number].position))
            rest = [row["text"] for chunk in build().chunks(position) for row in chunk.rows]
            assert rest == rows[8 * (number + 1) :], f"{name} after chunk {number}"
        assert build().describe()


def test_a_large_text_file_is_cut_at_blank_lines(tmp_path):
    (tmp_path / "big.txt").write_text("\n\n".join(text(i) for i in range(50)))
    source = registry.parse_component(
        "source", {"name": "txt", "files": [str(tmp_path / "*.txt")], "cut": 1000}
    ).build()
    rows = [row["text"] for chunk in source.chunks() for row in chunk.rows]
    assert "".join(rows) == (tmp_path / "big.txt").read_text() and len(rows) > 5
    assert all(row.endswith("\n\n") and len(row) < 1500 for row in rows[:-1])


def test_damage_costs_the_damaged_rows_and_nothing_else(tmp_path):
    good = [json.dumps({"text": text(i)}).encode() + b"\n" for i in range(40)]
    bad = [b'{"text": "\xe4"}\n', b"{oops\n", b"[1]\n", b"{}\n"]
    (tmp_path / "mixed.jsonl").write_bytes(b"".join([*good[:20], *bad, b"\n", *good[20:]]))
    draw = random.Random(0)
    noisy = [{"text": text(i) + draw.randbytes(4000).hex()} for i in range(40, 80)]
    whole = gzip.compress("".join(json.dumps(row) + "\n" for row in noisy).encode())
    (tmp_path / "zcut.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    source = {"read": {"name": "jsonl", "files": [str(tmp_path / "*.json*")]}, "select": {"max_symbols": 0.9}}
    counts = run(table(tmp_path / "out", {"a": source}))["a"].counts
    wrong = {k: v for k, v in counts.items() if k.startswith("broken")}
    assert wrong.pop("broken: file cut short") == 1
    assert wrong == {
        "broken: not UTF-8": 1, "broken: not JSON": 1 + (counts["broken: not JSON"] - 1),
        "broken: not a JSON object": 1, "broken: field text holds nothing, not text": 1,
    }  # fmt: skip
    assert counts["broken: not JSON"] in (1, 2), "the last line before the cut may be half a line"
    assert counts["kept"] >= 40 + 10


# Killed and resumed --------------------------------------------------------------------------------------------------

DRIVER = """
import sys
import components.data.preparation as p, components.data.sources as s
p.COMMIT_SECONDS, s.CHUNK_ROWS = 0.0, 16
from recipes.prepare_data import command
sys.exit(command(sys.argv[1:]))
"""


def corpus(folder):
    rows = [{"text": text(i % 900)} for i in range(1000)]
    for part in range(4):
        write_jsonl(folder / f"{part}.jsonl", rows[part * 250 : part * 250 + 250])
    return {"read": {"name": "jsonl", "files": [str(folder / "*.jsonl")]}}


def start(path):
    return subprocess.Popen(
        [sys.executable, "-c", DRIVER, str(path), "--workers", "0"],
        cwd=Path(__file__).parents[2],
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
    )


def size_of(folder):
    try:
        return sum(p.stat().st_size for p in folder.rglob("*.bin*"))
    except FileNotFoundError:  # renamed between listing and looking
        return 0


@pytest.mark.parametrize("kills", [3, pytest.param(20, marks=pytest.mark.heavy)])
def test_a_killed_preparation_resumes_to_the_same_bytes(tmp_path, kills):
    """Kills of a real process, when its files have grown to a random size."""
    draw = random.Random(1)
    source = corpus(tmp_path / "text")
    run(table(tmp_path / "unbroken", {"a": source}))
    path = tmp_path / "table.toml"
    path.write_text(tomli_w.dumps(table(tmp_path / "killed", {"a": source})))
    total = size_of(tmp_path / "unbroken")
    for share in sorted(draw.uniform(0.05, 0.9) for _ in range(kills)):
        process = start(path)
        while process.poll() is None and size_of(tmp_path / "killed") < share * total:
            time.sleep(0.001)
        process.send_signal(signal.SIGKILL)
        process.communicate()
    process = start(path)
    output = process.communicate()[0].decode()
    assert process.returncode == 0, output
    assert contents(tmp_path / "killed") == contents(tmp_path / "unbroken")


class Killed(BaseException):
    """Stands for the end of the process: nothing after it runs that a kill would not let run."""


def test_twenty_interruptions_at_random_moments_leave_no_trace(tmp_path, monkeypatch):
    """Cheaper than a kill, and at chosen instants: in the middle of documents, of finishing a shard, of a commit."""
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0.0)
    monkeypatch.setattr("components.data.sources.CHUNK_ROWS", 16)
    source, draw = corpus(tmp_path / "text"), random.Random(2)
    run(table(tmp_path / "unbroken", {"a": source}, target_tokens=40_000))
    countdown = [0]

    def interrupting(function):
        def call(*arguments, **keywords):
            countdown[0] -= 1
            if countdown[0] == 0:
                raise Killed
            return function(*arguments, **keywords)

        return call

    for owner, name in ((ShardWriter, "add"), (os, "replace"), (os, "fsync"), (Journal, "is_new"), (Journal, "commit")):
        monkeypatch.setattr(owner, name, interrupting(getattr(owner, name)))
    interruptions = 0
    while True:
        countdown[0] = draw.randint(1, 260) if interruptions < 20 else -1
        try:
            run(table(tmp_path / "killed", {"a": source}, target_tokens=40_000))
            break
        except Killed:
            interruptions += 1
    assert interruptions >= 15
    assert contents(tmp_path / "killed") == contents(tmp_path / "unbroken")


def test_a_full_disk_stops_with_one_sentence_and_resumes(tmp_path, monkeypatch, capsys):
    source = corpus(tmp_path / "text")
    run(table(tmp_path / "unbroken", {"a": source}))
    path = tmp_path / "table.toml"
    path.write_text(tomli_w.dumps(table(tmp_path / "full", {"a": source})))
    monkeypatch.setattr(preparation, "COMMIT_SECONDS", 0.0)
    left, write = [300], ShardWriter.add

    def full(writer, document):
        left[0] -= 1
        if left[0] == 0:
            raise OSError(errno.ENOSPC, "No space left on device")
        write(writer, document)

    monkeypatch.setattr(ShardWriter, "add", full)
    assert prepare_data.command([str(path), "--workers", "0"]) == 1
    assert "the disk is full" in capsys.readouterr().out
    assert prepare_data.command([str(path), "--workers", "0"]) == 0
    assert contents(tmp_path / "full") == contents(tmp_path / "unbroken")


# Bad input -----------------------------------------------------------------------------------------------------------


def test_a_source_that_cannot_be_right_is_refused_in_one_sentence(tmp_path):
    files = [str(write_jsonl(tmp_path / "a.jsonl", [{"text": text(i), "score": "4"} for i in range(9)]))]
    empty = [str(write_jsonl(tmp_path / "b.jsonl", [{"text": ""}] * 5))]
    jsonl = {"name": "jsonl", "files": files}
    cases = [
        (
            {"read": jsonl, "select": {"text": "content"}},
            "first 9 rows is broken: field content holds nothing, not text",
        ),
        ({"read": jsonl, "select": {"score": "score", "min_score": 3.0}}, "field score holds str, not a number"),
        ({"read": jsonl | {"files": empty}}, "gave no document: 5 read, 0 kept, 5 empty"),
        ({"read": jsonl | {"files": [str(tmp_path / "no/*.gz")]}}, "no file matches"),
        ({"read": {"name": "hub", "path": str(tmp_path / "nowhere")}}, "cannot be"),
        ({"read": {"name": "code_folder", "folder": "no/folder", "extensions": [".py"]}}, "is not a folder"),
    ]
    for number, (source, sentence) in enumerate(cases):
        with pytest.raises(SourceError, match=sentence) as caught:
            run(table(tmp_path / f"out{number}", {"a": source}))
        assert "\n" not in str(caught.value)


def test_a_damaged_parquet_file_stops_with_its_name_and_what_was_read_is_kept(tmp_path, monkeypatch):
    monkeypatch.setattr("components.data.sources.CHUNK_ROWS", 16)
    read = make_sources(tmp_path)["parquet"]
    damaged = tmp_path / "hub/train-2.parquet"
    content = damaged.read_bytes()
    damaged.write_bytes(content[: len(content) // 2])
    plan = table(tmp_path / "out", {"a": {"read": read}})
    with pytest.raises(SourceError, match="parquet files"):
        run(plan)
    damaged.write_bytes(content)
    assert run(plan)["a"].counts == {"read": 90, "kept": 90}


def test_a_corrected_table_starts_afresh_where_the_wrong_one_took_nothing(tmp_path):
    files = [str(write_jsonl(tmp_path / "a.jsonl", [{"content": text(i)} for i in range(30)]))]
    source = {"read": {"name": "jsonl", "files": files}}
    with pytest.raises(SourceError, match="correct its table"):
        run(table(tmp_path / "out", {"a": source}))
    assert run(table(tmp_path / "out", {"a": source | {"select": {"text": "content"}}}))["a"].counts["kept"] == 30
    begun = parsed(table(tmp_path / "out2", {"a": source | {"select": {"text": "content"}}}))
    tokenizer = begun.tokenizer.build()
    with workers(0, begun.tokenizer) as pool, Journal(tmp_path / "out2") as journal:
        unfinished = SourceRun(begun, "a", tokenizer, journal)
        unfinished._take_all(pool, 2, lambda tokens: None)
    with pytest.raises(SourceError, match="was begun with another table, tokenizer or split"):
        run(table(tmp_path / "out2", {"a": source}))


def test_two_preparations_do_not_write_into_one_folder(tmp_path):
    with Journal(tmp_path), pytest.raises(SourceError, match="another process is preparing into"):
        Journal(tmp_path)
    Journal(tmp_path).__exit__()


def test_another_table_or_tokenizer_does_not_go_on_with_what_is_there(tmp_path):
    rows = [{"text": text(i)} for i in range(50)]
    source = {"read": {"name": "jsonl", "files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    run(table(tmp_path / "out", {"a": source}))
    with pytest.raises(SourceError, match="was prepared from another table, tokenizer or split"):
        run(table(tmp_path / "out", {"a": source}) | {"tokenizer": {"name": "hymo_bpe_64k"}})
    (tmp_path / "mine/a").mkdir(parents=True)
    (tmp_path / "mine/a/thesis.txt").write_text("keep me")
    with pytest.raises(SourceError, match="holds files of something else"):
        run(table(tmp_path / "mine", {"a": source}))
    assert (tmp_path / "mine/a/thesis.txt").exists()


def test_verify_finds_a_changed_byte_a_lost_shard_and_says_so(tmp_path, capsys):
    rows = [{"text": text(i)} for i in range(200)]
    source = {"read": {"name": "jsonl", "files": [str(write_jsonl(tmp_path / "a.jsonl", rows))]}}
    path = tmp_path / "table.toml"
    path.write_text(tomli_w.dumps(table(tmp_path / "out", {"a": source})))
    assert prepare_data.command([str(path), "--workers", "0"]) == 0
    assert prepare_data.command([str(path), "--verify"]) == 0
    shard = tmp_path / "out/a/train-00000.bin"
    content = bytearray(shard.read_bytes())
    content[100] ^= 1
    shard.write_bytes(content)
    capsys.readouterr()
    assert prepare_data.command([str(path), "--verify"]) == 1
    assert "train-00000.bin differs from the hash in its manifest" in capsys.readouterr().out
    shard.unlink()
    assert prepare_data.command([str(path), "--verify"]) == 1
    assert "is missing though the manifest names it" in capsys.readouterr().out


def test_a_wrong_table_ends_with_status_2_and_every_problem(tmp_path, capsys):
    path = tmp_path / "table.toml"
    sources = {"a": {"read": {"name": "jsonll", "files": []}, "weight": 0}, "b": {"reed": 1}}
    path.write_text(tomli_w.dumps(table(tmp_path / "out", sources, splits={"train": 0.5})))
    assert prepare_data.command([str(path)]) == 2
    said = capsys.readouterr().out
    assert (
        all(w in said for w in ('Did you mean "jsonl"', 'Did you mean "read"', "sum to 1")) and "Traceback" not in said
    )
    assert all(line.startswith(f"{path} [") for line in said.splitlines())
    assert prepare_data.command([str(tmp_path / "no.toml")]) == 2
    assert capsys.readouterr().out == f"{tmp_path}/no.toml: cannot be read (No such file or directory)\n"


def test_a_dry_run_of_a_table_that_takes_all_says_so_and_an_output_that_is_a_file_is_told(tmp_path, capsys):
    rows = write_jsonl(tmp_path / "a.jsonl", [{"text": text(0)}])
    path = tmp_path / "table.toml"
    path.write_text(tomli_w.dumps(table(path, {"a": {"read": {"name": "jsonl", "files": [str(rows)]}}})))
    assert prepare_data.command([str(path), "--dry-run"]) == 0
    assert [cell.strip() for cell in capsys.readouterr().out.split("│")][2:5] == ["100.0%", "all", "all"]
    assert prepare_data.command([str(path), "--workers", "0"]) == 1
    assert capsys.readouterr().out.startswith(
        f"Stopped: {path}: File exists. Shards go to the table's folder, or to --o"
    )


def test_the_share_of_symbols_is_of_characters_whatever_their_bytes():
    letters = "éèàùçâêîôûëïü" * 3
    assert text_of_row({"text": letters + "1234567890" * 3}, Selection())
    with pytest.raises(Refused, match="symbols"):
        text_of_row({"text": letters + "1234567890" * 4}, Selection())


def test_a_document_shorter_than_the_format_allows_cannot_be_written(tmp_path, tokenizer):
    with pytest.raises(ValueError, match="at least 16 tokens"):
        write_shard(tmp_path, "train-00000", "train", [np.arange(5)], tokenizer.vocab_size)
    with pytest.raises(ShardError, match="does not exist"):
        Manifest.read(tmp_path)
    assert next(encoded(iter(()), Selection(), None, 1), None) is None
