// CASCADE: how the steps of all tiles are dealt out to the CTAs, each of which knows its shares from the
// beginning. Compiles for the host too (prefill_tiles.cuh).
//
// All rows of a request see the same keys, so that all its tiles have the same number of steps. Of a tile's
// steps the last ones, behind `region`, are cut into `mains` parts for a CTA each. What is left over of the
// tiles, `region` steps of each, is for the other CTAs: `own` tiles' each, and an equal share of the last
// `spread` tiles' regions. So CTAs go through the same keys side by side, with all but the last of them at
// the same time, and any number of CTAs is busy to the end. Where that does not pay, or where requests
// differ in length, each tile is cut into `parts`, which the CTAs take in turns.
#pragma once

constexpr int TURNS = 5;          // shares of a CTA at most; prefill.py makes room for them
constexpr int MOST_OWN = TURNS - 2;
constexpr int SHARE_COST = 3;     // steps that it takes to begin a share and to leave its part
constexpr int LEAST_SHARE = 3;    // steps of a part at least

struct Share {
  int tile;         // in the order of the line; -1: none
  int from, to, of; // steps [all * from / of, all * to / of)
};

struct Shares {
  int tiles, ctas;  // tiles of all kv heads that see keys
  int parts;        // of each tile; 0: as the first lines say
  int mains, rest, region, own, spread, steps;

  // `least`, `most`: steps of a tile.
  BOTH void plan(int all_tiles, int all_ctas, int least, int most) {
    tiles = all_tiles, ctas = all_ctas, steps = most, parts = 1;
    mains = rest = region = own = spread = 0;
    if (tiles <= 0) return;
    int best = 1 << 30;
    for (int turns = 1; turns <= TURNS; ++turns) {
      const int cut = max(min(turns * ctas / tiles, most / LEAST_SHARE), 1);
      const int taken = (tiles * cut + ctas - 1) / ctas;
      const int cost = taken * ((most + cut - 1) / cut + SHARE_COST);
      if (taken <= TURNS && cost < best) best = cost, parts = cut;
    }
    mains = ctas / tiles, rest = ctas - mains * tiles;
    if (least < most || rest == 0) return;
    own = tiles / rest, spread = tiles - own * rest;
    region = mains ? rest * max(most - SHARE_COST * mains * (2 * own + 1) / 2, 0) / ctas : most;
    if (own > MOST_OWN || region < 1 || (spread && spread * region < rest)) return;
    const int main_cost = mains ? (most - region + mains - 1) / mains + SHARE_COST : 0;
    const int rest_cost = own * region + (spread * region + rest - 1) / rest + SHARE_COST * (own + 2);
    if (max(main_cost, rest_cost) < best) parts = 0;
  }

  // Where the run of a CTA without a main part begins in the line of the last tiles' regions.
  BOTH int begin(int cta) const { return (int)((long long)spread * region * cta / rest); }

  BOTH Share share(int cta, int turn) const {
    if (parts > 0) {
      const int unit = turn * ctas + cta;
      if (unit >= tiles * parts) return {-1, 0, 0, 1};
      return {unit / parts, unit % parts, unit % parts + 1, parts};
    }
    if (cta < mains * tiles) {
      const int part = cta % mains, more = steps - region;
      if (turn > 0) return {-1, 0, 0, 1};
      return {cta / mains, region + more * part / mains, region + more * (part + 1) / mains, steps};
    }
    const int index = cta - mains * tiles;
    if (turn < own) return {turn * rest + index, 0, region, steps};
    const int from = begin(index), to = begin(index + 1), place = from / region + turn - own;
    const int low = max(from, place * region), high = min(to, (place + 1) * region);
    if (low >= high) return {-1, 0, 0, 1};
    return {own * rest + place, low - place * region, high - place * region, steps};
  }

  // Which part of a tile the n-th one is: turn * ctas + cta.
  BOTH int count(int tile) const {
    if (parts > 0) return parts;
    if (tile < own * rest) return mains + 1;
    const int place = tile - own * rest;
    return mains + owner((place + 1) * region - 1) - owner(place * region) + 1;
  }
  BOTH int unit(int tile, int n) const {
    if (parts > 0) return tile * parts + n;
    if (n < mains) return tile * mains + n;
    if (tile < own * rest) return tile / rest * ctas + mains * tiles + tile % rest;
    const int place = tile - own * rest, index = owner(place * region) + n - mains;
    return (own + place - begin(index) / region) * ctas + mains * tiles + index;
  }

  // The CTA, of those without a main part, whose run holds a step.
  BOTH int owner(int step) const {
    return (int)(((long long)(step + 1) * rest - 1) / ((long long)spread * region));
  }
};
