"""Texts of the user's that a drafter looks things up in: a corpus, and the datastore that is made of it.

A corpus is a text file, or a .jsonl file whose lines are texts or objects with a `text`, or with a `prompt` and a
`response`. A datastore is a safetensors file with its tokens and the order of its places, 32 bits each, read by memory
map; it belongs to one vocabulary.
"""

import hashlib
import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from safetensors import SafetensorError, safe_open
from safetensors.numpy import save
from transformers import PreTrainedTokenizerBase

from ..cache_dir import cache_dir
from ..decoding.draft import Resources
from ..decoding.model.source import Source
from ..decoding.model.storage import Progress, atomic_file, file_digest
from ..decoding.model.whose import NOTE
from ..errors import UserError
from .suffix_array import BORDER, DEPTH, SuffixArray, sort_places

KIND = f"datastore by {DEPTH} tokens"
_NOTED = {"vocabulary": str, "largest": int, "corpus": str}  # in the file's note, by type
PIECE = 1 << 20  # bytes of text that are tokenised at once


@dataclass(frozen=True, slots=True)
class Datastore:
    """`corpus` alone: made at the first use and kept in the cache. `file` alone: made before. Both: made there."""

    corpus: str | None
    file: str | None = None

    def check(self, target: Source) -> None:
        """Refuses what is not there or belongs to another vocabulary; reads no text but its beginning."""
        words = vocabulary_digest(target.tokenizer)
        file = self._locate(words)
        if file.exists():
            self._admit(file, words, target.config.vocab_size)
        elif self.corpus is not None:
            next(_documents(_corpus(self.corpus)))

    def open(self, resources: Resources) -> SuffixArray:
        """Makes it if it is not there. A replay has no target, and takes what its tokenizer made."""
        tokenizer, target = resources.tokenizer, resources.loaded
        words = vocabulary_digest(tokenizer)
        file = self._locate(words)
        if not file.exists():
            assert self.corpus is not None
            _make(file, _corpus(self.corpus), tokenizer, words, resources.progress)
        self._admit(file, words, None if target is None else target.config.vocab)
        return _read(file)

    def _locate(self, words: str) -> Path:
        corpus = None if self.corpus is None else _corpus(self.corpus)
        if self.file is None:
            assert corpus is not None
            key = hashlib.sha256(f"{KIND} {file_digest(corpus)} {words}".encode()).hexdigest()
            return cache_dir() / "datastores" / f"{key}.safetensors"
        file = Path(self.file).expanduser()
        if corpus is None and not file.is_file():
            raise UserError(f"drafting.datastore={self.file} is no file; with drafting.corpus=TEXT it is made there")
        return file

    def _admit(self, file: Path, words: str, vocab: int | None) -> None:
        about = _about(file)
        if about["vocabulary"] != words:
            raise UserError(f"{file} was made with another tokenizer than the target's: make one for this target")
        if vocab is not None and about["largest"] >= vocab:
            raise UserError(
                f"{file} holds token id {about['largest']}, but the target's vocabulary is 0 to {vocab - 1}"
            )
        if self.corpus is not None and about["corpus"] != file_digest(_corpus(self.corpus)):
            raise UserError(
                f"{file} was not made of {self.corpus}: name another drafting.datastore, or leave one of them out"
            )


def vocabulary_digest(tokenizer: PreTrainedTokenizerBase) -> str:
    """Of all tokens and their ids."""
    vocabulary = tokenizer.get_vocab()
    tokens = sorted(vocabulary, key=vocabulary.__getitem__)
    return hashlib.sha256(json.dumps([tokens, [vocabulary[t] for t in tokens]]).encode()).hexdigest()


def _corpus(path: str) -> Path:
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(f"drafting.corpus={path} is no file; it is a .txt or a .jsonl file")
    if file.suffix not in (".txt", ".jsonl"):
        raise UserError(f"drafting.corpus={path} is neither .txt nor .jsonl: convert it to one of them")
    return file


