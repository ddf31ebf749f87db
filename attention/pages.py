"""Which block of a pool holds which tokens of which sequence: block tables, shared prefixes, eviction. No tensors."""

import hashlib
from collections import OrderedDict
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..errors import UserError


@dataclass(slots=True)
class _Table:
    """One sequence: its blocks in order, its committed tokens, and how many rows are staged behind them. `digests`: of
    its leading full blocks, as far as they have been published or adopted."""

    blocks: list[int] = field(default_factory=list)
    tokens: list[int] = field(default_factory=list)
    staged: int = 0
    digests: list[bytes] = field(default_factory=list)


class Pages:
    """A pool of `total` blocks of `size` tokens. A block is free, used by at least one sequence, or cached: nobody
    refers to it, but it holds a published prefix until it is evicted, the one longest unused first.

    Only full blocks of committed tokens are published, by a digest of all tokens up to their end, and only with
    `share`. A sequence writes to a block of its own alone: what another one refers to as well is copied first, and what
    is written to is published no longer. A pool is of one model and one layout, which the digests do not name.
    """

    def __init__(self, total: int, size: int, *, share: bool = True) -> None:
        if size < 1:
            raise ValueError(f"a block holds at least 1 token, got {size}")
        self.size, self.share = size, share
        self.enough: int | None = None  # blocks with which what is asked of the pool cannot fail, where that is known
        self._refs = [0] * total
        self._digest: dict[int, bytes] = {}  # of the published blocks
        self._published: dict[bytes, int] = {}
        self._free = list(range(total))[::-1]
        self._cached: OrderedDict[int, None] = OrderedDict()  # the longest unused first
        self._tables: dict[int, _Table] = {}

    @property
    def total(self) -> int:
        return len(self._refs)

    @property
    def available(self) -> int:
        """Blocks that a sequence may have: the free ones, and the cached ones once they are evicted."""
        return len(self._free) + len(self._cached)

    @property
    def cached(self) -> int:
        return len(self._cached)

    @property
    def used(self) -> int:
        return self.total - self.available

    def table(self, sequence: int) -> tuple[int, ...]:
        """Its blocks: row i lies in block i // size at place i % size."""
        return tuple(self._tables[sequence].blocks)

    def length(self, sequence: int) -> int:
        """Committed rows."""
        return len(self._tables[sequence].tokens)

    def staged(self, sequence: int) -> int:
        return self._tables[sequence].staged

    def room(self, sequence: int) -> int:
        """Rows that may be staged while every other open sequence takes as many blocks."""
        table = self._tables[sequence]
        blocks = self.available // len(self._tables) - self._copies(table)
        return max(0, self._slack(table) + blocks * self.size) if blocks >= 0 else 0

    def grow(self, total: int) -> None:
        """To so many blocks, if there are fewer."""
        self._free[:0] = range(self.total, total)[::-1]
        self._refs += [0] * (total - self.total)

    def open(self, sequence: int) -> None:
        """Under a number of the caller's."""
        self._tables[sequence] = _Table()

    def adopt(self, sequence: int, prompt: Sequence[int]) -> int:
        """Give an empty sequence the published blocks that hold the beginning of a prompt. How many of its tokens are
        there: all but one at most, since the last one is computed for its logits."""
        table = self._tables[sequence]
        if table.blocks or table.tokens:
            raise ValueError(f"sequence {sequence} holds {len(table.tokens)} rows; an empty one adopts a prefix")
        for block, digest in self._match(prompt):
            if not self._refs[block]:
                del self._cached[block]
            self._refs[block] += 1
            table.blocks.append(block)
            table.digests.append(digest)
        found = min(len(table.blocks) * self.size, len(prompt) - 1) if table.blocks else 0
        self._trim(table, found)
        table.tokens = list(prompt[:found])
        return found

    def _match(self, prompt: Sequence[int]) -> Iterable[tuple[int, bytes]]:
        digest = b""
        for end in range(self.size, len(prompt) + 1, self.size):
            digest = _chained(digest, prompt[end - self.size : end])
            if (block := self._published.get(digest)) is None:
                return
            yield block, digest

    def stage(self, counts: Mapping[int, int]) -> list[tuple[int, int]]:
        """Blocks for so many more rows of each sequence, or an error and nothing changed. Returns (block, its copy):
        what must be copied before the rows are written."""
        wanted = {sequence: n for sequence, n in counts.items() if n}
        fresh = sum(max(0, -(-(n - self._slack(self._tables[s])) // self.size)) for s, n in wanted.items())
        tails: dict[int, int] = {}
        for sequence in wanted:
            if self._copies(table := self._tables[sequence]):
                tails[table.blocks[-1]] = tails.get(table.blocks[-1], 0) + 1
        # of those who refer to a block the last one keeps it
        fresh += sum(min(n, self._refs[block] - 1) for block, n in tails.items())
        if fresh > self.available:
            rows = f"{_counted(sum(wanted.values()), 'row')} of {_counted(len(wanted), 'sequence')}"
            larger = "a larger pages.blocks" if self.enough is None else f"pages.blocks={self.enough}"
            raise UserError(
                f"out of KV blocks: {rows} need{'s' * (sum(wanted.values()) == 1)} {_counted(fresh, 'more block')} "
                f"of {_counted(self.size, 'token')}, and {self.available} of {self.total} are left; "
                f"give {larger}, a smaller batch or fewer tokens"
            )
        copies = []
        for sequence, n in wanted.items():
            table = self._tables[sequence]
            if self._slack(table):
                block = table.blocks[-1]
                if self._refs[block] > 1:
                    table.blocks[-1] = self._take()
                    self._refs[block] -= 1
                    copies.append((block, table.blocks[-1]))
                else:
                    self._unpublish(block)
            table.staged += n
            while self._slack(table) < 0:
                table.blocks.append(self._take())
        return copies

    def commit(self, sequence: int, tokens: Sequence[int]) -> None:
        """So many of the staged rows are kept, and these are their tokens; full blocks are published."""
        table = self._tables[sequence]
        if len(tokens) > table.staged:
            raise ValueError(f"{len(tokens)} rows of sequence {sequence} are kept, but {table.staged} are staged")
        table.tokens += tokens
        table.staged = 0
        self._trim(table, len(table.tokens))
        if not self.share:
            return
        for i in range(len(table.digests), len(table.tokens) // self.size):
            before = table.digests[-1] if table.digests else b""
            table.digests.append(_chained(before, table.tokens[i * self.size : (i + 1) * self.size]))
            if table.digests[i] not in self._published:  # else somebody was faster, and this one stays private
                self._published[table.digests[i]] = table.blocks[i]
                self._digest[table.blocks[i]] = table.digests[i]

    def drop(self) -> None:
        """Forget every staged row."""
        for table in self._tables.values():
            if table.staged:
                table.staged = 0
                self._trim(table, len(table.tokens))

    def fork(self, sequence: int, child: int) -> None:
        """Open another sequence with the same committed rows, in the same blocks until one of them writes."""
        parent = self._tables[sequence]
        if parent.staged:
            raise ValueError(f"sequence {sequence} has staged rows; commit or drop them before it is forked")
        for block in parent.blocks:
            self._refs[block] += 1
        self._tables[child] = _Table(list(parent.blocks), list(parent.tokens), 0, list(parent.digests))

    def free(self, sequence: int) -> None:
        table = self._tables[sequence]
        if table.staged:
            raise ValueError(f"sequence {sequence} has staged rows; commit or drop them before it is freed")
        self._trim(table, 0)
        del self._tables[sequence]

    def forget(self) -> None:
        """Nothing is published any more."""
        for block in list(self._digest):
            self._unpublish(block)
        self._free += self._cached
        self._cached.clear()

    def check(self) -> None:
        """Asserts what always holds."""
        refs = [0] * self.total
        for table in self._tables.values():
            assert len(table.blocks) == -(-(len(table.tokens) + table.staged) // self.size)
            assert len(set(table.blocks)) == len(table.blocks)
            assert len(table.digests) <= len(table.blocks)
            for block in table.blocks:
                refs[block] += 1
            if table.staged:  # nobody else sees what it writes to
                written = table.blocks[len(table.tokens) // self.size :]
                assert all(self._refs[block] == 1 and block not in self._digest for block in written)
        assert refs == self._refs
        free, cached = set(self._free), set(self._cached)
        assert len(free) == len(self._free)
        assert not free & cached
        assert free | cached == {block for block, n in enumerate(refs) if not n}
        assert len(free) + len(cached) + self.used == self.total
        assert cached <= self._digest.keys()
        assert not free & self._digest.keys()
        assert {digest: block for block, digest in self._digest.items()} == self._published

    def _end(self, table: _Table) -> int:
        return len(table.tokens) + table.staged

    def _slack(self, table: _Table) -> int:
        """Places behind its last row in the blocks that it has."""
        return len(table.blocks) * self.size - self._end(table)

    def _copies(self, table: _Table) -> int:
        """1 where the next row lies in a block that another sequence refers to as well."""
        return int(self._slack(table) > 0 and self._refs[table.blocks[-1]] > 1)

    def _take(self) -> int:
        """A block for one sequence; a cached one is evicted only where none is free."""
        if self._free:
            block = self._free.pop()
        else:
            block, _ = self._cached.popitem(last=False)
            self._unpublish(block)
        self._refs[block] = 1
        return block

    def _unpublish(self, block: int) -> None:
        if (digest := self._digest.pop(block, None)) is not None:
            del self._published[digest]

    def _trim(self, table: _Table, rows: int) -> None:
        """Give back what lies behind so many rows, the last block first: a prefix outlives what continues it."""
        keep = -(-rows // self.size)
        while len(table.blocks) > keep:
            block = table.blocks.pop()
            self._refs[block] -= 1
            if not self._refs[block]:
                if block in self._digest:
                    self._cached[block] = None
                else:
                    self._free.append(block)
        del table.digests[rows // self.size :]


def _counted(n: int, what: str) -> str:
    return f"{n} {what}{'' if n == 1 else 's'}"


def _chained(before: bytes, tokens: Sequence[int]) -> bytes:
    """Of a block's tokens and all before them."""
    return hashlib.sha256(before + b"".join(token.to_bytes(8, "little", signed=True) for token in tokens)).digest()
