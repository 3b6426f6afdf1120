"""The ops around attention in Triton."""
