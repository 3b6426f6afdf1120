// Which keys a query sees.
#pragma once

#include "prefill_host.cuh"

constexpr bool HIDES_FIRST_KEYS = WINDOW_LEFT >= 0 || CHUNK > 0;  // some rows do not see the first keys

// Every mask is an interval of keys, [first_key, end_key) for the query at `position`; both ends rise with
// the position.
BOTH int first_key(int position) {
  int low = 0;
  if (position < 0) return 0;
  if (WINDOW_LEFT >= 0) low = max(low, position - WINDOW_LEFT);
  if (CHUNK > 0) low = max(low, position / max(CHUNK, 1) * CHUNK);
  return low;
}
BOTH int end_key(int position, int seq_len) {
  if (position < 0) return 0;
  int end = CAUSAL ? min(position + 1, seq_len) : seq_len;
  if (WINDOW_RIGHT >= 0) end = min(end, position + WINDOW_RIGHT + 1);
  if (CHUNK > 0) end = min(end, position / max(CHUNK, 1) * CHUNK + CHUNK);
  return end;
}
// The first position that sees a key at or after `key`.
BOTH int first_to_see(int key) {
  int position = CAUSAL ? key : 0;
  if (WINDOW_RIGHT >= 0) position = max(position, key - WINDOW_RIGHT);
  if (CHUNK > 0) position = max(position, key / max(CHUNK, 1) * CHUNK);
  return position;
}
