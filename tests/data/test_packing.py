import pytest
import torch

from data.packing import Packer
from errors import UserError
from tests.data.streams import ByteTokenizer, ListSource, lane_stream, random_texts


def start(lanes: int) -> torch.Tensor:
    return torch.tensor([[lane, 0] for lane in range(lanes)])


def make_packer(texts, *, seq_len=8, lanes=4, first_lane=0, num_lanes=None, epochs=1, positions=None, known=0):
    return Packer(
        ListSource(texts),
        ByteTokenizer(),
        seq_len=seq_len,
        first_lane=first_lane,
        num_lanes=num_lanes or lanes - first_lane,
        epochs=epochs,
        positions=start(lanes) if positions is None else positions,
        documents_per_epoch=known,
    )


def next_rows(packer: Packer) -> torch.Tensor | None:
    while not packer.has_rows():
        if not packer.tokenize_chunk():
            return None
    return packer.take_rows()


def all_rows(packer: Packer) -> list[torch.Tensor]:
    return list(iter(lambda: next_rows(packer), None))


def join(rows: list[torch.Tensor], lane: int) -> list[int]:
    """The stream that a lane's rows were cut from; each must begin with the last token of the one before."""
    tokens = rows[0][lane, :1].tolist()
    for row in rows:
        assert row[lane, 0] == tokens[-1]
        tokens += row[lane, 1:].tolist()
    return tokens


@pytest.mark.parametrize("chunk", [1, 100, 1 << 18])
def test_no_token_is_lost_or_doubled(rng, monkeypatch, chunk):
    monkeypatch.setattr("data.packing.CHUNK", chunk)
    texts, lanes, seq_len = random_texts(rng, 120), rng.randrange(1, 7), rng.randrange(1, 40)
    rows = all_rows(make_packer(texts, lanes=lanes, seq_len=seq_len))
    assert all(row.shape == (lanes, seq_len + 1) and row.dtype == torch.int64 for row in rows)
    streams = [lane_stream(texts, ByteTokenizer(), lane, lanes) for lane in range(lanes)]
    for lane, stream in enumerate(streams):
        assert join(rows, lane) == stream[: len(rows) * seq_len + 1]
    # Full rows only, and as many as the shortest lane allows.
    assert len(rows) == min((len(stream) - 1) // seq_len for stream in streams)


def test_epochs_go_on_in_the_lanes(rng):
    """In the second epoch documents come in another order and, as 13 is no multiple of 4, in other lanes."""
    texts = random_texts(rng, 13)
    source = ListSource(texts)
    rows = all_rows(make_packer(texts, epochs=3))
    of_all_epochs = [text for epoch in range(3) for text in source.order(epoch)]
    streams = [lane_stream(of_all_epochs, ByteTokenizer(), lane, 4) for lane in range(4)]
    assert [join(rows, lane) for lane in range(4)] == [stream[: len(rows) * 8 + 1] for stream in streams]
    assert len(rows) == min((len(stream) - 1) // 8 for stream in streams)


def test_only_own_documents_are_tokenised(rng):
    texts = [f"{i} " * rng.randrange(1, 9) for i in range(60)]
    packer = make_packer(texts, lanes=6, first_lane=2, num_lanes=3)
    all_rows(packer)
    assert packer.tokenizer.encoded == [text for i, text in enumerate(texts) if i % 6 in (2, 3, 4)]


def test_resume_does_not_tokenise_what_was_packed(rng):
    texts = [f"{i} " * rng.randrange(1, 9) for i in range(80)]
    packer = make_packer(texts, lanes=3)
    for _ in range(5):
        next_rows(packer)
    positions = packer.positions()
    resumed = make_packer(texts, lanes=3, positions=positions)
    rest = all_rows(resumed)
    assert all(torch.equal(a, b) for a, b in zip(rest, all_rows(packer), strict=True))
    lanes_start = positions[:, 0].tolist()
    needed = [text for i, text in enumerate(texts) if i >= lanes_start[i % 3]]
    assert resumed.tokenizer.encoded == needed
    assert resumed.source.readings == [(min(lanes_start), 0)]


def test_resume_at_every_row_of_several_epochs(rng):
    texts = random_texts(rng, rng.randrange(3, 12), longest=20)
    lanes = rng.randrange(1, 6)
    packer = make_packer(texts, lanes=lanes, epochs=4)
    places, rows = [(packer.positions(), packer.documents_per_epoch)], []
    for row in iter(lambda: next_rows(packer), None):
        rows.append(row)
        places.append((packer.positions(), packer.documents_per_epoch))
    for i, (positions, known) in enumerate(places):
        for first in range(lanes):
            # `known` may also be another rank's, which has not yet come to the end of an epoch.
            for documents in {known, 0} if int(positions[:, 0].min()) < len(texts) else {known}:
                resumed = make_packer(
                    texts,
                    lanes=lanes,
                    first_lane=first,
                    num_lanes=1,
                    epochs=4,
                    positions=positions,
                    known=documents,
                )
                expected = [row[first : first + 1] for row in rows[i:]]
                assert all(map(torch.equal, expected, all_rows(resumed)[: len(expected)]))


def test_a_source_too_small_for_a_row_ends(rng):
    assert all_rows(make_packer(["a"], lanes=4, epochs=1)) == []
    assert all_rows(make_packer(["a", "b"], lanes=2, seq_len=100, epochs=3)) == []


def test_a_source_smaller_than_the_lanes_goes_round(rng):
    packer = make_packer(["ab"], lanes=4, first_lane=3, seq_len=5, epochs=None)
    rows = [next_rows(packer) for _ in range(6)]
    assert join(rows, 0) == ([0, 99, 100, 1] * 8)[:31]
    assert packer.documents_per_epoch == 1


@pytest.mark.parametrize("epochs", [None, 1])
def test_an_empty_source_is_an_error(epochs):
    with pytest.raises(UserError, match="training.dataset.*no document"):
        next_rows(make_packer([], epochs=epochs))


def test_data_that_changed_since_the_checkpoint():
    longer = torch.tensor([[0, 99], [1, 0]])
    with pytest.raises(UserError, match="document 0 has 3 tokens, but the checkpoint has read 99"):
        next_rows(make_packer(["a", "b"] * 9, lanes=2, positions=longer))
    with pytest.raises(UserError, match="had 5 documents before, and has 2 in epoch 0"):
        next_rows(make_packer(["a", "b"], lanes=2, epochs=None, known=5))


def test_a_tokenizer_without_eos():
    tokenizer = ByteTokenizer()
    tokenizer.eos_id = None
    with pytest.raises(UserError, match=r"model\.tokenizer_path: bytes names no end-of-text"):
        Packer(
            ListSource(["a"]), tokenizer, seq_len=1, first_lane=0, num_lanes=1, epochs=1,
            positions=start(1), documents_per_epoch=0,
        )  # fmt: skip


def test_a_tokenizer_without_bos():
    packer = make_packer(["ab", "c"], lanes=1, seq_len=2)
    packer.tokenizer.bos_id = None
    assert join(all_rows(packer), 0) == [99, 100, 1, 101, 1]
