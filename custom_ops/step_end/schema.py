"""Schemas of the ops that end a step. The rules that every op keeps: registry.py."""

SCHEMAS = {
    # sampled_token_ids, input_ids, positions, slot_mapping [B] int64; seq_lens [B] int32. Rows with seq_len 0
    # (padding) and rows whose table is full stay as they are and get slot -1.
    "advance_step": """(Tensor sampled_token_ids, Tensor block_table, Tensor(a!) input_ids,
        Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) slot_mapping, *, int block_size) -> ()""",
    # logits [B, vocab_size]; temperature (0 = greedy), top_p, min_p, repetition_penalty [B] float32; top_k
    # [B] int32, 0 = all; seen [B, ceil(vocab_size / 32)] int32: bit v % 32 of word v // 32 says that token v
    # occurred; seeds, counters [B] int64: row's draw is Philox of (seed, counter, token) and nothing else;
    # out [B] int64: -2 (NO_TOKEN) where a logit of the row is NaN or all are -inf. B <= 65,535 on a GPU.
    "sample_tokens": """(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
        Tensor repetition_penalty, Tensor seen, Tensor seeds, Tensor counters, Tensor(a!) out) -> ()""",
    # The end of a decode step: sampled_token_ids [B] int64 -> tokens_out [B] int64 (-1 in rows of seq_len 0),
    # counters + 1, remaining [B] int32 - 1, seen bit set; a row whose token is -2 or one of stop_token_ids
    # [B, S] int64 (-1 = none), whose remaining is 0 or whose table is full ends: seq_len 0, slot -1. Other
    # rows move on as in advance_step. ring [slots + 1, steps + 1, at least B] int64 and launches [2] int64 (a
    # count, and zero): the tokens also go to ring[launches[0] % slots, step], or to the last, the scratch
    # slot, where launches[0] is negative. The last step of a launch writes launches[0] to ring[..., steps,
    # 0], behind its tokens, and then adds 1 to it unless it is negative.
    "accept_tokens": """(Tensor sampled_token_ids, Tensor block_table, Tensor stop_token_ids,
        Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) slot_mapping,
        Tensor(e!) counters, Tensor(f!) remaining, Tensor(g!) seen, Tensor(h!) tokens_out, *,
        int block_size, Tensor(i!)? ring=None, Tensor(j!)? launches=None, int step=0) -> ()""",
    # sample_tokens and accept_tokens in one, of their arguments; rows of seq_len 0 give token -1 and their
    # logits are of no account. All but logits and seen may be read early (docs/stream_order.md).
    "finish_step": """(Tensor logits, Tensor temperature, Tensor top_k, Tensor top_p, Tensor min_p,
        Tensor repetition_penalty, Tensor seeds, Tensor block_table, Tensor stop_token_ids,
        Tensor(a!) input_ids, Tensor(b!) positions, Tensor(c!) seq_lens, Tensor(d!) slot_mapping,
        Tensor(e!) counters, Tensor(f!) remaining, Tensor(g!) seen, Tensor(h!) tokens_out, *,
        int block_size, Tensor(i!)? ring=None, Tensor(j!)? launches=None, int step=0) -> ()""",
}
