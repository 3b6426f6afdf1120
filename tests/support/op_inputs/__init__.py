"""Inputs of the ops and of trees of tokens, with what is right for them; ``opcheck``: a case of every op."""
