// What prefill.cu and prefill_merge.cu are compiled for. The values are an example's, a causal Llama 3 8B:
// each specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int DIM = 128;                // width of a query and of a key
inline constexpr int DIM_V = 128;              // width of a value
inline constexpr int GROUP = 4;                // query heads of a kv head
inline constexpr int NUM_KV_HEADS = 8;         // of a layer
inline constexpr int BLOCK_SIZE = 16;          // tokens of a block of the cache
inline constexpr bool E5M2 = false;            // fp8 is e5m2, else e4m3
inline constexpr bool CAUSAL = true;           // no key behind a query's own position is seen
inline constexpr int WINDOW_LEFT = -1;         // keys before a query's own position that it sees; -1: all
inline constexpr int WINDOW_RIGHT = -1;        // keys behind it; -1: all
inline constexpr int CHUNK = 0;                // positions of a chunk, whose keys alone a query sees; 0: none
// of its request's query tokens a row sees those of its word (tree mask)
inline constexpr bool TREE = false;
inline constexpr bool SOFT_CAP = false;        // scores are bent by soft_cap * tanh(score / soft_cap)
inline constexpr bool ALIBI = false;           // scores fall by a head's slope times the distance
inline constexpr bool SINKS = false;           // a head's sink has a share in the softmax
inline constexpr bool LSE = false;             // log-sum-exp is stored
inline constexpr bool FP8_RESULTS = false;     // out is e4m3, results over a scale
inline constexpr bool HALF = false;            // q, out and what is multiplied are float16, else bfloat16
inline constexpr int KV_BYTES = 2;             // of a cached number; 1: fp8, which is converted
inline constexpr bool SCALES = false;          // keys and values of fp8 have scales
inline constexpr bool Q_FP8 = false;           // queries are e4m3 too, and multiplied as they are
inline constexpr int WARPGROUPS = 2;           // warpgroups that multiply, 64 query rows each
inline constexpr int TILE_KV = 128;            // keys of a step
inline constexpr int K_STAGES = 3;             // steps' keys on their way or in use
inline constexpr int V_STAGES = 2;             // steps' values on their way or in use
inline constexpr int Q_STAGES = 2;             // tiles of queries on their way or in use
// fp8: steps of keys or values that come or are converted; 0: no fp8
inline constexpr int RAW_STAGES = 0;
inline constexpr int DECODE_LEN = 0;           // up to so many query tokens: the decode launch's; 0: none
inline constexpr bool SPLIT = false;           // few tiles are cut into splits, for prefill_merge.cu
// prefixes of groups: all tiles are split, merged with the suffixes
inline constexpr bool CASCADE = false;
inline constexpr bool EVERY_LANE = false;      // all lanes arrive, not one for its warp; for racecheck
