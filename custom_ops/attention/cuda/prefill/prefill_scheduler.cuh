// The tile scheduler of prefill: which work tile the n-th ticket stands for. Compiles for the host
// too, where a "warp" has one lane.
//
// A tile is TILE_TOKENS query tokens of a request times the heads of one kv head. Its level is the number of
// key tiles up to the last key it sees. Tickets go through the kv heads a section at a time, so that the keys
// and values in use fit L2; in a section from the highest level down, so that the longest tiles begin first;
// in a level by request, kv head, tile: neighbours read the same keys at about the same time. Tiles without
// keys come last. The token rows behind the last request are one more request, without keys: they get zeros.
//
// SPLIT: where tiles with keys are few, each is cut into `splits` of about as many steps, a ticket each, so
// that all CTAs have work. Every CTA works out the same number of splits. There are no more of these tickets
// than CTAs. DECODE_LEN > 0: requests of up to DECODE_LEN query tokens, and the rows behind the last
// request, are the decode launch's: they have no tiles here. CASCADE: tiles are dealt out by
// cascade_scheduler.cuh, and are whole in the schedule.
#pragma once

#include "prefill_config.cuh"

#include "prefill_mask.cuh"

// packed query rows of a tile: token * GROUP + head of the group
constexpr int TILE_Q = WARPGROUPS * 64;
// query tokens of a tile; rows behind TILE_TOKENS * GROUP are idle
constexpr int TILE_TOKENS = TILE_Q / GROUP;
constexpr int HEAD_BYTES = (DIM + DIM_V) * KV_BYTES;  // a token's keys and values in one kv head
constexpr int L2_KEYS = 32 << 20;  // bytes of keys and values of a section that one request may have
// steps of a tile that is worth cutting, and of its splits at least
constexpr int SPLIT_WORTH_STEPS = 8, MIN_SPLIT_STEPS = 3;

#include "../cascade/cascade_scheduler.cuh"

struct Request {
  int start, query_len, seq_len;

  BOTH int tiles() const { return (query_len + TILE_TOKENS - 1) / TILE_TOKENS; }
  BOTH int position(int token) const { return seq_len - query_len + token; }

  // The first key that a token of the tile sees, and one past the last.
  // TREE: any token of a tree may stand right behind the context.
  BOTH int first_seen(int tile) const { return first_key(position(TREE ? 0 : tile * TILE_TOKENS)); }
  BOTH int end(int tile) const {
    return end_key(position(min((tile + 1) * TILE_TOKENS, query_len) - 1), seq_len);
  }

  // Key tiles up to the last one seen.
  BOTH int level(int tile) const { return (max(end(tile), 0) + TILE_KV - 1) / TILE_KV; }

  // The first tile of `level` or a higher one; levels do not fall from tile to tile.
  BOTH int first(int level) const {
    if (level <= 0) return 0;
    const int before = (level - 1) * TILE_KV;  // keys that a tile must see more than
    if (query_len <= 0 || seq_len <= before) return tiles();
    const int hidden = first_to_see(before) - position(0);
    return hidden <= 0 ? 0 : min(hidden / TILE_TOKENS, tiles() - 1);
  }
};

// Who gets which ticket. Each CTA of the first launch begins with the ticket of its number. All others are
// drawn: one with every tile, for the CTA's next, and by each of the `late` CTAs of a second launch one to
// begin with. So the last of total + late draws puts the counter back to zero.
struct Tickets {
  unsigned *counter;
  // tickets, and CTAs of the two launches; of numbers that are not below `total` there is no tile
  int total, early, late;

  BOTH int begin(int cta, bool is_late) const { return !is_late ? cta : total > 0 ? draw() : total; }
  BOTH int draw() const { return early + (int)count_up(counter, total + late - 1); }
};

struct WorkTile {
  int request, head, index, split;
  Request r;
};

struct TileScheduler {
  const int *starts, *seq_lens;
  int num_reqs, num_tokens;  // requests, token rows with padding
  int tiles, top, heads;     // of one kv head; highest level; kv heads of a section
  int live, splits;          // tiles of one kv head that see keys; tickets of each of them
  int shortest;              // key tiles of the shortest request that sees keys
  int owner;                 // the first request with tiles
  int section, level;        // of the last ticket: within a section levels only fall

  BOTH Request load(int request) const {
    Request s;
    s.start = starts[request];
    s.query_len = (request < num_reqs ? starts[request + 1] : num_tokens) - s.start;
    s.seq_len = request < num_reqs ? seq_lens[request] : 0;
    if (DECODE_LEN > 0 && (request == num_reqs || s.query_len <= DECODE_LEN)) s.query_len = s.seq_len = 0;
    return s;
  }

