// What decode.cu is compiled for. The values are an example's, 8 requests of Llama 3 8B: each specialisation
// gets this text with its own ones (config.py).
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
inline constexpr int PAIR_HEADS = 1;           // kv heads of a pair, 1 or 2
inline constexpr int QUERY_LEN = 1;            // most query tokens of a request, a power of two
inline constexpr int KV_BYTES = 2;             // of a cached number; 1: fp8
inline constexpr bool Q_HALF = false;          // q and out are float16, else bfloat16
// tensor cores multiply float16 (fp8 caches: always), else bfloat16
inline constexpr bool HALF = false;
inline constexpr long long K_BLOCK = 16384;    // strides of the caches, in numbers: k_cache, block
inline constexpr long long K_SLOT = 1024;      // k_cache, slot of a block
inline constexpr long long K_HEAD = 128;       // k_cache, kv head
inline constexpr long long V_BLOCK = 16384;    // v_cache, block
inline constexpr long long V_SLOT = 1024;      // v_cache, slot of a block
inline constexpr long long V_HEAD = 128;       // v_cache, kv head
inline constexpr bool SAME_MASK = true;        // all query rows of a request see the same keys
inline constexpr bool SCALES = false;          // keys and values have scales
inline constexpr bool PDL = true;              // launched early: programmatic dependent launch
// with more query tokens: the prefill launch's; 0: no such launch
inline constexpr int DECODE_LEN = 0;
inline constexpr int WARPS = 8;                // of a CTA; each owns WARP_KEYS keys of a tile
inline constexpr int WARP_KEYS = 16;           // of one warp in a tile, a multiple of 16
inline constexpr int STAGES = 3;               // tiles on their way or in use, per warp
inline constexpr int CTAS_PER_SM = 1;          // that registers must suffice for
inline constexpr int MIN_TILES = 1;            // least tiles of a CTA's run
#define ONE_WARP_SCHEDULES 0                   // one warp finds the run for its CTA; chooses its way
// requests of a lane whose lengths are then read in one trip to memory
inline constexpr int ASKED = 2;
inline constexpr int TEAM = 1;                 // CTAs that read neighbouring pairs of a request side by side
// tiles that a border of runs may move to an end of a pair; 0: none moves
inline constexpr int NEAR = 0;
// a run's next queries are asked for while states of warps meet
inline constexpr bool ASK_EARLY = false;
// pairs may have so many splits that they are merged in two steps
inline constexpr bool GROUPED = false;
inline constexpr int PREFETCH = 2;             // stages that may be filled while the kernels ahead still run
inline constexpr int PREFETCH_L2 = 1;          // tiles behind these that are asked for into L2 meanwhile
#define CLUSTER 2                              // CTAs of a cluster, a power of two; chooses an attribute
#define MAX_REGISTERS 0                        // 0: as many as CTAS_PER_SM leaves; chooses an attribute
