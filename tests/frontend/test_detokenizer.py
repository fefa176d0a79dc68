from __future__ import annotations

import itertools

import pytest
import tokenizers
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import decoders, models, pre_tokenizers

from hotstart.frontend.detokenizer import StopStrings, detokenizer
from hotstart.frontend.tokenizer import Tokenizer

TEXTS = st.text(max_size=40)


def byte_level() -> tokenizers.Tokenizer:
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    backend = tokenizers.Tokenizer(models.BPE({char: i for i, char in enumerate(alphabet)}, []))
    backend.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    backend.decoder = decoders.ByteLevel()
    backend.add_special_tokens(["<end>"])
    return backend


def sentencepiece_style(*, strips: bool = True) -> tokenizers.Tokenizer:
    pieces = ["<unk>", *(f"<0x{byte:02X}>" for byte in range(256)), "▁", "▁the", "▁fox", "a", "e", "é"]
    backend = tokenizers.Tokenizer(
        models.BPE({p: i for i, p in enumerate(pieces)}, [], byte_fallback=True, unk_token="<unk>")
    )
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    backend.decoder = decoders.Sequence([*steps, decoders.Strip(" ", 1, 0)] if strips else steps)
    return backend


def wordpiece() -> tokenizers.Tokenizer:
    pieces = ["[UNK]", "the", "fox", "##es", "##y", "jump", "##ing", "."]
    backend = tokenizers.Tokenizer(models.WordPiece({p: i for i, p in enumerate(pieces)}, unk_token="[UNK]"))
    backend.decoder = decoders.WordPiece(prefix="##")
    return backend


BYTE_LEVEL = Tokenizer(byte_level(), {})
SENTENCEPIECE = Tokenizer(sentencepiece_style(), {})
KEEPS_SPACES = Tokenizer(sentencepiece_style(strips=False), {})
WORDPIECE = Tokenizer(wordpiece(), {})


def pushed(tokenizer: Tokenizer, prompt: list[int], ids: list[int]) -> list[str]:
    detok = detokenizer(tokenizer, prompt)
    return [detok.push(token) for token in ids]


@given(text=TEXTS)
def test_pieces_join_to_the_text_decoded_whole(text: str) -> None:
    ids = BYTE_LEVEL.encode(text)
    assert "".join(pushed(BYTE_LEVEL, [], ids)) == BYTE_LEVEL.decode(ids) == text


@given(ids=st.lists(st.integers(0, 260)))
def test_any_ids_give_what_decoding_them_whole_gives_but_for_an_unfinished_end(ids: list[int]) -> None:
    joined = "".join(pushed(BYTE_LEVEL, [], ids))
    whole = BYTE_LEVEL.decode(ids)
    assert whole.startswith(joined)
    assert set(whole[len(joined) :]) <= {"�"}


@given(text=TEXTS.filter(bool))
def test_no_piece_holds_a_part_of_a_character(text: str) -> None:
    assert all(piece in text for piece in pushed(BYTE_LEVEL, [], BYTE_LEVEL.encode(text)))


def test_special_tokens_are_left_out_unless_asked_for() -> None:
    ids = [*BYTE_LEVEL.encode("a"), BYTE_LEVEL.backend.token_to_id("<end>")]
    shown = detokenizer(BYTE_LEVEL, [], skip_special_tokens=False)
    assert "".join(pushed(BYTE_LEVEL, [], ids)) == "a"
    assert "".join(shown.push(token) for token in ids) == "a<end>"


@pytest.mark.parametrize("tokenizer", [SENTENCEPIECE, KEEPS_SPACES], ids=["stripped", "kept"])
@given(words=st.lists(st.sampled_from(["▁the", "▁fox", "a", "é", "▁"]), min_size=1), emoji=st.booleans())
def test_sentencepiece_style_text_equals_the_whole_decoding(
    tokenizer: Tokenizer, words: list[str], emoji: bool
) -> None:
    ids = [tokenizer.backend.token_to_id(word) for word in words]
    if emoji:
        ids += [tokenizer.backend.token_to_id(f"<0x{byte:02X}>") for byte in "🦊".encode()]
    assert "".join(pushed(tokenizer, [], ids)) == tokenizer.decode(ids)


def test_sentencepiece_style_text_keeps_its_space_behind_a_prompt() -> None:
    the, fox = (SENTENCEPIECE.backend.token_to_id(word) for word in ("▁the", "▁fox"))
    assert pushed(SENTENCEPIECE, [the], [fox]) == [" fox"]


@given(ids=st.lists(st.integers(1, 7), min_size=1, max_size=30), split=st.integers(0, 30))
def test_vocabularies_that_look_at_neighbours_continue_the_prompt(ids: list[int], split: int) -> None:
    prompt, rest = ids[:split], ids[split:]
    assert WORDPIECE.decode(prompt) + "".join(pushed(WORDPIECE, prompt, rest)) == WORDPIECE.decode(ids)


@st.composite
def chunked(draw: st.DrawFn) -> tuple[str, list[str]]:
    """A text over few letters, so that stop strings occur and nearly occur, cut at random."""
    text = draw(st.text("ab", max_size=30))
    cuts = sorted(draw(st.lists(st.integers(0, len(text)), max_size=10)))
    edges = [0, *cuts, len(text)]
    return text, [text[i:j] for i, j in itertools.pairwise(edges)]


STOPS = st.lists(st.text("ab", min_size=1, max_size=4), min_size=1, max_size=4)


@given(chunks=chunked(), stops=STOPS, include=st.booleans())
def test_stop_strings_cut_alike_however_the_text_arrives(
    chunks: tuple[str, list[str]], stops: list[str], include: bool
) -> None:
    text, pieces = chunks
    stop = StopStrings(stops, include=include)
    shown = "".join(stop.push(piece) for piece in pieces)
    if stop.matched is None:
        shown += stop.flush()
    # By the definition: the end of the shortest beginning of the text that ends with a stop string.
    end = next((n for n in range(len(text) + 1) if any(text[:n].endswith(s) for s in stops)), None)
    if end is None:
        assert (shown, stop.matched) == (text, None)
    else:
        assert stop.matched is not None
        assert shown == (text[:end] if include else text[: end - len(stop.matched)])


@given(chunks=chunked(), stops=STOPS)
def test_nothing_shown_ends_with_what_may_become_a_stop_string(
    chunks: tuple[str, list[str]], stops: list[str]
) -> None:
    stop = StopStrings(stops)
    shown = ""
    for piece in chunks[1]:
        shown += stop.push(piece)
        if stop.matched is not None:
            break
        held = "".join(chunks[1])[len(shown) :]
        assert not any(
            shown.endswith(s[:n]) and held.startswith(s[n:]) for s in stops for n in range(1, len(s) + 1)
        )


@pytest.mark.parametrize("beginning", ["</s", "<", ""])
def test_a_beginning_of_a_stop_string_is_held_back_until_it_cannot_become_one(beginning: str) -> None:
    stop = StopStrings(["</stop>"])
    assert stop.push("text" + beginning) == "text"
    assert stop.push(" more") == beginning + " more"
