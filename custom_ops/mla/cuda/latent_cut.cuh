// A request cut by borders of ranges: which parts it has, and which CTAs of the merge put them together.
#pragma once

#include "latent_epilogue.cuh"

// Of the request in which a group's range begins. The first part may lie in its group's second slot.
struct __align__(16) Cut {
  Lengths of;
  int parts, first_group;  // no parts: nothing is to be put together
  int behind;              // whether the first part lies behind another request's
  int apart;               // groups from part to part: 2 where pairs of CTAs have joined theirs
  int mine;                // this group is the `mine`th of those whose ranges begin in the request
};
static_assert(sizeof(Cut) == CUT_FLOATS * 4, "as custom_ops/mla/cuda/latent.py makes room for it");

__device__ __forceinline__ Cut find_cut(const Params &p, const Schedule &schedule, const Place &place,
                                        int group, int row_tile) {
  if (group >= schedule.groups || schedule.tiles == 0) return {{0, 0, 0}, 0, 0, 0, 0, 0};
  const bool has_rows = row_tile * ROWS < place.of.query_len * NUM_HEADS;
  if (schedule.parts > 0) {
    const int apart = schedule.joined() ? 2 : 1, parts = schedule.parts / apart;
    return {place.of, parts > 1 && has_rows ? parts : 0, schedule.first_group, 0, apart,
            group - schedule.first_group};
  }
  const int begin = schedule.begin(group) - place.at, tiles_begin = begin + schedule.between,
            last = tiles_begin + place.of.tiles() - 1, first_group = schedule.group_of(tiles_begin),
            behind = schedule.begin(first_group) < begin, parts = schedule.group_of(last) - first_group + 1,
            mine = group - first_group - behind;
  return {place.of, parts > 1 && mine >= 0 && has_rows ? parts : 0, first_group, behind, 1, mine};
}

// With 64 rows attention notes it behind the slots, by a thread that has time, so that the merge, which finds
// room on a multiprocessor only when attention has ended there, need not work it out.
__device__ __forceinline__ Cut *note_of(const Params &p) {
  return (Cut *)(p.parts + (i64)p.groups * 2 * p.row_tiles * SLOT_FLOATS);
}