def _documents(file: Path) -> Iterator[tuple[str, int]]:
    """(a document, the bytes read so far). A text file comes in pieces. Refuses a corpus without any text."""
    done, empty = 0, True
    with file.open("rb") as lines:
        pieces = lines if file.suffix == ".jsonl" else iter(lambda: b"".join(lines.readlines(PIECE)), b"")
        for number, piece in enumerate(pieces, 1):
            done += len(piece)
            where = f"{file}:{number}" if file.suffix == ".jsonl" else str(file)
            try:
                text = piece.decode("utf-8-sig" if number == 1 else "utf-8")  # Windows puts a mark before a text
            except UnicodeDecodeError as error:
                raise UserError(f"{where} is not UTF-8 ({error.reason}): save it as such") from None
            if file.suffix == ".jsonl" and text.strip():
                text = _text_of(text, where)
            if text.strip():
                empty = False
                yield text, done
    if empty:
        raise UserError(f"drafting.corpus={file} holds no text")


def _batches(file: Path) -> Iterator[tuple[list[str], int]]:
    """Documents of a PIECE of text or more together."""
    batch: list[str] = []
    done = 0
    for text, done in _documents(file):
        batch.append(text)
        if sum(map(len, batch)) >= PIECE or len(batch) == 1000:
            yield batch, done
            batch = []
    if batch:
        yield batch, done


def _text_of(line: str, where: str) -> str:
    try:
        row: Any = json.loads(line)
    except (ValueError, RecursionError) as error:
        raise UserError(f"{where} is not JSON ({error})") from None
    text = row
    if isinstance(row, dict):
        text, prompt, response = row.get("text"), row.get("prompt"), row.get("response")
        if text is None and isinstance(prompt, str) and isinstance(response, str):
            text = prompt + response
    if not isinstance(text, str):
        raise UserError(
            f"{where}: a line of a corpus is a text in quotes, or an object with a `text` or with a `prompt` and a "
            f"`response`, not {line:.60}"
        )
    return text.encode("utf-8", "replace").decode()  # half a character, as "\ud800", has no bytes


def _make(file: Path, corpus: Path, tokenizer: PreTrainedTokenizerBase, words: str, progress: Progress | None) -> None:
    size, parts = corpus.stat().st_size, []
    for batch, done in _batches(corpus):
        found = tokenizer(batch, add_special_tokens=False, return_attention_mask=False, verbose=False)
        parts += [np.array([*ids, BORDER], np.uint32) for ids in found["input_ids"] if ids]
        if progress is not None:
            progress(f"reading {corpus.name}", done, size)
    if not parts:
        raise UserError(f"drafting.corpus={corpus} holds no text that the target's tokenizer knows")
    text = np.concatenate(parts)
    note = {
        "kind": KIND,
        "vocabulary": words,
        "largest": int(text[text != BORDER].max()),
        "corpus": file_digest(corpus),
        "documents": len(parts),
    }
    content = save({"text": text, "order": sort_places(text)}, {NOTE: json.dumps(note)})
    with atomic_file(file, len(content)) as whole:
        whole.write(content)


def _open(file: Path) -> Any:
    try:
        return safe_open(file, "pt")
    except (SafetensorError, OSError) as error:
        raise UserError(f"{file} cannot be read as a datastore ({error}): delete it and make it again") from None


def _about(file: Path) -> Mapping[str, Any]:
    stored = _open(file)
    try:
        about = json.loads((stored.metadata() or {})[NOTE])
        slices = {name: stored.get_slice(name) for name in stored.keys()}  # noqa: SIM118
    except (LookupError, ValueError):
        about, slices = {}, {}
    kinds = {name: part.get_dtype() for name, part in slices.items()}
    sizes = {tuple(part.get_shape()) for part in slices.values()}
    known = isinstance(about, Mapping) and about.get("kind") == KIND
    known = known and all(isinstance(about.get(name), kind) for name, kind in _NOTED.items())
    if not known or kinds != {"text": "U32", "order": "U32"} or [len(s) for s in sizes] != [1]:
        raise UserError(f"{file} is no {KIND}: name one that drafting.corpus made, or make it again")
    return about


def _read(file: Path) -> SuffixArray:
    stored = _open(file)
    text, order = stored.get_tensor("text").numpy(), stored.get_tensor("order").numpy()
    if not len(text) or text[-1] != BORDER or int(order.max()) >= len(text):
        raise UserError(f"{file} is damaged: delete it and make it again")
    if int(text[text != BORDER].max(initial=0)) > _about(file)["largest"]:
        raise UserError(f"{file} is damaged: delete it and make it again")
    return SuffixArray(text, order)
