// What top_k_indices.cu is compiled for. The values are an example's, 4 rows of 131,072 logits on an H200:
// each specialisation gets this text with its own ones (config.py).
#pragma once

inline constexpr int VECTORS = 4;              // groups of 4 logits that a thread holds
#define CLUSTER 8                              // CTAs that share a row; chooses an attribute
