"""TieredText: the text of one request where a prefix cache has copies of blocks on the host."""

from torchpaged.cache.cached_text import CachedText
from torchpaged.cache.host_tier import HostTier
from torchpaged.cache.runs import Place


class TieredText(CachedText):
    """See `CachedText`."""

    _is_counted = False

    def take(self, *, counts: bool = True, swapped: bool = False) -> list[int] | None:
        """See `CachedText`."""
        cache, host = self._cache, self._cache.host
        if self._find() or host is None:
            return None
        blocks = self._begin(len(self._blocks), counts=False)
        cache._not_saved.difference_update(blocks)
        blocks += self._bring(host, swapped)
        self._is_counted = counts
        if counts:
            self._count_tokens(len(self._blocks), "")
        return blocks

    def _bring(self, host: HostTier, always: bool) -> list[int]:
        """Blocks for the copies that the host has of what is behind those that were found; they are on their
        way."""
        cache, pool, runs = self._cache, self._cache.pool, self._runs
        places, following, front = list[Place](), [self._next], self._place
        for at in range(len(self._blocks), self._most):
            run, place, count, _ = runs.follow(front, self._data, at, at + 1, self._extra)
            if not count or run.block(place) or following[-1] in cache._promised:
                break
            front = run, place
            if not places and host.has(front):
                host.flush()  # what is found has a slot then; this one may have lost its own
            if not host.has(front):
                break
            places.append(front)
            more = at + 1 < self._most
            following.append(runs.key(front, self._data, at + 1, self._extra) if more else None)
        room = max(pool.num_free - pool.num_pinned, 0)
        count = host.worth_loading(places[:room], cache.block_size, always) if places and room else 0
        if not count:
            return []
        own = pool.allocate(count)
        self.num_arriving = count
        self.arrival = host.load(places[:count], own, self._tell)
        self._next = following[count]
        if self._next is not None:
            at = len(self._blocks) + count
            behind = runs.follow(places[count - 1], self._data, at, at + 1, self._extra)
            self._is_lost = behind[-1] is None
        cache.stats.host_tokens += count * cache.block_size
        return own

    def _tell(self, from_disk: int, lost: int, why: str) -> None:
        """How the way back ended; see `torchpaged.cache.host_tier.Told`."""
        stats, size = self._cache.stats, self._cache.block_size
        stats.disk_tokens += from_disk * size
        if not lost:
            return
        self.num_arriving -= lost
        stats.host_tokens -= lost * size
        if self._is_counted:
            stats.hit_tokens -= lost * size
            stats.missed_tokens[why] = stats.missed_tokens.get(why, 0) + lost * size