  // The lane's first request as `load` gives it, in a kernel that may have begun before those ahead have
  // ended (prefill.cu). Before this thread's load_and_forget_l1.
  BOTH Request load_first() const {
    const int request = min(warp_lane(), num_reqs);
    const bool real = request < num_reqs;
    Request s;
    s.start = load_l2(starts + request);
    s.query_len = (real ? load_l2(starts + request + 1) : num_tokens) - s.start;
    s.seq_len = real ? load_l2(seq_lens + request) : 0;
    return s;
  }

  BOTH int live_total() const { return live * NUM_KV_HEADS * splits; }
  BOTH int total() const { return live_total() + (tiles - live) * NUM_KV_HEADS; }

  // Most steps of a tile, or a few more.
  BOTH int most_steps() const {
    int keys = top * TILE_KV;
    if (WINDOW_LEFT >= 0 && (CAUSAL || WINDOW_RIGHT >= 0))
      keys = min(keys, WINDOW_LEFT + max(WINDOW_RIGHT, 0) + TILE_TOKENS + 2 * TILE_KV);
    if (CHUNK > 0) keys = min(keys, CHUNK + TILE_TOKENS + 2 * TILE_KV);
    return keys / TILE_KV;
  }

  BOTH void open(const int *query_starts, const int *lengths, int requests, int tokens, int ctas) {
    starts = query_starts;
    seq_lens = lengths;
    num_reqs = requests;
    num_tokens = tokens;
    int count = 0, seeing = 0, longest = 0, least = 1 << 30, mine = num_reqs;
    Request first = {0, 0, 0};
    if (DECODE_LEN == 0) {
      first = load_first();
      load_and_forget_l1(starts);
    }
    for (int r = warp_lane(); r <= num_reqs; r += LANES) {
      const Request s = DECODE_LEN == 0 && r < LANES ? first : load(r);
      if (count == 0 && s.tiles() > 0) mine = r;
      count += s.tiles();
      seeing += s.tiles() - s.first(1);
      longest = max(longest, s.seq_len);
      if (CASCADE && s.seq_len > 0 && s.query_len > 0) least = min(least, s.seq_len);
    }
    tiles = warp_sum(count);
    live = warp_sum(seeing);
    owner = warp_min(mine);
    top = level = (warp_max(longest) + TILE_KV - 1) / TILE_KV;
    heads = NUM_KV_HEADS;
    while (heads % 2 == 0 && (long long)top * TILE_KV * HEAD_BYTES * heads > L2_KEYS) heads /= 2;
    section = 0;
    splits = 1;
    if constexpr (CASCADE) shortest = (warp_min(least) + TILE_KV - 1) / TILE_KV;
    if (SPLIT && !CASCADE && live > 0 && most_steps() >= SPLIT_WORTH_STEPS)
      splits = max(min(ctas / (live * NUM_KV_HEADS), most_steps() / MIN_SPLIT_STEPS), 1);
  }

  // Tiles of one kv head at `floor` or above.
  BOTH int tiles_from(int floor) const {
    int count = 0;
    for (int r = warp_lane(); r <= num_reqs; r += LANES) {
      const Request s = load(r);
      count += s.tiles() - s.first(floor);
    }
    return warp_sum(count);
  }

  // The tile of a ticket below total(); tickets must rise.
  BOTH WorkTile find(int ticket) {
    WorkTile tile;
    tile.split = 0;
    // tiles before this one in its level; kv heads: the first, how many
    int left = ticket - live_total(), before = 0, together = NUM_KV_HEADS;
    if (left >= 0) {
      level = 0;
    } else {
      const int in_section = live * heads * splits, here = ticket / in_section,
                place = (ticket - here * in_section) / splits;
      tile.split = (ticket - here * in_section) % splits;
      if (here != section) level = top;
      section = here;
      before = section * heads;
      together = heads;
      const int wanted = place / heads;
      // the highest level with tiles_from(level) > wanted; tiles_from(1) is all that are live
      int low = 1, high = level;
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tiles_from(middle) > wanted) low = middle;
        else high = middle - 1;
      }
      level = low;
      left = place - tiles_from(level + 1) * heads;
    }
    for (int begin = 0;; begin += LANES) {
      const int request = begin + warp_lane();
      Request s = {0, 0, 0};
      int first = 0, count = 0;
      if (request <= num_reqs) {
        s = load(request);
        first = s.first(level);
        count = s.first(level + 1) - first;
      }
      const int upto = warp_sum_upto(count * together), home = warp_first(upto > left);
      if (home < 0) {
        left -= warp_take(upto, LANES - 1);
        continue;
      }
      const int many = warp_take(count, home);
      left -= warp_take(upto, home) - many * together;
      tile.request = begin + home;
      tile.head = before + left / many;
      tile.index = warp_take(first, home) + left % many;
      tile.r.start = warp_take(s.start, home);
      tile.r.query_len = warp_take(s.query_len, home);
      tile.r.seq_len = warp_take(s.seq_len, home);
      return tile;
    }
  }
};
