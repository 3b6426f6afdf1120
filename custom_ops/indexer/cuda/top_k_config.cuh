// What top_k_indices.cu is compiled for. Generated: each specialisation has one of its own. The file of this
// name in the repository is an example, 4 rows of 131,072 logits on an H200, and no kernel is compiled with
// it.
#pragma once

inline constexpr int VECTORS = 4;              // groups of 4 logits that a thread holds
#define CLUSTER 8                              // CTAs that share a row; chooses an attribute
