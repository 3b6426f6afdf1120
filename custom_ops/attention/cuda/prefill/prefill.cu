// Prefill attention over a paged cache on Hopper: one warp has the copy engine fetch blocks, two or three
// warpgroups multiply and exponentiate.
//
// A work tile is 64 packed query rows per consumer warpgroup (query tokens x heads of the group) of one kv
// head; CTAs stay (a persistent kernel), and take the next work tile of a schedule that each of them works
// out by itself (prefill_scheduler.cuh). Keys and values come through a ring of stages each, filled in the
// order K K V K V ... V, each block of the cache in one box; the producer runs on over the borders of tiles.
//
// A warpgroup asks for the scores of the next step before the softmax of this one is applied to the values,
// so that its exponentials overlap its own products; the warpgroups issue products in turns, so that one's
// exponentials overlap the others'. The accumulator is rescaled only if a row maximum of the warp rose,
// which is exact.
//
// Why nothing here waits for ever. (1) Stages are filled and used in one order by all warpgroups; the
// producer waits for a stage only until each consumer warp has released what was in it before. The warpgroup
// that is furthest behind holds at most one stage of each ring, and never the one that what it waits for is
// to go into: in every ring of two stages or more that stage has been released by it, and by those ahead of
// it. (2) A warpgroup that waits for its turn holds no stage. Those before it in the round have all that they
// need or get it by (1), issue their products and pass the turn on. (3) All warpgroups take the same turns:
// steps - 1 of every tile. (4) A tile of queries is waited for in the order in which the producer sends them,
// and released by its last scores, for which (1) holds. Every wait names its arrival in a comment. With fp8
// queries (fp8_step) turns are one for every step; the warpgroup that has the turn waits for its own products
// alone; one that waits for it, or for keys, may hold the values of the step before. Those keys are loaded in
// front of the values that would go into that stage, so that (1) holds with two stages of values or more.
//
// Compiled by NVRTC for sm_90a; its constants: prefill_config.cuh. Sources: FlashAttention-3
// (arXiv:2407.08608, 3.1 and 3.2).

#include "prefill_load.cuh"
#include "prefill_mainloop.cuh"

extern "C" __global__ void __launch_bounds__(THREADS, 1) paged_prefill(const __grid_constant__ Params p) {
  extern __shared__ __align__(1024) char shared[];
  __shared__ __align__(8) u64 barriers[BARRIERS];
  __shared__ __align__(16) QueryTile query_tiles[Q_STAGES];
  __shared__ int kinds[FP8 ? RAW_STAGES : 1];
  const SharedLayout smem(shared, barriers);
  let_merge_or_decode_begin();
  // The late launch begins before those ahead have ended. What it reads was complete when the first one
  // began, but this multiprocessor's L1 may be older.
  if (DECODE_LEN > 0 && p.is_late) load_and_forget_l1(p.starts);
  __shared__ TileScheduler opened;
  __shared__ Bands bands;  // with SPLIT
  if (threadIdx.x < 32) {  // here, where it may have more registers than the producer
    TileScheduler scheduler;
    scheduler.open(p.starts, p.seq_lens, p.num_reqs, p.num_tokens, p.ctas, &bands);
    if (threadIdx.x == 0) opened = scheduler;
  }
  if (threadIdx.x == 32) {
    const u32 full[4] = {smem.k_full, smem.v_full, smem.q_full, smem.raw_full},
              empty[4] = {smem.k_empty, smem.v_empty, smem.q_empty, smem.raw_empty};
    const int count[4] = {K_STAGES, V_STAGES, Q_STAGES, RAW_STAGES};
    for (int kind = 0; kind < 4; ++kind)
      for (int i = 0; i < count[kind]; ++i) {
        mbarrier_init(full[kind] + i * 8,
                      FP8 && (kind == 1 || (kind == 0 && !Q_FP8)) ? CONVERTERS * ARRIVING : 1);
        mbarrier_init(empty[kind] + i * 8,
                      (kind == 3 ? CONVERTERS : CONSUMER_WARPS) * ARRIVING);
      }
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");  // the copy engine sees them
    prefetch_tensormap(&p.q);
    prefetch_tensormap(&p.k);
    prefetch_tensormap(&p.v);
  }
  __syncthreads();
  if (threadIdx.x < 128) {
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(PRODUCER_REGISTERS));
    // known to be the same in all lanes: otherwise the producer spills
    const int warp = uniform(threadIdx.x / 32);
    if (warp == 0) {
      Producer producer{p, smem, kinds, {}, {}, {}, (int)threadIdx.x};
      producer.run(opened, query_tiles, &bands);
    } else if constexpr (FP8) {
      wait_for_kernels_ahead();
      Converter{smem, {}, {}, {}, (int)threadIdx.x - 32}.run(kinds);
    }
  } else {
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(CONSUMER_REGISTERS));
    Consumer consumer{p,
              smem,
              {},
              {},
              uniform(threadIdx.x / 128) - 1,
              uniform(threadIdx.x / 32 % 4),
              (int)threadIdx.x % 32};
    consumer.run(query_tiles);
  }
}
