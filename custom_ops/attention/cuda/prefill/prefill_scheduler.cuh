// The tile scheduler of prefill: which work tile the n-th ticket stands for. Compiles for the host
// too, where a "warp" has one lane.
//
// A tile is TILE_TOKENS query tokens of a request times the heads of one kv head. Its level is the number of
// key tiles up to the last key it sees. Tickets go through the kv heads a section at a time, so that the keys
// and values in use fit L2; in a section from the highest level down, so that the longest tiles begin first;
// in a level by request, kv head, tile: neighbours read the same keys at about the same time. Tiles without
// keys come last. The token rows behind the last request are one more request, without keys: they get zeros.
//
// SPLIT: tiles that have more steps than a CTA's equal share are cut into splits, a ticket each, so that all
// CTAs have work: each tile into as many, or, where tiles differ much, into splits of `part` steps at most.
// Every CTA works out the same. Tiles of as many splits are a band; bands come from the most splits down, so
// that in a section the tickets of whole tiles stand last. DECODE_LEN > 0: requests of up to DECODE_LEN query
// tokens, and the rows behind the last request, are the decode launch's: they have no tiles here. CASCADE:
// tiles are dealt out by cascade_scheduler.cuh, and are whole in the schedule.
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
// splits of a tile at most; and of all tiles for each CTA, which prefill_shape.py makes room for
constexpr int MOST_SPLITS = 160, CTA_PARTS = 3;
// Splits of tiles that are cut alike may have so many steps more than a share and a quarter: it takes time to
// find out how else to cut.
constexpr int ALIKE_STEPS = 12;
// A section has at least so many times the longest tile's steps for each CTA: otherwise the last section's
// longest tiles begin too late.
constexpr int SECTION_TILES = 2;
// A long tile has more than LONG_STEPS steps, and LONG_SHARES times as many are more than a CTA's share.
constexpr int LONG_STEPS = 8, LONG_SHARES = 4;
constexpr int MOST_WORK = 1 << 25;  // steps that a lane counts at most: more are many in any case
// steps of a tile, or a few more; of windows and chunks
constexpr int WINDOW_KEYS = WINDOW_LEFT >= 0 && (CAUSAL || WINDOW_RIGHT >= 0)
                                ? WINDOW_LEFT + (WINDOW_RIGHT > 0 ? WINDOW_RIGHT : 0)
                                : 1 << 30;
constexpr int SEEN_KEYS = CHUNK > 0 && CHUNK < WINDOW_KEYS ? CHUNK : WINDOW_KEYS;
constexpr int MOST_STEPS = SEEN_KEYS == 1 << 30 ? 1 << 24 : (SEEN_KEYS + TILE_TOKENS) / TILE_KV + 2;
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

  // Steps of the tiles that see keys, each of MOST_STEPS at most; nearly, since levels rise evenly.
  BOTH int work() const {
    const int begin = first(1), count = tiles() - begin;
    if (count <= 0) return 0;
    const int ends = min(level(begin), MOST_STEPS) + min(level(tiles() - 1), MOST_STEPS);
    return ends > MOST_WORK / count ? MOST_WORK : ends * count / 2;
  }

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
  int request, head, index;
  int halves[2];  // two numbers each: the producer is short of registers
  Request r;

  BOTH void set_split(int splits, int split, int partial, int cut) {
    halves[0] = splits | partial << 16, halves[1] = split | cut << 16;
  }
  BOTH int splits() const { return halves[0] & 0xffff; }
  BOTH int split() const { return halves[1] & 0xffff; }
  // where the split's result goes, -1: the tile is whole; the tile's number among those that are cut
  BOTH int partial() const { return halves[0] >> 16; }
  BOTH int cut() const { return halves[1] >> 16; }
};

// By splits of a tile, 1 to MOST_SPLITS: tiles that have more, and their tickets, of one kv head.
struct Bands {
  int tiles[MOST_SPLITS + 1], tickets[MOST_SPLITS + 1];
};

