"""SharedBlocks: the prompt blocks of running requests, by their tokens, for requests that begin alike.

    shared = SharedBlocks(block_size=16)
    shared.promise(first)                    # its prompt is going to be computed
    shared.computed(first)                   # so many of its tokens are
    blocks = shared.find(second)             # None: wait, what they share is still being computed
    shared.forget(first)                     # it leaves: blocks that nobody else holds are nobody's

A block is known by its own tokens and by all before it, compared token by token: no hashes, no collisions.
It is known as long as a request holds it. Host data only.
"""

from __future__ import annotations

from collections.abc import Iterator

from torchpaged.engine.sequence import Sequence


class _Node:
    """A full block of tokens behind those of its parents.

    Attributes:
        key: its tokens.
        block: where its keys and values are; None until they are computed.
        holders: requests that have it; those of its children are among them.
        children: what continues it, by tokens.
    """

    __slots__ = ("block", "children", "holders", "key")

    def __init__(self, key: tuple[int, ...] = ()) -> None:
        self.key = key
        self.block: int | None = None
        self.holders: set[Sequence] = set()
        self.children: dict[tuple[int, ...], _Node] = {}


class SharedBlocks:
    """A tree of blocks.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = _Node()
        self._paths: dict[Sequence, list[_Node]] = {}  # of those that compute their tokens, or have them
        self._waiting: dict[Sequence, list[_Node]] = {}  # what those that wait for others have seen of them
        self._counts: dict[Sequence, int] = {}  # by `count`, as long as nobody comes or goes

    def __contains__(self, sequence: Sequence) -> bool:
        """Whether it promised its tokens, and was not forgotten since."""
        return sequence in self._paths

    def _keys(self, sequence: Sequence, first: int) -> Iterator[tuple[int, ...]]:
        """Of its full blocks from ``first`` on. Its last token is in none: that one is always computed, since
        its logits are wanted."""
        size, tokens = self.block_size, sequence.tokens if sequence.output else sequence.prompt
        return (tuple(tokens[end - size : end]) for end in range((first + 1) * size, len(tokens), size))

    def find(self, sequence: Sequence) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known; None: another request is computing the
        one that would be next. Asked again, it goes on from there."""
        seen = self._waiting.pop(sequence, [])
        if seen and not seen[-1].holders:  # nobody's any more
            seen = []
        node = seen[-1] if seen else self._root
        for key in self._keys(sequence, len(seen)):
            child = node.children.get(key)
            if child is None:
                break
            if child.block is None:
                self._waiting[sequence] = seen
                return None
            seen.append(child)
            node = child
        return [node.block for node in seen if node.block is not None]

    def count(self, sequence: Sequence) -> int:
        """How many of its blocks others have, or are computing; 0 once it has begun itself."""
        if sequence in self._paths:
            return 0
        if sequence not in self._counts:
            node, count = self._root, 0
            for key in self._keys(sequence, 0):
                if key not in node.children:
                    break
                node, count = node.children[key], count + 1
            self._counts[sequence] = count
        return self._counts[sequence]

    def promise(self, sequence: Sequence) -> None:
        """``sequence`` is about to compute its tokens, but for those that `find` gave."""
        node, path = self._root, []
        for key in self._keys(sequence, 0):
            node = node.children.setdefault(key, _Node(key))
            node.holders.add(sequence)
            path.append(node)
        self._paths[sequence] = path
        self._counts.clear()

    def computed(self, sequence: Sequence) -> None:
        """As many of its tokens as ``num_computed`` says have their keys and values in its blocks."""
        path = self._paths.get(sequence, [])
        for place in reversed(range(min(len(path), sequence.num_computed // self.block_size))):
            if path[place].block is not None:  # so have all before: they are computed in order
                return
            path[place].block = sequence.blocks[place]

    def forget(self, sequence: Sequence) -> None:
        """``sequence`` gives its blocks up, or waits no longer."""
        self._waiting.pop(sequence, None)
        path = self._paths.pop(sequence, [])
        self._counts.clear()
        for node in path:
            node.holders.discard(sequence)
        parent = self._root
        for node in path:
            if not node.holders:  # nor has anybody what continues it
                del parent.children[node.key]
                return
            parent = node

    def clear(self) -> None:
        """Nobody holds anything."""
        self._root, self._paths, self._waiting, self._counts = _Node(), {}, {}, {}
