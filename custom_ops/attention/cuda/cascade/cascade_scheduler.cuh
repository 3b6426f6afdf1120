// CASCADE: how the steps of all tiles are dealt out to the CTAs, each of which knows its splits from the
// beginning. Compiles for the host too (prefill_scheduler.cuh).
//
// All rows of a request see the same keys, so that all its tiles have the same number of steps. Of a tile's
// steps the last ones, behind `region`, are cut into `main_splits` for a CTA each. What is left over of the
// tiles, `region` steps of each, is for the other CTAs: `own` tiles' each, and an equal share of the last
// `spread` tiles' regions. So CTAs go through the same keys side by side, with all but the last of them at
// the same time, and any number of CTAs is busy to the end. Where that does not pay, or where requests
// differ in length, each tile is cut into `splits`, which the CTAs take in turns.
#pragma once

constexpr int MAX_CTA_SPLITS = 5;          // splits of a CTA at most; prefill_shape.py makes room for them
constexpr int MOST_OWN = MAX_CTA_SPLITS - 2;
constexpr int SPLIT_COST = 3;     // steps that it takes to begin a split and to leave its result

struct CascadeSplit {
  int tile;         // in the order of the schedule; -1: none
  int from, to, of; // steps [all * from / of, all * to / of)
};

struct CascadeScheduler {
  int tiles, ctas;  // tiles of all kv heads that see keys
  int splits;       // of each tile; 0: as the first lines say
  int main_splits, rest, region, own, spread, steps;

  // `least`, `most`: steps of a tile.
  BOTH void schedule(int all_tiles, int all_ctas, int least, int most) {
    tiles = all_tiles, ctas = all_ctas, steps = most, splits = 1;
    main_splits = rest = region = own = spread = 0;
    if (tiles <= 0) return;
    int best = 1 << 30;
    for (int turns = 1; turns <= MAX_CTA_SPLITS; ++turns) {
      const int cut = max(min(turns * ctas / tiles, most / MIN_SPLIT_STEPS), 1);
      const int taken = (tiles * cut + ctas - 1) / ctas;
      const int cost = taken * ((most + cut - 1) / cut + SPLIT_COST);
      if (taken <= MAX_CTA_SPLITS && cost < best) best = cost, splits = cut;
    }
    main_splits = ctas / tiles, rest = ctas - main_splits * tiles;
    if (least < most || rest == 0) return;
    own = tiles / rest, spread = tiles - own * rest;
    region = main_splits ? rest * max(most - SPLIT_COST * main_splits * (2 * own + 1) / 2, 0) / ctas : most;
    if (own > MOST_OWN || region < 1 || (spread && spread * region < rest)) return;
    const int main_cost = main_splits ? (most - region + main_splits - 1) / main_splits + SPLIT_COST : 0;
    const int rest_cost = own * region + (spread * region + rest - 1) / rest + SPLIT_COST * (own + 2);
    if (max(main_cost, rest_cost) < best) splits = 0;
  }

  // Where the run of a CTA without a main split begins in the line of the last tiles' regions.
  BOTH int begin(int cta) const { return (int)((long long)spread * region * cta / rest); }

  BOTH CascadeSplit split(int cta, int turn) const {
    if (splits > 0) {
      const int partial = turn * ctas + cta;
      if (partial >= tiles * splits) return {-1, 0, 0, 1};
      return {partial / splits, partial % splits, partial % splits + 1, splits};
    }
    if (cta < main_splits * tiles) {
      const int split = cta % main_splits, more = steps - region;
      if (turn > 0) return {-1, 0, 0, 1};
      return {cta / main_splits, region + more * split / main_splits,
              region + more * (split + 1) / main_splits, steps};
    }
    const int index = cta - main_splits * tiles;
    if (turn < own) return {turn * rest + index, 0, region, steps};
    const int from = begin(index), to = begin(index + 1), place = from / region + turn - own;
    const int low = max(from, place * region), high = min(to, (place + 1) * region);
    if (low >= high) return {-1, 0, 0, 1};
    return {own * rest + place, low - place * region, high - place * region, steps};
  }

  // Which split of a tile the n-th one is: turn * ctas + cta.
  BOTH int num_splits(int tile) const {
    if (splits > 0) return splits;
    if (tile < own * rest) return main_splits + 1;
    const int place = tile - own * rest;
    return main_splits + owner((place + 1) * region - 1) - owner(place * region) + 1;
  }
  BOTH int partial(int tile, int n) const {
    if (splits > 0) return tile * splits + n;
    if (n < main_splits) return tile * main_splits + n;
    if (tile < own * rest) return tile / rest * ctas + main_splits * tiles + tile % rest;
    const int place = tile - own * rest, index = owner(place * region) + n - main_splits;
    return (own + place - begin(index) / region) * ctas + main_splits * tiles + index;
  }

  // The CTA, of those without a main split, whose run holds a step.
  BOTH int owner(int step) const {
    return (int)(((long long)(step + 1) * rest - 1) / ((long long)spread * region));
  }
};
