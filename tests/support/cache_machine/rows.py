"""Operations on rows: of `CacheRequests`, which fork and grow, and of `RowBlocks`, which are reordered."""

from collections import Counter
from typing import Any
from unittest.mock import patch

from cache_machine.books import Books
from torchpaged import PagedKVCache
from torchpaged.cache.row_blocks import RowBlocks


class Rows(Books):
    """A cache and its rows.

    Attributes:
        kv: whose blocks these are.
        batch: of `RowBlocks`, and what each row holds.
        stale: tables that were freed.
        numbers: of all tokens written, by what they are.
        done: how often which operation was done.
    """

    kv: PagedKVCache
    batch: tuple[RowBlocks, list[list[float]]] | None
    stale: list[list[int]]
    numbers: dict[Any, int]
    done: Counter[str]

    def number(self, *what: Any) -> float:
        """Another one for each text."""
        return float(self.numbers.setdefault(what, len(self.numbers)))

    def write(self, blocks: list[int], first: int, text: list[float]) -> None:
        self.flush()
        for place in range(first, len(text)):
            block = blocks[place // self.size]
            assert not self.pool.is_shared(block), f"block {block} is another's, too"
            self.words[block, place % self.size] = text[place]

    def copy(self, pairs: list[tuple[int, int]]) -> None:
        self.flush()
        for source, destination in pairs:
            self.words[destination] = self.words[source]

    # -------------------------------------------------------------------------------- rows that fork and grow
    def allocate(self) -> None:
        if len(self.rows) < 3:
            count = self.r.randint(1, 3)
            self.rows.append((self.kv.allocate(count), [[] for _ in range(count)]))

    def append(self) -> None:
        """Where the copies that it needs fail, nothing has changed."""
        if not self.rows:
            return
        rows, texts = self.r.choice(self.rows)
        lens = [self.r.choice([0, 1, 1, 2, 4]) for _ in texts]
        try:
            if self.r.random() < 0.3:
                with patch.object(self.kv, "copy_blocks", side_effect=OSError):
                    metadata = rows.append(lens)
            else:
                metadata = rows.append(lens)
        except OSError:
            self.done["failed copies"] += 1
            return
        self.flush()
        slots = iter(metadata.slot_mapping.tolist())
        for text, new in zip(texts, lens, strict=True):
            for _ in range(new):
                text.append(self.number("row", len(self.numbers)))
                self.words.reshape(-1)[next(slots)] = text[-1]

    def fork(self) -> None:
        if self.rows and len(self.rows) < 4:
            rows, texts = self.r.choice(self.rows)
            parents = [self.r.randrange(len(rows)) for _ in range(self.r.randint(1, 3))]
            self.rows.append((rows.fork(parents), [list(texts[n]) for n in parents]))

    def truncate(self) -> None:
        """To any lengths, and often to none: the rows are gone then."""
        if self.rows:
            place = self.r.randrange(len(self.rows))
            rows, texts = self.rows[place]
            before = [list(table) for table in rows.block_tables]
            if self.r.random() < 0.5:
                rows.free()
                self.stale += before
                del self.rows[place]
                return
            rows.truncate([self.r.randint(0, len(text)) for text in texts])
            for text, length in zip(texts, rows.seq_lens, strict=True):
                del text[length:]

    # -------------------------------------------------------------------------------- rows that are reordered
    def begin_batch(self) -> None:
        if self.batch is None:
            rows, count = RowBlocks(self.pool, self.size, self.r.randint(1, 3)), self.r.randint(1, 3)
            rows.allocate(count)
            self.batch = rows, [[] for _ in range(count)]
        elif self.r.random() < 0.4:
            self.stale += [list(row) for row in self.batch[0].rows]
            self.batch[0].free()
            self.batch = None
        elif self.r.random() < 0.5:
            self.batch[0].grow(self.batch[0].blocks_per_row + 1)

    def reindex(self) -> None:
        if self.batch is not None:
            rows, texts = self.batch
            parents = [self.r.randrange(len(rows)) for _ in range(self.r.randint(1, 3))]
            copies = rows.reindex(parents, [len(text) for text in texts])
            self.copy(copies)
            self.batch = rows, [list(texts[n]) for n in parents]

    def write_batch(self) -> None:
        """Every row goes on somewhere, maybe before its end: from there on its blocks must be its own."""
        if self.batch is not None:
            rows, texts = self.batch
            kept = [self.r.randint(0, len(text)) for text in texts]
            self.copy(rows.unshare(kept) or [])
            for row, text, place in zip(rows.rows, texts, kept, strict=True):
                room = len(row) * self.size - place
                del text[place:]
                text += [
                    self.number("row", len(self.numbers)) for _ in range(self.r.randint(0, min(room, 3)))
                ]
                self.write(row, place, text)
