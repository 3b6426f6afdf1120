// A query token of sparse latent attention: its request, and what it sees of that.
#pragma once

struct Token {
  int request, end;  // positions below are seen; 0: none
};

// By all lanes of a warp. The metadata is read before the kernels ahead have ended, from L2.
template <class P> __device__ __forceinline__ Token find_token(const P &p, int token, int lane) {
  int request = 0;  // the last one that begins at or before the token
  for (int first = 1; first < p.num_reqs; first += 32) {
    const int r = first + lane;
    request += __popc(__ballot_sync(ALL, r < p.num_reqs && load_l2(p.starts + r) <= token));
  }
  const int seq_len = load_l2(p.seq_lens + request),
            position = seq_len - load_l2(p.starts + request + 1) + token;
  const bool sees = position >= 0 && token < load_l2(p.starts + p.num_reqs);
  return {request, !sees ? 0 : CAUSAL ? min(seq_len, position + 1) : max(seq_len, 0)};
}