// Where the last ticket's tile was: within a section levels only fall.
struct Cursor {
  int section, level;
};

struct TileScheduler {
  const int *starts, *seq_lens;
  int num_reqs, num_tokens;  // requests, token rows with padding
  int tiles, top, heads;     // of one kv head; highest level; kv heads of a section
  int live, live_tickets;    // tiles of one kv head that see keys; their tickets
  int long_steps;            // behind tiles of more steps the next one is drawn late (prefill_load.cuh)
  int part, most_splits;     // steps of a split at most, 0: all are cut alike; splits of the longest tile
  int cut_tiles, cut_tickets;  // of one kv head: tiles that are cut, their tickets
  Bands *bands;                // with SPLIT, where `part` > 0
  int shortest;              // key tiles of the shortest request that sees keys
  int owner;                 // the first request with tiles

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

  BOTH int live_total() const { return live_tickets * NUM_KV_HEADS; }
  BOTH int total() const { return live_total() + (tiles - live) * NUM_KV_HEADS; }

  // Counts the bands' tiles and tickets for `part`. A tile of the most splits may have a higher level.
  BOTH void count_bands(int most) {
    most_splits = (most + part - 1) / part;
    for (int n = warp_lane(); n <= most_splits; n += LANES) bands->tiles[n] = 0;
    warp_meet();
    for (int r = warp_lane(); r <= num_reqs; r += LANES) {
      const Request s = load(r);
      int below = s.first(1);
      if (below >= s.tiles()) continue;
      for (int n = (min(s.level(below), most) + part - 1) / part; below < s.tiles(); ++n) {
        const int upto = n < most_splits ? s.first(n * part + 1) : s.tiles();
        if (upto > below) add_shared(&bands->tiles[n], upto - below);
        below = upto;
      }
    }
    warp_meet();
    int tiles_above = 0, tickets_above = 0;
    for (int last = most_splits; last > 0; last -= LANES) {
      const int n = last - warp_lane(), count = n > 0 ? bands->tiles[n] : 0;
      const int upto = warp_sum_upto(count), tickets_upto = warp_sum_upto(count * n);
      if (n > 0) {
        bands->tiles[n] = tiles_above + upto - count;
        bands->tickets[n] = tickets_above + tickets_upto - count * n;
      }
      tiles_above += warp_take(upto, LANES - 1);
      tickets_above += warp_take(tickets_upto, LANES - 1);
    }
    warp_meet();
    live_tickets = tickets_above, cut_tiles = bands->tiles[1], cut_tickets = bands->tickets[1];
  }

