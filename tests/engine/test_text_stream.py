"""Text as it comes is the text of all tokens, whatever a tokenizer does at the beginning of a decode, with
bytes, special tokens and spaces."""

import random

import pytest
from engine_requests import Letters

from torchpaged.engine.outputs import TextStream

WORDS = ["▁the", "▁a", "▁", "▁▁", "ing", ".", "▁'", "'", "s", "x", "▁.", "\ufffd"]
SPECIAL = len(WORDS) + 256


class Pieces:
    """As of SentencePiece: words, bytes where there is no word, one special token, which gives no text. The
    first space is left out."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        text, run = "", b""
        for token in [*ids, SPECIAL]:
            if len(WORDS) <= token < SPECIAL:
                run += bytes([token - len(WORDS)])
                continue
            try:
                text += run.decode()
            except UnicodeDecodeError:
                text += "\ufffd" * len(run)
            text, run = text + (WORDS[token] if token < SPECIAL else ""), b""
        return self.beginning(text.replace("▁", " "))

    def beginning(self, text: str) -> str:
        return text.removeprefix(" ")

    def encode(self, piece: str) -> list[int]:
        if piece in WORDS:
            return [WORDS.index(piece)]
        return [len(WORDS) + byte for byte in piece.encode()] if piece else [SPECIAL]


class NoSpaceInFront(Pieces):
    """All spaces at the beginning are left out."""

    def beginning(self, text: str) -> str:
        return text.lstrip()


class CleansUp(Pieces):
    """Takes spaces back that it gave, unless it is told not to."""

    clean_up_tokenization_spaces = True

    def decode(
        self,
        ids: list[int],
        skip_special_tokens: bool = True,
        clean_up_tokenization_spaces: bool | None = None,
    ) -> str:
        text = super().decode(ids)
        return text if clean_up_tokenization_spaces is False else text.replace(" .", ".").replace(" 's", "'s")


class Bytes(Pieces):
    """As of byte-level BPE: any byte, a special token, every space as it is."""

    def decode(self, ids: list[int], skip_special_tokens: bool = True) -> str:
        return bytes(token - len(WORDS) for token in ids if token != SPECIAL).decode(errors="replace")


@pytest.mark.parametrize(
    "tokenizer", [Pieces(), NoSpaceInFront(), CleansUp(), Bytes()], ids=lambda t: type(t).__name__
)
def test_text_in_pieces_is_the_text_of_all_tokens(tokenizer: Pieces) -> None:
    rng = random.Random(0)
    for _ in range(100):
        if isinstance(tokenizer, Bytes):
            ids = [len(WORDS) + rng.choice([*"▁é €🙂x".encode(), 255, 256]) for _ in range(60)]
        else:
            chosen = rng.choices([*WORDS, "é", "€🙂", "", "", ""], k=60)
            ids = [token for piece in chosen for token in tokenizer.encode(piece)]
        stream = TextStream(tokenizer)
        shown = [stream.push(token) for token in ids] + [stream.flush()]
        options = {"clean_up_tokenization_spaces": False} if isinstance(tokenizer, CleansUp) else {}
        assert "".join(shown) == tokenizer.decode(ids, **options)
        assert max(map(len, shown)) < 40, "held back"


def test_a_stop_string_within_the_first_tokens_ends_nothing_later() -> None:
    """It is the beginning of another one, so that it is held back until the next tokens."""

    def shown(least: int, *tokens: str) -> tuple[str, bool]:
        stream = TextStream(Letters(), ["b", "bcd"], least)
        text = "".join(stream.push(ord(letter) - 30) for letter in "".join(tokens))
        return text + stream.flush(), stream.stopped

    assert shown(2, "ab", "xyz") == ("abxyz", False)
    assert shown(2, "ab", "cxb") == ("abcx", True)
    assert shown(2, "ab", "cd") == ("a", True), "it ends behind them"
    assert shown(1, "ab", "xyz") == ("a", True)


@pytest.mark.timeout(60)
def test_a_stop_string_far_longer_than_the_text() -> None:
    """Each token looks at beginnings no longer than the text: others of the engine wait for it meanwhile."""
    tokens, pieces = [WORDS.index("s"), *[WORDS.index("x"), WORDS.index("s")] * 2], Pieces()
    stream = TextStream(pieces, ("xs" * 10**7,))
    assert ("".join(map(stream.push, tokens)), stream.flush()) == ("s", "xsxs")
