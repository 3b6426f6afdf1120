"""PrefixTree: the prompt blocks of running requests, by their tokens, for requests that begin alike.

    tree = PrefixTree(block_size=16)
    tree.promise(first)                    # its prompt is going to be computed
    tree.computed(first)                   # so many of its tokens are
    blocks = tree.find(second)             # None: wait, what they share is still being computed
    tree.forget(first)                     # it leaves: blocks that no other request holds are forgotten

A block is known by its own tokens and by all before it, compared token by token: no hashes, no collisions.
It is known as long as a request holds it. Host data only.
"""

from __future__ import annotations

from collections.abc import Iterator
from typing import Protocol


class Request(Protocol):
    """What the tree asks of a request, which is a key by its identity: ``num_computed`` of its ``tokens``,
    those of ``prompt`` and ``output``, have their keys and values in ``blocks``."""

    prompt: list[int]
    output: list[int]
    blocks: list[int]
    num_computed: int

    @property
    def tokens(self) -> list[int]:
        """Prompt and output."""


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
        self.holders: set[Request] = set()
        self.children: dict[tuple[int, ...], _Node] = {}


class PrefixTree:
    """A tree of blocks.

    Args:
        block_size: tokens per block.
    """

    def __init__(self, block_size: int) -> None:
        self.block_size = block_size
        self._root = _Node()
        self._paths: dict[Request, list[_Node]] = {}  # of those that compute their tokens, or have them
        self._waiting: dict[Request, list[_Node]] = {}  # what those that wait for others have seen of them
        self._counts: dict[Request, int] = {}  # by `count`, until a request comes or goes

    def __contains__(self, request: Request) -> bool:
        """Whether it promised its tokens, and was not forgotten since."""
        return request in self._paths

    def _keys(self, request: Request, first: int) -> Iterator[tuple[int, ...]]:
        """Of its full blocks from ``first`` on. Its last token is in none: that one is always computed, since
        its logits are wanted."""
        size, tokens = self.block_size, request.tokens if request.output else request.prompt
        return (tuple(tokens[end - size : end]) for end in range((first + 1) * size, len(tokens), size))

    def find(self, request: Request) -> list[int] | None:
        """The blocks that hold its first tokens, as many as are known; None: another request is computing the
        one that would be next. Asked again, it goes on from there."""
        seen = self._waiting.pop(request, [])
        if seen and not seen[-1].holders:  # all of its requests have left
            seen = []
        node = seen[-1] if seen else self._root
        for key in self._keys(request, len(seen)):
            child = node.children.get(key)
            if child is None:
                break
            if child.block is None:
                self._waiting[request] = seen
                return None
            seen.append(child)
            node = child
        return [node.block for node in seen if node.block is not None]

    def count(self, request: Request) -> int:
        """How many of its blocks others have, or are computing; 0 once it has begun itself."""
        if request in self._paths:
            return 0
        if request not in self._counts:
            node, count = self._root, 0
            for key in self._keys(request, 0):
                if key not in node.children:
                    break
                node, count = node.children[key], count + 1
            self._counts[request] = count
        return self._counts[request]

    def promise(self, request: Request) -> None:
        """``request`` is about to compute its tokens, but for those that `find` gave."""
        node, path = self._root, []
        for key in self._keys(request, 0):
            node = node.children.setdefault(key, _Node(key))
            node.holders.add(request)
            path.append(node)
        self._paths[request] = path
        self._counts.clear()

    def computed(self, request: Request) -> None:
        """As many of its tokens as ``num_computed`` says have their keys and values in its blocks."""
        path = self._paths.get(request, [])
        for place in reversed(range(min(len(path), request.num_computed // self.block_size))):
            if path[place].block is not None:  # so have all before: they are computed in order
                return
            path[place].block = request.blocks[place]

    def forget(self, request: Request) -> None:
        """``request`` gives its blocks up, or waits no longer."""
        self._waiting.pop(request, None)
        path = self._paths.pop(request, [])
        self._counts.clear()
        for node in path:
            node.holders.discard(request)
        parent = self._root
        for node in path:
            if not node.holders:  # its children have none either
                del parent.children[node.key]
                return
            parent = node

    def clear(self) -> None:
        """No request holds a block."""
        self._root, self._paths, self._waiting, self._counts = _Node(), {}, {}, {}