  // `of_bands`: for the scheduler alone, with SPLIT.
  BOTH void open(const int *query_starts, const int *lengths, int requests, int tokens, int ctas,
                 [[maybe_unused]] Bands *of_bands = nullptr) {
    starts = query_starts;
    seq_lens = lengths;
    num_reqs = requests;
    num_tokens = tokens;
    int count = 0, seeing = 0, longest = 0, least = 1 << 30, mine = num_reqs, steps = 0;
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
      if (!CASCADE) steps = min(steps + s.work(), MOST_WORK);
      if (CASCADE && s.seq_len > 0 && s.query_len > 0) least = min(least, s.seq_len);
    }
    tiles = warp_sum(count);
    live = warp_sum(seeing);
    owner = warp_min(mine);
    top = (warp_max(longest) + TILE_KV - 1) / TILE_KV;
    cut_alike(1);
    const int most = min(max(top, 1), MOST_STEPS), work = CASCADE ? 1 : warp_sum(steps);
    const int share = (int)((float)work * NUM_KV_HEADS / ctas) + 1;  // steps of a CTA
    long_steps = max(share / LONG_SHARES, LONG_STEPS);
    heads = NUM_KV_HEADS;
    while (heads % 2 == 0 && (long long)top * TILE_KV * HEAD_BYTES * heads > L2_KEYS &&
           (CASCADE || (long long)share * (heads / 2) >= (long long)most * SECTION_TILES * NUM_KV_HEADS))
      heads /= 2;
    if constexpr (CASCADE) shortest = (warp_min(least) + TILE_KV - 1) / TILE_KV;
    if (SPLIT && !CASCADE && live > 0 && most >= SPLIT_WORTH_STEPS) {
      bands = of_bands;
      cut(most, ctas, share);
    }
  }

  BOTH void cut_alike(int splits) {
    part = 0, most_splits = splits, live_tickets = live * splits;
    cut_tiles = splits > 1 ? live : 0, cut_tickets = cut_tiles * splits;
  }

  // Tiles of `most` steps at most; `share`: a CTA's of all. Each tile into as many splits as let all run at
  // once, unless the longest ones' have many more steps than the share. Then the longest into as many as it
  // has shares, or two or three times as many where that seems to take less time; the others into splits as
  // long.
  BOTH void cut(int most, int ctas, int share) {
    const int alike = max(min(ctas / (live * NUM_KV_HEADS), most / MIN_SPLIT_STEPS), 1);
    int best = (most + alike - 1) / alike, chosen = 0;
    if (live * NUM_KV_HEADS > ctas) best = max(best, share + most / 2);
    if (best > share + share / 4 + ALIKE_STEPS) {
      for (int turns = 1; turns <= CTA_PARTS; ++turns) {
        const int splits = min(min(turns * most / share, most / MIN_SPLIT_STEPS), MOST_SPLITS);
        if (splits < 2) continue;
        part = (most + splits - 1) / splits;
        count_bands(most);
        const int parts = cut_tickets * NUM_KV_HEADS;
        const bool at_once = live_total() <= ctas || parts * 16 <= ctas * 15;
        const int cost = at_once ? part + SPLIT_COST : share + part / 2 + SPLIT_COST * parts / ctas;
        if (parts <= CTA_PARTS * ctas && cost < best) best = cost, chosen = part;
        if (at_once) break;
      }
    }
    if (chosen == 0) cut_alike(alike);
    else if (part != chosen) part = chosen, count_bands(most);
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
  BOTH WorkTile find(int ticket, Cursor &cursor) const {
    int level = cursor.level;
    WorkTile tile;
    tile.set_split(1, 0, -1, 0);
    // tiles before this one in its level; kv heads: the first, how many
    int left = ticket - live_total(), before = 0, together = NUM_KV_HEADS;
    if (left >= 0) {
      level = 0;
    } else {
      const int in_section = live_tickets * heads, here = ticket / in_section;
      int place = ticket - here * in_section;
      if (SPLIT && !CASCADE && most_splits > 1) {
        // the fewest splits of which there are no more tickets than `place` above
        int low = part > 0 ? 1 : most_splits, tiles_above = 0, above = 0;
        for (int high = most_splits; low < high;) {
          const int middle = (low + high) / 2;
          if (bands->tickets[middle] * heads <= place) high = middle;
          else low = middle + 1;
        }
        if (part > 0) tiles_above = bands->tiles[low] * heads, above = bands->tickets[low] * heads;
        const int partial = low > 1 ? here * heads * cut_tickets + place : -1;
        place -= above;
        tile.set_split(low, place % low, partial, here * heads * cut_tiles + tiles_above + place / low);
        place = tiles_above + place / low;
      }
      if (here != cursor.section) level = top;
      cursor.section = here;
      before = here * heads;
      together = heads;
      const int wanted = place / heads;
      // the highest level with tiles_from(level) > wanted; tiles_from(1) is all that are live
      int low = 1, high = level;
      while (low < high) {
        const int middle = (low + high + 1) / 2;
        if (tiles_from(middle) > wanted) low = middle;
        else high = middle - 1;
      }
      cursor.level = level = low;
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
